"""Rolls prompts out ahead of training and holds the finished groups until their step takes them.

Prompts are drawn a batch at a time, each batch for one step; a step's rollouts may begin as soon as a version is
published that is at most `max_age` older than the step's. Rollouts run as coroutines where requests are dispatched; the
driver calls from its own thread. Invariants: every drawn prompt group reaches the buffer exactly once or ends the run
with its error; every wait has a deadline; at `stop` nothing runs on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
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
)
from nemo_rl.experience.prompts import Position
from nemo_rl.experience.replay_buffer import BufferedGroup, GroupKey, ReplayBuffer
from nemo_rl.experience.rollout_source import Rollout
from nemo_rl.experience.rollouts import number_samples
from nemo_rl.models.generation.interfaces import GenerationError
from nemo_rl.utils.record_events import GroupAdmitted

if TYPE_CHECKING:
    from nemo_rl.models.policy.interfaces import BatchHandle

logger = logging.getLogger(__name__)

_RETRY_S = (0.1, 5.0)

Admitted = tuple[GroupKey, BatchedDataDict]
"""A prompt group and its samples' prompts."""


@dataclass(frozen=True)
class CollectorLimits:
    """What bounds the collector."""

    max_age: int  # how many versions a step's rollouts may begin early
    last_step: int  # no prompt is drawn for this step or later ones
    max_failures: int = 0  # failed rollouts in a row that are tried again; one more ends the run
    stall_s: float = 1800.0  # without any finished group for so long, waiting ends with an error


@dataclass
class Draw:
    """A batch of prompts that was drawn: for which step, where the loader stood before, and whether the step is
    trained.
    """

    target: int
    attempt: int
    before: Position
    trained: bool = False


class SavedDraw(NamedTuple):
    """A draw in a checkpoint; a trained one between untrained ones is skipped on resume."""

    target: int
    attempt: int
    trained: bool


class TrajectoryCollector(Collector):
    """Collects one run's experience."""

    def __init__(self, parts: CollectorParts, limits: CollectorLimits) -> None:
        super().__init__(parts, StallPolicy(limits.stall_s))
        self._limits = limits
        self.buffer = ReplayBuffer(limits.max_age)
        self._draws: list[Draw] = []
        self._attempts: dict[int, int] = {}
        self._restored: list[SavedDraw] = []
        self._early: list[Admitted] = []
        self._open = asyncio.Event()
        self._open.set()
        self._untrained: set[GroupKey] = set()
        self._wanted = (0, 0)
        self._rolling = 0
        self._failures = 0
        self.exhausted = False

    # -- prompts in ---------------------------------------------------------------------------------------------------

    def set_weight_version(self, version: int) -> None:
        """Version `version` is published: rollouts of the steps up to `version + max_age` may begin."""
        with self._changed:
            self._version = version
        ready = self._early
        self._early = []
        # What was drawn before a restart comes back first, whatever its step.
        while self._restored and not self.exhausted:
            ready += self._draw(*self._restored.pop(0))
        for target in range(version, min(version + self._limits.max_age + 1, self._limits.last_step)):
            if target not in self._attempts and not self.exhausted:
                ready += self._draw(target, 0)
        self._launch(ready)

    def draw_ahead(self) -> None:
        """Draws the batch that the next version admits, while something else takes time. A loader that fails does so
        where the batch is wanted.
        """
        target = (self._version or 0) + self._limits.max_age + 1
        known = target in self._attempts or self.exhausted or self._restored
        if target < self._limits.last_step and not known and self._parts.prompts.prefetch():
            self._early += self._draw(target, 0)

    def _draw(self, target: int, attempt: int, trained: bool = False) -> list[Admitted]:
        """Draws one batch; its groups that are to be rolled out."""
        before = self._parts.prompts.position()
        try:
            prompts = self._parts.prompts.next()
        except StopIteration:
            self.exhausted = True
            return []
        if trained:
            with self._changed:
                self._draws.append(Draw(target, attempt, before, trained=True))
            self._forget_trained()
            return []
        self._attempts[target] = attempt + 1
        first = attempt * prompts.size
        numbers = [first + row for row in range(prompts.size)]
        with self._changed:
            self._draws.append(Draw(target, attempt, before))
            held = {group.key: group for group in self.buffer.groups()}
            self._untrained |= {GroupKey(target, attempt, number) for number in numbers}
            if not self.buffer.knows(target, attempt):
                self.buffer.expect(target, attempt, numbers)
        ready: list[Admitted] = []
        for row, number in enumerate(numbers):
            key = GroupKey(target, attempt, number)
            prompt = prompts.slice(row, row + 1)
            self._parts.record.emit(
                GroupAdmitted(
                    group_name(key), f"{self._parts.prompts.epoch}-{prompt['idx'][0]}", self._parts.generations, target
                )
            )
            if key in held:
                self._parts.record.emit(committed(held[key], restored=True))
            else:
                ready.append((key, number_samples(prompt, self._parts.generations, number)))
        return ready

    def _launch(self, admitted: Sequence[Admitted]) -> None:
        """Begins rollouts, with one call to the loop."""
        newest = (self._version or 0) + self._limits.max_age
        # Drawn before a restart that lowered the age: tokens of this version would be too old for the group's step.
        self._early += [(key, batch) for key, batch in admitted if key.target > newest]
        if ready := [(key, batch) for key, batch in admitted if key.target <= newest]:
            self._parts.start(self._begin(ready))

    async def _begin(self, admitted: Sequence[Admitted]) -> None:
        with self._changed:
            if self.stopped:
                return
            for key, batch in admitted:
                self._begin_task(key, self._collect(key, batch))

    # -- rollouts -----------------------------------------------------------------------------------------------------

    async def _collect(self, key: GroupKey, batch: BatchedDataDict) -> None:
        pause_s = _RETRY_S[0]
        while True:
            await self._open.wait()
            version = self._version or 0
            self._rolling += 1
            try:
                rollout = await self._parts.rollouts.roll_out_group(batch, self._parts.plan(key.target))
            except (GenerationError, EnvironmentFailure) as error:
                self._note_failure(key, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _RETRY_S[1])
                continue
            finally:
                self._rolling -= 1
                with self._changed:
                    self._changed.notify_all()
            handle = await self._write_pending(rollout.columns)
            self._commit(key, handle, rollout, version)
            return

    def _note_failure(self, key: GroupKey, error: BaseException) -> None:
        with self._changed:
            self._failures += 1
            failures = self._failures
        if failures > self._limits.max_failures:
            raise CollectorError(
                f"{failures} rollouts in a row failed, grpo.async_grpo.max_generation_failures allows "
                f"{self._limits.max_failures}; "
                f"the last, of group {group_name(key)}: {error}"
            ) from error
        logger.warning("group=%s rollout=failed again_in_a_row=%d reason=%s", group_name(key), failures, error)

    def _commit(self, key: GroupKey, handle: BatchHandle, rollout: Rollout, version: int) -> None:
        group = BufferedGroup(key, handle, rollout.columns.rows, dict(rollout.metrics), version)
        self._parts.record.emit(committed(group))
        with self._changed:
            self.buffer.add(group)
            self._failures = 0
            self._last_progress = time.monotonic()
            self._changed.notify_all()

    # -- groups out ---------------------------------------------------------------------------------------------------

    def take(
        self, target: int, attempt: int, on_progress: Callable[[int, int], None] = lambda ready, of: None
    ) -> list[BufferedGroup]:
        """The groups of one generation batch of a step, as soon as all of them are finished.

        Args:
            attempt: Which of its generation batches; one that was not drawn yet is drawn now.
            on_progress: Called with the finished groups and their total, as they grow, up to the last.

        Raises StopIteration: the prompts are exhausted; CollectorError: rollouts failed, the collector was stopped, or
        nothing arrived in time.
        """
        if not self.buffer.knows(target, attempt):
            self._launch(self._draw(target, attempt))
            if not self.buffer.knows(target, attempt):
                raise StopIteration

        with self._waiting(f"groups of step {target}"):
            while True:
                with self._changed:
                    self.check_health()
                    ready, missing = self.buffer.ready(target, attempt), self.buffer.missing(target, attempt)
                on_progress(ready, ready + len(missing))
                with self._changed:
                    if not missing:
                        groups = self.buffer.take(target, attempt)
                        self._untrained -= {group.key for group in groups}
                        return groups
                    self._wanted = (target, attempt)
                    if self.buffer.ready(target, attempt) == ready:
                        self._wait_for_change()

    def _waits_for(self) -> str:
        return f"step {self._wanted[0]} waits for groups {self.buffer.missing(*self._wanted)[:8]}"

    def _untrained_groups(self) -> set[GroupKey]:
        return self._untrained

    def finish_step(self, target: int) -> Position:
        """Closes the trained step `target`; returns the loader's position before the untrained prompts."""
        with self._changed:
            for draw in self._draws:
                draw.trained = draw.trained or draw.target <= target
            self._attempts = {step: count for step, count in self._attempts.items() if step > target}
        self._forget_trained()
        return self.position()

    def _forget_trained(self) -> None:
        with self._changed:
            while self._draws and self._draws[0].trained:
                self._draws.pop(0)

    # -- refits -------------------------------------------------------------------------------------------------------

    def prepare_for_refit(self, timeout_s: float) -> None:
        """Lets no rollout begin, and waits for those that run. Raises CollectorError: rollouts still run after
        `timeout_s`, or failed.
        """
        self._parts.start(self._gate(is_open=False)).result(timeout=timeout_s)
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._rolling:
                self.check_health()
                if time.monotonic() > deadline:
                    raise CollectorError(
                        f"{self._rolling} rollouts did not end within {timeout_s:.0f} s, so the weights "
                        "cannot be replaced; "
                        "grpo.async_grpo.in_flight_weight_updates: true replaces them below running requests"
                    )
                self._changed.wait(1.0)

    def resume_after_refit(self) -> None:
        """Rollouts begin again."""
        self._parts.start(self._gate(is_open=True)).result(timeout=30.0)

    async def _gate(self, *, is_open: bool) -> None:
        if is_open:
            self._open.set()
        else:
            self._open.clear()

    # -- checkpoints and end ------------------------------------------------------------------------------------------

    def position(self) -> Position:
        """Where the loader stood before the first batch that is not wholly trained."""
        with self._changed:
            return self._draws[0].before if self._draws else self._parts.prompts.position()

    def finished(self) -> list[BufferedGroup]:
        """The groups that wait for their step."""
        with self._changed:
            return self.buffer.groups()

    def count_intended_for_step(self, version: int) -> int:
        """Finished groups that the step starting from `version` trains."""
        with self._changed:
            return self.buffer.count_intended_for_step(version)

    def draws(self) -> list[SavedDraw]:
        """Every generation batch since `position`, in the order in which they were drawn."""
        with self._changed:
            return [SavedDraw(draw.target, draw.attempt, draw.trained) for draw in self._draws] + self._restored

    def restore(self, draws: Sequence[SavedDraw], groups: Sequence[BufferedGroup]) -> None:
        """Resumes from a checkpoint: the loader's position is before `draws`, of which `groups` are finished."""
        size = self._parts.prompts.batch_size
        with self._changed:
            self._restored = list(draws)
            for draw in draws:
                if not draw.trained:
                    self.buffer.expect(draw.target, draw.attempt, [draw.attempt * size + row for row in range(size)])
            for group in groups:
                self.buffer.add(group)
