"""Fits a scenario to a real run: its jobs, lengths, speeds and hand-over costs, read off the run's records.

The result is the starting point for questions that the run itself cannot answer: one job more, other mappings, more
GPUs. Durations are medians; a step's hold on its GPUs goes into `train_s` whole, with the driver's own time before it.
Validation is assumed to generate as much as training.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from nemo_rl.config.errors import UserError
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ACTOR_TRAIN, Priority
from nemo_rl.time_sharing.simulation.scenario import Scenario
from nemo_rl.time_sharing.simulation.scenario_reading import parse_scenario
from nemo_rl.utils import record_events as rec
from nemo_rl.utils.record import Entry


class FitError(UserError, ValueError):
    """The records say too little to make a scenario of them."""


_NOTHING = ("drain_s", "sleep_s", "wake_s", "sync_s", "start_s", "refresh_s", "load_s", "cache_s", "offload_s")
_UNLIMITED_BATCH = 1e6


@dataclass(slots=True)
class _Request:
    """`beside`: how many ran on its shard, itself among them, on average over its time."""

    shard: int
    begun: float
    area: float
    beside: float = 0.0
    ended: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class _Shard:
    """How many requests run now, and the area below that number over time until `until`."""

    running: int = 0
    area: float = 0.0
    until: float = 0.0
    most: int = 0

    def change(self, by: int, now: float) -> None:
        self.area += self.running * (now - self.until)
        self.until = now
        self.running += by
        self.most = max(self.most, self.running)


@dataclass(slots=True)
class _Job:
    registered: ev.Registered
    at: float
    ended: float = 0.0
    begin_s: float = 0.0
    builds_ahead: bool = False
    measures_batch: bool = False
    validated: dict[int, int] = field(default_factory=dict)
    granted: dict[str, tuple[float, Priority]] = field(default_factory=dict)
    inits: list[float] = field(default_factory=list)
    holds: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    committed: float | None = None
    released: float = 0.0
    samples: int = 0
    trained: int = 0
    steps: int = 0
    lengths: list[int] = field(default_factory=list)
    open: dict[str, _Request] = field(default_factory=dict)
    shards: dict[int, _Shard] = field(default_factory=lambda: defaultdict(_Shard))
    requests: list[_Request] = field(default_factory=list)


@dataclass(slots=True)
class _Costs:
    """`left`: when the last request of an unrouted rank ended, or it was unrouted."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    started: set[tuple[str, int]] = field(default_factory=set)
    syncs: dict[str, tuple[str, float]] = field(default_factory=dict)
    waking: dict[tuple[str, int], float] = field(default_factory=dict)
    unrouted: dict[tuple[str, int], float] = field(default_factory=dict)
    left: dict[tuple[str, int], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A run as a scenario."""

    scenario: Scenario
    measured: dict[str, float]  # seconds of each job of the run, from its registration to its end


def fit(entries: Iterable[Entry]) -> Fitted:
    """The scenario of a run. `entries`: the scheduler's log and the records of its pipelines, in the order in which
    things happened. Raises FitError: no pipeline of the records trained a step.
    """
    jobs: dict[str, _Job] = {}
    costs, pool = _Costs(), ev.PoolOpened(1, 1)
    for entry in entries:
        if isinstance(entry.event, ev.PoolOpened):
            pool = entry.event
        elif isinstance(entry.event, ev.Registered):
            jobs[entry.event.pipeline] = _Job(entry.event, entry.time)
        else:
            _take_scheduler(jobs, entry)
            job = jobs.get(entry.source.partition("/")[0])
            if job is not None:
                _take_pipeline(job, entry)
                _take_costs(costs, job.registered.pipeline, entry)
    fitted = {name: job for name, job in jobs.items() if job.steps and job.holds and job.lengths and job.requests}
    if not fitted:
        raise FitError("no pipeline of these records trained a step; give scheduler.jsonl and the records beside it")
    first = min(job.at for job in fitted.values())
    given = {
        "name": "a run's own times",
        "pool": {"nodes": pool.nodes, "gpus_per_node": pool.gpus_per_node, "slots_per_gpu": pool.slots_per_gpu},
        "jobs": [_section(name, job, job.at - first) for name, job in fitted.items()],
        # The trainer's work around a step is part of its hold.
        "costs": dict.fromkeys(_NOTHING, 0.0) | {name: statistics.median(s) for name, s in costs.seconds.items()},
        "limits": {name: float(value) for name, value in pool.limits.items()},
    }
    return Fitted(parse_scenario(given, where="the run"), {name: job.ended - job.at for name, job in fitted.items()})


def _take_scheduler(jobs: dict[str, _Job], entry: Entry) -> None:
    event, now = entry.event, entry.time
    match event:
        case ev.Requested(priority=Priority.INITIALIZATION) if event.pipeline in jobs:
            jobs[event.pipeline].begin_s = now - jobs[event.pipeline].at
        case ev.BuildsAhead() if event.pipeline in jobs:
            jobs[event.pipeline].builds_ahead = True
        case ev.DemandReported() if event.pipeline in jobs:
            jobs[event.pipeline].measures_batch |= event.rank_batch > 0
        case ev.Requested(priority=Priority.ACTOR_TRAINING) if event.pipeline in jobs:
            job = jobs[event.pipeline]
            # A batch that was there before the last step ended was not waited for. The clocks of scheduler and
            # job are compared, so a commit may seem to be later than what followed it.
            if job.committed is not None and job.released < job.committed <= now:
                job.gaps.append(now - job.committed)
        case ev.Granted() | ev.PriorityChanged() if event.cluster == ACTOR_TRAIN and event.pipeline in jobs:
            jobs[event.pipeline].granted[event.cluster] = (now, event.priority)
        case ev.Released() if event.pipeline in jobs:
            job = jobs[event.pipeline]
            job.released = now
            since, priority = job.granted.pop(event.cluster, (now, Priority.GENERATION))
            if priority is Priority.INITIALIZATION:
                job.inits.append(now - since)
            elif priority is not Priority.GENERATION:
                job.holds.append(now - since)
        case ev.Unregistered() if event.pipeline in jobs:
            jobs[event.pipeline].ended = now
        case _:
            pass


def _take_costs(costs: _Costs, name: str, entry: Entry) -> None:
    """The steps of hand-overs, which the ranks themselves record."""
    event, now = entry.event, entry.time
    match event:
        case ev.MemoryTaken() if event.what.startswith("rank "):
            costs.waking[name, int(event.what.removeprefix("rank "))] = now
        case rec.ShardWoken():
            rank = (name, event.shard)
            cost = "wake_s" if rank in costs.started else "start_s"
            costs.started.add(rank)
            costs.seconds[cost].append(now - costs.waking.pop(rank, now))
        case rec.SyncStarted():
            costs.syncs[event.sync_id] = ("sync_s" if event.transport == "wake" else "refresh_s", now)
        case rec.SyncFinished() if event.sync_id in costs.syncs:
            cost, began = costs.syncs.pop(event.sync_id)
            costs.seconds[cost].append(now - began)
        case rec.ShardUnrouted():
            costs.unrouted[name, event.shard] = costs.left[name, event.shard] = now
        case rec.RequestFinished() if (name, event.shard) in costs.unrouted:
            costs.left[name, event.shard] = now
        case rec.ShardSlept() if (name, event.shard) in costs.unrouted:
            left = costs.left.pop((name, event.shard))
            costs.seconds["drain_s"].append(left - costs.unrouted.pop((name, event.shard)))
            costs.seconds["sleep_s"].append(now - left)
        case _:
            pass


def _take_pipeline(job: _Job, entry: Entry) -> None:
    event, now = entry.event, entry.time
    match event:
        case rec.GroupAdmitted():
            job.samples = event.samples
        case rec.GroupCommitted():
            job.committed = now
        case rec.GroupTrained():
            job.trained += 1
        case rec.StepFinished():
            job.steps += 1
        case rec.Validated():
            job.validated[event.version] = event.samples
        case rec.TokensGenerated() if event.spans:
            job.lengths.append(event.spans[-1].end)
        case rec.RequestSubmitted():
            shard = job.shards[event.shard]
            shard.change(1, now)
            job.open[event.request_id] = _Request(event.shard, now, shard.area)
        case rec.RequestFinished() if event.request_id in job.open:
            request = job.open.pop(event.request_id)
            shard = job.shards[request.shard]
            shard.change(-1, now)
            request.beside = (shard.area - request.area) / max(now - request.begun, 1e-9)
            request.ended, request.tokens = now, event.tokens
            if event.tokens:
                job.requests.append(request)
        case _:
            pass


def _section(name: str, job: _Job, arrive_s: float) -> dict[str, object]:
    clusters = {cluster.name: cluster for cluster in job.registered.clusters}
    logs = [math.log(length) for length in job.lengths]
    rate, half_batch = _engine(job.requests)
    # The driver's own time between its last group and its request delays a step as training does.
    holds = job.holds[1:] or job.holds
    hold_s, own_s = statistics.median(holds), statistics.median(job.gaps) if job.gaps else 0.0
    # Without the training turns of GPUs that have slots, which come with these.
    train = sorted(set(clusters[ACTOR_TRAIN].gpus) & set(clusters[ACTOR_INFER].gpus))
    return {
        "name": name,
        "train": train,
        "infer": list(clusters[ACTOR_INFER].gpus),
        "tp": clusters[ACTOR_INFER].tp_size,
        "weight": job.registered.weight,
        "min_share": job.registered.min_share,
        "max_share": job.registered.max_share,
        "slice_s": job.registered.slice_s,
        "drain_s": job.registered.drain_s,
        "staleness": 1 if job.registered.staleness is None else job.registered.staleness,
        "steps": job.steps,
        "groups": max(round(job.trained / job.steps), 1),
        "samples_per_group": max(job.samples, 1),
        "begin_s": job.begin_s,
        "builds_ahead": job.builds_ahead,
        "measures_batch": job.measures_batch,
        "validation": _validation(job),
        "init_s": statistics.median(job.inits) if job.inits else 0.0,
        "train_s": hold_s + own_s,
        "compile_s": max(job.holds[0] - hold_s, 0.0),
        "tokens": {
            "median": float(statistics.median(job.lengths)),
            "sigma": min(statistics.pstdev(logs), 3.0),
            "max": max(job.lengths),
        },
        "engine": {
            "tokens_per_s": rate,
            "half_batch": half_batch,
            "max_running": max(shard.most for shard in job.shards.values()),
        },
        "arrive_s": arrive_s,
        "full_overlap": not set(clusters[ACTOR_INFER].gpus) - set(train),
    }


def _validation(job: _Job) -> dict[str, object]:
    if not job.validated:
        return {}
    between = [version for version in job.validated if 0 < version < job.steps]
    return {
        "samples": max(job.validated.values()),
        "at_start": 0 in job.validated,
        "period": math.gcd(*between) if between else 0,
        "at_end": job.steps in job.validated,
    }


def _engine(requests: Sequence[_Request]) -> tuple[float, float]:
    """`tokens_per_s` and `half_batch` of a shard: seconds per token grow along a line with the requests beside it."""
    beside = np.array([request.beside for request in requests])
    each = np.array([(request.ended - request.begun) / request.tokens for request in requests])
    tokens = np.array([request.tokens for request in requests], dtype=float)
    mean_beside, mean_each = np.average(beside, weights=tokens), float(np.average(each, weights=tokens))
    # Each request counts by its tokens; numpy weighs what it squares.
    slope, alone = np.polyfit(beside, each, 1, w=np.sqrt(tokens)) if np.ptp(beside) else (0.0, mean_each)
    if slope <= 0:
        return 1.0 / max(mean_each, 1e-6), _UNLIMITED_BATCH
    if alone <= 0:
        # Nothing is gained by running alone: the time of a token is that of the whole batch.
        alone = slope = mean_each / (1.0 + mean_beside)
    return float(1.0 / alone), max(float(alone / slope), 1e-3)
