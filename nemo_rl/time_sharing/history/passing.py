"""Invariant 9, of those who are let past: a later request may use the GPUs of a waiting one only if it will be done
before that one can start, as far as past holds tell.

How long holds last is worked out from grants and releases as rule 5 says: a moving average for each pipeline and kind,
that of all pipelines where one has had none yet. Judged is a request that is passed alone, as the first in the queue,
while its GPUs are held or free; what else may keep it waiting has no end that could be told from the record. Where
nothing else goes on, a request that could be let past so is let past, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.time_sharing.history.clocks import Clocks
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.protocol.types import Phase, Priority
from nemo_rl.utils.record import Entry

_NEWEST = 0.3
"""The weight of the newest hold in the average of its kind."""
_EPS = 1e-3


@dataclass(slots=True)
class _Hold:
    gpus: tuple[int, ...]
    since: float
    priority: Priority


@dataclass(slots=True)
class _Pipeline:
    clusters: dict[str, tuple[int, ...]]
    requests: dict[str, tuple[float, ev.Requested]] = field(default_factory=dict)
    claimed: set[str] = field(default_factory=set)
    holds: dict[str, _Hold] = field(default_factory=dict)
    usual: dict[Priority, float] = field(default_factory=dict)
    up: dict[int, Phase] = field(default_factory=dict)
    drained_at: dict[int, float] = field(default_factory=dict)
    demand: int = 0
    hungry_since: float | None = None
    leaving: bool = False

    def feed(self, time: float) -> None:
        """Begins or ends the wait for a first rank, as far as ranks that are up tell."""
        if self.demand <= 0 or any(phase is not Phase.ASLEEP for phase in self.up.values()):
            self.hungry_since = None
        elif self.hungry_since is None:
            self.hungry_since = time

    guaranteed: set[int] = field(default_factory=set)


class PassingChecks:
    """Watches who passes whom."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self._limits: dict[str, float] = {}
        self._pipelines: dict[str, _Pipeline] = {}
        self._withheld: set[int] = set()
        self._claims: dict[tuple[str, str, int], ev.Claimed] = {}
        self._unknown = self._recovering = False
        self._passed: Counter[str] = Counter()
        self._changed_at = -1.0
        self._plan_at = -1.0
        self._expected: dict[tuple[str, str], str] = {}
        """Who must be let past whom by the plan of `_plan_at`."""

    def handlers(self) -> dict[type, Callable[[Entry, Any], None]]:
        return {
            ev.PoolOpened: self._opened,
            ev.Registered: self._registered,
            ev.Unregistered: self._unregistered,
            ev.SchedulerStarted: self._started,
            ev.InventoryDone: self._inventory_done,
            ev.Leaving: self._leaving,
            ev.DemandReported: self._demand,
            ev.Fenced: self._fenced,
            ev.Requested: self._requested,
            ev.RequestDropped: self._dropped,
            ev.Claimed: self._claimed,
            ev.ClaimDropped: self._claim_dropped,
            ev.Granted: self._granted,
            ev.PriorityChanged: self._changed,
            ev.Released: self._released,
            ev.RankMoved: self._rank,
            ev.GpusQuarantined: self._quarantined,
            ev.GpusCleared: self._cleared,
        }

    def tail_lost(self, entry: Entry) -> None:
        """What is known of holds may have been forgotten, for good."""
        self._unknown = True
        self._expected = {}

    def finish(self, clocks: Clocks, ended: bool) -> None:
        """Nothing here is open."""

    def _opened(self, entry: Entry, event: ev.PoolOpened) -> None:
        self._limits = dict(event.limits)

    def _started(self, entry: Entry, event: ev.SchedulerStarted) -> None:
        self._recovering = event.term > 1

    def _inventory_done(self, entry: Entry, event: ev.InventoryDone) -> None:
        self._recovering = False

    def _leaving(self, entry: Entry, event: ev.Leaving) -> None:
        if (pipeline := self._pipelines.get(event.pipeline)) is not None:
            pipeline.leaving = True

    def _demand(self, entry: Entry, event: ev.DemandReported) -> None:
        self._end_plan(entry.time)
        if (pipeline := self._pipelines.get(event.pipeline)) is not None:
            pipeline.demand = max(event.target - event.done, 0)
            pipeline.feed(entry.time)

    def _registered(self, entry: Entry, event: ev.Registered) -> None:
        self._pipelines[event.pipeline] = _Pipeline({cluster.name: cluster.gpus for cluster in event.clusters})

    def _unregistered(self, entry: Entry, event: ev.Unregistered) -> None:
        for label in [label for label in self._passed if label.rpartition("#")[0] == event.pipeline]:
            del self._passed[label]
        self._pipelines.pop(event.pipeline, None)
        self._claims = {key: claim for key, claim in self._claims.items() if key[0] != event.pipeline}

    def _fenced(self, entry: Entry, event: ev.Fenced) -> None:
        if (pipeline := self._pipelines.get(event.pipeline)) is not None:
            pipeline.requests.clear()

    def _requested(self, entry: Entry, event: ev.Requested) -> None:
        self._end_plan(entry.time)
        if (pipeline := self._pipelines.get(event.pipeline)) is not None:
            key = entry.time + event.priority * self._limits.get("aging_s", 0.0)
            pipeline.requests[event.cluster] = (key, event)

    def _dropped(self, entry: Entry, event: ev.RequestDropped) -> None:
        if (pipeline := self._pipelines.get(event.pipeline)) is not None:
            pipeline.requests.pop(event.cluster, None)

    def _claim_dropped(self, entry: Entry, event: ev.ClaimDropped) -> None:
        self._claims.pop((event.pipeline, event.cluster, event.rank), None)

    def _granted(self, entry: Entry, event: ev.Granted) -> None:
        self._claims.pop((event.pipeline, event.cluster, -1), None)
        if (pipeline := self._pipelines.get(event.pipeline)) is not None:
            pipeline.requests.pop(event.cluster, None)
            pipeline.holds[event.cluster] = _Hold(event.gpus, entry.time, event.priority)

    def _changed(self, entry: Entry, event: ev.PriorityChanged) -> None:
        pipeline = self._pipelines.get(event.pipeline)
        if pipeline is None:
            return
        pipeline.requests.pop(event.cluster, None)
        self._changed_at = entry.time
        if (hold := pipeline.holds.get(event.cluster)) is not None:
            _learn(pipeline, hold, entry.time)
            hold.priority, hold.since = event.priority, entry.time

    def _released(self, entry: Entry, event: ev.Released) -> None:
        self._end_plan(entry.time)
        pipeline = self._pipelines.get(event.pipeline)
        if pipeline is not None and (hold := pipeline.holds.pop(event.cluster, None)) is not None:
            _learn(pipeline, hold, entry.time)

    def _rank(self, entry: Entry, event: ev.RankMoved) -> None:
        if event.phase in (Phase.WAKING, Phase.BUILDING):
            self._claims.pop((event.pipeline, "actor_infer", event.rank), None)
        if (pipeline := self._pipelines.get(event.pipeline)) is not None:
            if event.phase is Phase.DRAINING and pipeline.up.get(event.rank) is Phase.ACTIVE:
                pipeline.drained_at[event.rank] = entry.time
            pipeline.up[event.rank] = event.phase
            if event.guaranteed:
                pipeline.guaranteed.add(event.rank)
            elif event.phase is Phase.ASLEEP:
                pipeline.guaranteed.discard(event.rank)
            pipeline.feed(entry.time)

    def _quarantined(self, entry: Entry, event: ev.GpusQuarantined) -> None:
        self._withheld.update(event.gpus)

    def _cleared(self, entry: Entry, event: ev.GpusCleared) -> None:
        self._withheld.difference_update(event.gpus)

    def _claimed(self, entry: Entry, event: ev.Claimed) -> None:
        self._end_plan(entry.time)
        if self._plan_at != entry.time:
            self._plan_at, self._expected = entry.time, self._could_pass(entry.time)
        self._expected.pop((event.pipeline, event.cluster), None)
        for name, cluster in list(self._expected):
            if not set(self._pipelines[name].clusters[cluster]).isdisjoint(event.gpus):
                del self._expected[name, cluster]
        self._passed.update(event.passed)
        pipeline = self._pipelines.get(event.pipeline)
        if event.passed and pipeline is not None and not self._unknown:
            self._check_passing(entry, event, pipeline)
        self._claims[event.pipeline, event.cluster, event.rank] = event

    def _check_passing(self, entry: Entry, event: ev.Claimed, pipeline: _Pipeline) -> None:
        _, request = pipeline.requests.get(event.cluster, (0.0, None))
        if request is None:
            return
        who = f"{event.pipeline}/{event.cluster} ({request.priority.name})"
        seconds = pipeline.usual.get(request.priority)
        if seconds is None:
            self.found.append((9, f"{who} passes {', '.join(event.passed)}; nobody knows for how long it will hold"))
            return
        if len(event.passed) > 1:
            return
        begins = self._begins(entry.time, event)
        if entry.time + seconds > begins + _EPS:
            self.found.append(
                (
                    9,
                    f"{who} passes {event.passed[0]}, which can start in {begins - entry.time:.2f} s: it will hold for "
                    f"{seconds:.2f} s",
                )
            )

    def _end_plan(self, time: float) -> None:
        if time != self._plan_at and self._expected:
            for (name, cluster), what in self._expected.items():
                self.found.append((9, f"{name}/{cluster} is not let past {what}"))
            self._expected = {}

    def _could_pass(self, now: float) -> dict[tuple[str, str], str]:
        """Who must be let past before what a plan does now: the second of the queue, where the first waits for holds
        that last longer, and nothing else keeps the second waiting.
        """
        quiet = not (self._unknown or self._recovering or self._withheld) and self._changed_at != now
        aging = self._limits.get("aging_s", 0.0) * Priority.GENERATION
        waiting: list[tuple[float, str, ev.Requested]] = []
        for name, pipeline in self._pipelines.items():
            starved = pipeline.hungry_since is not None and now > pipeline.hungry_since + aging - _EPS
            if starved or pipeline.leaving:
                quiet = False
            claimed = {cluster for who, cluster, rank in self._claims if who == name and rank < 0}
            for cluster, (key, request) in pipeline.requests.items():
                if cluster not in pipeline.holds and cluster not in claimed:
                    waiting.append((key, name, request))
        if not quiet or len(waiting) < 2 or self._limits.get("max_initialising"):
            return {}
        (_, first, ahead), (_, second, behind) = sorted(waiting, key=lambda item: item[0])[:2]
        label, pipeline = f"{first}#{ahead.request}", self._pipelines[second]
        gpus, seconds = set(pipeline.clusters[behind.cluster]), pipeline.usual.get(behind.priority)
        passed_on = self._passed[label] >= self._limits.get("max_backfills", 0)
        if first == second or seconds is None or passed_on or not self._is_free(now, second, gpus):
            return {}
        begins = self._held_until(now, self._pipelines[first].clusters[ahead.cluster])
        return {(second, behind.cluster): f"{first}/{ahead.cluster}"} if begins > now + seconds + 0.1 else {}

    def _is_free(self, now: float, name: str, gpus: set[int]) -> bool:
        """Whether nobody has these GPUs but ranks that serve, and none of the pipeline's own is on its way up."""
        if any(not gpus.isdisjoint(claim.gpus) or claim.pipeline == name for claim in self._claims.values()):
            return False
        for other, pipeline in self._pipelines.items():
            if any(not gpus.isdisjoint(hold.gpus) for hold in pipeline.holds.values()):
                return False
            if other != name and gpus.isdisjoint(pipeline.clusters["actor_infer"]):
                continue
            moving = [r for r, phase in pipeline.up.items() if phase not in (Phase.ASLEEP, Phase.ACTIVE)]
            if pipeline.guaranteed or any(pipeline.drained_at.get(rank) != now for rank in moving):
                return False
        return True

    def _held_until(self, now: float, gpus: tuple[int, ...]) -> float:
        ends = [
            hold.since + self._usual(pipeline, hold.priority)
            for pipeline in self._pipelines.values()
            for hold in pipeline.holds.values()
            if not set(gpus).isdisjoint(hold.gpus)
        ]
        return max(ends, default=now)

    def _begins(self, now: float, event: ev.Claimed) -> float:
        """When the request that is passed is expected to begin; infinity where that cannot be told."""
        name, _, number = event.passed[0].rpartition("#")
        passed = self._pipelines.get(name)
        found = None
        if passed is not None:
            found = next((r for r in passed.requests.values() if r[1].request == int(number)), None)
        if passed is None or found is None or self._limits.get("max_initialising"):
            return math.inf
        key, request = found
        gpus = set(passed.clusters[request.cluster])
        if not self._withheld.isdisjoint(gpus) or any(not gpus.isdisjoint(c.gpus) for c in self._claims.values()):
            return math.inf
        begins = now
        for other, pipeline in self._pipelines.items():
            for earlier, _ in pipeline.requests.values():
                if other != name and earlier < key:
                    return math.inf
            infer, ranks = pipeline.clusters["actor_infer"], pipeline.up
            moving = any(phase is not Phase.ASLEEP and phase is not Phase.ACTIVE for phase in ranks.values())
            hungry = pipeline.hungry_since is not None
            if (moving or hungry or pipeline.guaranteed) and not gpus.isdisjoint(infer):
                return math.inf
            for hold in pipeline.holds.values():
                if not gpus.isdisjoint(hold.gpus):
                    if hold.since >= now:
                        return math.inf
                    begins = max(begins, hold.since + self._usual(pipeline, hold.priority))
        return begins

    def _usual(self, pipeline: _Pipeline, priority: Priority) -> float:
        if priority in pipeline.usual:
            return pipeline.usual[priority]
        past = [other.usual[priority] for other in self._pipelines.values() if priority in other.usual]
        return sum(past) / len(past) if past else math.inf


def _learn(pipeline: _Pipeline, hold: _Hold, time: float) -> None:
    known, seconds = pipeline.usual.get(hold.priority), time - hold.since
    pipeline.usual[hold.priority] = seconds if known is None else (1 - _NEWEST) * known + _NEWEST * seconds
