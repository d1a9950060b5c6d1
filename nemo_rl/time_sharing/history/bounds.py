"""How long a request or a pipeline without a rank may wait: the bound of docs/time_sharing_scheduler.md for one record.

It takes the longest hold of the record for H and adds the time that faults took from the wait that is judged: a rank
that cools off, GPUs in quarantine, a pipeline being ended, a scheduler that is down. Faults that overlap count once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from nemo_rl.time_sharing.log.events import Registered
from nemo_rl.time_sharing.protocol.types import Priority

MOST_WEIGHT = 4.0
"""A time slice lasts `max_slice_s` at most (`min_hold_s` before a hand-over was seen) times the pipeline's weight,
which counts up to this (rule 7)."""
_STEPS = ("sleep_s", "reap_s", "wake_s", "sync_s", "sync_s", "route_s")


class GpuWait(NamedTuple):
    """A pipeline waited from `since` to `until` for these GPUs, `what` in words."""

    pipeline: str
    gpus: frozenset[int]
    since: float
    until: float
    what: str


class WaitBound:
    """Longest admissible wait, from limits, holds, pipelines and faults seen so far."""

    def __init__(self) -> None:
        self.limits: Mapping[str, float] = {}
        self._longest_hold = 0.0
        self._most_pipelines = 0
        self._weight = 1.0
        self._slice_s = self._drain_s = 0.0
        self._mapped: dict[str, frozenset[int]] = {}
        # Pipeline, GPUs (None: everybody's), begin and end of each fault.
        self._faults: list[tuple[str, frozenset[int] | None, float, float]] = []

    def limit(self, name: str) -> float:
        return self.limits.get(name, 0.0)

    def registered(self, event: Registered, gpus: frozenset[int], registered: int) -> None:
        self._mapped[event.pipeline] = gpus
        self._weight = max(self._weight, min(event.weight, MOST_WEIGHT))
        self._slice_s = max(self._slice_s, event.slice_s)
        self._drain_s = max(self._drain_s, event.drain_s)
        self._most_pipelines = max(self._most_pipelines, registered)

    def held(self, seconds: float) -> None:
        """A cluster was held for so long; beyond `max_hold_s` the assumption is broken, not the bound."""
        self._longest_hold = max(self._longest_hold, min(seconds, self.limits.get("max_hold_s", float("inf"))))

    def add_fault(self, pipeline: str, gpus: Iterable[int] | None, begin: float, end: float) -> None:
        """A fault took this time, and the hand-over that it interrupted."""
        self._faults.append((pipeline, None if gpus is None else frozenset(gpus), begin - self._handover, end))

    @property
    def _handover(self) -> float:
        return max(self.limit("drain_s"), self._drain_s) + sum(self.limit(step) for step in _STEPS)

    def problem(self, wait: GpuWait) -> str | None:
        """Violation text of a wait that exceeds its bound; None if it is within."""
        seconds, allowed = wait.until - wait.since, self._without_faults()
        if seconds <= allowed or seconds <= (allowed := allowed + self._fault_s(wait)):
            return None
        longest = self._longest_hold
        return f"{wait.what}: {seconds:.1f} s, the bound is {allowed:.1f} s (longest hold {longest:.1f} s)"

    def _without_faults(self) -> float:
        """All ahead hold once, each with one hand-over, plus the aging window and time slices."""
        ahead = 2 * self._most_pipelines + self.limit("max_backfills") + 1
        time_slice = max(self.limit("min_hold_s"), self.limit("max_slice_s")) * self._weight
        time_slice = max(time_slice, self._slice_s)
        each = self._longest_hold + self._handover + time_slice + self.limit("lease_s")
        return Priority.GENERATION * self.limit("aging_s") + ahead * each

    def _fault_s(self, wait: GpuWait) -> float:
        """Seconds of a wait that faults took: on its own GPUs, on those of pipelines that share them, or everywhere."""
        reach = wait.gpus.union(*(gpus for gpus in self._mapped.values() if gpus & wait.gpus))
        faults = [f for f in self._faults if f[1] is None or f[0] == wait.pipeline or f[1] & reach]
        seconds, covered = 0.0, wait.since
        for _, _, began, ended in sorted(faults, key=lambda fault: fault[2]):
            begin, end = max(began, covered), min(ended, wait.until)
            if end > begin:
                seconds += end - begin
                covered = end
        return seconds
