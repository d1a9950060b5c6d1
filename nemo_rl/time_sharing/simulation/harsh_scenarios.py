"""Kinds of trouble that a random scenario meets by itself too rarely: every second one gets one of them on top.

Each kind concentrates on one part of the protocol: messages that come too late, logs that lose their end again and
again, processes that will not end, bounds that are always met, pipelines that leave, and GPUs that too many want.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Drawn = dict[str, Any]


def harsher(drawn: Drawn, rng: random.Random) -> Drawn:
    """The scenario that was drawn, or a harsher one made of it."""
    if rng.random() < 0.5:
        return drawn
    return rng.choice(_KINDS)(drawn, rng)


def _late(drawn: Drawn, rng: random.Random) -> Drawn:
    """Messages outlive the scheduler that sent them and the agent that they are for."""
    network = {"delay_s": 0.05, "loss": rng.choice((0.1, 0.3)), "duplicate": 0.3, "slow": 0.3}
    network["slow_s"] = rng.choice((4.0, 12.0))
    faults = {
        "scheduler_crashes": 150.0,
        "scheduler_restart_s": 1.2,
        "agent_crashes": 80.0,
        "restart_s": 0.5,
        "operation_fails": rng.choice((0.0, 0.1)),
        "log_losses": rng.choice((0.0, 0.8)),
        "withdrawals": 200.0,
    }
    return drawn | {"network": network, "faults": drawn["faults"] | faults, "jobs": _quick(drawn["jobs"], rng)}


def _losing(drawn: Drawn, rng: random.Random) -> Drawn:
    """The log loses its end, often more of it than one scheduler wrote."""
    faults = {
        "scheduler_crashes": 150.0,
        "scheduler_restart_s": 3.0,
        "agent_crashes": 60.0,
        "operation_fails": rng.choice((0.05, 0.25)),
        "log_losses": 0.8,
        "lost_entries": rng.choice((40, 150)),
    }
    costs = drawn["costs"] | rng.choice(({"drain_s": 0.05}, {"drain_s": 1.5, "sleep_s": 1.0}))
    return drawn | {"costs": costs, "faults": drawn["faults"] | faults}


def _lingering(drawn: Drawn, rng: random.Random) -> Drawn:
    """Engines hang and processes outlive those that end them."""
    faults = {
        "agent_crashes": 90.0,
        "cancels": 40.0,
        "scheduler_crashes": 120.0,
        "scheduler_restart_s": 1.2,
        "restart_s": 0.5,
        "operation_fails": rng.choice((0.1, 0.3)),
        "operation_hangs": rng.choice((0.0, 0.1)),
        "reap_fails": 0.5,
        "log_losses": rng.choice((0.0, 0.5)),
    }
    limits = drawn["limits"] | {"quarantine_s": rng.choice((4.0, 12.0)), "reap_s": 8.0}
    costs = drawn["costs"] | {"reap_s": 1.0}
    network = rng.choice((drawn["network"], {"delay_s": 0.05, "slow": 0.6, "slow_s": 6.0}))
    return drawn | {"faults": drawn["faults"] | faults, "limits": limits, "costs": costs, "network": network}


def _deaf(drawn: Drawn, rng: random.Random) -> Drawn:
    """Agents do not hear the scheduler, which ends ranks while they serve and take new weights."""
    faults = {"one_way_partitions": 300.0, "partition_s": 6.0, "scheduler_crashes": 20.0}
    limits = drawn["limits"] | {"drain_s": 1.5, "sleep_s": 3.0, "reap_s": 8.0, "quarantine_s": 5.0}
    costs = drawn["costs"] | {"refresh_s": 3.0, "start_s": 0.5}
    return drawn | {"faults": drawn["faults"] | faults, "limits": limits, "costs": costs}


def _tight(drawn: Drawn, rng: random.Random) -> Drawn:
    """Holds, requests and isolation end by their bounds."""
    limits = {"aging_s": 1.0, "max_hold_s": 14.0, "request_s": 8.0, "isolation_s": rng.choice((2.0, 60.0))}
    faults = {"outages": 60.0, "outage_s": 12.0}
    jobs = [job | {"train_s": rng.uniform(0.5, 6.0)} for job in drawn["jobs"]]
    return drawn | {"jobs": jobs, "faults": drawn["faults"] | faults, "limits": drawn["limits"] | limits}


def _leaving(drawn: Drawn, rng: random.Random) -> Drawn:
    """Pipelines are stopped, or leave by themselves, at any moment."""
    jobs = [
        job | {"leaves_s": job["arrive_s"] + rng.uniform(1, 120), "builds_ahead": rng.random() < 0.7}
        if rng.random() < 0.5
        else job
        for job in drawn["jobs"]
    ]
    costs = drawn["costs"] | {"start_s": 5.0, "drain_s": 2.0, "sleep_s": 3.0}
    return drawn | {"jobs": jobs, "costs": costs, "faults": drawn["faults"] | {"drains": 150.0, "withdrawals": 200.0}}


def _crowded(drawn: Drawn, rng: random.Random) -> Drawn:
    """Many small trainings before and behind wide ones, and nothing breaks."""
    jobs = []
    for number in range(6):
        if number < 2:
            tp, infer = rng.choice((2, 4)), list(range(8))
            train = rng.choice(([0, 1, 2, 3], [0, 1], [2, 3], [4, 5, 6, 7]))
        else:
            tp, train = 1, [rng.randrange(8)]
            infer = sorted({*train, *rng.sample(range(8), rng.randint(2, 4))})
        job = drawn["jobs"][number % len(drawn["jobs"])]
        mapped = {"name": f"job{number}", "train": train, "infer": infer, "tp": tp}
        train_s = rng.choice((rng.uniform(0.2, 1.0), rng.uniform(4, 15)))
        work = {"steps": 8, "groups": 2, "train_s": train_s, "log_probs_s": rng.choice((0.0, 0.5))}
        samples = {"samples_per_group": 4, "tokens": {"median": 60, "sigma": 0.8, "max": 1000}}
        jobs.append(job | mapped | work | samples | {"arrive_s": 0.0, "init_s": rng.choice((0.3, 3.0))})
    limits = drawn["limits"] | {"aging_s": rng.choice((1.0, 20.0)), "max_backfills": rng.choice((0, 1, 3))}
    limits["max_initialising"] = 0
    pool = {"nodes": 1, "gpus_per_node": 8}
    return drawn | {"pool": pool, "jobs": jobs, "limits": limits, "faults": {}}


def _long_holds(drawn: Drawn, rng: random.Random) -> Drawn:
    """Everybody trains for long, often after log-probs on the same GPUs, where most of the others generate."""
    number = rng.choice((2, 3, 4))
    jobs = []
    for at in range(number):
        job = drawn["jobs"][at % len(drawn["jobs"])]
        infer = sorted({at, *rng.sample(range(8), 4)})
        mapped = {"name": f"job{at}", "train": [at], "infer": infer, "tp": 1}
        work = {"steps": 6, "groups": 2, "train_s": rng.uniform(0.5, 8)}
        jobs.append(job | mapped | work | {"arrive_s": 0.0, "log_probs_s": rng.choice((0.0, 1.0))})
    limits = drawn["limits"] | {"max_hold_s": 60.0}
    faults = {"drains": 120.0} | rng.choice(({"log_losses": 0.0}, {"scheduler_crashes": 60.0, "agent_crashes": 30.0}))
    pool = {"nodes": 1, "gpus_per_node": 8}
    return drawn | {"pool": pool, "jobs": jobs, "limits": limits, "faults": faults | {"until_s": 600.0}}


def _quick(jobs: list[Drawn], rng: random.Random) -> list[Drawn]:
    work = {"init_s": 0.2, "steps": 12, "groups": 2, "samples_per_group": 4, "log_probs_s": 0.0}
    tokens = {"median": 30, "sigma": 0.8, "max": 300}
    return [job | work | {"train_s": rng.uniform(0.1, 1.0), "tokens": tokens} for job in jobs]


_KINDS: tuple[Callable[[Drawn, random.Random], Drawn], ...] = (
    _late,
    _losing,
    _lingering,
    _deaf,
    _tight,
    _leaving,
    _crowded,
    _long_holds,
)
