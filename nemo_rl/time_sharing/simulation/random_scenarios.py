"""Random scenarios for testing, and running them by the thousand with the checker as judge; `python -m
nemo_rl.time_sharing soak` is the command.

Pools, mappings, jobs and all kinds of faults are drawn from a seed, by which a failure can be repeated. Times are short
against the faults' rates, so that crashes, losses and time-outs meet every phase of every hand-over many times in a few
virtual minutes.
"""

from __future__ import annotations

import gc
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.simulation.coverage import reached
from nemo_rl.time_sharing.simulation.harsh_scenarios import Drawn, harsher
from nemo_rl.time_sharing.simulation.scenario import Scenario
from nemo_rl.time_sharing.simulation.scenario_reading import parse_scenario
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.utils.record import MemoryRecord, Record

_LIMITS = {
    "aging_s": 20.0,
    "min_hold_s": 3.0,
    "max_slice_s": 3.0,
    "max_hold_s": 300.0,
    "heartbeat_s": 2.0,
    "lease_s": 12.0,
    "isolation_s": 60.0,
    "retry_s": 1.0,
    "drain_s": 8.0,
    "sleep_s": 8.0,
    "wake_s": 15.0,
    "sync_s": 15.0,
    "route_s": 15.0,
    "grant_s": 10.0,
    "reap_s": 8.0,
    "quarantine_s": 20.0,
}
_FAULT_RATES = {
    "agent_crashes": 40.0,
    "scheduler_crashes": 30.0,
    "partitions": 30.0,
    "stuck_shards": 20.0,
    "slow_shards": 20.0,
    "clock_jumps": 15.0,
}


def random_scenario(seed: int) -> Scenario:
    """One scenario; the same seed gives the same one."""
    rng = random.Random(f"scenario/{seed}")
    per_node = rng.choice((2, 4, 8))
    nodes = rng.choice((1, 1, 2))
    jobs = [_job(rng, number, nodes * per_node, per_node) for number in range(rng.randint(2, 6))]
    steer = random.Random(f"steer/{seed}")
    jobs = [job | _shares(steer) for job in jobs]
    ahead = random.Random(f"ahead/{seed}")
    jobs = [job | {"builds_ahead": ahead.random() < 0.3} for job in jobs]
    measuring = random.Random(f"measures/{seed}")
    jobs = [job | {"measures_batch": measuring.random() < 0.3} for job in jobs]
    slicing = random.Random(f"slices/{seed}")
    jobs = [job | {"slice_s": slicing.uniform(1, 30) if slicing.random() < 0.15 else 0.0} for job in jobs]
    answering = random.Random(f"turns/{seed}")
    jobs = [job | _turns(answering) for job in jobs]
    drawn = {
        "name": f"random {seed}",
        "pool": {"nodes": nodes, "gpus_per_node": per_node},
        "jobs": jobs,
        "limits": {
            **_LIMITS,
            **_tight_limits(steer),
            "max_initialising": seed % 3,
            "max_backfills": random.Random(f"backfills/{seed}").choice((0, 1, 2)),
        },
        "horizon_s": 20_000.0,
        "network": _network(rng),
        "faults": _faults(rng) | _more_faults(steer),
        "costs": {"start_s": rng.choice((0.5, 3.0)), "sync_s": rng.choice((0.1, 1.0)), "jitter": 0.3},
    }
    drawn = harsher(drawn, random.Random(f"peril/{seed}"))
    return parse_scenario(_on_slots(_of_a_team(drawn, random.Random(f"team/{seed}")), random.Random(f"slots/{seed}")))


def _of_a_team(drawn: Drawn, rng: random.Random) -> Drawn:
    """Some pools are a team's, with quotas, and their jobs have priorities; one may run in gaps."""
    if rng.random() < 0.8:
        return drawn
    shares = rng.choice(((0.7, 0.3), (0.5, 0.25), (1.0, 0.0), (None, None)))
    groups = {f"g{number}": {"share": share} for number, share in enumerate(shares)} | {"below": {"parent": "g0"}}
    users: dict[str, dict[str, object]] = {
        name: {"parent": group} for name, group in (("u0", "g0"), ("u1", "below"), ("u2", "g1"), ("u3", "g1"))
    }
    users["u2"]["share"] = rng.choice((None, 0.5))
    jobs = [
        job | {"user": rng.choice(list(users)), "priority": "high" if rng.random() < 0.2 else "normal"}
        for job in drawn["jobs"]
    ]
    for name in users:
        # No job needs more than its limit.
        needs = [max(len(job["train"]), job["tp"]) for job in jobs if job["user"] == name]
        if needs and rng.random() < 0.4:
            users[name]["limit"] = max(needs) + rng.randint(0, 3)
    if rng.random() < 0.5:
        infer = rng.choice(jobs)["infer"]
        gap: Drawn = {"name": "gaps", "train": [], "infer": infer, "steps": 5, "user": "u0", "priority": "scavenger"}
        jobs.append(gap | {"tp": rng.choice([job["tp"] for job in jobs if job["infer"] == infer]), "staleness": 0})
    return drawn | {"groups": groups, "users": users, "jobs": jobs, "half_life_hours": rng.choice((0.02, 0.5))}


def _on_slots(drawn: Drawn, rng: random.Random) -> dict[str, object]:
    """Some pools have several slots on each GPU; what their jobs gain by that is measured all the time."""
    if rng.random() < 0.85 or any(job["tp"] > 1 for job in drawn["jobs"]):
        return drawn
    slots = rng.randint(2, 3)
    columns = {job["name"]: rng.randrange(slots) for job in drawn["jobs"]}
    jobs = [
        job | {name: [gpu * slots + columns[job["name"]] for gpu in job[name]] for name in ("train", "infer")}
        for job in drawn["jobs"]
    ]
    pool = drawn["pool"] | {"slots_per_gpu": slots, "neighbours_slow": rng.choice((0.0, 0.5, 2.0))}
    limits = {"measure_s": 20.0, "trial_steps": rng.choice((0, 1, 2)), "turn_s": rng.choice((0.0, 5.0, 20.0))}
    jobs = [job | {"steps": 3 * job["steps"]} for job in jobs]
    return drawn | {"pool": pool, "jobs": jobs, "limits": drawn["limits"] | limits}


def _turns(rng: random.Random) -> dict[str, object]:
    if rng.random() < 0.7:
        return {}
    return {"turns": rng.randint(2, 4), "environment_s": rng.choice((0.0, 1.0, 10.0))}


def _network(rng: random.Random) -> dict[str, object]:
    if rng.random() < 0.3:
        return {"delay_s": 0.002}
    return {
        "delay_s": rng.choice((0.001, 0.01, 0.1)),
        "loss": rng.choice((0.0, 0.02, 0.1)),
        "duplicate": rng.choice((0.0, 0.05)),
        "slow": rng.choice((0.0, 0.05)),
        "slow_s": 2.0,
    }


def _faults(rng: random.Random) -> dict[str, object]:
    faults: dict[str, object] = {kind: rate * rng.random() for kind, rate in _FAULT_RATES.items() if rng.random() < 0.5}
    faults |= {
        kind: chance
        for kind, chance in (("operation_fails", 0.02), ("operation_hangs", 0.01), ("reap_fails", 0.2))
        if rng.random() < 0.5
    }
    return {**faults, "restart_s": rng.choice((0.5, 5.0)), "partition_s": rng.choice((3.0, 15.0)), "until_s": 600.0}


def _tight_limits(rng: random.Random) -> dict[str, float]:
    """Bounds that are rarely met, met here and there."""
    tight = {"aging_s": 1.0, "max_hold_s": 12.0, "request_s": 15.0, "reap_s": 0.55}
    return {limit: seconds for limit, seconds in tight.items() if rng.random() < 0.05}


def _shares(rng: random.Random) -> dict[str, float]:
    if rng.random() < 0.8:
        return {}
    return {"min_share": rng.choice((0.0, 0.25, 0.5)), "max_share": rng.choice((0.5, 0.75, 1.0))}


def _more_faults(rng: random.Random) -> dict[str, object]:
    rates = {"one_way_partitions": 30.0, "outages": 20.0, "cancels": 20.0, "drains": 10.0}
    faults: dict[str, object] = {kind: rate * rng.random() for kind, rate in rates.items() if rng.random() < 0.3}
    if rng.random() < 0.2:
        faults["log_losses"] = 0.7
    return {**faults, "outage_s": rng.choice((5.0, 15.0, 40.0))}


def _job(rng: random.Random, number: int, pool: int, per_node: int) -> Drawn:
    tp = rng.choice([t for t in (1, 1, 1, 2, 4) if t * 2 <= per_node])
    ranks = rng.randint(2, max(2, min(8, pool // tp)))
    starts = sorted(rng.sample(range(pool // tp), min(ranks, pool // tp)))
    infer = [start * tp + i for start in starts for i in range(tp)]
    train = (
        infer[: rng.randint(1, len(infer) - tp)]
        if rng.random() < 0.5
        else sorted(rng.sample(infer[tp:], rng.randint(1, len(infer) - tp)))
    )
    groups = rng.choice((2, 4, 8))
    job: Drawn = {
        "name": f"job{number}",
        "train": train,
        "infer": infer,
        "tp": tp,
        "steps": rng.randint(2, 6),
        "groups": groups,
        "samples_per_group": rng.choice((4, 8)),
        "staleness": rng.choice((0, 1, 1, 2)),
        "train_s": rng.uniform(1, 15),
        "log_probs_s": rng.choice((0.0, 2.0)),
        "weight": rng.choice((1.0, 1.0, 3.0)),
        "tokens": {"median": rng.choice((100, 400)), "sigma": rng.choice((0.8, 1.2)), "max": 4000},
        "engine": {"half_batch": rng.choice((8, 64))},
        "arrive_s": rng.choice((0.0, rng.uniform(0, 100))),
    }
    if rng.random() < 0.15:
        job["leaves_s"] = max(rng.uniform(20, 300), job["arrive_s"])
    return job


class ScenarioVerdict(NamedTuple):
    """Result of one scenario: number of events, duration (virtual seconds), first violations, jobs that never ended,
    and counts of the scheduler's decisions.
    """

    seed: int
    events: int
    ended_s: float
    violations: tuple[str, ...]
    stuck: tuple[str, ...]
    reached: Counter[str]

    @property
    def clean(self) -> bool:
        return not self.violations and not self.stuck


def run_scenario(seed: int) -> ScenarioVerdict:
    """Simulates one random scenario and checks its record."""
    records: list[MemoryRecord] = []

    def remember(clock: Callable[[], float]) -> Record:
        records.append(MemoryRecord(clock=clock))
        return records[0]

    world = World(random_scenario(seed), seed, remember)
    world.run()
    violations = check(records[0].entries)
    stuck = tuple(name for name, job in world.jobs.items() if job.finished_at is None)
    said = tuple(str(violation) for violation in violations[:3])
    return ScenarioVerdict(seed, world.loop.events, world.loop.now, said, stuck, reached(world.entries))


def run_many(first: int, runs: int, processes: int) -> Iterator[ScenarioVerdict]:
    """Verdicts of consecutive seeds, in order."""
    with ProcessPoolExecutor(processes, initializer=_quiet) as pool:
        yield from pool.map(run_scenario, range(first, first + runs), chunksize=10)


def _quiet() -> None:
    logging.disable()
    # A record is a hundred thousand small objects without cycles, which the collector would look through again and
    # again.
    gc.set_threshold(200_000, 20, 20)
