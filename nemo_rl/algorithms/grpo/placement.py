"""Placements: they provide a GRPO run with accelerators while it is built.

`OwnPlacement` reserves slots for one run; a scheduler that lends accelerators supplies its own placement. Invariant:
only code inside `training_accelerators`, and engines that the placement starts, use accelerators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from nemo_rl.algorithms.grpo.control_plane import ControlPlane, OwnAccelerators
from nemo_rl.algorithms.grpo.refit import Refitter
from nemo_rl.algorithms.placement import OwnSlots, reserve
from nemo_rl.config import MasterConfig
from nemo_rl.distributed.accelerators import Accelerator
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.generation.vllm import VllmGeneration
from nemo_rl.models.generation.vllm.repair import ShardRepair
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.record import Record
from nemo_rl.utils.timer import Timer


@dataclass(frozen=True)
class Clusters:
    """Slots of training and generation: the same object if they share them, None without generation."""

    training: RayVirtualCluster
    generation: RayVirtualCluster | None

    def distinct(self) -> list[RayVirtualCluster]:
        """Each cluster once."""
        both = [cluster for cluster in (self.training, self.generation) if cluster is not None]
        return list({id(cluster): cluster for cluster in both}.values())


@dataclass(frozen=True)
class Built:
    """Parts of a run that a control plane needs. `slept`: memory reports of the engines from when they were put to
    sleep before their first use.
    """

    config: MasterConfig
    policy: Policy
    generation: VllmGeneration | None  # started, or able to start; None for replayed rollouts without validation
    version: int  # version of the policy's weights
    record: Record
    timer: Timer  # times of the current step
    progress: RunProgress
    slept: Sequence[Mapping[str, int]] = ()


class Placement(Protocol):
    """Provides a run with accelerators."""

    lends_shards: bool  # whether engines are built and routed one by one, on command
    record_prefix: str  # prefix of source names in the run record; `<pipeline>/` if several runs share a pool

    def connect(self, config: MasterConfig) -> Accelerator:
        """Joins or starts the Ray cluster; returns its kind of accelerator."""
        ...

    def disconnect(self) -> None:
        """Leaves the Ray cluster. Safe to call twice."""
        ...

    def reserve(self, config: MasterConfig, accelerator: Accelerator) -> Clusters:
        """Reserves the run's slots."""
        ...

    def shard_record(self, record: Record) -> Record:
        """The record for events of requests and shards."""
        ...

    def generation_prepared(self, generation: VllmGeneration) -> None:
        """Called once generation's actors exist. Where shards are lent, no engine is built yet."""
        ...

    def training_accelerators(self) -> AbstractContextManager[object]:
        """Context manager around building the policy."""
        ...

    def control_plane(self, built: Built) -> ControlPlane:
        """Creates the control plane. Called inside `training_accelerators`, with the weights on the devices."""
        ...


class OwnPlacement(OwnSlots):
    """For a run with slots of its own."""

    lends_shards = False
    record_prefix = ""

    def __init__(self) -> None:
        super().__init__()
        self._cuda = False

    def reserve(self, config: MasterConfig, accelerator: Accelerator) -> Clusters:
        """Shared slots if generation is colocated, separate slots otherwise."""
        self._cuda = accelerator.is_cuda
        cluster, colocated = config.cluster, config.policy.generation.colocated
        nodes, each = cluster.num_nodes, cluster.gpus_per_node
        replayed = config.grpo.rollout_replay is not None and not validates(config)
        if replayed or colocated.enabled:
            shared = reserve(cluster, accelerator, "policy", [each] * nodes, groups=2)
            return Clusters(shared, None if replayed else shared)
        if nodes == 1:
            own = colocated.resources.gpus_per_node or 0
            training = reserve(cluster, accelerator, "policy", [each - own])
            return Clusters(training, reserve(cluster, accelerator, "generation", [own]))
        own = colocated.resources.num_nodes or 0
        training = reserve(cluster, accelerator, "policy", [each] * (nodes - own))
        return Clusters(training, reserve(cluster, accelerator, "generation", [each] * own))

    def shard_record(self, record: Record) -> Record:
        """Records all events."""
        return record.bind("generation")

    def generation_prepared(self, generation: VllmGeneration) -> None:
        """Does nothing: the engines start by themselves."""

    def training_accelerators(self) -> AbstractContextManager[object]:
        """Does nothing: the run owns its slots."""
        return nullcontext()

    def control_plane(self, built: Built) -> ControlPlane:
        """Refits generation from the live policy."""
        refitter = None
        if built.generation is not None:
            refitter = Refitter(
                built.policy,
                built.generation,
                built.config.weight_sync,
                colocated=built.generation.colocated,
                cuda=self._cuda,
                record=built.record.bind("refit"),
                slept=built.slept,
                repair=ShardRepair(built.generation),
            )
        return OwnAccelerators(refitter, built.timer, built.progress.phase)


def validates(config: MasterConfig) -> bool:
    """Whether the run validates at any time."""
    return config.grpo.val_period > 0 or config.grpo.val_at_start or config.grpo.val_at_end
