"""Numbers of a simulation: time and slowdown of each job, how busy the GPUs were, hand-overs, fairness; and the table that shows them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nemo_rl.time_sharing import events as ev
from nemo_rl.time_sharing.scenario import Job, Scenario
from nemo_rl.time_sharing.simulation.baselines import GAP_RATIO, GAP_RATIO_DECISIONS, SERIAL, STATIC, accept_all, alone, way
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.time_sharing.types import Phase
from nemo_rl.time_sharing.validator import validate
from nemo_rl.utils.record import Entry, NullRecord, Record


@dataclass(slots=True)
class Outcome:
    """One run. `seconds` and `slowdown` by job; `gpu_busy` is the part of GPU time in which a trainer or a shard with requests worked."""

    total_s: float
    seconds: dict[str, float]
    slowdown: dict[str, float]
    gpu_busy: float
    service_spread: float
    handovers_s: list[float]
    preemptions: int
    unfinished: tuple[str, ...]
    events: int
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def p99_slowdown(self) -> float:
        return percentile(list(self.slowdown.values()), 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, interpolated; 0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


class AloneTimes:
    """Each job by itself, with the same prompts, without faults; simulated once per job and seed. `known` are runs that are there already."""

    def __init__(self, scenario: Scenario, known: dict[tuple[str, int], Outcome] | None = None) -> None:
        self._scenario = scenario.model_copy(update={"faults": type(scenario.faults)(), "network": type(scenario.network)()})
        self.known = {} if known is None else known

    def of(self, job: Job, seed: int) -> float:
        """Seconds from its start to its end."""
        return self.run(job, seed).total_s

    def run(self, job: Job, seed: int) -> Outcome:
        """The run of this job alone; its `total_s` lasts from its start to its end."""
        key = (job.name, seed)
        if key not in self.known:
            world = World(alone(self._scenario, job), seed, lambda clock: NullRecord())
            world.run()
            run = world.jobs[job.name]
            seconds = run.finished_at or world.loop.now
            handovers, preemptions = _handovers(world.entries)
            busy = (run.train_gpu_s + run.generate_gpu_s) / (seconds * self._scenario.gpu_pool.size)
            unfinished = () if run.finished_at is not None else (job.name,)
            self.known[key] = Outcome(seconds, {job.name: seconds}, {job.name: 1.0}, busy, 0.0, handovers, preemptions, unfinished, world.loop.events)
        return self.known[key]


def compose(scenario: Scenario, name: str, seed: int, alone_times: AloneTimes) -> Outcome:
    """What `run_way` says of SERIAL and STATIC, put together from runs of each job alone: there no two jobs use a GPU at the same time.

    Each job starts when every earlier one that shares a GPU with it has ended. Left out is what the network does between two jobs (milliseconds), so
    this takes a fraction of the time where jobs are many. Raises ValueError for other ways, and for scenarios with faults or jobs that leave.
    """
    if name not in (SERIAL, STATIC) or scenario.faults != type(scenario.faults)() or any(job.leaves_s is not None for job in scenario.jobs):
        raise ValueError(f"{name}: only {SERIAL} and {STATIC}, without faults and jobs that leave, can be put together from jobs alone")
    changed, _ = way(scenario, name)
    times = AloneTimes(changed) if name == STATIC else alone_times
    ends: dict[str, float] = {}
    gpus = {job.name: frozenset(job.train) | frozenset(job.infer) for job in changed.jobs}
    for job in sorted(changed.jobs, key=lambda j: (j.arrive_s, j.name)):
        before = [end for other, end in ends.items() if not gpus[other].isdisjoint(gpus[job.name])]
        ends[job.name] = max([job.arrive_s, *before]) + times.of(job, seed)
    runs = {job.name: times.run(job, seed) for job in changed.jobs}
    seconds = {job.name: ends[job.name] - job.arrive_s for job in scenario.jobs}
    slowdown = {job.name: seconds[job.name] / max(alone_times.of(job, seed), 1e-9) for job in scenario.jobs}
    pool, total = scenario.gpu_pool.size, max(ends.values())
    busy = {name: run.gpu_busy * run.total_s * pool for name, run in runs.items()}
    service = [busy[job.name] / job.weight / max(seconds[job.name], 1e-9) for job in scenario.jobs]
    return Outcome(
        total,
        seconds,
        slowdown,
        sum(busy.values()) / (total * pool),
        _spread(service),
        [span for run in runs.values() for span in run.handovers_s],
        sum(run.preemptions for run in runs.values()),
        tuple(name for run in runs.values() for name in run.unfinished),
        sum(run.events for run in runs.values()),
    )


def run_way(scenario: Scenario, name: str, seed: int, alone_times: AloneTimes, make_record: Callable[[Callable[[], float]], Record] | None = None) -> Outcome:
    """Simulates a scenario in one of the ways of `baselines.WAYS` and sums it up."""
    changed, rule = way(scenario, name)
    validator = accept_all if name in (GAP_RATIO, GAP_RATIO_DECISIONS) else validate
    world = World(changed, seed, make_record or (lambda clock: NullRecord()), rule=rule, validator=validator)
    world.run()
    return summarise(world, scenario, seed, alone_times)


def summarise(world: World, scenario: Scenario, seed: int, alone_times: AloneTimes) -> Outcome:
    seconds: dict[str, float] = {}
    slowdown: dict[str, float] = {}
    unfinished: list[str] = []
    for job in scenario.jobs:
        run = world.jobs[job.name]
        end = run.finished_at if run.finished_at is not None else world.loop.now
        seconds[job.name] = end - job.arrive_s
        if run.finished_at is None:
            unfinished.append(job.name)
        if job.leaves_s is None:
            slowdown[job.name] = seconds[job.name] / max(alone_times.of(job, seed), 1e-9)
    total = max(job.arrive_s + seconds[job.name] for job in scenario.jobs)
    busy = sum(run.train_gpu_s + run.generate_gpu_s for run in world.jobs.values())
    service = [(run.train_gpu_s + run.generate_gpu_s) / run.job.weight / max(seconds[name], 1e-9) for name, run in world.jobs.items()]
    handovers, preemptions = _handovers(world.entries)
    return Outcome(
        total, seconds, slowdown, busy / (total * scenario.gpu_pool.size), _spread(service), handovers, preemptions, tuple(unfinished), world.loop.events
    )


def _spread(service: Sequence[float]) -> float:
    """Standard deviation of the service per weight, over its mean."""
    return statistics.pstdev(service) / statistics.fmean(service) if len(service) > 1 and sum(service) else 0.0


def _handovers(entries: Sequence[Entry]) -> tuple[list[float], int]:
    """Seconds from a claim on GPUs to their use (granted, or the rank routed), and how many ranks were sent to sleep for others."""
    claimed: dict[tuple[str, str, int], float] = {}
    spans: list[float] = []
    preemptions = 0
    for entry in entries:
        event = entry.event
        if isinstance(event, ev.Claimed):
            claimed[event.pipeline, event.cluster, event.rank] = entry.time
        elif isinstance(event, ev.Granted):
            began = claimed.pop((event.pipeline, event.cluster, -1), None)
            if began is not None:
                spans.append(entry.time - began)
        elif isinstance(event, ev.RankMoved):
            if event.phase is Phase.ACTIVE:
                began = claimed.pop((event.pipeline, "actor_infer", event.rank), None)
                if began is not None:
                    spans.append(entry.time - began)
            elif event.phase is Phase.DRAINING:
                preemptions += 1
    return spans, preemptions


def table(rows: Sequence[tuple[str, Sequence[Outcome]]]) -> list[list[str]]:
    """Header and one line per way, means over runs."""
    lines = [["way", "total s", "vs serial", "slowdown mean", "p99", "GPU busy", "service spread", "hand-over p50 / p99 s", "preemptions", "unfinished"]]
    serial = next((statistics.fmean(o.total_s for o in outcomes) for name, outcomes in rows if name == "one_after_the_other"), None)
    for name, outcomes in rows:
        total = statistics.fmean(o.total_s for o in outcomes)
        spans = [s for o in outcomes for s in o.handovers_s]
        lines.append(
            [
                name,
                f"{total:.0f}",
                f"{serial / total:.2f}x" if serial else "-",
                f"{statistics.fmean(statistics.fmean(o.slowdown.values()) for o in outcomes if o.slowdown):.2f}",
                f"{statistics.fmean(o.p99_slowdown for o in outcomes):.2f}",
                f"{statistics.fmean(o.gpu_busy for o in outcomes):.0%}",
                f"{statistics.fmean(o.service_spread for o in outcomes):.2f}",
                f"{percentile(spans, 50):.2f} / {percentile(spans, 99):.2f}",
                f"{statistics.fmean(o.preemptions for o in outcomes):.0f}",
                str(sum(len(o.unfinished) for o in outcomes)),
            ]
        )
    return lines
