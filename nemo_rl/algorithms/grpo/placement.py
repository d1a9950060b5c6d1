"""Where the accelerators of a GRPO run are, while it is built.

`OwnPlacement` reserves slots for one run; a scheduler that lends accelerators supplies its own placement. Invariant:
only code inside `building`, and engines that the placement starts, use accelerators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nemo_rl.algorithms.distillation.engine_teacher import ServedTeacher
from nemo_rl.algorithms.grpo.accelerators import GRPOAccelerators, OwnAccelerators
from nemo_rl.algorithms.grpo.refit import Refitter
from nemo_rl.algorithms.placement import Clusters, OwnSlots, Placement, reserve
from nemo_rl.config import ConfigError, MasterConfig, generation_world_size, training_world_size
from nemo_rl.config.teacher_sections import Teacher, teachers_of
from nemo_rl.distributed.accelerator_slots import Accelerator
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.record import Record
from nemo_rl.utils.timer import Timer


@dataclass(frozen=True)
class Built:
    """Parts of a run that are moved on and off its accelerators, and what watches them."""

    config: MasterConfig
    policy: Policy
    generation: VllmGeneration | None  # started, or able to start; None for replayed rollouts without validation
    version: int  # version of the policy's weights
    record: Record
    timer: Timer  # times of the current step
    progress: RunProgress


class GRPOPlacement(Placement[MasterConfig, Built, GRPOAccelerators], Protocol):
    """Provides a GRPO run with accelerators."""

    def served_teacher(self, teacher: Teacher, config: MasterConfig) -> ServedTeacher:
        """The teacher that a job of its own serves. Raises ConfigError: there is none."""
        ...

    def generation_prepared(self, generation: VllmGeneration) -> None:
        """Called once generation's actors exist. Where shards are lent, no engine is built yet."""
        ...


class OwnPlacement(OwnSlots):
    """For a run with slots of its own."""

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

    def generation_prepared(self, generation: VllmGeneration) -> None:
        """Does nothing: the engines start by themselves."""

    def accelerators(self, parts: Built) -> OwnAccelerators:
        """Refits generation from the live policy."""
        refitter = None
        if parts.generation is not None:
            parts.generation.fleet.enable_rebuilds()
            refitter = Refitter(
                parts.policy,
                parts.generation,
                parts.config.weight_sync,
                colocated=parts.generation.colocated,
                cuda=self._cuda,
                record=parts.record.bind("refit"),
            )
        return OwnAccelerators(refitter, parts.timer, parts.progress.phase)


def validates(config: MasterConfig) -> bool:
    """Whether the run validates at any time."""
    return config.grpo.val_period > 0 or config.grpo.val_at_start or config.grpo.val_at_end
