"""A call under way on a policy's workers, for callers that have something else to do meanwhile.

Knows workers and futures, not what was called. Invariant: what is to happen after a failure happens once, before the
caller learns of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

import ray

from nemo_rl.distributed.worker_calls import WorkerError
from nemo_rl.distributed.worker_groups import MultiWorkerFuture, RayWorkerGroup

Result = TypeVar("Result")


class PendingCall(Generic[Result]):
    """One call.

    Args:
        group: The workers.
        future: Their calls.
        combine: Makes the result of the kept answers, in rank order.
        on_error: Called once when a worker failed.
    """

    def __init__(
        self,
        group: RayWorkerGroup,
        future: MultiWorkerFuture,
        combine: Callable[[list[object]], Result],
        *,
        on_error: Callable[[], None],
    ) -> None:
        self._group = group
        self._future = future
        self._combine = combine
        self._on_error: Callable[[], None] | None = on_error

    def done(self) -> bool:
        """Whether every worker has answered, with or without an error."""
        refs = self._future.futures
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return len(ready) == len(refs)

    def result(self, timeout_s: float | None = None) -> Result:
        """Waits for the answer.

        Args:
            timeout_s: Deadline in seconds; that of the workers by default.

        Raises:
            WorkerError: A worker failed.
            WorkerTimeoutError: No answer within the deadline.
        """
        try:
            return self._combine(self._group.get_all_worker_results(self._future, timeout_s=timeout_s))
        except WorkerError:
            on_error, self._on_error = self._on_error, None
            if on_error is not None:
                on_error()
            raise

    def __await__(self) -> Generator[object, None, Result]:
        """The result, awaited by an event loop, which goes on meanwhile."""
        return asyncio.to_thread(self.result).__await__()
