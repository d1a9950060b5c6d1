"""How long anybody may have to wait: the bound of docs/time_sharing_scheduler.md, worked out from one record.

It takes the longest hold of the record for H and the registered weights for the length of time slices, and adds the
time that faults took from the very wait that is judged: a rank that cools off, GPUs in quarantine, a pipeline being
ended, a scheduler that is down. A second counts once, however many faults share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from nemo_rl.time_sharing.protocol.types import Priority

_MOST_WEIGHT = 4.0
"""A time slice lasts `max_slice_s` at most (`min_hold_s` before a hand-over was seen) times the pipeline's weight,
which counts up to this (rule 7)."""


class Wait(NamedTuple):
    """Somebody waited from `since` to `until` for these GPUs."""

    pipeline: str
    gpus: frozenset[int]
    since: float
    until: float
    what: str

    @property
    def seconds(self) -> float:
        return self.until - self.since


class Disturbance(NamedTuple):
    """A fault and the time it took: from its GPUs and its pipeline, or from everybody when `gpus` is None."""

    pipeline: str
    gpus: frozenset[int] | None
    begin: float
    end: float


class WaitBound:
    """Collects what the bound depends on."""

    def __init__(self) -> None:
        self.limits: Mapping[str, float] = {}
        self.longest_hold = 0.0
        self.most_pipelines = 0
        self._weight = 1.0
        self._mapped: dict[str, frozenset[int]] = {}
        self._disturbances: list[Disturbance] = []

    def limit(self, name: str) -> float:
        return self.limits.get(name, 0.0)

    def registered(self, pipeline: str, gpus: frozenset[int], weight: float, registered: int) -> None:
        self._mapped[pipeline] = gpus
        self._weight = max(self._weight, min(weight, _MOST_WEIGHT))
        self.most_pipelines = max(self.most_pipelines, registered)

    def held(self, seconds: float) -> None:
        """A pipeline held its cluster for so long; beyond `max_hold_s` the assumption is broken, not the bound."""
        self.longest_hold = max(self.longest_hold, min(seconds, self.limits.get("max_hold_s", float("inf"))))

    def disturbed(self, pipeline: str, gpus: Iterable[int] | None, begin: float, end: float) -> None:
        """A fault took this time; the hand-over that it ended in the middle is lost with it."""
        self._disturbances.append(
            Disturbance(pipeline, None if gpus is None else frozenset(gpus), begin - self.handover, end)
        )

    @property
    def handover(self) -> float:
        steps = ("drain_s", "sleep_s", "reap_s", "wake_s", "sync_s", "sync_s", "route_s")
        return sum(self.limit(step) for step in steps)

    @property
    def bound(self) -> float:
        """Everyone ahead holds once, each with one hand-over, plus the aging window and time slices; without faults."""
        ahead = 2 * self.most_pipelines + self.limit("max_backfills") + 1
        time_slice = max(self.limit("min_hold_s"), self.limit("max_slice_s")) * self._weight
        each = self.longest_hold + self.handover + time_slice + self.limit("lease_s")
        return Priority.GENERATION * self.limit("aging_s") + ahead * each

    def lost(self, wait: Wait) -> float:
        """Seconds of a wait that faults took: on its own GPUs, on those of anybody it shares them with, or
        everywhere.
        """
        shared = [gpus for gpus in self._mapped.values() if gpus & wait.gpus]
        reach = wait.gpus.union(*shared)
        touching = [d for d in self._disturbances if d.gpus is None or d.pipeline == wait.pipeline or d.gpus & reach]
        seconds, covered = 0.0, wait.since
        for disturbance in sorted(touching, key=lambda d: d.begin):
            begin, end = max(disturbance.begin, covered), min(disturbance.end, wait.until)
            if end > begin:
                seconds += end - begin
                covered = end
        return seconds
