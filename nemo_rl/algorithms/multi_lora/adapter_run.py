"""One adapter of a job as a GRPO run: its own data, environments, loss, logs and checkpoints, on shared accelerators.

Everything that a run does is GRPO's own; policy, generation and control plane are views of the job's, and environments
are shared where they keep nothing of what they judge. Invariants: what one adapter builds, it alone uses and closes;
every prompt group of a closed record was trained or dropped.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from typing_extensions import override

from nemo_rl.algorithms.grpo.assembly import (
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
from nemo_rl.algorithms.placement import check_policy
from nemo_rl.algorithms.resume import Resume
from nemo_rl.algorithms.startup import (
    check_steps_left,
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
from nemo_rl.config.multi_lora import AdapterConfig
from nemo_rl.distributed.accelerator_slots import Accelerator
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.environments.environment_registry import await_environments, environment_class, section_of
from nemo_rl.environments.shares import SharedEnvironments
from nemo_rl.experience.store import InProcessStore
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.multi_lora.multi_lora_policy import MultiLoraPolicy
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.adapter_files import AdapterInfo
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.files import adapter_states, replace_file
from nemo_rl.utils.progress import RunProgress, StartPhases
from nemo_rl.utils.record import ARCHIVE_BYTES, RecordWriter
from nemo_rl.utils.record_events import GroupAdmitted, GroupDropped, GroupTrained, adapter_pipeline
from nemo_rl.utils.timer import TimeoutChecker, Timer

if TYPE_CHECKING:
    from transformers import PretrainedConfig


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
        layers = sorted({n.rpartition(".")[0].rpartition(".")[2] for n in shared.policy.slot_factors(slot)})
        info = AdapterInfo(config.policy.model_name, lora.dim, lora.alpha, layers)
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
