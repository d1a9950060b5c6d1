"""A background thread that runs one task at a time, in order.

Invariants: at most one task runs, and none waits; a task's error is raised once, by the next call; nothing runs after
`close`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

logger = logging.getLogger(__name__)


class BacklogStuck(TimeoutError):
    """A piece of work did not end by its deadline."""


class Backlog:
    """Runs one task at a time. `timeout_s`: how long a caller waits for a task."""

    def __init__(self, name: str, timeout_s: float = 300.0) -> None:
        self._name, self._timeout_s = name, timeout_s
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._running: Future[object] | None = None

    def put(self, work: Callable[[], object]) -> None:
        """Waits for the running task, then starts `work`. Raises what that task raised, without starting `work`."""
        self.wait()
        self._running = self._pool.submit(work)

    def wait(self) -> None:
        """Waits for the running task. Raises BacklogStuck after `timeout_s`, or the task's error."""
        if (error := self._outcome()) is not None:
            raise error

    def _outcome(self) -> BaseException | None:
        running, self._running = self._running, None
        if running is None:
            return None
        wait([running], timeout=self._timeout_s)
        if not running.done():
            return BacklogStuck(f"{self._name}: not done within {self._timeout_s:.0f} s")
        return running.exception()

    def close(self) -> None:
        """Waits for the running task and ends the thread; logs its error. Safe to call twice."""
        if (error := self._outcome()) is not None:
            logger.error("%s=failed", self._name, exc_info=error)
        self._pool.shutdown(wait=False)
