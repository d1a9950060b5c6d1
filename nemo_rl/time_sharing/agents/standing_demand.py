"""Standing demand: the number of samples of a waiting pipeline that need an engine.

A prompt group is open until its last sample is finished, and between turns a sample waits for its environment. Neither
finished samples of open groups nor samples that wait for an environment need an engine, so demand = min(open samples,
recent peak of requests under way). It rises at once and falls with a delay, because a sample whose environment answers
at once comes back before an engine could be handed over.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

FALLS_AFTER_S = 2.0
_POLL_S = 0.25


SetDemand = Callable[[int, int], None]
"""Takes the samples that are waited for, and how many of them are there or need no engine (`Agent.set_demand`)."""


class RecentPeak:
    """The largest count of the last `window_s` seconds; `now` never falls."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        # Falling counts, each with when it replaced a larger one.
        self._counts: deque[tuple[int, float]] = deque()

    def add(self, count: int, now: float) -> None:
        """`count` holds from now on."""
        since = now
        while self._counts and self._counts[-1][0] <= count:
            _, since = self._counts.pop()
        self._counts.append((count, since))

    def at(self, now: float) -> int:
        """The peak; 0 before the first count."""
        while len(self._counts) > 1 and self._counts[1][1] <= now - self._window_s:
            self._counts.popleft()
        return self._counts[0][0] if self._counts else 0


class StandingDemand:
    """The demand of a wait. Any thread may call; times are of one clock that never falls.

    Args:
        falls_after_s: How long fewer requests were under way before the demand falls.
    """

    def __init__(self, set_demand: SetDemand, *, falls_after_s: float = FALLS_AFTER_S) -> None:
        self._set_demand = set_demand
        self._peak = RecentPeak(falls_after_s)
        self._lock = threading.Lock()
        self._total = self._open = 0
        self._sent: tuple[int, int] | None = None
        self._begun = False

    def open_groups(self, ready: int, of: int, samples: int, now: float) -> None:
        """`ready` of `of` groups of `samples` samples each are there."""
        with self._lock:
            self._total, self._open = of * samples, max(of - ready, 0) * samples
            self._send(now)

    def under_way(self, requests: int, now: float) -> None:
        """Number of requests that run on an engine or wait for one. Before the first request all open samples count,
        since engines may wake before requests are sent.
        """
        with self._lock:
            self._begun |= requests > 0
            if self._begun:
                self._peak.add(requests, now)
                self._send(now)

    def _send(self, now: float) -> None:
        needed = min(self._open, self._peak.at(now)) if self._begun else self._open
        demand = (self._total, self._total - needed)
        if demand != self._sent:
            self._sent = demand
            self._set_demand(*demand)


class OpenSamples:
    """The demand of batches that others send when they like: the samples of all of them that are not finished. True
    while a batch is open.
    """

    def __init__(self, set_demand: SetDemand) -> None:
        self._demand = StandingDemand(set_demand)
        self._lock = threading.Lock()
        self._total = 0
        # Each a list of one number, so that what counts down needs no lock.
        self._unfinished: list[list[int]] = []

    def __bool__(self) -> bool:
        return bool(self._unfinished)

    @contextmanager
    def batch(self, samples: int) -> Generator[Callable[[], None]]:
        """Context of an open batch of `samples`; yields a function to call for each finished sample, which does not
        block. Samples that are unfinished when the block ends by an error no longer count.
        """
        mine = [samples]

        def finished() -> None:
            mine[0] -= 1

        with self._lock:
            self._total += samples
            self._unfinished.append(mine)
        self.report()
        try:
            yield finished
        finally:
            with self._lock:
                self._unfinished = [other for other in self._unfinished if other is not mine]
                if not self._unfinished:
                    self._total = 0
            self.report()

    def report(self) -> None:
        """Sends the number of open samples."""
        with self._lock:
            open_now = sum(left for (left,) in self._unfinished)
            self._demand.open_groups(self._total - open_now, self._total, 1, time.monotonic())


@contextmanager
def standing_demand(
    set_demand: SetDemand, requests_under_way: Callable[[], int], samples: int
) -> Generator[Callable[[int, int], None]]:
    """The demand of a wait, until it ends; yields what takes how many groups of `samples` samples each are ready, and
    of how many. `requests_under_way` is asked on a thread of its own.
    """
    demand, over = StandingDemand(set_demand), threading.Event()

    def poll() -> None:
        while not over.wait(_POLL_S):
            demand.under_way(requests_under_way(), time.monotonic())

    polling = threading.Thread(target=poll, name="standing-demand", daemon=True)
    polling.start()
    try:
        yield lambda ready, of: demand.open_groups(ready, of, samples, time.monotonic())
    finally:
        over.set()
        polling.join()
        set_demand(0, 0)
