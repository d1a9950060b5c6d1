"""The other ways to run the same jobs, to compare time-sharing with: on GPUs that the pool chooses, each alone, one
after the other, static split, batch queue, gap-ratio rule.

One after the other: a job has its whole mapping to itself from its first to its last step, in order of arrival; jobs
that share no GPU run side by side. Static split: the pool is cut once into lanes that fit the jobs, each lane runs its
jobs one after the other. Batch queue: see `BatchQueue`; once with every job's duration known, once with limits such as
users give. All run on the real scheduler.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass

from nemo_rl.time_sharing.planning import planner
from nemo_rl.time_sharing.planning.plan import Plan, Snapshot
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import ACTOR_TRAIN, Demand
from nemo_rl.time_sharing.scheduling.scheduler import PlanRule
from nemo_rl.time_sharing.simulation import gap_ratio
from nemo_rl.time_sharing.simulation.scenario import Scenario, ScenarioJob

OURS, SERIAL, STATIC, GAP_RATIO = "time_sharing", "one_after_the_other", "static_split", "gap_ratio"
PLACED = "time_sharing_placed"
"""Ours, with jobs that lie where the pool puts them when they come: what it costs that they name their GPUs."""
QUEUE, QUEUE_LIMITS = "batch_queue", "batch_queue_limits"
QUEUES = (QUEUE, QUEUE_LIMITS)
WAYS = (OURS, SERIAL, STATIC, *QUEUES, GAP_RATIO)
GAP_RATIO_DECISIONS = "gap_ratio_decisions"
"""The gap-ratio rule without its serial cycles: what its decisions alone are worth."""


def one_after_the_other(snapshot: Snapshot, now: float) -> Plan:
    """The planner, shown only the jobs that have their GPUs to themselves: first come, first served, in the scenario's
    order where several come at once. A teacher is there for all of them.
    """
    taken: set[int] = set()
    visible = {}
    for name, pipeline in sorted(snapshot.pipelines.items(), key=lambda item: item[1].registered_at):
        gpus = pipeline.topology.mapped_gpus
        if ACTOR_TRAIN not in pipeline.topology.clusters:
            visible[name] = pipeline
            continue
        if gpus & taken:
            visible[name] = dataclasses.replace(pipeline, wants={}, demand=Demand(), unscheduled_since=None)
        else:
            visible[name] = pipeline
        taken |= gpus
    return planner.plan(dataclasses.replace(snapshot, pipelines=visible), now)


def on_whole_gpus(scenario: Scenario) -> Scenario:
    """The same jobs where no GPU has slots: on the GPUs that their slots lie on."""
    pool = scenario.gpu_pool
    if pool.slots_per_gpu == 1:
        return scenario

    def moved(job: ScenarioJob) -> ScenarioJob:
        gpus = {slot: pool.gpu_of(slot) for slot in (*job.train, *job.infer)}
        infer = tuple(sorted({gpus[slot] for slot in job.infer}))
        # A job that takes whole GPUs has all of their slots.
        width = max(job.tp * len(infer) // len(job.infer), 1)
        train = tuple(sorted({gpus[slot] for slot in job.train}))
        return job.model_copy(update={"train": train, "infer": infer, "tp": width})

    pool_section = scenario.pool.model_copy(update={"slots_per_gpu": 1})
    return scenario.model_copy(update={"pool": pool_section, "jobs": tuple(map(moved, scenario.jobs))})


def static_split(scenario: Scenario) -> Scenario:
    """The same jobs on lanes of their own: a lane is as wide as an even part of the pool, and at least as the training
    of its first job.
    """
    pool = scenario.gpu_pool
    even = pool.slots // len(scenario.jobs)
    lanes: list[tuple[int, int]] = []
    load: list[float] = []
    jobs: list[ScenarioJob] = []
    first_free = 0
    for job in sorted(scenario.jobs, key=lambda j: (-len(j.train), j.arrive_s)):
        width = max(even, len(job.train), job.tp)
        width = -(-width // job.tp) * job.tp
        start = -(-first_free // job.tp) * job.tp
        if start + width <= pool.slots:
            lanes.append((start, width))
            load.append(0.0)
            lane, first_free = len(lanes) - 1, start + width
        else:
            fits = [i for i, (begin, size) in enumerate(lanes) if size >= width and begin % job.tp == 0] or [
                max(range(len(lanes)), key=lambda i: lanes[i][1])
            ]
            lane = min(fits, key=lambda i: load[i])
        load[lane] += _size(job) / lanes[lane][1]
        begin, size = lanes[lane]
        gpus = tuple(range(begin, begin + size // job.tp * job.tp))
        jobs.append(
            job.model_copy(
                update={
                    "train": gpus[: len(job.train)],
                    "infer": gpus,
                    "full_overlap": True,
                    "min_share": 0.0,
                    "max_share": 1.0,
                    "placed": False,
                }
            )
        )
    order = {job.name: number for number, job in enumerate(scenario.jobs)}
    return scenario.model_copy(update={"jobs": tuple(sorted(jobs, key=lambda j: order[j.name]))})


def _size(job: ScenarioJob) -> float:
    """Roughly how much work a job is, for balancing lanes."""
    return job.steps * (
        job.groups
        * job.samples_per_group
        * job.tokens.median
        / job.engine.tokens_per_s
        / job.engine.half_batch
        * job.tp
        + job.train_s * len(job.train)
    ) + job.compile_s * len(job.train)


def alone(scenario: Scenario, job: ScenarioJob) -> Scenario:
    """Only this job and its teacher, from time zero, without faults."""
    teachers = tuple(t.model_copy(update={"arrive_s": 0.0}) for t in scenario.teachers if t.name == job.teacher)
    jobs = (job.model_copy(update={"arrive_s": 0.0, "leaves_s": None}),)
    return scenario.model_copy(update={"jobs": jobs, "teachers": teachers, "adapter_jobs": (), "absences": ()})


def way(scenario: Scenario, name: str) -> tuple[Scenario, PlanRule]:
    """Scenario and planning rule of one way of running it. Where GPUs are not shared, jobs are not placed by the other
    jobs:
    the static split and the queue move them by rules of their own. Raises ValueError: there are teachers or jobs of
    adapters, for whom these two have no GPUs.
    """
    if (scenario.teachers or scenario.adapter_jobs) and name in (STATIC, *QUEUES):
        raise ValueError(
            f"{name}: jobs that share a teacher, and jobs of adapters, cannot each have their GPUs to themselves"
        )
    if name not in (OURS, PLACED):
        scenario = scenario.model_copy(update={"absences": ()})
    if name == STATIC:
        return static_split(scenario), one_after_the_other
    if name in (PLACED, SERIAL, *QUEUES):
        jobs = tuple(job.model_copy(update={"placed": name == PLACED}) for job in scenario.jobs)
        scenario = scenario.model_copy(update={"jobs": jobs})
    return scenario, {
        OURS: planner.plan,
        PLACED: planner.plan,
        QUEUE: planner.plan,
        QUEUE_LIMITS: planner.plan,
        SERIAL: one_after_the_other,
        GAP_RATIO: gap_ratio.plan,
        GAP_RATIO_DECISIONS: gap_ratio.decide,
    }[name]


def worth_comparing(scenario: Scenario) -> tuple[str, ...]:
    """All ways that the jobs can be run in, ours first; `PLACED` only where a job that names its GPUs could lie
    elsewhere. With teachers or jobs of adapters, neither those in which each job has its GPUs to itself, nor the
    gap-ratio rule, which starves them: its jobs keep a rank each.
    """
    fixed = any(not job.placed and len(job.infer) < scenario.gpu_pool.slots for job in scenario.jobs)
    ways = (OURS, PLACED, *WAYS[1:]) if fixed and len(scenario.jobs) > 1 else WAYS
    beside = scenario.teachers or scenario.adapter_jobs
    return tuple(name for name in ways if not beside or name in (OURS, PLACED, SERIAL))


def accept_all(snapshot: Snapshot, plan: Plan) -> list[str]:
    """No validation: the gap-ratio rule evicts for no taker, which the validator would refuse, and is to be shown as it
    is.
    """
    return []


_LIMIT_ERROR = (1.0, 3.0)
"""Users ask for up to so many times what their job takes: one that runs into its limit is ended."""


@dataclass(frozen=True, slots=True)
class _Running:
    gpus: frozenset[int]
    ends_by: float


class BatchQueue:
    """A batch queue as clusters have it: a job waits until enough GPUs are free, and keeps them to its end.

    First come, first served, with EASY backfill: the head of the queue reserves the GPUs that come free for it first,
    by the users' `limits` (seconds, by job); a later job may start before it if it ends by then or takes none of these.
    """

    def __init__(self, pool: Pool, limits: dict[str, float]) -> None:
        self._pool, self._limits = pool, limits
        self._free = set(range(pool.slots))
        self._waiting: list[ScenarioJob] = []
        self._running: dict[str, _Running] = {}

    def submit(self, job: ScenarioJob) -> None:
        """Puts a job at the end of the queue."""
        self._waiting.append(job)

    def ended(self, name: str) -> None:
        """Takes a job's GPUs back; one that never started leaves the queue."""
        running = self._running.pop(name, None)
        if running is not None:
            self._free |= running.gpus
        self._waiting = [job for job in self._waiting if job.name != name]

    def start(self, now: float) -> Iterator[ScenarioJob]:
        """The jobs that start at `now`, each moved to its GPUs."""
        while self._waiting and (gpus := self._fit(self._waiting[0], self._free)) is not None:
            yield self._place(self._waiting.pop(0), gpus, now)
        if not self._waiting:
            return
        at, reserved = self._reservation(self._waiting[0], now)
        for job in self._waiting[1:]:
            in_time = now + self._limits[job.name] <= at
            gpus = self._fit(job, self._free if in_time else self._free - reserved)
            if gpus is not None:
                self._waiting.remove(job)
                yield self._place(job, gpus, now)

    def _place(self, job: ScenarioJob, gpus: tuple[int, ...], now: float) -> ScenarioJob:
        self._free.difference_update(gpus)
        self._running[job.name] = _Running(frozenset(gpus), now + self._limits[job.name])
        place = dict(zip(job.infer, gpus, strict=True))
        return job.model_copy(update={"infer": gpus, "train": tuple(place[gpu] for gpu in job.train)})

    def _reservation(self, head: ScenarioJob, now: float) -> tuple[float, frozenset[int]]:
        """Start of the head of the queue if all jobs take as long as they may, and the GPUs that it gets then."""
        free = set(self._free)
        for running in sorted(self._running.values(), key=lambda r: r.ends_by):
            free |= running.gpus
            gpus = self._fit(head, free)
            if gpus is not None:
                return max(running.ends_by, now), frozenset(gpus)
        raise ValueError(f"job {head.name!r} does not fit an empty pool of {self._pool.slots} GPUs")

    def _fit(self, job: ScenarioJob, free: set[int]) -> tuple[int, ...] | None:
        """GPUs for all ranks of a job, the fullest nodes first so that few are broken into; None if there are
        too few.
        """
        node = self._pool.gpus_per_node
        per_node: dict[int, list[range]] = {}
        for begin in range(0, self._pool.slots, max(node, job.tp)):
            starts = range(begin, begin + max(node, job.tp) - job.tp + 1, job.tp)
            blocks = [range(start, start + job.tp) for start in starts]
            fitting = [block for block in blocks if free.issuperset(block)]
            if fitting:
                per_node[begin] = fitting
        order = sorted(per_node, key=lambda begin: (len(free.intersection(range(begin, begin + node))), begin))
        found = [block for begin in order for block in per_node[begin]][: len(job.infer) // job.tp]
        if len(found) * job.tp < len(job.infer):
            return None
        return tuple(sorted(gpu for block in found for gpu in block))


def user_limit(seconds: float, job: ScenarioJob, seed: int) -> float:
    """Time limit that a user who roughly knows that a job takes `seconds` would set; the same for a job and seed at
    every call.
    """
    return seconds * random.Random(f"{seed}/{job.name}/limit").uniform(*_LIMIT_ERROR)
