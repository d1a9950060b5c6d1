"""Placements: they provide a GRPO run with accelerators while it is built.

`OwnPlacement` reserves slots for one run; a scheduler that lends accelerators supplies its own placement. Invariant:
only code inside `training_accelerators`, and engines that the placement starts, use accelerators.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from nemo_rl.algorithms.distillation.engine_teacher import ServedTeacher
from nemo_rl.algorithms.grpo.control_plane import ControlPlane, OwnAccelerators
from nemo_rl.algorithms.grpo.refit import Refitter
from nemo_rl.algorithms.placement import OwnSlots, reserve
from nemo_rl.config import ConfigError, MasterConfig, generation_world_size, training_world_size
from nemo_rl.config.teachers import Teacher, teachers_of
from nemo_rl.distributed.accelerators import Accelerator
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.record import Record
from nemo_rl.utils.timer import Timer


@dataclass(frozen=True)
class Clusters:
    """Slots of training and generation: the same object if they share them, None without generation. `teachers`: slots
    of teachers that have their own, by name.
    """

    training: RayVirtualCluster
    generation: RayVirtualCluster | None
    teachers: Mapping[str, RayVirtualCluster] = field(default_factory=dict)

    def distinct(self) -> list[RayVirtualCluster]:
        """Each cluster once."""
        every = [self.training, self.generation, *self.teachers.values()]
        return list({id(cluster): cluster for cluster in every if cluster is not None}.values())


@dataclass(frozen=True)
class Built:
    """Parts of a run that a control plane needs."""

    config: MasterConfig
    policy: Policy
    generation: VllmGeneration | None  # started, or able to start; None for replayed rollouts without validation
    version: int  # version of the policy's weights
    record: Record
    timer: Timer  # times of the current step
    progress: RunProgress


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

    def served_teacher(self, teacher: Teacher, config: MasterConfig) -> ServedTeacher:
        """The teacher that a job of its own serves. Raises ConfigError: there is none."""
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
        """Shared slots if generation is colocated, separate slots otherwise; teachers share those of training or have
        their own.
        """
        self._cuda = accelerator.is_cuda
        cluster, colocated = config.cluster, config.policy.generation.colocated
        teachers = teachers_of(config)
        sharing = sum(teacher.resources is None for teacher in teachers)

        def slots(count: int) -> list[int]:
            return [count] if cluster.num_nodes == 1 else [cluster.gpus_per_node] * (count // cluster.gpus_per_node)

        own = {
            teacher.name: reserve(cluster, accelerator, teacher.name, slots(teacher.slots(config)))
            for teacher in teachers
            if teacher.resources is not None
        }
        replayed = config.grpo.rollout_replay is not None and not validates(config)
        world = training_world_size(config)
        if replayed or colocated.enabled:
            world += 0 if colocated.enabled else generation_world_size(config)
            shared = reserve(cluster, accelerator, "policy", slots(world), groups=2 + sharing)
            return Clusters(shared, None if replayed else shared, own)
        training = reserve(cluster, accelerator, "policy", slots(world), groups=1 + sharing)
        generation = reserve(cluster, accelerator, "generation", slots(generation_world_size(config)))
        return Clusters(training, generation, own)

    def served_teacher(self, teacher: Teacher, config: MasterConfig) -> ServedTeacher:
        """Refuses: there are no other jobs."""
        raise ConfigError(
            [
                f"{teacher.job_key} is {teacher.job}, and this run is no job of a pool; submit it to the pool of that "
                "job, or leave the key out"
            ]
        )

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
            built.generation.fleet.enable_rebuilds()
            refitter = Refitter(
                built.policy,
                built.generation,
                built.config.weight_sync,
                colocated=built.generation.colocated,
                cuda=self._cuda,
                record=built.record.bind("refit"),
            )
        return OwnAccelerators(refitter, built.timer, built.progress.phase)


def validates(config: MasterConfig) -> bool:
    """Whether the run validates at any time."""
    return config.grpo.val_period > 0 or config.grpo.val_at_start or config.grpo.val_at_end
