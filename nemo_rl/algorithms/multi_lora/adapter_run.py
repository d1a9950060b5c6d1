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

from nemo_rl.algorithms.grpo.assembly import assembled, make_loaders, make_loss, make_rollout_sources
from nemo_rl.algorithms.grpo.collect import prompts_per_batch
from nemo_rl.algorithms.grpo.placement import OwnPlacement
from nemo_rl.algorithms.grpo.run import GRPORun, GRPOState
from nemo_rl.algorithms.grpo.step_reports import DeviceCount
from nemo_rl.algorithms.memory_watch import MemoryWatch, WatchedActors
from nemo_rl.algorithms.multi_lora.engines import AdapterAccelerators, AdapterEngines, AdapterGeneration
from nemo_rl.algorithms.multi_lora.passes import AdapterPolicy, SharedPasses
from nemo_rl.algorithms.placement import check_policy
from nemo_rl.algorithms.startup import Algorithm, Limits, prepared
from nemo_rl.config.data_rules import environments_in_use
from nemo_rl.config.multi_lora import AdapterConfig
from nemo_rl.data.loader import Loader
from nemo_rl.distributed.accelerator_slots import Accelerator
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.environments.environment_registry import Actors, await_environments, environment_class, section_of
from nemo_rl.environments.shares import SharedEnvironments
from nemo_rl.experience.store import InProcessStore
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.multi_lora.multi_lora_policy import MultiLoraPolicy
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.adapter_files import AdapterInfo
from nemo_rl.utils.files import adapter_states, replace_file
from nemo_rl.utils.progress import RunProgress, StartPhases
from nemo_rl.utils.record import ARCHIVE_BYTES, RecordWriter
from nemo_rl.utils.record_events import GroupAdmitted, GroupDropped, GroupTrained, adapter_pipeline
from nemo_rl.utils.timer import Timer

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


class _Guest(OwnPlacement):
    """The placement of an adapter: the job's cluster is there, and stays."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self._accelerator = accelerator

    def connect(self, config: object) -> Accelerator:  # type: ignore[override]
        return self._accelerator

    def disconnect(self) -> None:
        """Does nothing: the job leaves the cluster."""


@dataclass(frozen=True)
class _Environments:
    """An adapter's environments while it is prepared."""

    actors: Actors
    adapter: str
    shared: SharedEnvironments

    def shutdown(self) -> None:
        """Gives them back. Safe to call twice."""
        self.shared.give_back(self.adapter)


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
    """An adapter's run, its slot filled. For errors see `algorithms.startup.prepared`.

    Args:
        removed: Set when the adapter was removed.
        progress: Called with the prompt groups that are there and those that are waited for.
    """
    config, name = adapter.config, adapter.name
    console = Console(file=cast(Any, _Prefixed(name)), width=140)
    start, placement = StartPhases(console), _Guest(shared.accelerator)
    with prepared(config, _algorithm(adapter, shared.environments), placement, start) as ready, ExitStack() as undo:
        record = records.open(name, Path(config.logger.log_dir))
        undo.callback(record.close)
        actors = ready.ray_parts.actors
        await_environments(actors, config.env)
        paths = ready.checkpointer.get_resume_paths(ready.resume.checkpoint) if ready.resume is not None else None
        fresh = ready.resume is not None and ready.resume.fresh_optimizer
        taken = shared.policy.fill_slot(
            slot,
            config.policy,
            None if paths is None else str(paths.weights.resolve()),
            None if paths is None or paths.optimizer is None or fresh else str(paths.optimizer.resolve()),
            ready.resume.info["total_steps"] if ready.resume is not None else 0,
        )
        undo.callback(shared.policy.clear_slot, slot)
        start.say(f"slot {slot}: {taken / (1 << 20):.1f} MiB on each training rank, with its optimizer")
        lora = config.policy.dtensor_cfg.lora_cfg
        layers = sorted({n.rpartition(".")[0].rpartition(".")[2] for n in shared.policy.slot_factors(slot)})
        info = AdapterInfo(config.policy.model_name, lora.dim, lora.alpha, layers)
        policy = AdapterPolicy(shared.passes, shared.policy, config.policy, name, slot, removed, ready.tokenizer)
        generation = AdapterGeneration(shared.engines, name, removed, policy, record)
        store = InProcessStore(ready.tokenizer.pad_token_id, config.policy.make_sequence_length_divisible_by)
        timer = Timer()
        # Both views have what a run calls.
        policy_view, generation_view = cast(Policy, policy), cast(VllmGeneration, generation)
        sources = make_rollout_sources(
            store, config, ready.tokenizer, generation_view, ready.datasets, actors, record, f"{name}/"
        )
        progress_of_run = RunProgress(ready.total_steps, title=name, first_step=ready.state.step, console=console)
        watched: dict[str, WatchedActors] = {
            "trainer": lambda: shared.policy.worker_group.workers,
            "environment": lambda: [actor for replicas in actors.values() for actor in replicas],
        }
        run = assembled(
            config,
            ready,
            policy=policy_view,
            loss_fn=make_loss(config.loss_fn),
            generation=generation_view,
            accelerators=AdapterAccelerators(shared.engines, name, slot, info, timer, record, progress),
            sources=sources,
            store=store,
            record=record,
            timer=timer,
            progress=progress_of_run,
            memory=MemoryWatch(watched, shared.engines.generation, ready.logger, progress_of_run.say),
            environments=actors,
            placement=placement,
            clusters=[],
            device_count=shared.device_count,
            adapter=name,
        )
        undo.pop_all()
    return run


def _algorithm(adapter: AdapterConfig, environments: SharedEnvironments) -> Algorithm[GRPOState, Loader, _Environments]:
    config = adapter.config
    grpo = config.grpo
    epochs = None if config.data.use_multiple_dataloader or grpo.use_dynamic_sampling else grpo.max_num_epochs

    def check() -> PretrainedConfig:
        for name in environments_in_use(config):
            environment_class(name, section_of(name, config.env))
        make_loss(config.loss_fn)
        return check_policy(config)

    return Algorithm(
        state=GRPOState(),
        resumed=lambda resume: GRPOState.from_training_info(resume.info),
        seed=grpo.seed,
        limits=Limits("grpo.max_num_steps", grpo.max_num_steps, epochs, prompts_per_batch(grpo)),
        check_directories=lambda checkpointer, resume: None,
        check=check,
        loaders=lambda datasets, tokenizer: make_loaders(config, datasets),
        begin=lambda accelerator, checkpointer, resume: _Environments(
            environments.lend(adapter.name, environments_in_use(config), config.env), adapter.name, environments
        ),
    )


def close_run(run: GRPORun, environments: SharedEnvironments) -> None:
    """Closes what an adapter's run has of its own, and gives its environments back; safe after a failure."""
    with ExitStack() as stack:
        if isinstance(run.record, RecordWriter):
            stack.callback(run.record.close)
        stack.callback(environments.give_back, run.adapter)
        stack.callback(run.store.close)
        stack.callback(run.logger.close)
        stack.callback(run.record.flush)
        stack.callback(run.checkpointer.shutdown)
        stack.callback(run.reports.close)


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
