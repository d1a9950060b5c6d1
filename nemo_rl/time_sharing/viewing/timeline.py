"""Timeline of a record: occupation of GPUs by phase, waits, demand and hand-overs.

A pure projection of the scheduler's events (and of the agents' steps); trace and report draw from here and read no
event themselves.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.comparison import Simulated
from nemo_rl.time_sharing.protocol.quotas import QuotaNode
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ClusterSpec, Phase, Priority
from nemo_rl.utils import record_events as rec
from nemo_rl.utils.record import Entry

Lane = Literal["gpus", "queue", "out"]


class Interval(NamedTuple):
    """A stretch of a pipeline's time, in seconds. Lane `gpus`: it holds GPUs. `queue`: a request of it waits, until its
    grant or end. `out`: GPUs are out of use (phase `quarantined`), or its rank is kept from them (`cooling`).

    On GPUs, `phase` is that of a rank, `held` or `fenced`, and `number` counts the hold that the stretch is part of.
    `tag` is as in `Priority.tag`, `plan` is the number of the plan that gave the GPUs; `rank`, `step` and `plan` are -1
    where there is none. `kind`: `request` for a fixed cluster; for a rank `initial` (its first wake), `proactive` (a
    later one) or `guaranteed` (a guaranteed slice).
    """

    lane: Lane
    start: float
    end: float
    pipeline: str
    gpus: tuple[int, ...] = ()
    phase: str = ""
    label: str = ""
    tag: str = ""
    cluster: str = ACTOR_INFER
    rank: int = -1
    step: int = -1
    kind: str = "request"
    number: int = -1
    plan: int = -1


class Level(NamedTuple):
    """A pipeline's standing demand in samples, or its GPUs, from `time` on."""

    pipeline: str
    time: float
    value: float


def in_unit(text: str, unit: str) -> str:
    """A sentence about GPUs in the words of a pool whose slots are something else.

    >>> in_unit("rank 1 wakes on GPUs 1, 2", "CPU slot")
    'rank 1 wakes on CPU slots 1, 2'
    """
    return re.sub(r"\bGPU(s?)\b", rf"{unit}\1", text)


@dataclass(slots=True)
class Timeline:
    """Data of pictures, in seconds since the record's first entry, which was at `origin` on its clock. `intervals` are
    in the order in which they ended; `handovers`: how long each took, as `HandoverWatch` finds them; `marks`: (time,
    request, decision or release in words); `faults`: (time, fault in words); `decisions`: (time, plan, reason in a
    sentence); `measured`: latest measured gain of running together; `entitled`: GPUs that each pipeline with demand was
    entitled to by the last plan that says so; `users`: who submitted a pipeline, on a pool for a team; `quotas`: that
    team's, and `use` what its groups and users have had of late, in slot-seconds; `priorities`: of pipelines;
    `lead_s`: how much older requests one of high priority passes, which is to wait for `high_wait_s` at most.

    `away`: the nodes that are away at the end. `pipelines` are in order of their registration. `simulated`: a
    simulation's own comparison, None for a real run.
    """

    pool: Pool = field(default_factory=lambda: Pool(1, 1))
    away: set[int] = field(default_factory=set)
    origin: float = 0.0
    end: float = 0.0
    intervals: list[Interval] = field(default_factory=list)
    handovers: list[float] = field(default_factory=list)
    demand: list[Level] = field(default_factory=list)
    gpus: list[Level] = field(default_factory=list)
    active_gpus: list[tuple[float, float]] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    faults: list[tuple[float, str]] = field(default_factory=list)
    decisions: list[tuple[float, int, str]] = field(default_factory=list)
    entitled: dict[str, float] = field(default_factory=dict)
    pipelines: list[str] = field(default_factory=list)
    users: dict[str, str] = field(default_factory=dict)
    priorities: dict[str, str] = field(default_factory=dict)
    quotas: tuple[QuotaNode, ...] = ()
    use: Mapping[str, float] = field(default_factory=dict)
    lead_s: float = 0.0
    high_wait_s: float = 0.0
    steps: dict[str, int] = field(default_factory=dict)
    measured: str = ""
    simulated: Simulated | None = None

    def of(self, lane: Lane) -> list[Interval]:
        """The intervals of a lane."""
        return [interval for interval in self.intervals if interval.lane == lane]

    def busy(self) -> float:
        """Part of the GPUs' time in which a pipeline trains or generates on them, 0 to 1."""
        held = (
            self.pool.gpus_in(o.gpus) * (o.end - o.start) for o in self.of("gpus") if o.phase in ("held", "serving")
        )
        return sum(held) / max(self.end * self.pool.gpus, 1e-9)


class HandoverWatch:
    """How long GPUs are on their way: from a claim on them to their use, the cluster granted or the rank routed.

    A claim that is dropped or fenced counts for nothing; a repeated one counts from its last decision. `take` gets the
    scheduler's events in order; `found` are the seconds of the hand-overs that ended.
    """

    def __init__(self) -> None:
        self.found: list[float] = []
        self._claimed: dict[tuple[str, str, int], float] = {}

    def take(self, time: float, event: object) -> None:
        match event:
            case ev.Claimed():
                self._claimed[event.pipeline, event.cluster, event.rank] = time
                return
            case ev.Granted():
                key = (event.pipeline, event.cluster, -1)
            case ev.RankMoved(phase=Phase.SERVING):
                key = (event.pipeline, ACTOR_INFER, event.rank)
            case _:
                return
        began = self._claimed.pop(key, None)
        if began is not None:
            self.found.append(time - began)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, interpolated; 0 for none."""
    return float(np.percentile(values, percent)) if values else 0.0


_NO_PLAN = -1
"""The plan of a decision that no plan made."""
_NEVER = float("inf")
_Key = tuple[object, ...]
"""Of an open interval: its lane, then the cluster or rank, the waiting cluster, or the outage."""


class TimelineBuilder:
    """Builds a timeline entry by entry; the part so far can be drawn at any time."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.clusters: dict[str, dict[str, ClusterSpec]] = {}
        self.open: dict[_Key, Interval] = {}
        self.watch = HandoverWatch()
        self.counts: dict[str, float] = {}
        self.holds = 0
        self.plans: dict[tuple[str, str, int], int] = {}
        self.started: set[tuple[str, int]] = set()
        self._empty = True

    def take(self, entry: Entry) -> None:
        """The next entry."""
        if self._empty:
            self._empty, self.timeline.origin = False, entry.time
        time = entry.time - self.timeline.origin
        if not isinstance(entry.event, Simulated):
            self.timeline.end = max(self.timeline.end, time)
        self.watch.take(time, entry.event)
        _take(self, entry.source, entry.event, time)

    def so_far(self, end: float | None = None) -> Timeline:
        """The timeline so far; open items are drawn to `end`, seconds since the first entry (default: the last entry),
        and stay open here.
        """
        seen = copy.copy(self)
        seen.open, seen.counts = dict(self.open), dict(self.counts)
        t = self.timeline
        seen.timeline = shown = replace(
            t,
            end=max(t.end, end or 0.0),
            intervals=list(t.intervals),
            gpus=list(t.gpus),
            active_gpus=list(t.active_gpus),
            handovers=list(self.watch.found),
        )
        for key in self.open:
            seen.close(key, shown.end)
        return shown

    def gpus_of(self, pipeline: str, cluster: str, rank: int) -> tuple[int, ...]:
        spec = self.clusters[pipeline][cluster]
        return spec.gpus if rank < 0 else spec.gpus[rank * spec.tp_size : (rank + 1) * spec.tp_size]

    def hold(
        self,
        whose: tuple[str, str, int],
        time: float,
        phase: str,
        tag: str,
        label: str,
        *,
        step: int = -1,
        kind: str = "request",
    ) -> None:
        """A cluster or rank holds its GPUs in this phase from now on."""
        key, gpus = ("gpus", *whose), self.gpus_of(*whose)
        before = self.open.get(key)
        if before is None:
            number, self.holds = self.holds, self.holds + 1
            self.count(whose[0], time, self.timeline.pool.gpus_in(gpus))
        else:
            number = before.number
            self.close(key, time, last=False)
        pipeline, cluster, rank = whose
        self.open[key] = Interval(
            "gpus", time, _NEVER, pipeline, gpus, phase, label, tag, cluster, rank, step, kind, number
        )

    def close(self, key: _Key, time: float, *, last: bool = True) -> None:
        """Ends an open interval, if there is one. `last`: the GPUs are free, not in another phase of their hold."""
        begun = self.open.pop(key, None)
        if begun is None:
            return
        own = (begun.pipeline, begun.cluster, begun.rank)
        ended = begun._replace(end=min(time, begun.end), plan=self.plans.get(own, -1))
        # A request that is granted at once was in the queue nevertheless.
        if ended.end > ended.start or ended.lane == "queue":
            self.timeline.intervals.append(ended)
        if last and ended.lane == "gpus":
            self.count(ended.pipeline, time, -self.timeline.pool.gpus_in(ended.gpus))

    def begin_outage(self, key: _Key, outage: Interval) -> None:
        self.close(key, outage.start)
        self.open[key] = outage

    def count(self, pipeline: str, time: float, change: float) -> None:
        self.counts[pipeline] = round(self.counts.get(pipeline, 0.0) + change, 6)
        self.timeline.gpus.append(Level(pipeline, time, self.counts[pipeline]))
        self.timeline.active_gpus.append((time, sum(self.counts.values())))


def build_timeline(entries: Iterable[Entry]) -> Timeline:
    """The timeline of a record. Items open at its end are closed there."""
    builder = TimelineBuilder()
    for entry in entries:
        builder.take(entry)
    return builder.so_far()


def _take(builder: TimelineBuilder, source: str, event: object, time: float) -> None:
    timeline = builder.timeline
    match event:
        case ev.PoolOpened():
            timeline.pool, timeline.away = event.pool, set()
            timeline.lead_s = event.limits.get("high_lead_s", 0.0)
            timeline.high_wait_s = event.limits.get("high_wait_s", 0.0)
        case ev.Registered():
            builder.clusters[event.pipeline] = {cluster.name: cluster for cluster in event.clusters}
            if event.pipeline not in timeline.pipelines:
                timeline.pipelines.append(event.pipeline)
            timeline.priorities[event.pipeline] = event.priority
            if event.user:
                timeline.users[event.pipeline] = event.user
        case ev.QuotasSet():
            timeline.quotas = event.nodes
        case ev.UseWeighed():
            timeline.use = event.use
        case ev.UserActed():
            who = event.user or "a token that is no user's"
            timeline.decisions.append((time, _NO_PLAN, f"{who}: {event.action} {event.subject}: {event.outcome}"))
        case ev.NodeDraining() | ev.NodeAway() | ev.NodeHere():
            left = "is away" if isinstance(event, ev.NodeAway) else "is here"
            now = "is to leave" if isinstance(event, ev.NodeDraining) else left
            timeline.decisions.append((time, _NO_PLAN, f"node {event.node} {now}"))
            (timeline.away.add if isinstance(event, ev.NodeAway) else timeline.away.discard)(event.node)
        case ev.Requested():
            waiting = Interval("queue", time, _NEVER, event.pipeline, tag=event.priority.tag, cluster=event.cluster)
            builder.open["queue", event.pipeline, event.cluster] = waiting
            timeline.marks.append((time, f"enqueue {event.priority.tag} {event.pipeline}/{event.cluster}"))
        case ev.RequestDropped():
            builder.close(("queue", event.pipeline, event.cluster), time)
        case ev.Claimed():
            builder.plans[event.pipeline, event.cluster, event.rank] = event.plan
            who, count = event.cluster if event.rank < 0 else f"rank {event.rank}", timeline.pool.gpus_in(event.gpus)
            timeline.marks.append(
                (time, f"plan {event.plan}: {event.pipeline}/{who} gets {count:g} {'GPU' if count == 1 else 'GPUs'}")
            )
        case ev.Granted() | ev.PriorityChanged():
            builder.close(("queue", event.pipeline, event.cluster), time)
            tag = event.priority.tag
            label = f"{tag} {event.pipeline} {event.cluster} step {event.step}"
            builder.hold((event.pipeline, event.cluster, -1), time, "held", tag, label, step=event.step)
        case ev.Released():
            builder.close(("gpus", event.pipeline, event.cluster, -1), time)
            timeline.marks.append((time, f"release {event.pipeline}/{event.cluster}"))
        case ev.RankMoved():
            _take_rank(builder, event, time)
        case ev.Unregistered():
            for key, own in list(builder.open.items()):
                if own.pipeline == event.pipeline and (own.lane == "gpus" or own.phase == "cooling"):
                    builder.close(key, time)
            builder.started = {(name, rank) for name, rank in builder.started if name != event.pipeline}
            timeline.demand.append(Level(event.pipeline, time, 0))
        case ev.DemandReported():
            timeline.demand.append(Level(event.pipeline, time, max(event.target - event.done, 0) * event.unit))
        case ev.PlanExplained():
            timeline.decisions += [(time, event.plan, sentence) for sentence in event.sentences]
            per_gpu = timeline.pool.slots_per_gpu
            timeline.entitled = {name: slots / per_gpu for name, slots in event.entitled.items()}
        case ev.Paused() | ev.Resumed() | ev.SharingMeasured():
            said = _who_runs(event)
            timeline.decisions.append((time, _NO_PLAN, said))
            timeline.measured = said if isinstance(event, ev.SharingMeasured) else timeline.measured
        case Simulated():
            timeline.simulated = event
        case rec.ShardWoken():
            # The steps of a rise are in the record of its pipeline.
            whose = (source.partition("/")[0], ACTOR_INFER, event.shard)
            rising = builder.open.get(("gpus", *whose))
            if rising is not None and rising.phase == Phase.RISING.value:
                label = f"GEN {whose[0]} rank {event.shard} syncing"
                builder.hold(whose, time, "syncing", rising.tag, label, kind=rising.kind)
        case rec.StepFinished():
            name = source.partition("/")[0]
            timeline.steps[name] = timeline.steps.get(name, 0) + 1
        case _:
            _take_fault(builder, event, time)


def _who_runs(event: ev.Paused | ev.Resumed | ev.SharingMeasured) -> str:
    if isinstance(event, ev.Paused):
        return f"{event.pipeline} pauses: {event.reason}."
    if isinstance(event, ev.Resumed):
        return f"{event.pipeline} goes on."
    steps = (f"{name} {event.alone_s[name]:.1f} and {event.together_s[name]:.1f} s" for name in event.alone_s)
    then = "they go on together" if event.keeps else "they run in turn"
    return f"A step alone and together takes {', '.join(steps)}: a gain of {event.gain:.2f}, {then}."


def _take_fault(builder: TimelineBuilder, event: object, time: float) -> None:
    timeline = builder.timeline
    match event:
        case ev.Fenced():
            timeline.faults.append((time, f"{event.pipeline} is cut off: {event.reason}"))
            label = f"{event.pipeline}: being ended ({event.reason})"
            for own in [own for own in builder.open.values() if own.pipeline == event.pipeline and own.lane == "gpus"]:
                whose = (own.pipeline, own.cluster, own.rank)
                builder.hold(whose, time, "fenced", own.tag, label, step=own.step, kind=own.kind)
        case ev.SchedulerStarted() if event.term > 1:
            timeline.faults.append((time, f"the scheduler restarts (term {event.term})"))
        case ev.GpusQuarantined():
            label = f"quarantined: {event.reason} ({event.pipeline})"
            timeline.faults.append((time, f"GPUs {', '.join(map(timeline.pool.name_of, event.gpus))} {label}"))
            key = ("out", event.pipeline, event.rank, event.incarnation, event.gpus)
            outage = Interval("out", time, _NEVER, event.pipeline, event.gpus, "quarantined", label)
            builder.begin_outage(key, outage)
        case ev.GpusCleared():
            builder.close(("out", event.pipeline, event.rank, event.incarnation, event.gpus), time)
        case ev.RankCooling():
            label = f"{event.pipeline} rank {event.rank} cools off, others may have its GPUs"
            timeline.faults.append((time, f"{event.pipeline} rank {event.rank} is taken out of service"))
            gpus, until = builder.gpus_of(event.pipeline, ACTOR_INFER, event.rank), event.until - timeline.origin
            outage = Interval("out", time, until, event.pipeline, gpus, "cooling", label)
            builder.begin_outage(("out", event.pipeline, event.rank), outage)
        case ev.PlanRejected():
            timeline.faults.append((time, f"a plan was refused: {'; '.join(event.problems)}"))
        case ev.Isolated():
            said = f"{event.silent} of {event.registered} pipelines are silent: the scheduler waits for its network"
            timeline.faults.append((time, said))
        case ev.Reconnected():
            said = "pipelines stay silent and are ended" if event.given_up else "pipelines are heard again"
            timeline.faults.append((time, f"{said} after {event.seconds:.0f} s"))
        case ev.ClockJumped():
            timeline.faults.append((time, f"the clock jumped by {event.seconds:g} s"))
        case _:
            pass


def _take_rank(builder: TimelineBuilder, event: ev.RankMoved, time: float) -> None:
    whose = (event.pipeline, ACTOR_INFER, event.rank)
    if event.phase is Phase.ASLEEP:
        builder.close(("gpus", *whose), time)
        return
    rank = (event.pipeline, event.rank)
    if event.phase in (Phase.RISING, Phase.BUILDING):
        kind = "guaranteed" if event.guaranteed else "proactive" if rank in builder.started else "initial"
        builder.started.add(rank)
    else:
        before = builder.open.get(("gpus", *whose))
        kind = "proactive" if before is None else before.kind
    version = f" v{event.version}" if event.version >= 0 else ""
    label = f"GEN {event.pipeline} rank {event.rank} {event.phase.value}{version}"
    builder.hold(whose, time, event.phase.value, Priority.GENERATION.tag, label, kind=kind)
