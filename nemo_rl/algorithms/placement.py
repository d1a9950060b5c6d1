"""Where a run's accelerators are, when it may use them, and how its policy starts on them, for every algorithm.

Steps call `Accelerators` at fixed points. A run keeps those that it reserved for itself (`KeptAccelerators`); a
scheduler lends and takes back those of a pool (`nemo_rl.time_sharing.pipelines`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import torch

from nemo_rl.algorithms.profiling import profile_of_run
from nemo_rl.algorithms.resume import Resume
from nemo_rl.config import ClusterConfig, EvalMasterConfig, MasterConfig
from nemo_rl.config.master import RootConfig
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


ReportProgress = Callable[[int, int], None]
"""Takes the prompt groups that are there and those that are waited for."""

DemandKind = Literal["training", "validation"]


class Accelerators(Protocol):
    """Decides who uses a run's accelerators."""

    def demand(
        self, step: int, groups: int, ready: int, kind: DemandKind = "training"
    ) -> AbstractContextManager[ReportProgress]:
        """Context manager around the wait for `groups` prompt groups, of which `ready` are finished. Yields a callback
        that reports progress.
        """
        ...

    def lend_training(self, step: int) -> None:
        """Blocks until the training accelerators may be used for step `step`."""
        ...

    def yield_training(self, step: int) -> None:
        """The run does without the training accelerators until the next `lend_training`; their lender may take them.
        The gradients of an open step are kept.
        """
        ...

    def stop(self) -> None:
        """Called once when the run ends, also after an error."""
        ...


class KeptAccelerators:
    """Accelerators that the run may use at any time."""

    def demand(
        self, step: int, groups: int, ready: int, kind: DemandKind = "training"
    ) -> AbstractContextManager[ReportProgress]:
        """Reports to no one."""
        return nullcontext(lambda ready, of: None)

    def lend_training(self, step: int) -> None:
        """Returns at once."""

    def yield_training(self, step: int) -> None:
        """Does nothing: the run keeps its accelerators."""

    def stop(self) -> None:
        """Does nothing."""


Config_contra = TypeVar("Config_contra", contravariant=True)
Parts_contra = TypeVar("Parts_contra", contravariant=True)
Held_co = TypeVar("Held_co", bound=Accelerators, covariant=True)

_LONG_STEP_S = 10.0
_MUCH_OF_FREE = 0.3


def check_policy(config: RootConfig, *, generates: bool = False) -> PretrainedConfig:
    """Checks before anything starts that the policy can be built; returns the model's configuration.

    Args:
        generates: Whether engines run it, too.

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


def reserve_all(cluster: ClusterConfig, accelerator: Accelerator, name: str) -> Clusters:
    """Reserves all configured slots, for whatever the run does."""
    slots = reserve(cluster, accelerator, name, [cluster.gpus_per_node] * cluster.num_nodes)
    return Clusters(slots, slots)


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


class ConnectsRay(Protocol[Config_contra]):
    """The part of a placement that joins Ray."""

    def connect(self, config: Config_contra) -> Accelerator:
        """Joins or starts the Ray cluster; returns its kind of accelerator."""
        ...

    def disconnect(self) -> None:
        """Leaves the Ray cluster. Safe to call twice."""
        ...


class Placement(ConnectsRay[Config_contra], Protocol[Config_contra, Parts_contra, Held_co]):
    """Where the accelerators of a run are, while it is set up.

    Attributes:
        lends_shards: Whether engines are built and routed one by one, on command.
        record_prefix: Prefix of source names in the run record; `<pipeline>/` if several runs share a pool.
    """

    lends_shards: bool
    record_prefix: str

    def reserve(self, config: Config_contra, accelerator: Accelerator) -> Clusters:
        """Reserves the run's slots."""
        ...

    def shard_record(self, record: Record) -> Record:
        """The record for events of requests and shards."""
        ...

    def building(self) -> AbstractContextManager[object]:
        """Context manager around building the policy."""
        ...

    def accelerators(self, parts: Parts_contra) -> Held_co:
        """The accelerators of the run, whose parts are built. Called inside `building`, where there is a policy."""
        ...


class OwnSlots:
    """Base of placements that reserve slots for one run, and may start a Ray cluster for it."""

    lends_shards = False
    record_prefix = ""

    def __init__(self) -> None:
        self._ray = RayConnection()

    def connect(self, config: RootConfig | EvalMasterConfig) -> Accelerator:
        return self._ray.open(device=config.cluster.device, cpu_slots=config.cluster.cpu_slots)

    def disconnect(self) -> None:
        """Stops the cluster if this run started it."""
        self._ray.close()

    def shard_record(self, record: Record) -> Record:
        """Records all events."""
        return record.bind("generation")

    def building(self) -> AbstractContextManager[object]:
        """Does nothing: the run owns its slots."""
        return nullcontext()


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

    Args:
        forward_passes: That a step makes over its samples, beside those of training.
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
