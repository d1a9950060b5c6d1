"""Generates rollouts ahead of training, or beside it, and gives a step its groups.

`PromptQueue` decides which prompts are drawn, begin and belong to a step; this draws them in the driver's thread, runs
rollouts as coroutines on the dispatch loop, keeps finished groups, and writes the run record. Invariants: the queue's
decisions are carried out under one lock; every drawn group is trained once, dropped with a reason, or held by a
checkpoint; every wait has a deadline and names what it waited for; after `stop` nothing runs.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentFailure
from nemo_rl.experience.environment_batcher import environment_lines
from nemo_rl.experience.prompt_queue import PromptQueue, SavedBatch
from nemo_rl.experience.prompts import BufferedGroup, EpochPrompts, GroupKey, Position, StaleGroupError, group_name
from nemo_rl.experience.rollout_source import LiveRollouts, Rollout
from nemo_rl.experience.rollout_tasks import (
    CollectorError,
    CollectorStalled,
    FailurePolicy,
    Failures,
    RefitPolicy,
    RolloutTasks,
    StallPolicy,
    Start,
)
from nemo_rl.experience.rollouts import RolloutPlan, number_samples
from nemo_rl.experience.samplers import SlotStatus
from nemo_rl.experience.store import ExperienceStore
from nemo_rl.models.generation.interfaces import GenerationError
from nemo_rl.utils.record import Record
from nemo_rl.utils.record_events import GroupAdmitted, GroupDropped, WaitBegun, WaitEnded

if TYPE_CHECKING:
    from nemo_rl.models.policy.interfaces import BatchHandle

logger = logging.getLogger(__name__)

_POLL_S = 5.0
_STORE_WRITES = 8


@dataclass(frozen=True)
class CollectorParts:
    """Collaborators of a collector."""

    prompts: EpochPrompts
    rollouts: LiveRollouts
    store: ExperienceStore  # where finished groups wait for their step
    plan: Callable[[int], RolloutPlan]  # how the rollouts of a batch are drawn
    start: Start
    generations: int
    record: Record


@dataclass
class _Prompt:
    """Inputs to the rollouts of one prompt."""

    batch: BatchedDataDict
    identity: str


class Collector:
    """Collects the experience of one run.

    Args:
        queue: Decides. Its sampler says which groups a step takes, and how old they may be.
        failures: Retry and drop policy of failed rollouts.
        stall: Stall watchdog of waits.
        refits: Policy of rollouts that run during a refit.

    Attributes:
        tasks: The running rollouts.
        evicted: Groups that were restarted because no step would have taken them.
    """

    def __init__(
        self,
        parts: CollectorParts,
        queue: PromptQueue,
        failures: FailurePolicy,
        stall: StallPolicy,
        refits: RefitPolicy,
    ) -> None:
        self._parts, self.queue, self._policy, self._stall = parts, queue, failures, stall
        self._failures = Failures(failures)
        self._changed = threading.Condition()
        self.tasks = RolloutTasks(parts.start, self._changed, refits)
        # Of its own: calls of environments fill the loop's default pool.
        self._writes = ThreadPoolExecutor(_STORE_WRITES, thread_name_prefix="store-write")
        self._restored: list[SavedBatch] = []
        self._prompt_of: dict[GroupKey, _Prompt] = {}
        self._buffer: dict[GroupKey, BufferedGroup] = {}
        self._committing: set[GroupKey] = set()
        self._version: int | None = None
        self._last_progress = time.monotonic()
        self.evicted = 0

    def __len__(self) -> int:
        """Finished groups that wait for a step."""
        return len(self._buffer)

    # -- prompts in ---------------------------------------------------------------------------------------------------

    def set_weight_version(self, version: int) -> None:
        """Publishes `version`: restarts groups that are too old for every later step, and draws and starts prompts that
        are now allowed.
        """
        with self._changed:
            self._version = version
        self._pump()

    def _pump(self) -> None:
        """Drops stale groups, restores, draws and launches, as far as the queue allows; from the driver's thread."""
        with self._changed:
            # One that is being stored is looked at again when it is.
            stale = [key for key in self.queue.stale() if key not in self._committing]
            tasks = self.tasks.forget(stale)
            for key in stale:
                self._begin_again(key)
        self.tasks.cancel(tasks)
        while self._restored and not self.queue.exhausted:
            self._restore_batch(self._restored.pop(0))
        while self.queue.wants_batch():
            self._draw(self.queue.draw)
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

    def draw_ahead(self) -> None:
        """Draws the batches that the next version admits, while the driver is busy. A loader's error is raised where
        the batch is wanted.
        """
        while not self._restored and self.queue.wants_batch(ahead=True) and self._parts.prompts.prefetch():
            self._draw(self.queue.draw)

    def extend_step(self) -> None:
        """Draws and starts a further generation batch for the open step, which took all of its groups. Raises
        StopIteration: the prompts are used up.
        """
        if not self._draw(self.queue.extend_step):
            raise StopIteration
        self._launch()

    def _draw(self, into_queue: Callable[[int, Position], list[GroupKey]]) -> bool:
        """Draws a batch; whether there was one. The loader may take a while, so the lock is free meanwhile."""
        if (drawn := self._next_batch()) is None:
            return False
        batch, before = drawn
        with self._changed:
            self._admit_batch(batch, dict(enumerate(into_queue(batch.size, before))))
        return True

    def _restore_batch(self, saved: SavedBatch) -> None:
        if (drawn := self._next_batch()) is None:
            return
        batch, before = drawn
        keys = {row: GroupKey(saved.batch, attempt, number) for row, attempt, number in saved.open}
        with self._changed:
            self.queue.restore(saved.batch, batch.size, keys, before)
            self._admit_batch(batch, keys)

    def _next_batch(self) -> tuple[BatchedDataDict, Position] | None:
        """The loader's next batch, and where the loader stood before it; None if the prompts are used up."""
        before = self._parts.prompts.position()
        try:
            return self._parts.prompts.next(), before
        except StopIteration:
            with self._changed:
                self.queue.exhausted = True
            return None

    def _admit_batch(self, batch: BatchedDataDict, keys: dict[int, GroupKey]) -> None:
        for row, key in keys.items():
            identity = f"{self._parts.prompts.epoch}-{batch['idx'][row]}"
            samples = number_samples(batch.slice(row, row + 1), self._parts.generations, key.number)
            self._admit(key, _Prompt(samples, identity))
            if (held := self._buffer.get(key)) is not None:
                self.queue.launched(key, held.generated_at)
                self.queue.ready(key)
                self._parts.record.emit(held.committed(restored=True))

    def _admit(self, key: GroupKey, prompt: _Prompt) -> None:
        self._prompt_of[key] = prompt
        self._parts.record.emit(GroupAdmitted(group_name(key), prompt.identity, self._parts.generations, key.target))

    # -- rollouts -----------------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        """Begins every rollout that may begin, with one call to the loop. From any thread."""
        with self._changed:
            if self.tasks.stopped or self._version is None:
                return
            keys = self.queue.to_launch(self._version)
            for key in keys:
                self.queue.launched(key, self._version)
        if keys:
            self.tasks.begin(keys, self._collect)

    async def _collect(self, key: GroupKey) -> None:
        pause_s, longest_s = self._policy.backoff_s
        version = self._version or 0
        # It may have been started again before this began.
        if (prompt := self._prompt_of.get(key)) is None:
            return
        while True:
            try:
                async with self.tasks.generating():
                    rollout = await self._parts.rollouts.roll_out_group(prompt.batch, self._parts.plan(key.target))
            except (GenerationError, EnvironmentFailure) as error:
                if not self._tries_again(key, error):
                    break
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
                continue
            if not self._may_commit(key):
                return
            # The store answers in its own time; requests go on meanwhile.
            handle = await asyncio.wrap_future(self._writes.submit(self._parts.store.write_pending, rollout.columns))
            self._commit(key, handle, rollout, version)
            break
        self._launch()

    def _tries_again(self, key: GroupKey, error: BaseException) -> bool:
        """Whether a failed rollout is tried again; its prompt is given up otherwise."""
        with self._changed:
            if key not in self._prompt_of:
                return False
            if self._failures.tries_again(group_name(key), self.queue.failed(key), error):
                return True
            self.queue.give_up(key)
            self._forget([key])
            self._parts.record.emit(GroupDropped(group_name(key), "failed"))
            self._changed.notify_all()
            return False

    def _may_commit(self, key: GroupKey) -> bool:
        """Whether a finished rollout is still wanted; afterwards it is not restarted."""
        with self._changed:
            wanted = key in self._prompt_of and not self.tasks.stopped
            if wanted:
                self._committing.add(key)
            return wanted

    def _commit(self, key: GroupKey, handle: BatchHandle, rollout: Rollout, version: int) -> None:
        group = BufferedGroup(key, handle, rollout.columns.rows, rollout.samples, dict(rollout.metrics), version)
        with self._changed:
            self._committing.discard(key)
            self.tasks.forget([key])
            self._parts.record.emit(group.committed())
            self._buffer[key] = group
            self.queue.ready(key)
            self._failures.succeeded()
            self._last_progress = time.monotonic()
            self._changed.notify_all()

    def _forget(self, keys: Iterable[GroupKey]) -> None:
        for key in keys:
            self._prompt_of.pop(key, None)
        self.tasks.forget(keys)

    # -- groups out ---------------------------------------------------------------------------------------------------

    def take(
        self,
        enough: Callable[[Sequence[BufferedGroup]], bool] = lambda groups: False,
        on_progress: Callable[[int, int], None] = lambda ready, of: None,
        before_wait: Callable[[], None] = lambda: None,
    ) -> list[BufferedGroup]:
        """Blocks until `enough` groups of the open step are ready and takes them; empty once the step is complete.

        Args:
            enough: Whether these groups are worth a pass; by default only all that the step waits for are.
            on_progress: Called with the groups that the step has or could take, and its total, as they grow.
            before_wait: Called once, before the first wait, where the groups are not there yet.

        Raises StopIteration: the prompts are used up, and the open step is too small without them; CollectorError:
        rollouts failed, too many prompts of the step were dropped, or nothing arrived in time; StaleGroupError: a group
        is older than the sampler allows.
        """
        waits = False
        with self._waiting(f"groups of step {self.queue.step.version}"):
            while True:
                self._pump()
                with self._changed:
                    self.tasks.check_health()
                    ready, of = self.queue.ready_for_step(), self.queue.step.wanted - len(self.queue.step.dropped)
                # It may wait for the loop where requests are dispatched, which takes the lock.
                on_progress(ready, of)
                with self._changed:
                    if self.queue.ready_for_step() != ready:
                        # Progress is reported up to the last group.
                        continue
                    keys = self.queue.select(lambda keys: enough([self._buffer[key] for key in keys]))
                    taken = self._take(keys) if keys is not None else None
                    if taken is None and waits:
                        self._wait_for_change()
                if taken is not None:
                    # There is room in the buffer again.
                    self._launch()
                    return taken
                if not waits:
                    before_wait()
                    waits = True

    def _take(self, keys: Sequence[GroupKey]) -> list[BufferedGroup]:
        self._check_size(keys)
        groups = [self._buffer.pop(key) for key in keys]
        self._check_age(groups)
        return groups

    def _check_size(self, taken: Sequence[GroupKey]) -> None:
        step = self.queue.step
        if step.dropped and self.queue.too_small():
            raise CollectorError(
                f"step {step.version} lost {len(step.dropped)} of its {step.wanted} prompts, and less than "
                "async_rl.rollout_failure.min_step_batch_fraction is left; "
                "async_rl.rollout_failure.on_dropped_prompt: replace takes others"
            )
        if not taken and self.queue.too_small():
            raise StopIteration

    def _check_age(self, groups: Sequence[BufferedGroup]) -> None:
        step, max_age = self.queue.version, self.queue.max_lag
        for group in groups:
            if group.is_stale(step, max_age):
                raise StaleGroupError(
                    f"group {group_name(group.key)} has tokens of version {group.oldest}; step {step} allows at most "
                    f"{max_age} versions of age"
                )

    def hand_over(self, groups: Sequence[BufferedGroup]) -> None:
        """Hands groups of the open step to the caller, who records the outcome of those that are not trained."""
        with self._changed:
            self._forget([group.key for group in groups])

    def numbers(self) -> dict[GroupKey, int]:
        """The groups that the open step took, with their numbers in it."""
        with self._changed:
            return dict(self.queue.taken_in_order())

    def finish_step(self) -> Position:
        """Closes the trained step; returns the loader's position before the untrained prompts."""
        with self._changed:
            self._forget(self.queue.finish_step().taken)
        return self.position()

    def count_intended_for_step(self, version: int) -> int:
        """Groups that the step which starts from `version` took, or could take if it began now."""
        with self._changed:
            return self.queue.ready_for_step(version)

    # -- waiting ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _waiting(self, what: str) -> Generator[None]:
        """The span of a wait, which the record shows."""
        self._parts.record.emit(WaitBegun(what, what, time.time() + self._stall.timeout_s))
        with self._changed:
            self._last_progress = time.monotonic()
        outcome = "cancelled"
        try:
            yield
            outcome = "done"
        except StopIteration:
            outcome = "done"
            raise
        except CollectorStalled:
            outcome = "expired"
            raise
        finally:
            self._parts.record.emit(WaitEnded(what, outcome))

    def _wait_for_change(self) -> None:
        """Waits, under the lock, until something may have happened to a group."""
        left = self._last_progress + self._stall.timeout_s - time.monotonic()
        if left <= 0:
            said = f"no group was finished for {self._stall.timeout_s:.0f} s; {self._waits_for()}"
            said = f"{said}; {busy}" if (busy := environment_lines()) else said
            said = f"{said}; {self._stall.advice}" if self._stall.advice else said
            if self._stall.aborts:
                raise CollectorStalled(said)
            logger.warning("stall: %s", said)
            self._last_progress, left = time.monotonic(), self._stall.timeout_s
        self._changed.wait(min(left, _POLL_S))

    def _waits_for(self) -> str:
        slots = self.queue.slots()
        by_status = {status.value: sum(slot.status is status for slot in slots) for status in SlotStatus}
        rolling = [group_name(slot.key) for slot in slots if slot.status is SlotStatus.ROLLING]
        return (
            f"step {self.queue.step.version} waits for {self.queue.step.missing} of {self.queue.step.wanted} groups, "
            f"of all groups {by_status}, rolling {rolling[:8]}"
        )

    # -- refits, checkpoints and end ----------------------------------------------------------------------------------

    def prepare_for_refit(self, timeout_s: float) -> None:
        """See `RolloutTasks.hold_back`."""
        self.tasks.hold_back(timeout_s)

    def resume_after_refit(self) -> None:
        """Rollouts begin again."""
        self.tasks.let_go()

    def position(self) -> Position:
        """Position of the loader before the first batch that is not wholly trained."""
        with self._changed:
            drawn = self.queue.drawn()
            before = drawn[0].before if drawn else None
            return before if before is not None else self._parts.prompts.position()

    def finished(self) -> list[BufferedGroup]:
        """The groups that wait for a step."""
        with self._changed:
            return [self._buffer[key] for key in sorted(self._buffer)]

    def draws(self) -> list[SavedBatch]:
        """Every batch since `position`, in the order in which they were drawn."""
        with self._changed:
            return [drawn.saved() for drawn in self.queue.drawn()] + self._restored

    def restore(self, draws: Sequence[SavedBatch], groups: Iterable[BufferedGroup]) -> None:
        """Resumes from a checkpoint: the loader's position is before `draws`, of which `groups` are finished."""
        with self._changed:
            self._restored = list(draws)
            self._buffer = {group.key: group for group in groups}

    def clear(self) -> None:
        """Drops the waiting groups, at the end of a run."""
        for group in self.finished():
            self._parts.store.clear(group.tokens)

    def stop(self) -> None:
        """Ends all rollouts and records untrained groups as dropped. Safe to call twice."""
        if self.tasks.stopped:
            return
        self.tasks.stop()
        self._writes.shutdown(wait=False)
        for key in sorted(self._prompt_of):
            self._parts.record.emit(GroupDropped(group_name(key), "end_of_run"))
