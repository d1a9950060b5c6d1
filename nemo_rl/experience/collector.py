"""What collectors share that generate rollouts in parallel with training: waits, errors, record events, shutdown.

Rollouts are coroutines on the dispatch loop; the driver calls from its own thread. Invariants: every wait has a
deadline and names what it waited for; after `stop` nothing runs, and every untrained group is recorded as dropped.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError, RayTaskError

from nemo_rl.config.errors import UserError
from nemo_rl.experience.columns import RolloutColumns
from nemo_rl.experience.environment_batcher import environment_lines
from nemo_rl.experience.prompts import EpochPrompts
from nemo_rl.experience.replay_buffer import BufferedGroup, GroupKey
from nemo_rl.experience.rollout_source import LiveRollouts
from nemo_rl.experience.rollouts import RolloutPlan
from nemo_rl.experience.store import ExperienceStore
from nemo_rl.models.generation.interfaces import GenerationError
from nemo_rl.utils.record import Record
from nemo_rl.utils.record_events import GroupCommitted, GroupDropped, WaitBegun, WaitEnded

if TYPE_CHECKING:
    from nemo_rl.models.policy.interfaces import BatchHandle

logger = logging.getLogger(__name__)

_CAUSES = 8
_POLL_S = 5.0
_LAUNCH_S = 60.0
_STORE_WRITES = 8


class CollectorError(UserError, RuntimeError):
    """The collector cannot deliver: too many rollouts failed, it was stopped, or nothing arrived in time."""


class CollectorStalled(CollectorError):
    """No group was finished in time."""


@dataclass(frozen=True)
class StallPolicy:
    """What a wait for groups does when none finishes."""

    timeout_s: float = 600.0  # seconds without a finished group that count as a stall
    aborts: bool = True  # whether a stall ends the run; it is logged otherwise
    advice: str = ""  # what to do about it


@dataclass(frozen=True)
class CollectorParts:
    """What a collector works with. `start`: starts a coroutine on the loop where requests are dispatched."""

    prompts: EpochPrompts
    rollouts: LiveRollouts
    store: ExperienceStore  # where finished groups wait for their step
    plan: Callable[[int], RolloutPlan]  # how the rollouts of a batch are drawn
    start: Callable[[Coroutine[object, object, object]], Future[Any]]
    generations: int
    record: Record


class Collector:
    """The common part. `stall`: what becomes of a wait without end."""

    def __init__(self, parts: CollectorParts, stall: StallPolicy) -> None:
        self._parts, self._stall = parts, stall
        self._changed = threading.Condition()
        # Of its own: calls of environments fill the loop's default pool.
        self._writes = ThreadPoolExecutor(_STORE_WRITES, thread_name_prefix="store-write")
        self._tasks: dict[GroupKey, asyncio.Task[None]] = {}
        self._version: int | None = None
        self._last_progress = time.monotonic()
        self._fatal: BaseException | None = None
        self.stopped = False

    def finished(self) -> list[BufferedGroup]:
        """The groups that wait for a step."""
        raise NotImplementedError

    def _untrained_groups(self) -> Iterable[GroupKey]:
        """Admitted groups that were not trained."""
        raise NotImplementedError

    def _waits_for(self) -> str:
        """What the open wait lacks, for people."""
        raise NotImplementedError

    # -- rollouts -----------------------------------------------------------------------------------------------------

    def _begin_task(self, key: GroupKey, rollout: Coroutine[object, object, None]) -> None:
        """On the loop, under the lock."""
        self._tasks[key] = task = asyncio.create_task(rollout)
        task.add_done_callback(lambda ended: self._ended(key, ended))

    def _ended(self, key: GroupKey, task: asyncio.Task[None]) -> None:
        with self._changed:
            # What the collector itself cancels it has forgotten before.
            forgotten = self._tasks.get(key) is not task
            if not forgotten:
                del self._tasks[key]
            error = None if task.cancelled() else task.exception()
            if task.cancelled() and not forgotten:
                error = CollectorError(f"the rollout of group {group_name(key)} was cancelled")
            if error is not None and not self.stopped:
                self._fatal = self._fatal or error
            self._changed.notify_all()

    def _cancel(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Cancels rollouts and waits until they have ended."""
        if tasks:
            self._parts.start(_cancel_all(tasks)).result(timeout=_LAUNCH_S)

    async def _write_pending(self, columns: RolloutColumns) -> BatchHandle:
        """Writes a finished group into the store, which answers in its own time; other requests go on meanwhile."""
        return await asyncio.wrap_future(self._writes.submit(self._parts.store.write_pending, columns))

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

    def check_health(self) -> None:
        """Raises what ended the collector, if something did. Raises CollectorError: rollouts failed or the collector
        was stopped.
        """
        if isinstance(self._fatal, CollectorError):
            raise self._fatal
        if self._fatal is not None:
            raise CollectorError(f"a rollout ended the run: {self._fatal}") from self._fatal
        if self.stopped:
            raise CollectorError("the collector was stopped while the run still waits for it")

    # -- end ----------------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Drops the waiting groups, at the end of a run."""
        for group in self.finished():
            self._parts.store.clear(group.tokens)

    def stop(self) -> None:
        """Ends all rollouts and records untrained groups as dropped. Safe to call twice."""
        with self._changed:
            if self.stopped:
                return
            self.stopped = True
            tasks = list(self._tasks.values())
            self._changed.notify_all()
        self._cancel(tasks)
        self._writes.shutdown(wait=False)
        for key in sorted(self._untrained_groups()):
            self._parts.record.emit(GroupDropped(group_name(key), "end_of_run"))


async def _cancel_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def committed(group: BufferedGroup, *, restored: bool = False) -> GroupCommitted:
    """The record event of a finished group."""
    newest, tokens = int(group.rows["newest_version"].max()), int(group.rows["generated_lengths"].sum())
    return GroupCommitted(group_name(group.key), newest, tokens, restored)


def group_name(key: GroupKey) -> str:
    """Identity of a group in the run record."""
    return f"{key.target}-{key.number}"


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
