"""Where a run's policy and engines are built, and by whose leave.

`OwnPlacement` reserves slots for one run; a scheduler that lends accelerators brings a placement of its own. Knows what
has to be built in which order, not how. Invariant: nothing touches an accelerator outside `training_accelerators`, but
engines that the placement starts itself.
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
    """Slots of training and of generation; the same object when they share them, None without generation."""

    training: RayVirtualCluster
    generation: RayVirtualCluster | None

    def distinct(self) -> list[RayVirtualCluster]:
        """Each cluster once."""
        both = [cluster for cluster in (self.training, self.generation) if cluster is not None]
        return list({id(cluster): cluster for cluster in both}.values())


@dataclass(frozen=True)
class Built:
    """What a control plane is made of.

    Attributes:
        config: The run's.
        policy: Started.
        generation: Started, or able to start; None where rollouts are replayed and nothing validates.
        version: Of the policy's weights.
        record: Run record.
        timer: Times of the current step.
        progress: What a person watches.
        slept: What the engines said when generation was put to sleep before it ever served.
    """

    config: MasterConfig
    policy: Policy
    generation: VllmGeneration | None
    version: int
    record: Record
    timer: Timer
    progress: RunProgress
    slept: Sequence[Mapping[str, int]] = ()


class Placement(Protocol):
    """Gives a run its accelerators.

    Attributes:
        lends_shards: Whether engines are built and routed one by one, by order.
        record_prefix: Begins the name of every source in the run record; `<pipeline>/` where several runs share a pool.
    """

    lends_shards: bool
    record_prefix: str

    def connect(self, config: MasterConfig) -> Accelerator:
        """Joins or starts the Ray cluster; its kind of accelerator."""
        ...

    def disconnect(self) -> None:
        """Leaves the Ray cluster. Safe to call twice."""
        ...

    def reserve(self, config: MasterConfig, accelerator: Accelerator) -> Clusters:
        """The run's slots."""
        ...

    def shard_record(self, record: Record) -> Record:
        """Where generation records what becomes of requests and shards."""
        ...

    def generation_prepared(self, generation: VllmGeneration) -> None:
        """Generation's actors are there; where shards are lent, none of their engines stands yet."""
        ...

    def training_accelerators(self) -> AbstractContextManager[object]:
        """The span in which the policy may be built on its slots."""
        ...

    def control_plane(self, built: Built) -> ControlPlane:
        """Owns the accelerators from here on; called inside `training_accelerators`, with the weights resident."""
        ...


class OwnPlacement(OwnSlots):
    """One run on slots of its own."""

    lends_shards = False
    record_prefix = ""

    def __init__(self) -> None:
        super().__init__()
        self._cuda = False

    def reserve(self, config: MasterConfig, accelerator: Accelerator) -> Clusters:
        """Shared slots where generation is colocated, separate ones otherwise."""
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
        """Generation tells all of it."""
        return record.bind("generation")

    def generation_prepared(self, generation: VllmGeneration) -> None:
        """Its engines start by themselves."""

    def training_accelerators(self) -> AbstractContextManager[object]:
        """They are the run's from the start."""
        return nullcontext()

    def control_plane(self, built: Built) -> ControlPlane:
        """A run by itself, which refits generation from the live policy."""
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
