"""Invariant 9: nobody starves. Also, of invariant 10, that a grant is what was asked for.

Starvation is judged twice. By order: a request may be overtaken on its GPUs by at most `max_backfills` requests that
are behind it in the aged queue, and each of these names it. By time: it is served within the bound that follows from
the longest hold in this record (`wait_bound`). Requests that were open when the log lost its end are not judged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.time_sharing.history.clocks import Clocks
from nemo_rl.time_sharing.history.wait_bound import Wait, WaitBound
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, SLEEP_PHASES, Phase, Priority
from nemo_rl.utils.record import Entry


@dataclass(slots=True)
class _Request:
    """A request as it was made, and its place in the queue; one of a pipeline that is asked to leave may be served or
    not.
    """

    since: float
    key: float
    gpus: frozenset[int]
    number: int
    step: int
    priority: Priority
    claimed: bool = False
    overtaken: int = 0
    judged: bool = True


@dataclass(slots=True)
class _Pipeline:
    clusters: dict[str, frozenset[int]]
    tp: int
    mapping: tuple[int, ...]
    awake: set[int] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    holding_since: float = 0.0
    demand: int = 0
    unscheduled_since: float | None = None
    leaving: bool = False

    def rank_gpus(self, rank: int) -> tuple[int, ...]:
        return self.mapping[rank * self.tp : (rank + 1) * self.tp]

    @property
    def mapped(self) -> frozenset[int]:
        return frozenset().union(*self.clusters.values())


class StarvationChecks:
    """Watches the queue and who has work but no rank."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self._wait_bound = WaitBound()
        self._requests: dict[tuple[str, str], _Request] = {}
        self._pipelines: dict[str, _Pipeline] = {}
        self._past: dict[str, _Pipeline] = {}
        self._waited: list[Wait] = []
        self._recovering = False
        self._forgotten: set[tuple[str, str]] = set()
        """Clusters for which a request may be open that was made before the log lost its end."""
        self._last_time = 0.0

    def handlers(self) -> dict[type, Callable[[Entry, Any], None]]:
        return {
            ev.PoolOpened: self._opened,
            ev.SchedulerStarted: self._started,
            ev.InventoryDone: self._inventory_done,
            ev.Reconnected: self._reconnected,
            ev.Registered: self._registered,
            ev.Unregistered: self._unregistered,
            ev.Requested: self._requested,
            ev.RequestDropped: self._dropped,
            ev.Claimed: self._claimed,
            ev.ClaimDropped: self._claim_dropped,
            ev.Granted: self._granted,
            ev.PriorityChanged: self._priority_changed,
            ev.Released: self._released,
            ev.RankMoved: self._rank,
            ev.DemandReported: self._demand,
            ev.Leaving: self._leaving,
            ev.Fenced: self._fenced,
            ev.GpusQuarantined: self._quarantined,
            ev.RankCooling: self._cooling,
            ev.CommandEnded: self._seen,
        }

    def tail_lost(self, entry: Entry) -> None:
        self._recovering = True
        self._requests.clear()
        self._forgotten = {(name, cluster) for name, pipeline in self._past.items() for cluster in pipeline.clusters}
        for pipeline in self._pipelines.values():
            if pipeline.unscheduled_since is not None:
                pipeline.unscheduled_since = entry.time

    def finish(self, clocks: Clocks, ended: bool) -> None:
        now = clocks.scheduler
        for (pipeline, cluster), request in self._requests.items():
            if not request.judged:
                continue
            self._waited.append(
                Wait(
                    pipeline,
                    request.gpus,
                    request.since,
                    now,
                    f"{pipeline} waits for {cluster} since {request.since:.1f} s",
                )
            )
        for name, state in self._pipelines.items():
            if state.held:
                self._wait_bound.held(now - state.holding_since)
            if state.unscheduled_since is not None:
                self._end_hunger(
                    name, state, now, f"{name} has had work and no rank since {state.unscheduled_since:.1f} s"
                )
        bound = self._wait_bound.bound
        for wait in self._waited:
            if wait.seconds > bound and wait.seconds > (allowed := bound + self._wait_bound.lost(wait)):
                longest = self._wait_bound.longest_hold
                self._bad(
                    9, f"{wait.what}: {wait.seconds:.1f} s, the bound is {allowed:.1f} s (longest hold {longest:.1f} s)"
                )

    def _bad(self, invariant: int, message: str) -> None:
        self.found.append((invariant, message))

    def _of(self, name: str) -> _Pipeline:
        pipeline = self._pipelines.get(name)
        if pipeline is None:
            # Spoken of again by a scheduler that has lost its end from the log.
            pipeline = self._pipelines[name] = self._past[name]
        return pipeline

    def _seen(self, entry: Entry, event: object) -> None:
        self._last_time = entry.time

    def _opened(self, entry: Entry, event: ev.PoolOpened) -> None:
        self._wait_bound.limits = dict(event.limits)

    def _started(self, entry: Entry, event: ev.SchedulerStarted) -> None:
        lease = self._wait_bound.limit("lease_s") * (1 if event.complete else 2)
        self._wait_bound.disturbed("", None, self._last_time, entry.time + lease)
        self._recovering = event.term > 1

    def _reconnected(self, entry: Entry, event: ev.Reconnected) -> None:
        limit = self._wait_bound.limit
        self._wait_bound.disturbed(
            "", None, entry.time - event.seconds - limit("lease_s"), entry.time + limit("lease_s")
        )

    def _inventory_done(self, entry: Entry, event: ev.InventoryDone) -> None:
        self._recovering = False

    def _registered(self, entry: Entry, event: ev.Registered) -> None:
        infer = next(cluster for cluster in event.clusters if cluster.name == ACTOR_INFER)
        pipeline = _Pipeline(
            {cluster.name: frozenset(cluster.gpus) for cluster in event.clusters}, infer.tp_size, infer.gpus
        )
        self._pipelines[event.pipeline] = pipeline
        self._past[event.pipeline] = _Pipeline(pipeline.clusters, pipeline.tp, pipeline.mapping)
        self._wait_bound.registered(event.pipeline, pipeline.mapped, event.weight, len(self._pipelines))

    def _unregistered(self, entry: Entry, event: ev.Unregistered) -> None:
        self._pipelines.pop(event.pipeline, None)
        self._drop_requests(event.pipeline)

    def _drop_requests(self, name: str) -> None:
        for key in [key for key in self._requests if key[0] == name]:
            del self._requests[key]

    # The queue.

    def _requested(self, entry: Entry, event: ev.Requested) -> None:
        key = entry.time + event.priority * self._wait_bound.limit("aging_s")
        gpus = self._of(event.pipeline).clusters[event.cluster]
        self._forgotten.discard((event.pipeline, event.cluster))
        self._requests[event.pipeline, event.cluster] = _Request(
            entry.time, key, gpus, event.request, event.step, event.priority
        )

    def _dropped(self, entry: Entry, event: ev.RequestDropped) -> None:
        self._requests.pop((event.pipeline, event.cluster), None)

    def _claimed(self, entry: Entry, event: ev.Claimed) -> None:
        if event.cluster == ACTOR_INFER:
            return
        mine = self._requests.get((event.pipeline, event.cluster))
        if mine is not None:
            mine.claimed = True
            self._count_overtaken(event.pipeline, mine.key, frozenset(event.gpus), event.passed)

    def _count_overtaken(self, by: str, key: float, taken: frozenset[int], passed: tuple[str, ...]) -> None:
        for (name, cluster), other in self._requests.items():
            if other.claimed or not other.judged or other.key >= key or name == by or other.gpus.isdisjoint(taken):
                continue
            held = self._pipelines[name].held
            if cluster not in held and f"{name}#{other.number}" not in passed and not self._recovering:
                self._bad(9, f"{name} waits for {cluster} and is overtaken by {by}, which is behind it in the queue")
            other.overtaken += 1
            if other.overtaken > self._wait_bound.limit("max_backfills"):
                self._bad(9, f"{name} waits for {cluster} and is overtaken for the {other.overtaken}th time, by {by}")

    def _claim_dropped(self, entry: Entry, event: ev.ClaimDropped) -> None:
        waiting = self._requests.get((event.pipeline, event.cluster))
        if event.rank < 0 and waiting is not None:
            waiting.claimed = False

    def _granted(self, entry: Entry, event: ev.Granted) -> None:
        self._check_asked(event)
        pipeline = self._of(event.pipeline)
        if not pipeline.held:
            pipeline.holding_since = entry.time
        pipeline.held.add(event.cluster)
        self._serve(event.pipeline, event.cluster, entry.time)

    def _priority_changed(self, entry: Entry, event: ev.PriorityChanged) -> None:
        self._check_asked(event)
        self._serve(event.pipeline, event.cluster, entry.time)

    def _check_asked(self, event: ev.Granted | ev.PriorityChanged) -> None:
        """Only what was asked for is granted; a new scheduler may also write down what it finds to be held."""
        key = (event.pipeline, event.cluster)
        who, asked = f"{event.pipeline}/{event.cluster}", self._requests.get(key)
        if self._recovering or (asked is None and key in self._forgotten):
            self._forgotten.discard(key)
            return
        given = (event.request, event.step, event.priority)
        if asked is None:
            self._bad(
                10, f"{who} is granted (request {event.request}, step {event.step}) without having been asked for"
            )
        elif given != (asked.number, asked.step, asked.priority):
            wanted = f"request {asked.number}, step {asked.step}, {asked.priority.name}"
            self._bad(
                10,
                f"{who} is granted as request {event.request}, step {event.step}, {event.priority.name}; "
                f"asked for was {wanted}",
            )

    def _serve(self, pipeline: str, cluster: str, time: float) -> None:
        waiting = self._requests.pop((pipeline, cluster), None)
        if waiting is not None and waiting.judged:
            self._waited.append(
                Wait(
                    pipeline,
                    waiting.gpus,
                    waiting.since,
                    time,
                    f"{pipeline} waited for {cluster} from {waiting.since:.1f} s",
                )
            )

    def _released(self, entry: Entry, event: ev.Released) -> None:
        self._end_hold(self._of(event.pipeline), event.cluster, entry.time)

    def _end_hold(self, pipeline: _Pipeline, cluster: str, time: float) -> None:
        if cluster not in pipeline.held:
            return
        pipeline.held.remove(cluster)
        if not pipeline.held:
            self._wait_bound.held(time - pipeline.holding_since)

    # Faults and generation.

    def _fenced(self, entry: Entry, event: ev.Fenced) -> None:
        name, pipeline, limit = event.pipeline, self._of(event.pipeline), self._wait_bound.limit
        for cluster in list(pipeline.held):
            self._end_hold(pipeline, cluster, entry.time)
        self._drop_requests(name)
        pipeline.leaving = True
        self._feed(name, entry.time)
        self._wait_bound.disturbed(name, pipeline.mapped, entry.time - limit("lease_s"), entry.time + limit("reap_s"))

    def _quarantined(self, entry: Entry, event: ev.GpusQuarantined) -> None:
        self._wait_bound.disturbed(
            event.pipeline, event.gpus, entry.time, event.until + self._wait_bound.limit("reap_s")
        )

    def _cooling(self, entry: Entry, event: ev.RankCooling) -> None:
        gpus = self._of(event.pipeline).rank_gpus(event.rank)
        self._wait_bound.disturbed(event.pipeline, gpus, entry.time, event.until + self._wait_bound.limit("reap_s"))

    def _rank(self, entry: Entry, event: ev.RankMoved) -> None:
        self._last_time = entry.time
        pipeline = self._of(event.pipeline)
        if event.phase is Phase.ASLEEP or event.phase in SLEEP_PHASES:
            pipeline.awake.discard(event.rank)
        else:
            pipeline.awake.add(event.rank)
        self._feed(event.pipeline, entry.time)
        if event.phase is Phase.FAILED:
            until = entry.time + self._wait_bound.limit("quarantine_s") + self._wait_bound.limit("reap_s")
            self._wait_bound.disturbed(event.pipeline, pipeline.rank_gpus(event.rank), entry.time, until)

    def _demand(self, entry: Entry, event: ev.DemandReported) -> None:
        self._of(event.pipeline).demand = max(event.target - event.done, 0) * event.unit
        self._feed(event.pipeline, entry.time)

    def _leaving(self, entry: Entry, event: ev.Leaving) -> None:
        self._of(event.pipeline).leaving = True
        self._feed(event.pipeline, entry.time)
        for (name, _), request in self._requests.items():
            request.judged = request.judged and name != event.pipeline

    def _feed(self, name: str, time: float) -> None:
        pipeline = self._of(name)
        unscheduled = pipeline.demand > 0 and not pipeline.awake and not pipeline.leaving
        if unscheduled and pipeline.unscheduled_since is None:
            pipeline.unscheduled_since = time
        elif not unscheduled and pipeline.unscheduled_since is not None:
            self._end_hunger(
                name, pipeline, time, f"{name} had work and no rank from {pipeline.unscheduled_since:.1f} s"
            )

    def _end_hunger(self, name: str, pipeline: _Pipeline, time: float, what: str) -> None:
        if pipeline.unscheduled_since is not None:
            self._waited.append(Wait(name, pipeline.clusters[ACTOR_INFER], pipeline.unscheduled_since, time, what))
            pipeline.unscheduled_since = None
