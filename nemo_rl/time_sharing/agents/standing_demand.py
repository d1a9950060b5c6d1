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
from typing import Protocol

FALLS_AFTER_S = 2.0
_POLL_S = 0.25


class ProgressReporter(Protocol):
    """Reports the progress of a batch to the scheduler."""

    def begin_progress(self, target: int, done: int = 0, unit: int = 1) -> None: ...

    def report_progress(self, done: int) -> None: ...

    def end_progress(self) -> None: ...


class RecentPeak:
    """The largest count of the last `window_s` seconds; `now` never falls."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        # Falling counts, each with when the next one replaced it: None for the present one.
        self._counts: deque[tuple[int, float | None]] = deque()

    def add(self, count: int, now: float) -> None:
        """`count` holds from now on."""
        if self._counts:
            last, _ = self._counts.pop()
            if last > count:
                self._counts.append((last, now))
        while self._counts and self._counts[-1][0] <= count:
            self._counts.pop()
        self._counts.append((count, None))

    def at(self, now: float) -> int:
        """The peak; 0 before the first count."""
        while len(self._counts) > 1:
            _, until = self._counts[0]
            if until is None or until > now - self._window_s:
                break
            self._counts.popleft()
        return self._counts[0][0] if self._counts else 0


class StandingDemand:
    """The demand of one wait, or of several one after the other. Any thread may call; times are of one clock that never
    falls.

    Args:
        progress: Hears of the demand, in samples.
        falls_after_s: How long fewer requests were under way before the demand falls.
    """

    def __init__(self, progress: ProgressReporter, *, falls_after_s: float = FALLS_AFTER_S) -> None:
        self._progress = progress
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

    def end(self) -> None:
        """Ends the demand until groups are open again."""
        with self._lock:
            self._sent = None
            self._progress.end_progress()

    def _send(self, now: float) -> None:
        needed = min(self._open, self._peak.at(now)) if self._begun else self._open
        sent, (total, done) = self._sent, (self._total, self._total - needed)
        self._sent = (total, done)
        if sent is None or sent[0] != total or sent[1] > done:
            self._progress.begin_progress(total, done)
        elif sent[1] != done:
            self._progress.report_progress(done)


class OpenSamples:
    """The demand of batches that others send when they like: the samples of all of them that are not finished. True
    while a batch is open.
    """

    def __init__(self, progress: ProgressReporter) -> None:
        self._demand = StandingDemand(progress)
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
            self._send()
        try:
            yield finished
        finally:
            with self._lock:
                self._unfinished = [other for other in self._unfinished if other is not mine]
                if self._unfinished:
                    self._send()
                else:
                    self._total = 0
                    self._demand.end()

    def report(self) -> None:
        """Sends the number of open samples."""
        with self._lock:
            if self._unfinished:
                self._send()

    def _send(self) -> None:
        open_now = sum(left for (left,) in self._unfinished)
        self._demand.open_groups(self._total - open_now, self._total, 1, time.monotonic())


@contextmanager
def standing_demand(
    progress: ProgressReporter, requests_under_way: Callable[[], int], samples: int
) -> Generator[Callable[[int, int], None]]:
    """The demand of a wait, until it ends; yields what takes how many groups of `samples` samples each are ready, and
    of how many. `requests_under_way` is asked on a thread of its own.
    """
    demand, over = StandingDemand(progress), threading.Event()

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
        demand.end()
