"""The world around drivers and collectors in tests, without Ray and without a model: prompts, generation, policy, store
and record, on a thread's event loop or on virtual time.

`World` surrounds a real driver and records in which order it calls what, and what it trains. `Schedule` surrounds a
real collector on virtual time: a seed decides everything, and nothing runs beside the caller.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.accelerators import OwnAccelerators
from nemo_rl.algorithms.grpo.assembly import make_source
from nemo_rl.algorithms.grpo.run import GRPOState
from nemo_rl.algorithms.grpo.step_reports import DeviceCount, StepReports
from nemo_rl.config import load_master_config
from nemo_rl.data_plane.client import StoredClient
from nemo_rl.data_plane.column_io import read_columns, write_columns
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentFailure
from nemo_rl.experience.collector import Collector, CollectorParts
from nemo_rl.experience.data_plane_store import DataPlaneStore
from nemo_rl.experience.prompt_queue import PromptQueue, QueueLimits, SavedBatch
from nemo_rl.experience.prompts import BufferedGroup, EpochPrompts, Position, group_id, group_name
from nemo_rl.experience.rollout_source import Rollout
from nemo_rl.experience.rollout_tasks import CollectorError, FailurePolicy, RefitPolicy, StallPolicy, Start
from nemo_rl.experience.rollouts import RolloutLimits, RolloutPlan, SampleOutcome
from nemo_rl.experience.samplers import InOrder, ReadyFirst, Sampler, WeightFifo, Windowed
from nemo_rl.experience.store import InProcessStore, RolloutColumns
from nemo_rl.models.generation.interfaces import GenerationSamplingParams
from nemo_rl.models.policy.tq_policy import StoredColumns
from nemo_rl.time_sharing.history.checker import check
from nemo_rl.utils.record import MemoryRecord
from nemo_rl.utils.record_events import (
    GroupAdmitted,
    GroupDropped,
    GroupTrained,
    RecordedSpan,
    RequestFinished,
    RequestSubmitted,
    StepBegun,
    StepFinished,
    SyncFinished,
    SyncStarted,
    TokensGenerated,
)
from nemo_rl.utils.timer import TimeoutChecker, Timer

CONFIG = Path(__file__).parents[1] / "examples" / "configs" / "grpo_arithmetic_async_cpu.yaml"
PROMPTS, SAMPLES = 3, 2
SMALL = (
    f"grpo.num_prompts_per_step={PROMPTS}",
    f"grpo.num_generations_per_prompt={SAMPLES}",
    f"policy.train_global_batch_size={PROMPTS * SAMPLES}",
    "policy.train_micro_batch_size=2",
    "policy.logprob_batch_size=2",
    "grpo.val_at_start=false",
    "grpo.val_period=0",
    "grpo.val_at_end=false",
    "grpo.max_num_epochs=1",
    "grpo.max_num_steps=5",
    "loss_fn.reference_policy_kl_penalty=0.0",
    "checkpointing.metric_name=null",
    "checkpointing.keep_top_k=null",
)


class Loader:
    """Batches of `rows` prompts 0, 1, 2, ..., from batch `at` on."""

    def __init__(self, batches: int = 40, at: int = 0, rows: int = PROMPTS) -> None:
        self.at, self._batches, self._rows, self._over = at, batches, rows, False

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[BatchedDataDict[Any]]:
        # A second pass begins at the first batch.
        self.at = 0 if self._over else self.at
        rows = self._rows
        while self.at < self._batches:
            self.at += 1
            idx = list(range(rows * (self.at - 1), rows * self.at))
            yield BatchedDataDict(idx=idx, length=torch.ones(rows), loss_multiplier=torch.ones(rows))
        self._over = True

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}


def rollout_of(
    batch: BatchedDataDict[Any], version: int, reward: Callable[[int, int], float] = lambda prompt, sample: sample
) -> Rollout:
    """Samples of four tokens, each the number of its prompt, of which the last three were drawn under `version`."""
    rows, samples = batch.size, [*zip(map(int, batch["idx"]), batch["sample_number"].tolist(), strict=True)]
    versions, drawn = torch.full((rows,), version), torch.full((rows,), 3)
    tokens = BatchedDataDict(
        input_ids=torch.tensor([[prompt] * 4 for prompt, _ in samples]),
        input_lengths=torch.full((rows,), 4),
        token_mask=torch.tensor([[0, 1, 1, 1]] * rows),
        generation_logprobs=torch.zeros(rows, 4),
        token_versions=torch.full((rows, 4), version, dtype=torch.int32),
        content=[f"{prompt}/{sample}" for prompt, sample in samples],
    )
    columns = BatchedDataDict(
        total_reward=torch.tensor([float(reward(*sample)) for sample in samples]),
        truncated=torch.zeros(rows, dtype=torch.bool),
        sample_mask=torch.ones(rows),
        prompt_lengths=torch.ones(rows),
        response_lengths=drawn,
        generated_lengths=drawn,
        total_lengths=torch.full((rows,), 4),
        prompt_number=batch["prompt_number"],
        sample_number=batch["sample_number"],
        weight_version=versions,
        newest_version=versions,
        mixed_kv=torch.zeros(rows, dtype=torch.bool),
    )
    outcomes = [
        SampleOutcome(1, [3], 0, 4, score, {}, False, ended=True, out_of_turns=False, unverified=False, branches=None)
        for score in columns["total_reward"].tolist()
    ]
    return Rollout(RolloutColumns(tokens, columns), outcomes)


def parts_of(
    loader: Any, rollouts: Any, start: Start, record: MemoryRecord, *, epoch: int = 0, rows: int = PROMPTS, samples: int
) -> CollectorParts:
    """What a collector works with: one epoch of batches of `rows` prompts, and groups of so many samples."""
    prompts, plain = EpochPrompts(loader, batch_size=rows, epoch=epoch, max_epochs=1), GenerationSamplingParams()
    plan = partial(RolloutPlan, 1, sampling=plain, limits=RolloutLimits(8, 4, 1))
    return CollectorParts(prompts, rollouts, InProcessStore(0), plan, start, samples, record)


class DispatchLoop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        # What was cancelled ends first.
        self.start(asyncio.sleep(0.01)).result(timeout=60.0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=60.0)


class World:
    """Everything around the driver, writing down what happens."""

    def __init__(
        self,
        tmp_path: Path,
        *overrides: str,
        loader: Loader | None = None,
        state: GRPOState | None = None,
        resumed_from: Path | None = None,
        plane: StoredClient | None = None,
        config: Path = CONFIG,
    ) -> None:
        self.plane = plane
        self.happened: list[str] = []
        self.step_open = False
        self.trained: list[int] = []
        self.sample_numbers: list[int] = []
        self.rewards: Callable[[int, int], float] = lambda prompt, sample: sample
        self.served = -1
        self.released = 0
        self.attempts: list[int] = []
        self.loop = DispatchLoop()
        self.saved: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        config = load_master_config(config, [*SMALL, f"checkpointing.checkpoint_dir={tmp_path}/ck", *overrides])
        loader = loader or Loader()
        self.run: Any = SimpleNamespace(
            adapter="",
            config=config,
            policy=self,
            generation=self,
            rollouts=self,
            resumed_from=resumed_from,
            accelerators=None,
            source=None,
            validation=None,
            store=InProcessStore(0) if plane is None else DataPlaneStore(plane, 0),
            loss_fn=None,
            train_loader=loader,
            val_loader=None,
            logger=SimpleNamespace(log_metrics=self.log_metrics, log_dir=tmp_path, samples_dir=tmp_path),
            checkpointer=SimpleNamespace(
                finish=lambda: None, poll=lambda: None, tolerate_failure=nullcontext, retry_due=False
            ),
            state=state or GRPOState(),
            record=MemoryRecord(),
            timer=Timer(),
            timeout=TimeoutChecker(None),
            memory=SimpleNamespace(after_step=lambda step: None, last=lambda: None),
            progress=SimpleNamespace(
                phase=lambda name: None,
                validated=lambda value, name, step: None,
                step_done=lambda *a, **k: None,
            ),
            total_steps=len(loader),
            teachers=None,
        )
        run = self.run
        self.run.reports = StepReports(
            run.config, run.store, run.logger, run.record, run.progress, run.generation, DeviceCount(2, 1, 1)
        )
        self.run.accelerators = OwnAccelerators(self, self.run.timer, self.run.progress.phase)  # type: ignore[arg-type]
        self.run.source = make_source(self.run)
        self.logged: list[dict[str, Any]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int, prefix: str, **_: Any) -> None:
        if prefix == "train":
            self.logged.append(metrics)

    def events(self, kind: type) -> list[Any]:
        return [entry.event for entry in self.run.record.entries if isinstance(entry.event, kind)]

    def every_prompt_is_accounted_for(self) -> None:
        admitted = [event.group_id for event in self.events(GroupAdmitted)]
        ended = [event.group_id for kind in (GroupTrained, GroupDropped) for event in self.events(kind)]
        assert len(admitted) == len(set(admitted)) and sorted(admitted) == sorted(ended)

    def resumed(self, step: int, *overrides: str, kind: type[World] | None = None, **arguments: Any) -> World:
        """Another run, from this one's checkpoint of a step."""
        loader, files = self.saved[step]
        folder = Path(tempfile.mkdtemp(dir=self.run.logger.log_dir))
        for name, content in files.items():
            torch.save(content, folder / name)
        state = GRPOState(step=step, step_in_epoch=step)
        loader = Loader(len(self.run.train_loader), at=loader["at"])
        return (kind or type(self))(
            folder, *overrides, loader=loader, state=state, resumed_from=folder, plane=self.plane, **arguments
        )

    # Refitter and policy have room, and no shard is lost here.
    close = make_room = await_rebuild = prepare_for_training = staticmethod(lambda *_: None)

    def revive(self, version: int) -> None:
        # The real one waits for the loop where requests are dispatched: nobody may hold what that waits for.
        self.start_on_dispatch_loop(asyncio.sleep(0)).result(timeout=30.0)

    # generation
    def start_on_dispatch_loop(self, work: Any) -> Any:
        return self.loop.start(work)

    async def roll_out_group(self, batch: BatchedDataDict[Any], plan: RolloutPlan) -> Rollout:
        version = max(0, self.served)
        await asyncio.sleep(0.002)
        return rollout_of(batch, version, self.rewards)

    def roll_out(self, batch: BatchedDataDict[Any], plan: RolloutPlan, attempt: int) -> Rollout:
        self.attempts.append(attempt)
        return rollout_of(batch, max(0, self.served), self.rewards)

    # refitter
    def release_device(self) -> None:
        self.released += 1

    def bring_to(self, version: int, timer: Any = None, *, recompute_kv: bool = True) -> None:
        self.happened.append(f"refit {version}")
        self.served = version

    def metrics(self) -> dict[str, float]:
        return {}

    # policy
    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        self.happened.append("logprobs")

    def get_logprobs(self, data: Any, timer: Any = None) -> Any:
        if self.plane is None:
            return BatchedDataDict(logprobs=torch.zeros(data["input_ids"].shape))
        write_columns(
            self.plane,
            data,
            {"prev_logprobs": torch.zeros(read_columns(self.plane, data, ["input_ids"])["input_ids"].shape)},
        )
        return StoredColumns({"logprobs": "prev_logprobs"})

    def submit_train(self, data: Any, loss_fn: Any, timer: Any = None) -> Any:
        self.happened.append("train")
        self._train_on(data)
        return SimpleNamespace(result=self._result)

    def _train_on(self, data: Any) -> None:
        if self.plane is not None:
            data = read_columns(self.plane, data, data.fields)
        self.trained += data["input_ids"][::SAMPLES, 0].tolist()
        self.sample_numbers += data["sample_index"].tolist()

    def _result(self) -> dict[str, Any]:
        metrics = {"global_valid_toks": [1.0]}
        return {"loss": torch.zeros(1), "grad_norm": 0.0, "all_mb_metrics": metrics, "num_ranks": 1}

    def begin_train_step(self, loss_fn: Any, *, gbs: int | None = None) -> None:
        assert not self.step_open
        self.step_open = True
        self.happened.append("begin")

    def train_microbatches(self, data: Any, timer: Any = None) -> None:
        assert self.step_open
        self._train_on(data)
        self.happened.append(f"train {len(self.trained)}")

    def submit_finish_train_step(self) -> Any:
        assert self.step_open
        self.step_open = False
        self.happened.append("finish")
        return SimpleNamespace(result=self._result)

    def abort_train_step(self) -> None:
        self.step_open = False
        self.happened.append("abort")


class Hooks:
    """Writes down every call; as a control plane it refits by itself."""

    def __init__(self, world: World, *, refits: bool) -> None:
        self._world, self._refits = world, refits
        self.progress: list[tuple[int, int, bool]] = []

    def on_trajectory_collector_created(self, collector: Any) -> None:
        self._world.happened.append("collector")
        self._world.served = 0 if self._refits else self._world.served

    def begin_progress_batch(self, step: int, target: int, completed: int) -> None:
        self._world.happened.append(f"begin {step}")

    def report_progress(self, step_target_trajectories: int, completed: int, new_batch: bool) -> None:
        self.progress.append((step_target_trajectories, completed, new_batch))

    def end_progress_batch(self) -> None:
        self._world.happened.append("end")

    def clear_progress(self) -> None:
        self._world.happened.append("clear")

    def before_training(self, step: int) -> None:
        self._world.happened.append(f"before training {step}")

    def before_weight_sync(self, step: int) -> None:
        self._world.happened.append(f"before sync {step}")

    def after_training(self, step: int) -> int | None:
        self._world.happened.append(f"after training {step}")
        self._world.served = step + 1 if self._refits else self._world.served
        return step + 1 if self._refits else None


def save_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints in memory: what would be written, by step."""

    def save(checkpointer: Any, world: World, loader: Any, step: int, info: Any, config: Any, also: Any) -> None:
        world.happened.append(f"save {step}")
        world.saved[step] = (loader.state_dict(), dict(also))

    monkeypatch.setattr("nemo_rl.algorithms.training_loop.begin_checkpoint", save)


# -- virtual time -----------------------------------------------------------------------------------------------------


class Wedged(AssertionError):
    """Nothing can happen any more, and the run is not over."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that skips the time for which it would wait, and that runs only while the caller waits for it."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Skipping(self))

    def time(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> None:
        """Runs whatever is due within that time."""
        self.run_until_complete(asyncio.sleep(seconds))

    def start(self, work: Coroutine[Any, Any, Any]) -> Any:
        """As `VllmGeneration.start_on_dispatch_loop`."""
        task = self.create_task(work)
        return SimpleNamespace(cancel=task.cancel, result=lambda timeout: self.run_until_complete(task))


class _Skipping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        self._loop.now += timeout or 0.0
        return super().select(0)


class VirtualCondition(nullcontext[None]):
    """A condition of a world without threads. Raises Wedged: nothing was notified in the time of a wait."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop, self._notified = loop, asyncio.Event()

    def wait(self, timeout: float) -> None:
        self._notified.clear()
        try:
            self._loop.run_until_complete(asyncio.wait_for(self._notified.wait(), timeout))
        except TimeoutError as error:
            raise Wedged(f"nothing happened for {timeout:.1f} s") from error

    def notify_all(self) -> None:
        self._notified.set()


class VirtualPool:
    """A pool whose work takes `seconds`."""

    def __init__(self, loop: VirtualLoop, seconds: float) -> None:
        self._loop, self._seconds = loop, seconds

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()

        def finish() -> None:
            if done.set_running_or_notify_cancel():
                done.set_result(work(*arguments))

        self._loop.call_later(self._seconds, finish)
        return done

    def shutdown(self, wait: bool) -> None: ...


@dataclass(frozen=True)
class Progress:
    """What a run came to, or what a checkpoint holds of it: prompts by their end, completed steps, and where the
    collector stood. `left`: prompts that were drawn and that the run's end left over.
    """

    trained: Sequence[int] = ()
    failed: Sequence[int] = ()
    left: Sequence[int] = ()
    steps: int = 0
    position: Position = Position({"at": 0}, 0)
    draws: Sequence[SavedBatch] = ()
    ready: Sequence[BufferedGroup] = ()


_UNIT = 0.01
"""Virtual seconds of the units below; far more of them than any rollout takes are one wait of the collector."""


class Schedule:
    """One random schedule of a streaming run: rollouts take as long as the seed says, fail, are given up or begin
    again; the run crashes and goes on from its last checkpoint. The history checker reads the record of every life.

    Attributes:
        lags: How old trained groups were.
        crashes: Lives that ended early.
        evicted: Groups that were generated again.
    """

    def __init__(self, seed: int) -> None:
        self._random = draw = random.Random(seed)
        self.wanted = draw.randint(1, 4)
        window = draw.randint(0, 2)
        kinds: list[Sampler] = [InOrder(window), WeightFifo(window), Windowed(window), Windowed(window, True)]
        self.sampler: Sampler = draw.choice([*kinds, ReadyFirst(window)])
        self.batches = draw.randint(1, 5)
        self.limits = QueueLimits(
            wanted=self.wanted,
            last_step=min(draw.randint(1, 6), self.batches),
            capacity=self.wanted * (self.sampler.window() + 1) + draw.randint(0, 4),
            max_inflight=draw.choice([None, 1, 2, 5]),
            min_fraction=0.01,
            replaces=draw.random() < 0.5,
        )
        self._least = draw.randint(1, self.wanted)
        self._fail_rate = draw.choice([0.0, 0.0, 0.2])
        self._crash_rate = draw.choice([0.0, 0.0, 0.15])
        self._save_period = draw.randint(1, 2)
        self._takes = draw.choice([lambda: draw.expovariate(1), lambda: 1.0, lambda: min(draw.paretovariate(1.2), 90)])
        self._train_s = _UNIT * draw.choice([0.0, 0.3, 3.0])
        self._sync_s = _UNIT * draw.choice([0.0, 1.0])
        self._store_s = _UNIT * draw.choice([0.0, 0.0, 1.0])
        self._draws_ahead = draw.random() < 0.5
        self.lags: list[int] = []
        self.crashes, self.evicted = 0, 0
        self._saved = Progress()

    def run(self) -> Progress:
        """Lives until the run is over."""
        while (ended := self._live()) is None:
            self.crashes += 1
        return ended

    def _live(self) -> Progress | None:
        self._loop, self._before = (loop := VirtualLoop()), self._saved
        self._record = MemoryRecord(source="run/driver", clock=lambda: loop.now)
        self._running: set[str] = set()
        self._collector = collector = self._built()
        try:
            ended = self._train_to_end()
            # Safe to call twice.
            for _ in range(2 * ended):
                collector.stop()
            if self._record.entries:
                found = check(self._record.entries, ended=ended)
                assert not found, found[0]
            return self._progress() if ended else None
        finally:
            self.evicted += collector.evicted
            collector.stop()
            loop.pass_time(2 * self._store_s)
            loop.close()

    def _built(self) -> Collector:
        loop, saved = self._loop, self._saved
        loader = Loader(self.batches, saved.position.loader_state["at"], self.wanted)
        rows, epoch = self.wanted, saved.position.epoch
        parts = parts_of(loader, self, loop.start, self._record, epoch=epoch, rows=rows, samples=1)
        failures = FailurePolicy(backoff_s=(0.0, 0.0), max_skipped=99, max_skipped_in_a_row=99)
        queue = PromptQueue(self.sampler, self.limits, saved.steps)
        collector: Any = Collector(parts, queue, failures, StallPolicy(), RefitPolicy())
        collector._changed = collector.tasks._changed = VirtualCondition(loop)
        collector._writes = VirtualPool(loop, self._store_s)
        collector.restore(saved.draws, saved.ready)
        return collector

    def _train_to_end(self) -> bool:
        """Whether the run has ended rather than crashed."""
        collector, queue = self._collector, self._collector.queue
        self._publish()
        while (step := queue.version) < self.limits.last_step:
            self._record.emit(StepBegun(step))
            while groups := self._take():
                self.lags += [step - group.generated_at for group in groups]
                # Rollouts go on while the part trains.
                self._loop.pass_time(self._train_s * len(groups))
                waits = queue.to_launch(self._published)
                assert not waits or collector.tasks.stopped, f"{waits} may begin and do not"
            if not (taken := queue.step.taken):
                return True
            if self._draws_ahead:
                collector.draw_ahead()
            for key in taken:
                self._record.emit(GroupTrained(group_name(key), step))
            self._record.emit(StepFinished(step, step + 1, len(taken)))
            collector.finish_step()
            # Rollouts go on, and begin, below the refit.
            self._loop.pass_time(self._sync_s)
            self._publish()
            if queue.version % self._save_period == 0:
                ready = [group for group in collector.finished() if self._random.random() < 0.8]
                self._saved = replace(
                    self._progress(), position=collector.position(), draws=collector.draws(), ready=[*map(_copy, ready)]
                )
            if self._random.random() < self._crash_rate:
                return False
        return True

    def _publish(self) -> None:
        self._published = version = self._collector.queue.version
        self._record.emit(SyncStarted(f"v{version}", version, (0,)))
        self._record.emit(SyncFinished(f"v{version}", version))
        self._collector.set_weight_version(version)

    def _take(self) -> Sequence[BufferedGroup]:
        step = self._collector.queue.step
        with suppress(StopIteration):
            try:
                return self._collector.take(lambda groups: len(groups) >= self._least)
            except CollectorError:
                # A step whose prompts were all given up ends the run.
                if len(step.dropped) < step.wanted:
                    raise
        return ()

    async def roll_out_group(self, batch: BatchedDataDict[Any], plan: RolloutPlan) -> Rollout:
        name, version, outcome = group_id(plan.step, int(batch["prompt_number"][0])), self._published, "aborted"
        assert name not in {group_name(group.key) for group in self._before.ready}, "it was finished before the crash"
        self._record.emit(RequestSubmitted(name, 0, name))
        self._running.add(name)
        self._permits_balance()
        try:
            await asyncio.sleep(_UNIT * self._takes())
            outcome = "failed" if self._random.random() < self._fail_rate else "done"
        finally:
            self._running.remove(name)
            self._record.emit(RequestFinished(name, 0, outcome, 3 * (outcome == "done")))
        if outcome == "failed":
            raise EnvironmentFailure("planted")
        self._record.emit(TokensGenerated(name, name, (RecordedSpan(version, 0, 3),)))
        return rollout_of(batch, version)

    def _permits_balance(self) -> None:
        limits, queue = self.limits, self._collector.queue
        assert queue.live() <= limits.capacity
        assert limits.max_inflight is None or len(self._running) <= queue.rolling() <= limits.max_inflight
        slots = queue.slots()
        assert len(slots) == len({slot.place for slot in slots}), "two groups in one place"
        begun = {group.key: group.generated_at for group in self._collector.finished()}
        assert begun == {slot.key: slot.started for slot in slots if slot.ready}

    def _progress(self) -> Progress:
        events = [entry.event for entry in self._record.entries]
        prompt_of = {one.group_id: int(one.prompt_id[2:]) for one in events if isinstance(one, GroupAdmitted)}
        trained = [prompt_of[one.group_id] for one in events if isinstance(one, GroupTrained)]
        dropped = [(one.reason, prompt_of[one.group_id]) for one in events if isinstance(one, GroupDropped)]
        return Progress(
            [*self._before.trained, *trained],
            [*self._before.failed, *(prompt for reason, prompt in dropped if reason == "failed")],
            [prompt for reason, prompt in dropped if reason == "end_of_run"],
            self._collector.queue.version,
        )


def _copy(group: BufferedGroup) -> BufferedGroup:
    # Its columns are cleared once it is trained.
    return replace(group, tokens=BatchedDataDict(group.tokens.get_dict()))
