"""Where a run's accelerators are, when it may use them, and how its policy starts on them, for every algorithm.

Steps call `Accelerators` at fixed points. A run keeps those that it reserved for itself (`OwnPlacement`); a scheduler
lends and takes back those of a pool (`nemo_rl.time_sharing.pipelines`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from nemo_rl.algorithms.accelerators import Accelerators, OwnAccelerators
from nemo_rl.algorithms.grpo.refitter import Refitter
from nemo_rl.algorithms.profiling import profile_of_run
from nemo_rl.algorithms.resume import Resume
from nemo_rl.config import (
    ClusterConfig,
    ConfigError,
    EvalMasterConfig,
    MasterConfig,
    generation_world_size,
    training_world_size,
)
from nemo_rl.config.master import RootConfig
from nemo_rl.config.teacher_sections import Teacher, teachers_of
from nemo_rl.config.world_sizes import parallel_sizes
from nemo_rl.distributed.accelerator_slots import Accelerator
from nemo_rl.distributed.devices import free_memory, total_memory
from nemo_rl.distributed.ray_runtime import RayConnection
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerGroup
from nemo_rl.models.generation.vllm.engine_actors import cpu_engine_bytes, parameters_of
from nemo_rl.models.policy.backend import backend_spec
from nemo_rl.models.policy.lm_policy import Policy, start_policy_actors
from nemo_rl.models.policy.memory_estimate import MemoryEstimate, estimate, policy_bytes_on_cpu
from nemo_rl.models.policy.model_config import check_length, check_replay, check_vision, check_weights, model_config
from nemo_rl.utils.checkpoint import CheckpointManager, verify_weights
from nemo_rl.utils.flops import TransformerShape, UnknownArchitecture, Work, processor_flops_per_s
from nemo_rl.utils.record import Record

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from nemo_rl.algorithms.distillation.teachers import ServedTeacher
    from nemo_rl.algorithms.training_loop import TrainingRun
    from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration


RunConfig = RootConfig | EvalMasterConfig

_LONG_STEP_S = 10.0
_MUCH_OF_FREE = 0.3


def check_policy(config: RootConfig, *, generates: bool = False) -> PretrainedConfig:
    """Checks before anything starts that the policy can be built; returns the model's configuration. `generates`:
    whether engines run it, too.

    Raises ModelNotFoundError: there is no model at `policy.model_name`; UnsupportedModelError: heads, vocabulary or
    experts do not divide over the ranks of training, it takes no sequences as long as configured, or there are no
    experts whose routes could be replayed;
    KernelUnavailableError: a package is asked for and not installed; OptimizerConfigError: optimizer or schedule do not
    exist or refuse their arguments; CheckpointError: `policy.model_name` is a damaged checkpoint.
    """
    verify_weights(Path(config.policy.model_name))
    model = model_config(config.policy)
    check_weights(config.policy.model_name)
    check_replay(model, config.policy)
    policy = config.policy
    lengths = {"policy.max_total_sequence_length": policy.max_total_sequence_length}
    if generates:
        lengths["policy.generation.vllm_cfg.max_model_len"] = policy.generation.vllm_cfg.max_model_len
        check_vision(model, policy.model_name)
    check_length(model, policy.model_name, lengths, generates=generates)
    backend_spec(config.policy).check(config.policy, model)
    return model


def check_device(config: RootConfig, accelerator: Accelerator) -> None:
    """Checks that the accelerators can run the training backend. Raises KernelUnavailableError: they cannot."""
    backend_spec(config.policy).check_device(config.policy, cuda=accelerator.is_cuda)


def reserve(
    cluster: ClusterConfig, accelerator: Accelerator, name: str, per_node: Sequence[int], *, groups: int = 1
) -> RayVirtualCluster:
    """Reserves slots on the cluster. `cluster`: ports, and slots per node. `groups`: worker groups that share each
    slot.
    """
    return RayVirtualCluster(
        list(per_node),
        use_gpus=accelerator.is_cuda,
        max_colocated_worker_groups=groups,
        num_gpus_per_node=cluster.gpus_per_node,
        name=name,
        port_range_low=cluster.master_port_range_low,
        port_range_high=cluster.master_port_range_high,
    )


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


class Placement(Protocol):
    """Where the accelerators of a run are, while it is set up. Only code inside `building`, and engines that the
    placement starts, use accelerators.

    Attributes:
        lends_shards: Whether engines are built and routed one by one, on command.
        record_prefix: Prefix of source names in the run record; `<pipeline>/` if several runs share a pool.
    """

    lends_shards: bool
    record_prefix: str

    def connect(self, config: RunConfig) -> Accelerator:
        """Joins or starts the Ray cluster; returns its kind of accelerator."""
        ...

    def disconnect(self) -> None:
        """Leaves the Ray cluster. Safe to call twice."""
        ...

    def reserve(self, config: RunConfig, accelerator: Accelerator) -> Clusters:
        """Reserves the run's slots."""
        ...

    def shard_record(self, record: Record) -> Record:
        """The record for events of requests and shards."""
        ...

    def served_teacher(self, teacher: Teacher, config: MasterConfig) -> ServedTeacher:
        """The teacher that a job of its own serves. Raises ConfigError: there is none."""
        ...

    def generation_prepared(self, generation: VllmGeneration) -> None:
        """Called once generation's actors exist. Where shards are lent, no engine is built yet."""
        ...

    def building(self) -> AbstractContextManager[object]:
        """Context manager around building the policy."""
        ...

    def accelerators(self, run: TrainingRun[Any]) -> Accelerators:
        """The accelerators of a run that is built but for them. Called inside `building`, where there is a policy."""
        ...

    def engines_alone(self, generation: VllmGeneration) -> Accelerators:
        """The accelerators of engines that nothing trains."""
        ...


class OwnPlacement:
    """Slots that are reserved for one run, on a Ray cluster that it joins or starts."""

    lends_shards = False
    record_prefix = ""

    def __init__(self) -> None:
        self._ray = RayConnection()
        self._cuda = False

    def connect(self, config: RunConfig) -> Accelerator:
        return self._ray.open(device=config.cluster.device, cpu_slots=config.cluster.cpu_slots)

    def disconnect(self) -> None:
        """Stops the cluster if this run started it."""
        self._ray.close()

    def reserve(self, config: RunConfig, accelerator: Accelerator) -> Clusters:
        """All slots of the configuration. With GRPO, shared slots if generation is colocated and separate slots
        otherwise; teachers share those of training or have their own.
        """
        self._cuda = accelerator.is_cuda
        if isinstance(config, MasterConfig):
            return _clusters_of(config, accelerator)
        cluster = config.cluster
        name = "evaluation" if isinstance(config, EvalMasterConfig) else "policy"
        slots = reserve(cluster, accelerator, name, [cluster.gpus_per_node] * cluster.num_nodes)
        return Clusters(slots, slots)

    def shard_record(self, record: Record) -> Record:
        """Records all events."""
        return record.bind("generation")

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

    def building(self) -> AbstractContextManager[object]:
        """Does nothing: the run owns its slots."""
        return nullcontext()

    def engines_alone(self, generation: VllmGeneration) -> Accelerators:
        """They stay with the run."""
        return Accelerators()

    def accelerators(self, run: TrainingRun[Any]) -> OwnAccelerators:
        """Refits generation, if there is any, from the live policy."""
        refitter = None
        if run.generation is not None:
            run.generation.fleet.enable_rebuilds()
            refitter = Refitter(
                run.policy,
                run.generation,
                run.config.weight_sync,
                colocated=run.generation.colocated,
                cuda=self._cuda,
                record=run.record.bind("refit"),
            )
        return OwnAccelerators(refitter, run.timer, run.progress.phase)


def _clusters_of(config: MasterConfig, accelerator: Accelerator) -> Clusters:
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
    validates = config.grpo.val_period > 0 or config.grpo.val_at_start or config.grpo.val_at_end
    replayed = config.grpo.rollout_replay is not None and not validates
    world = training_world_size(config)
    if replayed or colocated.enabled:
        world += 0 if colocated.enabled else generation_world_size(config)
        shared = reserve(cluster, accelerator, "policy", slots(world), groups=2 + sharing)
        return Clusters(shared, None if replayed else shared, own)
    training = reserve(cluster, accelerator, "policy", slots(world), groups=1 + sharing)
    generation = reserve(cluster, accelerator, "generation", slots(generation_world_size(config)))
    return Clusters(training, generation, own)


def tell_memory(
    config: RootConfig, actors: RayWorkerGroup, say: Callable[[str], None], *, engines: int = 0
) -> MemoryEstimate | None:
    """Says what each GPU of training will hold, before anything is loaded. Returns it, or None for a model of unknown
    sizes.

    Args:
        actors: The policy's, from `begin_policy`.
        say: Prints a line for the person.
        engines: That sleep on each of these GPUs.

    Raises GpuMemoryError: training cannot fit, whatever the lengths of the samples.
    """
    try:
        shape = TransformerShape.from_hf_config(model_config(config.policy))
    except UnknownArchitecture:
        return None
    found = estimate(
        config.policy,
        shape,
        parallel_sizes(config.policy, len(actors.workers)),
        parameters=parameters_of(config.policy),
        device_bytes=min(actors.run("device_bytes")),
        engines=engines,
    )
    say(found.check(config.policy) or found.line())
    return found


def tell_cpu_memory(
    config: RootConfig, actors: RayWorkerGroup, say: Callable[[str], None], *, reference: bool = False
) -> None:
    """Says what the processes of a run take of a machine without GPUs, before anything is loaded, where that is a good
    part of what is free; of policies on the DTensor backend, which alone was measured.

    Args:
        actors: The policy's, from `begin_policy`.
        reference: Whether the policy keeps the reference's weights.
    """
    policy = config.policy
    if not policy.dtensor_cfg.enabled:
        return
    host = torch.device("cpu")
    worker = policy_bytes_on_cpu(policy, parameters_of(policy), len(actors.workers), reference=reference)
    engine = cpu_engine_bytes(policy, config.cluster.cpu_slot_memory_gb) if isinstance(config, MasterConfig) else 0
    if worker * len(actors.workers) + engine < _MUCH_OF_FREE * free_memory(host):
        return
    beside = f", an engine {engine / 1e9:.1f} GB" if engine else ""
    say(
        f"memory without GPUs, estimated: a policy worker {worker / 1e9:.1f} GB and the activations of its rows"
        f"{beside}; this machine has {total_memory(host) / 1e9:.1f} GB, {free_memory(host) / 1e9:.1f} GB of them free"
    )


def tell_step_time(config: RootConfig, say: Callable[[str], None], *, forward_passes: int) -> None:
    """Says what a step will take at most on slots of processors, where that is long: a pretrained model is slow there.
    `forward_passes`: that a step makes over its samples, beside those of training.
    """
    policy = config.policy
    try:
        shape = TransformerShape.from_hf_config(model_config(policy))
    except UnknownArchitecture:
        return
    samples, length = policy.train_global_batch_size, policy.max_total_sequence_length
    work = Work.of([length] * samples, [length] * samples)
    operations = forward_passes * shape.forward_flops(work) + shape.train_flops(work)
    speed = processor_flops_per_s()
    if operations / speed >= _LONG_STEP_S:
        say(
            f"a step takes about {operations / speed:,.0f} s on these processors, at {speed / 1e9:,.0f} GFLOP/s, "
            f"if each of its {samples:,} samples has {length:,} tokens, and less where they are shorter"
        )


def begin_policy(
    config: RootConfig,
    cluster: RayVirtualCluster,
    checkpointer: CheckpointManager,
    resume: Resume | None,
    *,
    init_reference_model: bool,
) -> RayWorkerGroup:
    """Starts the policy's actors.

    Args:
        cluster: Slots; all of them are used.
        resume: Checkpoint to load, or None.
        init_reference_model: Whether the initial weights are kept for reference log-probabilities.

    Raises CheckpointError: the checkpoint has no weights.
    """
    paths = checkpointer.get_resume_paths(resume.checkpoint) if resume is not None else None
    optimizer = paths.optimizer if paths is not None and resume is not None and not resume.fresh_optimizer else None
    return start_policy_actors(
        cluster,
        config.policy,
        weights_path=str(paths.weights.resolve()) if paths else None,
        optimizer_path=str(optimizer.resolve()) if optimizer else None,
        steps_done=resume.info["total_steps"] if resume is not None else 0,
        init_reference_model=init_reference_model,
        profile=profile_of_run(),
    )


def start_policy(
    config: RootConfig,
    cluster: RayVirtualCluster,
    tokenizer: PreTrainedTokenizerBase,
    actors: RayWorkerGroup,
    *,
    last_step: int,
) -> Policy:
    """Makes the actors load the policy; returns before they have finished.

    Args:
        cluster: Slots; all of them are used.
        actors: From `begin_policy`.
        last_step: Of the run.
    """
    if isinstance(config, MasterConfig) and config.data_plane.enabled:
        from nemo_rl.models.policy.tq_policy import TQPolicy

        return TQPolicy(cluster, config.policy, tokenizer, dp_cfg=config.data_plane, actors=actors, last_step=last_step)
    return Policy(cluster, config.policy, tokenizer, actors=actors, last_step=last_step)
