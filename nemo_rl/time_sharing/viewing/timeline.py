"""Timeline of a record: occupation of GPUs by phase, waits, demand and hand-overs.

A pure projection of the scheduler's events (and of the agents' steps); trace and report draw from here and read no
event themselves.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.comparison import Simulated
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ClusterSpec, Phase, Priority
from nemo_rl.time_sharing.viewing.handovers import Handover, HandoverWatch
from nemo_rl.utils import record_events as rec
from nemo_rl.utils.record import Entry


class Occupation(NamedTuple):
    """One stretch on some GPUs, seconds: `tag` as in `Priority.tag`, `phase` of a rank, `held` or `fenced`; `number`
    counts the hold it is part of.

    `rank` and `step` are -1 where there is none, `plan` is the number of the plan that gave the GPUs. `kind`: `request`
    for a fixed cluster; for a rank `initial` (its first wake), `proactive` (a later one) or `guaranteed` (a guaranteed
    slice).
    """

    gpus: tuple[int, ...]
    start: float
    end: float
    pipeline: str
    tag: str
    phase: str
    label: str
    number: int
    cluster: str = ACTOR_INFER
    rank: int = -1
    step: int = -1
    plan: int = -1
    kind: str = "request"


class Outage(NamedTuple):
    """GPUs that are out of use (`quarantined`), or that one pipeline's rank is kept from (`cooling`), seconds."""

    gpus: tuple[int, ...]
    start: float
    end: float
    pipeline: str
    kind: str
    label: str


class Waited(NamedTuple):
    """One request in the queue, from its arrival to its grant or end."""

    pipeline: str
    cluster: str
    tag: str
    start: float
    end: float


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
    """Data of pictures, in seconds since the record's first entry, which was at `origin` on its clock. `marks`: (time,
    request, decision or release in words); `faults`: (time, fault in words); `decisions`: (time, plan, reason in a
    sentence); `measured`: latest measured gain of running together; `entitled`: GPUs that each pipeline with demand was
    entitled to by the last plan that says so.

    `pipelines` are in order of their registration. `simulated`: a simulation's own comparison, None for a real run.
    """

    pool: Pool = field(default_factory=lambda: Pool(1, 1))
    origin: float = 0.0
    end: float = 0.0
    occupations: list[Occupation] = field(default_factory=list)
    waits: list[Waited] = field(default_factory=list)
    handovers: list[Handover] = field(default_factory=list)
    demand: list[Level] = field(default_factory=list)
    gpus: list[Level] = field(default_factory=list)
    active_gpus: list[tuple[float, float]] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    faults: list[tuple[float, str]] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    decisions: list[tuple[float, int, str]] = field(default_factory=list)
    entitled: dict[str, float] = field(default_factory=dict)
    pipelines: list[str] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)
    measured: str = ""
    simulated: Simulated | None = None

    def busy(self) -> float:
        """Part of the GPUs' time in which a pipeline trains or generates on them, 0 to 1."""
        held = (
            self.pool.gpus_in(o.gpus) * (o.end - o.start) for o in self.occupations if o.phase in ("held", "serving")
        )
        return sum(held) / max(self.end * self.pool.gpus, 1e-9)


_NO_PLAN = -1
"""The plan of a decision that no plan made."""


@dataclass(slots=True)
class _Open:
    start: float
    phase: str
    number: int
    label: str
    tag: str
    step: int
    kind: str


_OutageKey = tuple[tuple[int, ...], str, int, int] | tuple[str, int]
"""A quarantine (GPUs, pipeline, incarnation, rank), or a rank that cools off (pipeline, rank)."""


class TimelineBuilder:
    """Builds a timeline entry by entry; the part so far can be drawn at any time."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.clusters: dict[str, dict[str, ClusterSpec]] = {}
        self.open: dict[tuple[str, str, int], _Open] = {}
        self.queue: dict[tuple[str, str], tuple[float, Priority]] = {}
        self.watch = HandoverWatch()
        self.counts: dict[str, float] = {}
        self.holds = 0
        self.plans: dict[tuple[str, str, int], int] = {}
        self.started: set[tuple[str, int]] = set()
        self.out: dict[_OutageKey, Outage] = {}
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
        seen.open, seen.queue, seen.out, seen.counts = map(dict, (self.open, self.queue, self.out, self.counts))
        t = self.timeline
        seen.timeline = shown = replace(
            t,
            end=max(t.end, end or 0.0),
            occupations=list(t.occupations),
            waits=list(t.waits),
            gpus=list(t.gpus),
            active_gpus=list(t.active_gpus),
            outages=list(t.outages),
            handovers=list(self.watch.found),
        )
        for key in list(seen.open):
            seen.close(key, shown.end)
        for pipeline, cluster in list(seen.queue):
            seen.end_wait(pipeline, cluster, shown.end)
        for outage in list(seen.out):
            seen.end_outage(outage, shown.end)
        return shown

    def gpus_of(self, key: tuple[str, str, int]) -> tuple[int, ...]:
        pipeline, cluster, rank = key
        spec = self.clusters[pipeline][cluster]
        return spec.gpus if rank < 0 else spec.gpus[rank * spec.tp_size : (rank + 1) * spec.tp_size]

    def begin(
        self,
        key: tuple[str, str, int],
        time: float,
        phase: str,
        tag: str,
        label: str,
        *,
        step: int = -1,
        kind: str = "request",
    ) -> None:
        before = self.open.get(key)
        number = before.number if before is not None else self.holds
        if before is None:
            self.holds += 1
            self.count(key, time, self.timeline.pool.gpus_in(self.gpus_of(key)))
        else:
            self.close(key, time, last=False)
        self.open[key] = _Open(time, phase, number, label, tag, step, kind)

    def close(self, key: tuple[str, str, int], time: float, *, last: bool = True) -> None:
        held = self.open.pop(key, None)
        if held is None:
            return
        if time > held.start:
            plan = self.plans.get(key, -1)
            stretch = Occupation(
                self.gpus_of(key),
                held.start,
                time,
                key[0],
                held.tag,
                held.phase,
                held.label,
                held.number,
                key[1],
                key[2],
                held.step,
                plan,
                held.kind,
            )
            self.timeline.occupations.append(stretch)
        if last:
            self.count(key, time, -self.timeline.pool.gpus_in(self.gpus_of(key)))

    def begin_outage(self, key: _OutageKey, outage: Outage) -> None:
        self.end_outage(key, outage.start)
        self.out[key] = outage

    def end_outage(self, key: _OutageKey, time: float) -> None:
        outage = self.out.pop(key, None)
        if outage is not None and min(time, outage.end) > outage.start:
            self.timeline.outages.append(outage._replace(end=min(time, outage.end)))

    def count(self, key: tuple[str, str, int], time: float, change: float) -> None:
        self.counts[key[0]] = round(self.counts.get(key[0], 0.0) + change, 6)
        self.timeline.gpus.append(Level(key[0], time, self.counts[key[0]]))
        self.timeline.active_gpus.append((time, sum(self.counts.values())))

    def end_wait(self, pipeline: str, cluster: str, time: float) -> None:
        waiting = self.queue.pop((pipeline, cluster), None)
        if waiting is not None:
            self.timeline.waits.append(Waited(pipeline, cluster, waiting[1].tag, waiting[0], time))


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
            timeline.pool = event.pool
        case ev.Registered():
            builder.clusters[event.pipeline] = {cluster.name: cluster for cluster in event.clusters}
            if event.pipeline not in timeline.pipelines:
                timeline.pipelines.append(event.pipeline)
        case ev.Requested():
            builder.queue[event.pipeline, event.cluster] = (time, event.priority)
            timeline.marks.append((time, f"enqueue {event.priority.tag} {event.pipeline}/{event.cluster}"))
        case ev.RequestDropped():
            builder.end_wait(event.pipeline, event.cluster, time)
        case ev.Claimed():
            builder.plans[event.pipeline, event.cluster, event.rank] = event.plan
            who, count = event.cluster if event.rank < 0 else f"rank {event.rank}", timeline.pool.gpus_in(event.gpus)
            timeline.marks.append(
                (time, f"plan {event.plan}: {event.pipeline}/{who} gets {count:g} {'GPU' if count == 1 else 'GPUs'}")
            )
        case ev.Granted() | ev.PriorityChanged():
            builder.end_wait(event.pipeline, event.cluster, time)
            key = (event.pipeline, event.cluster, -1)
            builder.begin(
                key,
                time,
                "held",
                event.priority.tag,
                f"{event.priority.tag} {event.pipeline} {event.cluster} step {event.step}",
                step=event.step,
            )
        case ev.Released():
            builder.close((event.pipeline, event.cluster, -1), time)
            timeline.marks.append((time, f"release {event.pipeline}/{event.cluster}"))
        case ev.RankMoved():
            _take_rank(builder, event, time)
        case ev.Unregistered():
            for key in [key for key in builder.open if key[0] == event.pipeline]:
                builder.close(key, time)
            for rank in [key for key in builder.out if key[0] == event.pipeline]:
                builder.end_outage(rank, time)
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
            _step_of_rise(builder, source.partition("/")[0], event.shard, time)
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
            for key in [key for key in builder.open if key[0] == event.pipeline]:
                held = builder.open[key]
                builder.begin(
                    key,
                    time,
                    "fenced",
                    held.tag,
                    f"{event.pipeline}: being ended ({event.reason})",
                    step=held.step,
                    kind=held.kind,
                )
        case ev.SchedulerStarted() if event.term > 1:
            timeline.faults.append((time, f"the scheduler restarts (term {event.term})"))
        case ev.GpusQuarantined():
            label = f"quarantined: {event.reason} ({event.pipeline})"
            timeline.faults.append((time, f"GPUs {', '.join(map(timeline.pool.name_of, event.gpus))} {label}"))
            whose = (event.pipeline, event.incarnation, event.rank)
            builder.begin_outage(
                (event.gpus, *whose), Outage(event.gpus, time, float("inf"), event.pipeline, "quarantined", label)
            )
        case ev.GpusCleared():
            builder.end_outage((event.gpus, event.pipeline, event.incarnation, event.rank), time)
        case ev.RankCooling():
            label = f"{event.pipeline} rank {event.rank} cools off, others may have its GPUs"
            timeline.faults.append((time, f"{event.pipeline} rank {event.rank} is taken out of service"))
            gpus = builder.gpus_of((event.pipeline, ACTOR_INFER, event.rank))
            builder.begin_outage(
                (event.pipeline, event.rank),
                Outage(gpus, time, event.until - timeline.origin, event.pipeline, "cooling", label),
            )
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


def _step_of_rise(builder: TimelineBuilder, pipeline: str, rank: int, time: float) -> None:
    key = (pipeline, ACTOR_INFER, rank)
    rising = builder.open.get(key)
    if rising is not None and rising.phase == Phase.RISING.value:
        label = f"GEN {pipeline} rank {rank} syncing"
        builder.begin(key, time, "syncing", Priority.GENERATION.tag, label, kind=rising.kind)


def _take_rank(builder: TimelineBuilder, event: ev.RankMoved, time: float) -> None:
    key = (event.pipeline, ACTOR_INFER, event.rank)
    if event.phase is Phase.ASLEEP:
        builder.close(key, time)
        return
    rank = (event.pipeline, event.rank)
    if event.phase in (Phase.RISING, Phase.BUILDING):
        kind = "guaranteed" if event.guaranteed else "proactive" if rank in builder.started else "initial"
        builder.started.add(rank)
    else:
        kind = builder.open[key].kind if key in builder.open else "proactive"
    version = f" v{event.version}" if event.version >= 0 else ""
    builder.begin(
        key,
        time,
        event.phase.value,
        Priority.GENERATION.tag,
        f"GEN {event.pipeline} rank {event.rank} {event.phase.value}{version}",
        kind=kind,
    )
