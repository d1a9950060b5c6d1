"""Rollouts as tasks on the dispatch loop: begun, held back during a refit, cancelled, and watched for errors; and the
policy of rollouts that fail, and of a wait without end.

A failed rollout is tried again, or its prompt is dropped, or the run ends. Invariants: the first unexpected error of a
task is kept and raised by `check_health`; a cancelled task that was not forgotten first is an error; after `stop` no
task runs.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError, RayTaskError

from nemo_rl.config.errors import UserError
from nemo_rl.experience.prompts import GroupKey, group_name
from nemo_rl.models.generation.interfaces import GenerationError
from nemo_rl.utils.timer import Timer

logger = logging.getLogger(__name__)

_CAUSES = 8


class CollectorError(UserError, RuntimeError):
    """The collector cannot deliver: too many rollouts failed, it was stopped, or nothing arrived in time."""


class CollectorStalled(CollectorError):
    """No group was finished in time."""


@dataclass(frozen=True)
class StallPolicy:
    """Stall watchdog of a wait for groups."""

    timeout_s: float = 600.0  # seconds without a finished group that count as a stall
    aborts: bool = True  # whether a stall ends the run; it is logged otherwise
    advice: str = ""  # what to do about it


@dataclass(frozen=True)
class FailurePolicy:
    """Bounds of failures: either failures in a row count, of any prompt, or each prompt has attempts of its own."""

    in_a_row: int | None = None  # failed rollouts in a row that are tried again; None counts attempts of prompts
    infra_attempts: int = 5  # rollouts of a prompt before failures of the machinery end the run
    data_attempts: int = 2  # rollouts of a prompt before failures of its own make it be dropped
    backoff_s: tuple[float, float] = (1.0, 30.0)  # first pause and longest pause between attempts
    max_skipped: int = 0  # prompts that a run may drop
    max_skipped_in_a_row: int = 0  # prompts that may be dropped without one that finishes between them


class Failures:
    """Counts the failures of a run."""

    def __init__(self, policy: FailurePolicy) -> None:
        self._policy = policy
        self._in_a_row = 0
        self._skipped_in_a_row = 0
        self.skipped = 0  # prompts that were dropped

    def succeeded(self) -> None:
        """A group was finished."""
        self._in_a_row = self._skipped_in_a_row = 0

    def tries_again(self, name: str, attempts: int, error: BaseException) -> bool:
        """Whether a rollout of group `name`, which failed `attempts` times, is tried again; otherwise its prompt is
        dropped. Raises CollectorError: the failures are too many for the run.
        """
        self._in_a_row += 1
        if self._policy.in_a_row is None:
            return self._has_attempts(name, attempts, error)
        if self._in_a_row > self._policy.in_a_row:
            raise CollectorError(
                f"{self._in_a_row} rollouts in a row failed, grpo.async_grpo.max_generation_failures allows "
                f"{self._policy.in_a_row}; the last, of group {name}: {error}"
            ) from error
        logger.warning("group=%s rollout=failed again_in_a_row=%d reason=%s", name, self._in_a_row, error)
        return True

    def _has_attempts(self, name: str, attempts: int, error: BaseException) -> bool:
        policy, machinery = self._policy, is_infrastructure(error)
        allowed = policy.infra_attempts if machinery else policy.data_attempts
        if attempts < allowed:
            logger.warning("group=%s rollout=failed attempt=%d of=%d reason=%s", name, attempts, allowed, error)
            return True
        key = "max_infra_attempts_per_prompt" if machinery else "max_data_attempts_per_prompt"
        said = f"group {name} failed {attempts} times, async_rl.rollout_failure.{key}={allowed}; the last: {error}"
        if machinery:
            raise CollectorError(said) from error
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self.skipped > policy.max_skipped or self._skipped_in_a_row > policy.max_skipped_in_a_row:
            raise CollectorError(
                f"{said}; async_rl.rollout_failure.max_skipped_prompts={policy.max_skipped} and "
                f"max_consecutive_dropped_prompts={policy.max_skipped_in_a_row} allow no further dropped prompt"
            ) from error
        logger.warning("group=%s prompt=dropped skipped=%d reason=%s", name, self.skipped, error)
        return False


def is_infrastructure(error: BaseException) -> bool:
    """Whether a rollout failed through the infrastructure rather than its prompt: an engine, a timeout, a connection or
    a Ray process is among its causes.
    """
    cause: BaseException | None = error
    for _ in range(_CAUSES):
        if cause is None:
            return False
        if isinstance(cause, (GenerationError, TimeoutError, ConnectionError)):
            return True
        # An environment's own exception arrives as a task error.
        if isinstance(cause, RayError) and not isinstance(cause, RayTaskError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


_CANCEL_S = 60.0
_GATE_S = 30.0
_TICK_S = 0.05

Start = Callable[[Coroutine[object, object, object]], Future[Any]]
"""Starts a coroutine on the loop where requests are dispatched."""


@dataclass(frozen=True)
class RefitPolicy:
    """How generation takes new weights while rollouts run."""

    recompute_kv: bool = True  # whether requests that run during a refit recompute their KV cache
    drain_s: float | None = None  # longest wait for running rollouts to end first; None replaces weights below them


class RolloutTasks:
    """The running rollouts of one collector.

    Args:
        changed: Guards the tasks; notified whenever one ends.
        refits: Policy of rollouts that run during a refit.

    Attributes:
        loop_lag_s: Worst delay of the loop since it was last set to 0.
    """

    def __init__(self, start: Start, changed: threading.Condition, refits: RefitPolicy) -> None:
        self._start, self._changed, self.refits = start, changed, refits
        self._tasks: dict[GroupKey, asyncio.Task[None]] = {}
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self._in_rollout = 0
        self._watch: Future[None] | None = None
        self._fatal: BaseException | None = None
        self.stopped = False
        self.loop_lag_s = 0.0

    def begin(self, keys: Sequence[GroupKey], collect: Callable[[GroupKey], Coroutine[object, object, None]]) -> None:
        """Starts `collect` for each group, with one call to the loop."""
        if self._watch is None:
            self._watch = self._start(self._watch_loop())
        self._start(self._begin(keys, collect))

    async def _begin(
        self, keys: Sequence[GroupKey], collect: Callable[[GroupKey], Coroutine[object, object, None]]
    ) -> None:
        with self._changed:
            if self.stopped:
                return
            for key in keys:
                self._tasks[key] = task = asyncio.create_task(collect(key))
                task.add_done_callback(lambda ended, key=key: self._ended(key, ended))

    def _ended(self, key: GroupKey, task: asyncio.Task[None]) -> None:
        with self._changed:
            # Tasks cancelled on purpose were forgotten before.
            forgotten = self._tasks.get(key) is not task
            if not forgotten:
                del self._tasks[key]
            error = None if task.cancelled() else task.exception()
            if task.cancelled() and not forgotten:
                error = CollectorError(f"the rollout of group {group_name(key)} was cancelled")
            if error is not None and not self.stopped:
                self._fatal = self._fatal or error
            self._changed.notify_all()

    def forget(self, keys: Iterable[GroupKey]) -> list[asyncio.Task[None]]:
        """Forgets the tasks of groups; those that may still run, for `cancel`."""
        return [self._tasks.pop(key) for key in keys if key in self._tasks]

    def cancel(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Cancels tasks and waits until they have ended. Must be called without the lock."""
        if tasks:
            self._start(_cancel_all(tasks)).result(timeout=_CANCEL_S)

    def check_health(self) -> None:
        """Raises CollectorError: a task failed, or `stop` was called."""
        if isinstance(self._fatal, CollectorError):
            raise self._fatal
        if self._fatal is not None:
            raise CollectorError(f"a rollout ended the run: {self._fatal}") from self._fatal
        if self.stopped:
            raise CollectorError("the collector was stopped while the run still waits for it")

    async def _watch_loop(self) -> None:
        while not self.stopped:
            begun = time.monotonic()
            await asyncio.sleep(_TICK_S)
            self.loop_lag_s = max(self.loop_lag_s, time.monotonic() - begun - _TICK_S)

    # -- refits -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def generating(self) -> AsyncGenerator[None]:
        """Around the generation of a group; waits while `hold_back` is in force."""
        await self._may_begin.wait()
        self._in_rollout += 1
        try:
            yield
        finally:
            self._in_rollout -= 1
            with self._changed:
                self._changed.notify_all()

    @contextmanager
    def refit_window(self, timer: Timer) -> Generator[None]:
        """Context manager around a refit: waits for running rollouts to end first, if the policy says so."""
        if self.refits.drain_s is None:
            yield
            return
        with timer.time("idle/refit_bubble"):
            self.hold_back(self.refits.drain_s)
        try:
            yield
        finally:
            self.let_go()

    def hold_back(self, timeout_s: float) -> None:
        """Lets no generation begin, and waits for those that run. Raises CollectorError: some still run after
        `timeout_s`, or failed.
        """
        self._start(self._set_gate(is_open=False)).result(timeout=timeout_s)
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._in_rollout:
                self.check_health()
                if time.monotonic() > deadline:
                    raise CollectorError(
                        f"{self._in_rollout} rollouts did not end within {timeout_s:.0f} s, so the weights "
                        "cannot be replaced; "
                        "grpo.async_grpo.in_flight_weight_updates: true replaces them below running requests"
                    )
                self._changed.wait(1.0)

    def let_go(self) -> None:
        """Generation may begin again."""
        self._start(self._set_gate(is_open=True)).result(timeout=_GATE_S)

    async def _set_gate(self, *, is_open: bool) -> None:
        if is_open:
            self._may_begin.set()
        else:
            self._may_begin.clear()

    # -- end ----------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ends all tasks."""
        with self._changed:
            self.stopped = True
            tasks = list(self._tasks.values())
            self._changed.notify_all()
        self.cancel(tasks)
        if self._watch is not None:
            self._watch.cancel()


async def _cancel_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
