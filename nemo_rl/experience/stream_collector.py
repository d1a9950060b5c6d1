"""Rolls prompts out for a streaming run and gives a step its groups as they finish.

`PromptQueue` decides; this part does: it draws prompts in the driver's thread, runs rollouts where requests are
dispatched, keeps the finished groups, and writes the run record. Knows no training. Invariants: what the queue says is
done under one lock; every wait has a deadline and says what it waited for; at `stop` nothing runs on, and every prompt
that was not trained is recorded as dropped.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from ray.exceptions import RayError, RayTaskError

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.errors import EnvironmentFailure
from nemo_rl.experience.prompt_queue import PromptQueue
from nemo_rl.experience.prompts import Position, PromptSource
from nemo_rl.experience.replay_buffer import BufferedGroup, GroupKey
from nemo_rl.experience.rollout_source import Rollout
from nemo_rl.experience.rollouts import RolloutPlan, number_samples
from nemo_rl.experience.samplers import SlotStatus
from nemo_rl.experience.store import ExperienceStore
from nemo_rl.experience.trajectory_collector import (
    STORE_WRITES,
    CollectorError,
    GroupRollouts,
    cancel_all,
    committed,
    ended_by,
    group_name,
)
from nemo_rl.models.generation.interfaces import GenerationError
from nemo_rl.utils.record import Record
from nemo_rl.utils.record_events import GroupAdmitted, GroupDropped, WaitBegun, WaitEnded

logger = logging.getLogger(__name__)

_CAUSES = 8
_LOOK_S = 5.0
_LAUNCH_S = 60.0
_TICK_S = 0.05


@dataclass(frozen=True)
class FailurePolicy:
    """What becomes of rollouts that fail.

    Attributes:
        infra_attempts: Rollouts of a prompt before failures of the machinery end the run.
        data_attempts: Rollouts of a prompt before failures of its own make it be dropped.
        backoff_s: First pause and longest pause between attempts.
        max_skipped: Prompts that a run may drop.
        max_in_a_row: Prompts that may be dropped without one that finishes between them.
    """

    infra_attempts: int = 5
    data_attempts: int = 2
    backoff_s: tuple[float, float] = (1.0, 30.0)
    max_skipped: int = 0
    max_in_a_row: int = 0


@dataclass(frozen=True)
class StallPolicy:
    """What a wait for groups does when none finishes.

    Attributes:
        timeout_s: Seconds without a finished group that count as a stall.
        aborts: Whether a stall ends the run; it is logged otherwise.
    """

    timeout_s: float = 600.0
    aborts: bool = True


class SavedBatch(NamedTuple):
    """A drawn batch as a checkpoint has it: its number, its prompts, and `(row, attempt, number)` of those that are not
    trained.
    """

    batch: int
    rows: int
    open: tuple[tuple[int, int, int], ...]


@dataclass
class _Prompt:
    """What rolling a prompt out takes."""

    batch: BatchedDataDict[Any]
    identity: str


class StreamCollector:
    """Collects the experience of one streaming run.

    Args:
        prompts: Batches of prompts.
        rollouts: Rolls groups out.
        store: Where finished groups wait for their step.
        plan: How the rollouts of a batch are drawn.
        start: Starts a coroutine on the loop where requests are dispatched.
        queue: Decides.
        generations: Samples per prompt.
        failures: What becomes of rollouts that fail.
        stall: What becomes of a wait without end.
        record: Run record.
    """

    def __init__(
        self,
        *,
        prompts: PromptSource,
        rollouts: GroupRollouts,
        store: ExperienceStore[Any],
        plan: Callable[[int], RolloutPlan],
        start: Callable[[Coroutine[Any, Any, Any]], Future[Any]],
        queue: PromptQueue,
        generations: int,
        failures: FailurePolicy,
        stall: StallPolicy,
        record: Record,
    ) -> None:
        self._prompts, self._rollouts, self._store, self._plan, self._start = prompts, rollouts, store, plan, start
        self._generations, self._policy, self._stall, self._record = generations, failures, stall, record
        self.queue = queue
        self._writes = ThreadPoolExecutor(STORE_WRITES, thread_name_prefix="store-write")
        self._changed = threading.Condition()
        self._restored: list[SavedBatch] = []
        self._befores: dict[int, Position] = {}
        self._prompt_of: dict[GroupKey, _Prompt] = {}
        self._buffer: dict[GroupKey, BufferedGroup] = {}
        self._tasks: dict[GroupKey, asyncio.Task[None]] = {}
        self._committing: set[GroupKey] = set()
        self._version: int | None = None
        self._last_progress = time.monotonic()
        self._in_a_row = 0
        self._fatal: BaseException | None = None
        self.skipped = 0
        self.evicted = 0
        self.loop_lag_s = 0.0
        self._watch: Future[None] | None = None
        self.stopped = False

    def __len__(self) -> int:
        return len(self._buffer)

    # -- prompts in ---------------------------------------------------------------------------------------------------

    def set_weight_version(self, version: int) -> None:
        """Version `version` is published: what is too old for every step from now on begins anew, and prompts that it
        is early enough for are drawn and begin.
        """
        with self._changed:
            self._version = version
            stale = [key for key in self.queue.stale() if key not in self._committing]
            tasks = [self._tasks.pop(key) for key in stale if key in self._tasks]
            for key in stale:
                self._begin_again(key)
        if tasks:
            self._start(cancel_all(tasks)).result(timeout=_LAUNCH_S)
        if self._watch is None:
            self._watch = self._start(self._watch_loop())
        self.draw()
        self._launch()

    def _begin_again(self, key: GroupKey) -> None:
        group, prompt = self._buffer.pop(key, None), self._prompt_of.pop(key)
        if group is not None:
            self._store.clear(group.tokens)
        fresh = self.queue.again(key)
        self.evicted += 1
        row = prompt.batch.slice(0, 1)
        self._record.emit(GroupDropped(group_name(key), "stale"))
        self._admit(fresh, _Prompt(number_samples(row, self._generations, fresh.number), prompt.identity))

    def draw(self) -> None:
        """Draws the prompts that may be dispatched; from the driver's thread, for the loader may take a while."""
        while self._restored and not self.queue.exhausted:
            saved = self._restored.pop(0)
            self._draw(saved)
        while self.queue.wants_batch():
            self._draw(None)

    def _draw(self, saved: SavedBatch | None) -> None:
        before = self._prompts.position()
        try:
            batch = self._prompts.next()
        except StopIteration:
            with self._changed:
                self.queue.exhausted = True
            return
        with self._changed:
            if saved is None:
                keys = dict(enumerate(self.queue.draw(batch.size)))
            else:
                keys = {row: GroupKey(saved.batch, attempt, number) for row, attempt, number in saved.open}
                self.queue.restore(saved.batch, batch.size, keys)
            number = saved.batch if saved is not None else keys[0].target
            self._befores[number] = before
            for row, key in keys.items():
                identity = f"{self._prompts.epoch}-{batch['idx'][row]}"
                samples = number_samples(batch.slice(row, row + 1), self._generations, key.number)
                self._admit(key, _Prompt(samples, identity))
                if (held := self._buffer.get(key)) is not None:
                    self.queue.launched(key, held.generated_at)
                    self.queue.ready(key)
                    self._record.emit(committed(held, restored=True))

    def _admit(self, key: GroupKey, prompt: _Prompt) -> None:
        self._prompt_of[key] = prompt
        self._record.emit(GroupAdmitted(group_name(key), prompt.identity, self._generations, key.target))

    async def _watch_loop(self) -> None:
        """Keeps how late the loop came back at worst; whoever reads `loop_lag_s` sets it to 0 again."""
        while not self.stopped:
            begun = time.monotonic()
            await asyncio.sleep(_TICK_S)
            self.loop_lag_s = max(self.loop_lag_s, time.monotonic() - begun - _TICK_S)

    def _launch(self) -> None:
        """Begins every rollout that may begin, with one call to the loop. From any thread."""
        with self._changed:
            if self.stopped or self._version is None:
                return
            keys = self.queue.to_launch()
            for key in keys:
                self.queue.launched(key, self._version)
        if keys:
            self._start(self._begin(keys))

    async def _begin(self, keys: Sequence[GroupKey]) -> None:
        with self._changed:
            for key in keys:
                if key in self._prompt_of and not self.stopped:
                    self._tasks[key] = asyncio.create_task(self._collect(key))
                    self._tasks[key].add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        with self._changed:
            self._fatal = self._fatal or task.exception()
            self._changed.notify_all()

    # -- rollouts -----------------------------------------------------------------------------------------------------

    async def _collect(self, key: GroupKey) -> None:
        pause_s, longest_s = self._policy.backoff_s
        prompt, version = self._prompt_of[key], self._version or 0
        while True:
            try:
                rollout = await self._rollouts.roll_out_group(prompt.batch, self._plan(key.target))
            except (GenerationError, EnvironmentFailure) as error:
                if not self._tries_again(key, error):
                    break
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
                continue
            if not self._may_commit(key):
                return
            # A store elsewhere answers in its own time; other requests go on meanwhile.
            handle = await asyncio.wrap_future(self._writes.submit(self._store.write_pending, rollout.columns))
            self._commit(key, handle, rollout, version)
            break
        self._launch()

    def _may_commit(self, key: GroupKey) -> bool:
        """Whether a finished rollout is still wanted; from here on it is not begun anew."""
        with self._changed:
            wanted = key in self._prompt_of and not self.stopped
            if wanted:
                self._committing.add(key)
            return wanted

    def _tries_again(self, key: GroupKey, error: BaseException) -> bool:
        """Whether a failed rollout is tried again; its prompt is given up otherwise.

        Raises:
            CollectorError: The run's budget for failures is used up.
        """
        policy, machinery, name = self._policy, is_infrastructure(error), group_name(key)
        with self._changed:
            if key not in self._prompt_of:
                return False
            attempts = self.queue.failed(key)
            allowed = policy.infra_attempts if machinery else policy.data_attempts
            if attempts < allowed:
                logger.warning("group=%s rollout=failed attempt=%d of=%d reason=%s", name, attempts, allowed, error)
                return True
            keys = "max_infra_attempts_per_prompt" if machinery else "max_data_attempts_per_prompt"
            said = f"group {name} failed {attempts} times, async_rl.rollout_failure.{keys}={allowed}; the last: {error}"
            if machinery:
                raise CollectorError(said) from error
            self.skipped += 1
            self._in_a_row += 1
            if self.skipped > policy.max_skipped or self._in_a_row > policy.max_in_a_row:
                raise CollectorError(
                    f"{said}; async_rl.rollout_failure.max_skipped_prompts={policy.max_skipped} and "
                    f"max_consecutive_dropped_prompts={policy.max_in_a_row} allow no further dropped prompt"
                ) from error
            logger.warning("group=%s prompt=dropped skipped=%d reason=%s", name, self.skipped, error)
            self.queue.give_up(key)
            self._forget(key)
            self._record.emit(GroupDropped(name, "failed"))
            self._changed.notify_all()
            return False

    def _commit(self, key: GroupKey, handle: Any, rollout: Rollout, version: int) -> None:
        group = BufferedGroup(key, handle, rollout.columns.rows, dict(rollout.metrics), version)
        with self._changed:
            self._committing.discard(key)
            self._tasks.pop(key, None)
            self._record.emit(committed(group))
            self._buffer[key] = group
            self.queue.ready(key)
            self._in_a_row = 0
            self._last_progress = time.monotonic()
            self._changed.notify_all()

    def _forget(self, key: GroupKey) -> None:
        self._prompt_of.pop(key, None)
        self._tasks.pop(key, None)

    # -- groups out ---------------------------------------------------------------------------------------------------

    def take(
        self,
        enough: Callable[[Sequence[BufferedGroup]], bool],
        on_progress: Callable[[int, int], None] = lambda ready, of: None,
    ) -> list[BufferedGroup]:
        """The groups that the open step takes next, once they are enough, or no others come for it; empty when it has
        all that it gets.

        Args:
            enough: Whether these groups are worth a pass.
            on_progress: Called with the groups that the step has or could take, and its total, as they grow.

        Raises:
            StopIteration: The prompts are used up, and the open step is too small without them.
            CollectorError: Rollouts failed, too many prompts of the step were dropped, or nothing arrived in time.
        """
        step = self.queue.step.version
        wait = f"groups of step {step}"
        self._record.emit(WaitBegun(wait, wait, time.time() + self._stall.timeout_s))
        outcome = "cancelled"
        try:
            with self._changed:
                self._last_progress = time.monotonic()
            while True:
                self.draw()
                self._launch()
                with self._changed:
                    self._check_health()
                    on_progress(self.queue.ready_for_step(), self.queue.step.wanted - len(self.queue.step.dropped))
                    keys = self.queue.select(lambda keys: enough([self._buffer[key] for key in keys]))
                    if keys is not None:
                        outcome = "done"
                        if self.queue.step.dropped:
                            self._check_size()
                        if not keys and self.queue.too_small():
                            raise StopIteration
                        return [self._buffer.pop(key) for key in keys]
                    left = self._last_progress + self._stall.timeout_s - time.monotonic()
                    if left <= 0:
                        outcome = "expired"
                        self._stalled()
                        self._last_progress, left = time.monotonic(), self._stall.timeout_s
                    self._changed.wait(min(left, _LOOK_S))
        finally:
            self._record.emit(WaitEnded(wait, outcome))

    def _check_size(self) -> None:
        step = self.queue.step
        if self.queue.too_small():
            raise CollectorError(
                f"step {step.version} lost {len(step.dropped)} of its {step.wanted} prompts, and less than "
                "async_rl.rollout_failure.min_step_batch_fraction is left; "
                "async_rl.rollout_failure.on_dropped_prompt: replace takes others"
            )

    def _stalled(self) -> None:
        slots = self.queue.slots()
        by_status = {status.value: sum(slot.status is status for slot in slots) for status in SlotStatus}
        rolling = [group_name(slot.key) for slot in slots if slot.status is SlotStatus.ROLLING]
        said = (
            f"no group was finished for {self._stall.timeout_s:.0f} s; step {self.queue.step.version} waits for "
            f"{self.queue.step.missing} of {self.queue.step.wanted} groups, of all groups {by_status}, "
            f"rolling {rolling[:8]}"
        )
        if self._stall.aborts:
            raise CollectorError(f"{said}; async_rl.stall_watchdog.stall_timeout_s allows more")
        logger.warning("stall: %s; async_rl.stall_watchdog.stall_action: abort ends the run instead", said)

    def _check_health(self) -> None:
        if self._fatal is not None:
            raise ended_by(self._fatal) from self._fatal
        if self.stopped:
            raise CollectorError("the collector was stopped while the run still waits for it")

    def numbers(self) -> dict[GroupKey, int]:
        """The groups that the open step took, with their numbers in it."""
        with self._changed:
            return dict(self.queue.taken_in_order())

    def finish_step(self, target: int) -> Position:
        """The open step, `target`, is trained. Where the loader stood before what is still to be trained."""
        with self._changed:
            for key in self.queue.finish_step().taken:
                self._forget(key)
            open_batches = {drawn.batch for drawn in self.queue.drawn()}
            self._befores = {batch: before for batch, before in self._befores.items() if batch in open_batches}
        return self.position()

    def count_intended_for_step(self, version: int) -> int:
        """Groups that the step which starts from `version` took, or could take now."""
        with self._changed:
            return self.queue.ready_for_step() if version == self.queue.step.version else 0

    # -- checkpoints and end ------------------------------------------------------------------------------------------

    def position(self) -> Position:
        """Where the loader stood before the first batch that is not wholly trained."""
        with self._changed:
            return self._befores[min(self._befores)] if self._befores else self._prompts.position()

    def finished(self) -> list[BufferedGroup]:
        """The groups that wait for a step."""
        with self._changed:
            return [self._buffer[key] for key in sorted(self._buffer)]

    def draws(self) -> list[SavedBatch]:
        """Every batch since `position`, in the order in which they were drawn."""
        with self._changed:
            drawn = [
                SavedBatch(one.batch, one.rows, tuple((row, key.attempt, key.number) for row, key in one.open.items()))
                for one in self.queue.drawn()
            ]
            return drawn + self._restored

    def restore(self, draws: Sequence[SavedBatch], groups: Sequence[BufferedGroup]) -> None:
        """Goes on from a checkpoint: the loader stands before `draws`, of which `groups` are finished already."""
        with self._changed:
            self._restored = list(draws)
            self._buffer = {group.key: group for group in groups}

    def clear(self) -> None:
        """Forgets the groups that wait; for the end of a run that trains no more."""
        for group in self.finished():
            self._store.clear(group.tokens)

    def stop(self) -> None:
        """Ends every rollout; groups that nobody trained are recorded as dropped. Safe to call twice."""
        with self._changed:
            if self.stopped:
                return
            self.stopped = True
            tasks = list(self._tasks.values())
            self._changed.notify_all()
        if tasks:
            self._start(cancel_all(tasks)).result(timeout=_LAUNCH_S)
        if self._watch is not None:
            self._watch.cancel()
        self._writes.shutdown(wait=False)
        for key in sorted(self._prompt_of):
            self._record.emit(GroupDropped(group_name(key), "end_of_run"))


def is_infrastructure(error: BaseException) -> bool:
    """Whether a rollout failed for what the machinery did, rather than for its prompt: an engine, a timeout, a
    connection or a Ray process, somewhere among its causes.
    """
    cause: BaseException | None = error
    for _ in range(_CAUSES):
        if cause is None:
            return False
        if isinstance(cause, (GenerationError, TimeoutError, ConnectionError)):
            return True
        # What the code of an environment raised in its actor comes back as a task error.
        if isinstance(cause, RayError) and not isinstance(cause, RayTaskError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
