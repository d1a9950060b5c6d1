"""Builds a job of adapters: what they share (slots of accelerators, the frozen base model, engines), and each as a GRPO
run with its own data, loss, logs and checkpoints.

Training and engines keep their memory side by side on shared accelerators: adapters train while others generate.
Everything that a run does is GRPO's own; policy, generation and control plane are views of the job's, and environments
are shared where they keep nothing of what they judge. Invariants: if a step fails, everything built before is shut
down; what one adapter builds, it alone uses and closes; every prompt group of a closed record was trained or dropped.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from rich.console import Console
from typing_extensions import override

from nemo_rl.algorithms.grpo.assembly import (
    check_model,
    end_files_first,
    limits_of,
    make_loaders,
    make_loss,
    make_rollout_sources,
    make_source,
    resumed_from,
    validation_of,
    watched_actors,
)
from nemo_rl.algorithms.grpo.run import GRPORun, GRPOState
from nemo_rl.algorithms.grpo.step_reports import DeviceCount, StepReports
from nemo_rl.algorithms.memory_watch import MemoryWatch
from nemo_rl.algorithms.multi_lora.engines import AdapterAccelerators, AdapterEngines, AdapterGeneration
from nemo_rl.algorithms.multi_lora.passes import AdapterPolicy, SharedPasses
from nemo_rl.algorithms.placement import OwnPlacement, check_device, check_policy
from nemo_rl.algorithms.profiling import profile_of_run
from nemo_rl.algorithms.resume import Resume
from nemo_rl.algorithms.startup import (
    check_steps_left,
    check_tokens,
    find_checkpoint,
    find_position,
    import_transformers,
    log_start,
    open_logger,
    read_data,
    set_seed,
)
from nemo_rl.config import MasterConfig
from nemo_rl.config.data_rules import environments_in_use
from nemo_rl.config.errors import UserError
from nemo_rl.config.master import MultiLoraMasterConfig
from nemo_rl.config.multi_lora import AdapterConfig
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.accelerator_slots import Accelerator
from nemo_rl.distributed.actor_logs import collect_actor_logs
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.environments.environment_registry import await_environments, environment_class, section_of
from nemo_rl.environments.shares import SharedEnvironments
from nemo_rl.experience.store import InProcessStore
from nemo_rl.models.generation.interfaces import request_timeout_s
from nemo_rl.models.generation.vllm.engine_actors import start_engine_actors
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.multi_lora import memory
from nemo_rl.models.multi_lora.engine import LAYERS as ENGINE_LAYERS
from nemo_rl.models.multi_lora.engine import WORKER as ENGINE_WORKER
from nemo_rl.models.multi_lora.multi_lora_policy import WORKER as POLICY_WORKER
from nemo_rl.models.multi_lora.multi_lora_policy import MultiLoraPolicy
from nemo_rl.models.policy.lm_policy import Policy, start_policy_actors
from nemo_rl.models.policy.model_config import UnsupportedModelError, number_of_experts
from nemo_rl.utils.adapter_files import AdapterInfo
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.files import adapter_states, replace_file
from nemo_rl.utils.progress import RunProgress, StartPhases
from nemo_rl.utils.record import ARCHIVE_BYTES, RecordWriter
from nemo_rl.utils.record_events import GroupAdmitted, GroupDropped, GroupTrained, adapter_pipeline
from nemo_rl.utils.timer import TimeoutChecker, Timer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from nemo_rl.config.nsight_variables import Profile
    from nemo_rl.data.model_tokens import StopTokens
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster

_GIB = 1 << 30


def check_base(config: MultiLoraMasterConfig) -> PretrainedConfig:
    """Checks the base without loading weights; returns the model's configuration. Raises UnsupportedModelError: a layer
    that is named does not exist, the rank is larger than engines take, or the model is a mixture of experts; for others
    see `grpo.assembly.check_model`.
    """
    model = check_model(config)
    rank = config.policy.dtensor_cfg.lora_cfg.dim
    if rank > memory.ENGINE_RANKS[-1]:
        raise UnsupportedModelError(
            f"policy.dtensor_cfg.lora_cfg.dim is {rank}, and vLLM takes adapters up to rank {memory.ENGINE_RANKS[-1]}"
        )
    if number_of_experts(model):
        raise UnsupportedModelError(
            f"{config.policy.model_name} is a mixture of experts: which tokens reach an expert is not known from the "
            "row, so that its layers cannot tell adapters apart; train each adapter as a run of its own"
        )
    return model


def check_layers(adapter: AdapterConfig) -> None:
    """Checks an adapter against the model; loads no weights. Raises UnsupportedModelError: it names layers that do not
    exist; for others see `placement.check_policy`.
    """
    try:
        check_policy(adapter.config)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{adapter.source}: {error}") from error


def with_adapters(config: MultiLoraMasterConfig) -> MultiLoraMasterConfig:
    """The base's configuration with engines that take adapters; what the user put into `vllm_kwargs` wins."""
    config = config.model_copy(deep=True)
    generation, slots = config.policy.generation, config.multi_lora.slots
    rank = config.policy.dtensor_cfg.lora_cfg.dim
    generation.vllm_kwargs = {
        "enable_lora": True,
        "max_loras": slots,
        # Requests of the version before may still run when a new one comes.
        "max_cpu_loras": 2 * slots,
        "max_lora_rank": memory.engine_rank(rank),
        **generation.vllm_kwargs,
    }
    # The base's weights are the files'; nothing would send them again after a deeper sleep.
    generation.vllm_cfg.sleep_level = 1
    return config


class DeviceBytes(NamedTuple):
    """Device memory on each GPU, bytes."""

    engines: int
    trainer: int


class NoRoomForAdapters(UserError, RuntimeError):
    """Training has no room for as many adapters as there are slots."""


def _check_room(config: MultiLoraMasterConfig, free: int) -> None:
    """Whether every slot can be filled, so that one that joins later does not end the others."""
    needed, slots = memory.trainer_bytes(config), config.multi_lora.slots
    if needed > free:
        raise NoRoomForAdapters(
            f"multi_lora.slots={slots}: training of so many adapters takes {needed / _GIB:.1f} GiB, and beside engines "
            f"and base {free / _GIB:.1f} GiB of a GPU are free; lower "
            "policy.generation.vllm_cfg.gpu_memory_utilization, or slots"
        )


@contextmanager
def shared_parts(
    config: MultiLoraMasterConfig,
    start: StartPhases,
    adapters: Sequence[AdapterConfig] = (),
    device_bytes: DeviceBytes | None = None,
) -> Generator[Shared]:
    """Context manager with the parts that adapters share, up and running.

    Args:
        adapters: Those that will join first; they are checked before anything starts.
        device_bytes: Memory of each GPU that they may take, where other jobs use it too; None for all.

    For errors see `check_base`; WorkerError: the policy or an engine did not start; NoRoomForAdapters: the GPUs cannot
    hold as many adapters as there are slots.
    """
    config, placement = with_adapters(config), OwnPlacement()
    with ExitStack() as stack:
        with start.phase("base model and tokenizer"):
            tokenizer, ends = _checked_base(config, adapters, start)
        with start.phase("Ray"):
            stack.callback(placement.disconnect)
            accelerator = placement.connect(config)
            check_device(config, accelerator)
            clusters = placement.reserve(config, accelerator)
            for cluster in clusters.distinct():
                stack.callback(cluster.shutdown)
        stack.callback(collect_actor_logs, Path(config.logger.log_dir) / "actors")
        if clusters.generation is None:
            raise RuntimeError("adapters need engines")
        if device_bytes is not None:
            clusters.generation.slot_bytes = device_bytes.engines - memory.engine_bytes(config)
        profile = profile_of_run()
        with start.phase("engines"):
            generation = _start_engines(config, clusters.generation, tokenizer, ends, profile)
            stack.callback(generation.shutdown)
            if accelerator.is_cuda:
                # An engine takes its share of the memory that is free; training takes its own afterwards.
                generation.wait_until_started()
        with start.phase("policy"):
            if device_bytes is not None:
                clusters.training.slot_bytes = device_bytes.trainer
            workers = start_policy_actors(
                clusters.training,
                config.policy,
                init_reference_model=False,
                worker_extension_cls_fqn=POLICY_WORKER,
                profile=profile,
            )
            policy = MultiLoraPolicy(clusters.training, config.policy, tokenizer, actors=workers)
            stack.callback(policy.shutdown)
            policy.wait_until_started()
            generation.wait_until_started()
            if accelerator.is_cuda:
                _check_room(config, policy.free_bytes())
        engines = AdapterEngines(generation, policy)
        stack.callback(engines.close)
        passes = SharedPasses(policy, config.multi_lora)
        stack.callback(passes.close)
        slots = [cluster.world_size() for cluster in clusters.distinct()]
        yield Shared(
            policy,
            engines,
            passes,
            accelerator,
            clusters.distinct(),
            DeviceCount(sum(slots), clusters.training.world_size(), clusters.generation.world_size()),
        )


def _checked_base(
    config: MultiLoraMasterConfig, adapters: Sequence[AdapterConfig], start: StartPhases
) -> tuple[PreTrainedTokenizerBase, StopTokens]:
    """Checks the base and the first adapters, without their weights; returns the tokenizer and what ends a response."""
    import_transformers()
    model = check_base(config)
    for adapter in adapters:
        check_layers(adapter)
    # Engines compute nothing for layers that no adapter has, such as the output layer.
    config.policy.generation.vllm_kwargs.setdefault(ENGINE_LAYERS, memory.layer_kinds(config.policy))
    tokenizer = get_tokenizer(config.policy.tokenizer, trust_remote_code=config.policy.trust_remote_code)
    return tokenizer, check_tokens(config.policy, model, tokenizer, start.say)


def _start_engines(
    config: MultiLoraMasterConfig,
    cluster: RayVirtualCluster,
    tokenizer: PreTrainedTokenizerBase,
    ends: StopTokens,
    profile: Profile | None,
) -> VllmGeneration:
    """Starts the engines that all adapters share; does not wait for them."""
    actors = start_engine_actors(
        cluster,
        config.policy,
        config.cluster,
        seed=config.grpo.seed,
        colocated=False,
        refits=False,
        profile=profile,
        worker=ENGINE_WORKER,
    )
    return VllmGeneration(
        actors,
        pad_token_id=tokenizer.pad_token_id,
        stop_token_ids=list(ends.ids),
        request_timeout_s=request_timeout_s(),
    )


@dataclass(frozen=True)
class Shared:
    """What the adapters of a job share."""

    policy: MultiLoraPolicy
    engines: AdapterEngines
    passes: SharedPasses
    accelerator: Accelerator
    clusters: list[RayVirtualCluster]
    device_count: DeviceCount
    environments: SharedEnvironments = field(default_factory=SharedEnvironments)


class _Prefixed:
    """Standard error, each line with the adapter's name before it."""

    def __init__(self, name: str) -> None:
        self._name, self._rest = name, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            sys.stderr.write(f"{self._name}: {line}\n")
        return len(text)

    def flush(self) -> None:
        """Lines are written whole."""
        sys.stderr.flush()


def build_run(
    adapter: AdapterConfig,
    slot: int,
    shared: Shared,
    records: AdapterRecords,
    removed: threading.Event,
    progress: Callable[[int, int], None],
) -> GRPORun:
    """An adapter's run, its slot filled. For errors see `grpo.assembly.setup`.

    Args:
        removed: Set when the adapter was removed.
        progress: Called with the prompt groups that are there and those that are waited for.
    """
    config, name = adapter.config, adapter.name
    console = Console(file=cast(Any, _Prefixed(name)), width=140)
    start, limits = StartPhases(console), limits_of(config)
    with ExitStack() as stack:
        with start.phase("directories"):
            checkpointer, resume = find_checkpoint(config)
            check_steps_left(resume, limits)
        with start.phase("model, tokenizer and data"):
            import_transformers()
            set_seed(config.grpo.seed)
            model = _check(config)
            actors = shared.environments.lend(name, environments_in_use(config), config.env)
            stack.callback(shared.environments.give_back, name)
            data = read_data(config, model, resume, shared.accelerator, start.say)
            loaders = make_loaders(config, data.datasets)
            state, total_steps = find_position(data, loaders, GRPOState(), GRPOState.from_training_info, limits)
        logger = open_logger(config, data, loaders, start.say, stack)
        record = records.open(name, Path(config.logger.log_dir))
        stack.callback(record.close)
        await_environments(actors, config.env)
        taken = shared.policy.fill_slot(slot, config.policy, *_saved_factors(checkpointer, data.resume))
        start.say(f"slot {slot}: {taken / (1 << 20):.1f} MiB on each training rank, with its optimizer")
        lora = config.policy.dtensor_cfg.lora_cfg
        layers = (name.rpartition(".")[0] for name in shared.policy.slot_factors(slot))
        info = AdapterInfo.of(config.policy.model_name, lora.dim, lora.alpha, layers)
        policy = AdapterPolicy(shared.passes, shared.policy, config.policy, name, slot, removed, data.tokenizer)
        generation = AdapterGeneration(shared.engines, name, removed, policy, record)
        store = InProcessStore(data.tokenizer.pad_token_id, config.policy.make_sequence_length_divisible_by)
        timer = Timer()
        # Both views have what a run calls.
        policy_view, generation_view = cast(Policy, policy), cast(VllmGeneration, generation)
        rollouts, validation_rollouts = make_rollout_sources(
            store, config, data.tokenizer, generation_view, data.datasets, actors, record, f"{name}/"
        )
        progress_of_run = RunProgress(total_steps, title=name, first_step=state.step, console=console)
        watched = watched_actors(shared.policy, actors)
        run = GRPORun(
            config=config,
            policy=policy_view,
            generation=generation_view,
            rollouts=rollouts,
            validation=validation_of(validation_rollouts, actors, data.datasets),
            store=store,
            loss_fn=make_loss(config.loss_fn),
            train_loader=loaders.train,
            val_loader=loaders.validation,
            logger=logger,
            checkpointer=checkpointer,
            state=state,
            record=record,
            timer=timer,
            timeout=TimeoutChecker(config.checkpointing.checkpoint_must_save_by),
            progress=progress_of_run,
            memory=MemoryWatch(watched, shared.engines.generation, logger, progress_of_run.say),
            total_steps=total_steps,
            clusters=[],
            reports=StepReports(config, store, logger, record, progress_of_run, generation_view, shared.device_count),
            adapter=name,
            resumed_from=resumed_from(data.resume),
        )
        run.accelerators = AdapterAccelerators(shared.engines, name, slot, info, timer, record, progress)
        run.source = make_source(run)
        end_files_first(run, stack)
        log_start(config, logger, state.step, start, {})
        run.ending = stack.pop_all()
    return run


def _check(config: MasterConfig) -> PretrainedConfig:
    for name in environments_in_use(config):
        environment_class(name, section_of(name, config.env))
    make_loss(config.loss_fn)
    return check_policy(config)


def _saved_factors(checkpointer: CheckpointManager, resume: Resume | None) -> tuple[str | None, str | None, int]:
    """Weights and optimizer state of a checkpoint, or None, and the steps behind them."""
    paths = checkpointer.get_resume_paths(resume.checkpoint) if resume is not None else None
    if resume is None or paths is None:
        return None, None, 0
    optimizer = None if paths.optimizer is None or resume.fresh_optimizer else str(paths.optimizer.resolve())
    return str(paths.weights.resolve()), optimizer, resume.info["total_steps"]


class AdapterRecord(RecordWriter):
    """The record of one adapter's run; `close` accounts for prompt groups that are still open."""

    def __init__(self, path: Path, *, source: str) -> None:
        self._open_groups: dict[str, None] = {}
        super().__init__(path, source=source, archive_bytes=ARCHIVE_BYTES)

    @override
    def _write(self, source: str, clock: Callable[[], float], event: object) -> None:
        super()._write(source, clock, event)
        if isinstance(event, GroupAdmitted):
            self._open_groups[event.group_id] = None
        elif isinstance(event, (GroupTrained, GroupDropped)):
            self._open_groups.pop(event.group_id, None)

    @override
    def close(self) -> None:
        # An adapter that was removed or failed leaves the groups of its step untrained.
        for group in list(self._open_groups):
            self.emit(GroupDropped(group, "adapter_left"))
        super().close()


@dataclass(frozen=True)
class AdapterRecords:
    """Where the adapters of a job write what happens to them: each into its own log directory.

    job: The job's name in a pool, whose other jobs may have adapters of equal names.
    folder: That pool's log, which gets a link to each record.
    """

    job: str = ""
    folder: Path | None = None

    def keep(self, states: Sequence[Mapping[str, object]]) -> None:
        """Lets the pool know how far the adapters are."""
        if self.folder is not None:
            replace_file(adapter_states(self.folder, self.job), json.dumps(list(states)))

    def open(self, adapter: str, log_dir: Path) -> AdapterRecord:
        """The record of an adapter that starts. `log_dir`: the numbered directory of this run of it."""
        path = log_dir / "record.jsonl"
        record = AdapterRecord(path, source=f"{adapter_pipeline(self.job, adapter)}/driver")
        if self.folder is not None:
            # A job that got its GPUs back goes on from checkpoints, in further records.
            link = self.folder / f"{self.job}.{adapter}.{time.time_ns()}.jsonl"
            link.symlink_to(path.absolute())
        return record
