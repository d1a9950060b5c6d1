"""Figures of a simulation: time and slowdown of each job, use of GPUs, hand-overs, fairness, and unfinished jobs.

A job that did not train all its steps has no slowdown and enters no mean.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.planning.validator import validate
from nemo_rl.time_sharing.protocol.types import Phase
from nemo_rl.time_sharing.simulation.baselines import (
    GAP_RATIO,
    GAP_RATIO_DECISIONS,
    OURS,
    PLACED,
    QUEUE,
    QUEUES,
    BatchQueue,
    accept_all,
    alone,
    on_whole_gpus,
    user_limit,
    way,
)
from nemo_rl.time_sharing.simulation.scenario import Scenario, ScenarioJob
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.time_sharing.viewing.timeline import HandoverWatch, percentile
from nemo_rl.utils.record import Entry, NullRecord, Record


@dataclass(slots=True)
class SimulatedOutcome:
    """One run. `seconds` and `slowdown` by job; `gpu_busy` is the part of GPU time in which a trainer or a shard with
    requests worked.

    A job is unfinished unless all its steps are trained or its user stopped it (`leaves_s`); `fates` says in words what
    became of it. It has no slowdown, nor has a job that does not finish alone. `faults` counts what went wrong, by
    kind.
    """

    total_s: float
    seconds: dict[str, float]
    slowdown: dict[str, float]
    gpu_busy: float
    service_spread: float
    handovers_s: list[float]
    preemptions: int
    unfinished: tuple[str, ...]
    events: int
    fates: dict[str, str] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)

    @property
    def p99_slowdown(self) -> float:
        return percentile(list(self.slowdown.values()), 99)


class AloneTimes:
    """Each job by itself, with the same prompts, without faults; simulated once per job and seed. `known` are runs that
    are there already; `watch` gets every simulation before it runs.
    """

    def __init__(
        self,
        scenario: Scenario,
        known: dict[tuple[str, int], SimulatedOutcome] | None = None,
        watch: Callable[[World], None] = lambda world: None,
    ) -> None:
        self._scenario = scenario.model_copy(
            update={"faults": type(scenario.faults)(), "network": type(scenario.network)()}
        )
        self.known = {} if known is None else known
        self.watch = watch

    @cached_property
    def on_whole_gpus(self) -> AloneTimes:
        """The same jobs where GPUs have no slots."""
        return AloneTimes(on_whole_gpus(self._scenario), watch=self.watch)

    def of(self, job: ScenarioJob, seed: int) -> float:
        """Seconds from its start to its end."""
        return self.run(job, seed).total_s

    def run(self, job: ScenarioJob, seed: int) -> SimulatedOutcome:
        """The run of this job alone; its `total_s` lasts from its start to its end."""
        key = (job.name, seed)
        if key not in self.known:
            world = World(alone(self._scenario, job), seed, lambda clock: NullRecord())
            self.watch(world)
            world.run()
            self.known[key] = summarise(world, world.scenario, seed)
        return self.known[key]


def batch_queue(scenario: Scenario, name: str, seed: int, alone_times: AloneTimes) -> BatchQueue | None:
    """The queue of a way that has one: knowing how long each job takes alone (QUEUE), or by users' limits
    (QUEUE_LIMITS).
    """
    if name not in QUEUES:
        return None
    known = {job.name: alone_times.of(job, seed) for job in scenario.jobs}
    limits = known if name == QUEUE else {job.name: user_limit(known[job.name], job, seed) for job in scenario.jobs}
    return BatchQueue(scenario.gpu_pool, limits)


def as_run(scenario: Scenario, name: str, alone_times: AloneTimes) -> tuple[Scenario, AloneTimes]:
    """What a way of running jobs has of them. Only sharing knows slots; in other ways a job has its GPUs to itself."""
    if name in (OURS, PLACED) or scenario.gpu_pool.slots_per_gpu == 1:
        return scenario, alone_times
    return on_whole_gpus(scenario), alone_times.on_whole_gpus


def run_way(
    scenario: Scenario,
    name: str,
    seed: int,
    alone_times: AloneTimes,
    make_record: Callable[[Callable[[], float]], Record] = lambda clock: NullRecord(),
) -> SimulatedOutcome:
    """Simulates a scenario in one of the ways of `baselines.WAYS` and sums it up. `make_record`: see `Surroundings`."""
    scenario, alone_times = as_run(scenario, name, alone_times)
    changed, rule = way(scenario, name)
    validator = accept_all if name in (GAP_RATIO, GAP_RATIO_DECISIONS) else validate
    queue = batch_queue(scenario, name, seed, alone_times)
    world = World(changed, seed, make_record, rule=rule, validator=validator, queue=queue)
    alone_times.watch(world)
    world.run()
    return summarise(world, scenario, seed, alone_times)


def summarise(world: World, scenario: Scenario, seed: int, alone_times: AloneTimes | None = None) -> SimulatedOutcome:
    """Outcome of a finished simulation. `alone_times`: of its jobs; None where it is of one job alone."""
    seconds: dict[str, float] = {}
    slowdown: dict[str, float] = {}
    fates: dict[str, str] = {}
    for job in scenario.jobs:
        run = world.jobs[job.name]
        end = run.finished_at if run.finished_at is not None else world.loop.now
        seconds[job.name] = max(end - job.arrive_s, 1e-9)
        if run.fate:
            fates[job.name] = run.fate
        elif alone_times is None:
            slowdown[job.name] = 1.0
        elif job.leaves_s is None and not alone_times.run(job, seed).unfinished:
            slowdown[job.name] = seconds[job.name] / alone_times.of(job, seed)
    for plan in scenario.adapter_jobs:
        if fate := world.jobs[plan.name].fate:
            fates[plan.name] = fate
    total = max(job.arrive_s + seconds[job.name] for job in scenario.jobs)
    busy = sum(run.train_gpu_s + run.generate_gpu_s for run in world.jobs.values())
    runs = [world.jobs[job.name] for job in scenario.jobs]
    service = [
        (run.train_gpu_s + run.generate_gpu_s) / run.job.weight / max(seconds[run.job.name], 1e-9) for run in runs
    ]
    handovers, preemptions = _handovers(world.entries)
    slots = scenario.gpu_pool.slots
    absent_s = sum(absence.gone_s(total) for absence in world.scenario.absences) * slots / scenario.gpu_pool.nodes
    return SimulatedOutcome(
        total,
        seconds,
        slowdown,
        busy / max(total * slots - absent_s, 1e-9),
        spread(service),
        handovers,
        preemptions,
        tuple(fates),
        world.loop.events,
        fates=fates,
        faults=_faults(world),
    )


def _faults(world: World) -> dict[str, int]:
    kinds: dict[type, str] = {
        ev.Fenced: "pipelines fenced",
        ev.RankCooling: "ranks cooled off",
        ev.GpusQuarantined: "GPU quarantines",
    }
    counts = Counter(kinds[type(entry.event)] for entry in world.entries if type(entry.event) in kinds)
    return {**world.strikes, **{name: counts[name] for name in kinds.values() if counts[name]}}


def spread(service: Sequence[float]) -> float:
    """Standard deviation of the service per weight, over its mean."""
    return statistics.pstdev(service) / statistics.fmean(service) if len(service) > 1 and sum(service) else 0.0


def _handovers(entries: Sequence[Entry]) -> tuple[list[float], int]:
    """How long each hand-over took, seconds, and how many ranks were sent to sleep."""
    watch = HandoverWatch()
    preemptions = 0
    for entry in entries:
        watch.take(entry.time, entry.event)
        preemptions += isinstance(entry.event, ev.RankMoved) and entry.event.phase is Phase.FALLING
    return watch.found, preemptions
