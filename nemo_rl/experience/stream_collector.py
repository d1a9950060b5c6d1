"""Generates rollouts for a streaming run and gives a step its groups as they finish.

`PromptQueue` decides; this draws prompts in the driver's thread, runs rollouts on the dispatch loop, keeps finished
groups, and writes the run record. Invariants: the queue's decisions are carried out under one lock; every wait has a
deadline and names what it waited for; after `stop` nothing runs, and every untrained prompt is recorded as dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentFailure
from nemo_rl.experience.collector import (
    Collector,
    CollectorError,
    CollectorParts,
    StallPolicy,
    committed,
    group_name,
    is_infrastructure,
)
from nemo_rl.experience.prompt_queue import PromptQueue
from nemo_rl.experience.prompts import Position
from nemo_rl.experience.replay_buffer import BufferedGroup, GroupKey
from nemo_rl.experience.rollout_source import Rollout
from nemo_rl.experience.rollouts import number_samples
from nemo_rl.experience.samplers import SlotStatus
from nemo_rl.models.generation.interfaces import GenerationError
from nemo_rl.utils.record_events import GroupAdmitted, GroupDropped

if TYPE_CHECKING:
    from nemo_rl.models.policy.interfaces import BatchHandle

logger = logging.getLogger(__name__)

_TICK_S = 0.05


@dataclass(frozen=True)
class FailurePolicy:
    """What becomes of rollouts that fail."""

    infra_attempts: int = 5  # rollouts of a prompt before failures of the machinery end the run
    data_attempts: int = 2  # rollouts of a prompt before failures of its own make it be dropped
    backoff_s: tuple[float, float] = (1.0, 30.0)  # first pause and longest pause between attempts
    max_skipped: int = 0  # prompts that a run may drop
    max_in_a_row: int = 0  # prompts that may be dropped without one that finishes between them


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

    batch: BatchedDataDict
    identity: str


class StreamCollector(Collector):
    """Collects the experience of one streaming run. `failures`: what becomes of rollouts that fail. `stall`: what
    becomes of a wait without end.
    """

    def __init__(self, parts: CollectorParts, queue: PromptQueue, failures: FailurePolicy, stall: StallPolicy) -> None:
        super().__init__(parts, stall)
        self.queue = queue
        self._policy = failures
        self._restored: list[SavedBatch] = []
        self._befores: dict[int, Position] = {}
        self._prompt_of: dict[GroupKey, _Prompt] = {}
        self._buffer: dict[GroupKey, BufferedGroup] = {}
        self._committing: set[GroupKey] = set()
        self._in_a_row = 0
        self.skipped = 0
        self.evicted = 0
        self.loop_lag_s = 0.0
        self._watch: Future[None] | None = None

    def __len__(self) -> int:
        return len(self._buffer)

    # -- prompts in ---------------------------------------------------------------------------------------------------

    def set_weight_version(self, version: int) -> None:
        """Publishes `version`: restarts groups that are too old for every later step, and draws and starts prompts that
        are now allowed.
        """
        with self._changed:
            self._version = version
        if self._watch is None:
            self._watch = self._parts.start(self._watch_loop())
        self._pump()

    def _pump(self) -> None:
        """Whatever may happen to prompts now; from the driver's thread."""
        with self._changed:
            # One that is being stored is looked at again when it is.
            stale = [key for key in self.queue.stale() if key not in self._committing]
            tasks = [self._tasks.pop(key) for key in stale if key in self._tasks]
            for key in stale:
                self._begin_again(key)
        self._cancel(tasks)
        self.draw()
        self._launch()

    def _begin_again(self, key: GroupKey) -> None:
        group, prompt = self._buffer.pop(key, None), self._prompt_of.pop(key)
        if group is not None:
            self._parts.store.clear(group.tokens)
        fresh = self.queue.again(key)
        self.evicted += 1
        row = prompt.batch.slice(0, 1)
        self._parts.record.emit(GroupDropped(group_name(key), "stale"))
        self._admit(fresh, _Prompt(number_samples(row, self._parts.generations, fresh.number), prompt.identity))

    def draw(self) -> None:
        """Draws the prompts that may be dispatched; from the driver's thread, for the loader may take a while."""
        while self._restored and not self.queue.exhausted:
            saved = self._restored.pop(0)
            self._draw(saved)
        while self.queue.wants_batch():
            self._draw(None)

    def draw_ahead(self) -> None:
        """Draws what the next version admits, while something else takes time. A loader that fails does so where the
        batch is wanted.
        """
        while not self._restored and self.queue.wants_batch(ahead=True) and self._parts.prompts.prefetch():
            self._draw(None)

    def _draw(self, saved: SavedBatch | None) -> None:
        before = self._parts.prompts.position()
        try:
            batch = self._parts.prompts.next()
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
                identity = f"{self._parts.prompts.epoch}-{batch['idx'][row]}"
                samples = number_samples(batch.slice(row, row + 1), self._parts.generations, key.number)
                self._admit(key, _Prompt(samples, identity))
                if (held := self._buffer.get(key)) is not None:
                    self.queue.launched(key, held.generated_at)
                    self.queue.ready(key)
                    self._parts.record.emit(committed(held, restored=True))

    def _admit(self, key: GroupKey, prompt: _Prompt) -> None:
        self._prompt_of[key] = prompt
        self._parts.record.emit(GroupAdmitted(group_name(key), prompt.identity, self._parts.generations, key.target))

    async def _watch_loop(self) -> None:
        """Keeps the event loop's worst delay; readers of `loop_lag_s` reset it to 0."""
        while not self.stopped:
            begun = time.monotonic()
            await asyncio.sleep(_TICK_S)
            self.loop_lag_s = max(self.loop_lag_s, time.monotonic() - begun - _TICK_S)

    def _launch(self) -> None:
        """Begins every rollout that may begin, with one call to the loop. From any thread."""
        with self._changed:
            if self.stopped or self._version is None:
                return
            keys = self.queue.to_launch(self._version)
            for key in keys:
                self.queue.launched(key, self._version)
        if keys:
            self._parts.start(self._begin(keys))

    async def _begin(self, keys: Sequence[GroupKey]) -> None:
        with self._changed:
            for key in keys:
                if key in self._prompt_of and not self.stopped:
                    self._begin_task(key, self._collect(key))

    # -- rollouts -----------------------------------------------------------------------------------------------------

    async def _collect(self, key: GroupKey) -> None:
        pause_s, longest_s = self._policy.backoff_s
        prompt, version = self._prompt_of[key], self._version or 0
        while True:
            try:
                rollout = await self._parts.rollouts.roll_out_group(prompt.batch, self._parts.plan(key.target))
            except (GenerationError, EnvironmentFailure) as error:
                if not self._tries_again(key, error):
                    break
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
                continue
            if not self._may_commit(key):
                return
            handle = await self._write_pending(rollout.columns)
            self._commit(key, handle, rollout, version)
            break
        self._launch()

    def _may_commit(self, key: GroupKey) -> bool:
        """Whether a finished rollout is still wanted; afterwards it is not restarted."""
        with self._changed:
            wanted = key in self._prompt_of and not self.stopped
            if wanted:
                self._committing.add(key)
            return wanted

    def _tries_again(self, key: GroupKey, error: BaseException) -> bool:
        """Whether a failed rollout is tried again; its prompt is given up otherwise."""
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
            self._parts.record.emit(GroupDropped(name, "failed"))
            self._changed.notify_all()
            return False

    def _commit(self, key: GroupKey, handle: BatchHandle, rollout: Rollout, version: int) -> None:
        group = BufferedGroup(key, handle, rollout.columns.rows, dict(rollout.metrics), version)
        with self._changed:
            self._committing.discard(key)
            self._tasks.pop(key, None)
            self._parts.record.emit(committed(group))
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
        before_wait: Callable[[], None] = lambda: None,
    ) -> list[BufferedGroup]:
        """The groups that the open step takes next, once they are enough, or no others come for it; empty when it has
        all that it gets.

        Args:
            enough: Whether these groups are worth a pass.
            on_progress: Called with the groups that the step has or could take, and its total, as they grow.
            before_wait: Called once, before the first wait, where the groups are not there yet.

        Raises StopIteration: the prompts are used up, and the open step is too small without them; CollectorError:
        rollouts failed, too many prompts of the step were dropped, or nothing arrived in time.
        """
        waits = False
        with self._waiting(f"groups of step {self.queue.step.version}"):
            while True:
                self._pump()
                with self._changed:
                    self.check_health()
                    ready, of = self.queue.ready_for_step(), self.queue.step.wanted - len(self.queue.step.dropped)
                # It may wait for the loop where requests are dispatched, which takes the lock.
                on_progress(ready, of)
                with self._changed:
                    keys = self.queue.select(lambda keys: enough([self._buffer[key] for key in keys]))
                    if keys is not None:
                        if self.queue.step.dropped:
                            self._check_size()
                        if not keys and self.queue.too_small():
                            raise StopIteration
                        return [self._buffer.pop(key) for key in keys]
                    if waits:
                        self._wait_for_change()
                if not waits:
                    before_wait()
                    waits = True

    def _check_size(self) -> None:
        step = self.queue.step
        if self.queue.too_small():
            raise CollectorError(
                f"step {step.version} lost {len(step.dropped)} of its {step.wanted} prompts, and less than "
                "async_rl.rollout_failure.min_step_batch_fraction is left; "
                "async_rl.rollout_failure.on_dropped_prompt: replace takes others"
            )

    def _waits_for(self) -> str:
        slots = self.queue.slots()
        by_status = {status.value: sum(slot.status is status for slot in slots) for status in SlotStatus}
        rolling = [group_name(slot.key) for slot in slots if slot.status is SlotStatus.ROLLING]
        return (
            f"step {self.queue.step.version} waits for {self.queue.step.missing} of {self.queue.step.wanted} groups, "
            f"of all groups {by_status}, rolling {rolling[:8]}"
        )

    def _untrained_groups(self) -> list[GroupKey]:
        return list(self._prompt_of)

    def numbers(self) -> dict[GroupKey, int]:
        """The groups that the open step took, with their numbers in it."""
        with self._changed:
            return dict(self.queue.taken_in_order())

    def finish_step(self, target: int) -> Position:
        """Closes the trained step `target`; returns the loader's position before the untrained prompts."""
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
            return self._befores[min(self._befores)] if self._befores else self._parts.prompts.position()

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
        """Resumes from a checkpoint: the loader's position is before `draws`, of which `groups` are finished."""
        with self._changed:
            self._restored = list(draws)
            self._buffer = {group.key: group for group in groups}

    def stop(self) -> None:
        """See `Collector`; the loop is watched no more."""
        super().stop()
        if self._watch is not None:
            self._watch.cancel()
