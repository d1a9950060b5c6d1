"""Mixes of jobs drawn by seed, for `time_sharing_mixes.py`: kinds of mixes that people run, none of them chosen so that
sharing looks well.

Hand-overs cost what a model of 7B costs (5 to 10 s each, engines built in 40 s), and the scheduler's limits are its
defaults. A seed draws how many jobs there are, how large they are, where they lie and when they come.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from nemo_rl.time_sharing.simulation.scenario import Scenario
from nemo_rl.time_sharing.simulation.scenario_reading import parse_scenario

COSTS = {
    "start_s": 40.0,
    "drain_s": 0.5,
    "sleep_s": 1.5,
    "wake_s": 2.5,
    "sync_s": 3.0,
    "refresh_s": 3.0,
    "load_s": 3.0,
    "cache_s": 2.0,
    "offload_s": 2.0,
}
"""A 7B model in bf16: 15 GB of weights and 90 GB of optimizer state to and from the host."""
CHEAP = {"start_s": 5.0}

Draw = Callable[[random.Random], tuple[int, list[dict[str, Any]]]]


def drawn(mix: str, seed: int, costs: dict[str, float] | None = None) -> Scenario:
    """The mix of this name that the seed draws."""
    gpus, jobs = DRAWN[mix](random.Random(f"{mix}/{seed}"))
    pool = {"nodes": gpus // 8, "gpus_per_node": 8}
    return parse_scenario({"name": mix, "pool": pool, "jobs": jobs, "costs": COSTS if costs is None else costs})


def _job(
    rng: random.Random, name: str, start: int, width: int, train: int, *, tp: int = 1, size: float = 1.0, **keys: Any
) -> dict[str, Any]:
    """A job on `width` GPUs from `start`, with steps of half a minute to four minutes; `size` scales its batch."""
    groups = max(round(rng.uniform(3, 8) * width * size / tp**0.5), 2)
    return {
        "name": name,
        "infer": list(range(start, start + width)),
        "train": list(range(start, start + train)),
        "tp": tp,
        "full_overlap": train > width - tp,
        "groups": groups,
        "samples_per_group": 8,
        "staleness": 0,
        "train_s": round(rng.uniform(15, 60), 1),
        "init_s": round(rng.uniform(20, 40), 1),
        "tokens": {"median": rng.choice([400, 800, 1500]), "sigma": rng.choice([0.6, 0.8, 1.0]), "max": 8192},
        "engine": {"tokens_per_s": 60.0 * tp**0.5, "half_batch": 32.0, "max_running": 128},
        **keys,
    }


def _giant_and_small(rng: random.Random) -> tuple[int, list[dict[str, Any]]]:
    """One job on half of 64 GPUs or all, and thirty on four or eight GPUs side by side that come over twenty
    minutes.
    """
    width, train = rng.choice([(32, 16), (32, 32), (48, 16), (64, 16), (64, 32)])
    size, wide = rng.choice([0.1, 0.3, 1.0]), rng.choice([4, 8])
    keys = {"steps": rng.randint(16, 24), "train_s": round(rng.uniform(30, 90), 1)}
    jobs = [_job(rng, "giant", 0, width, train, tp=rng.choice([1, 2, 4]), size=size, **keys)]
    for number in range(30):
        keys = {"steps": rng.randint(3, 8), "arrive_s": round(rng.uniform(0, 1200), 1)}
        jobs.append(_job(rng, f"small{number}", number * wide % 64, wide, wide // 2, size=size, **keys))
    return 64, jobs


def _bursts(rng: random.Random) -> tuple[int, list[dict[str, Any]]]:
    """A working day on 32 GPUs: every hour and a half, five to nine jobs within ten minutes."""
    jobs: list[dict[str, Any]] = []
    for burst in range(5):
        begin = burst * 5400
        for _ in range(rng.randint(5, 9)):
            width = rng.choice([8, 16, 16, 32])
            start = rng.randrange((32 - width) // 8 + 1) * 8
            arrive = round(begin + rng.uniform(0, 600), 1)
            train = width // rng.choice([2, 4])
            jobs.append(_job(rng, f"job{len(jobs)}", start, width, train, steps=rng.randint(5, 20), arrive_s=arrive))
    return 32, jobs


def _mixed_tp(rng: random.Random) -> tuple[int, list[dict[str, Any]]]:
    """Twelve jobs of tp 1 to 8 on 32 GPUs, side by side, that come within ten minutes."""
    jobs: list[dict[str, Any]] = []
    size, start = rng.choice([0.3, 1.0]), 0
    for number in range(12):
        tp = (1, 2, 4, 8)[number % 4]
        width = max(rng.choice([8, 8, 16]), 2 * tp)
        keys = {"steps": rng.randint(4, 12), "arrive_s": round(rng.uniform(0, 600), 1), "staleness": rng.choice([0, 1])}
        train = min(rng.choice([4, 8]), width - tp)
        jobs.append(_job(rng, f"tp{tp}_{number}", min(start % 32, 32 - width), width, train, tp=tp, size=size, **keys))
        start += width
    return 32, jobs


def _three_on_eight(rng: random.Random) -> tuple[int, list[dict[str, Any]]]:
    """Three jobs that each train on all of eight GPUs."""
    return 8, [_job(rng, f"job{n}", 0, 8, 8, steps=rng.randint(8, 20)) for n in range(3)]


def _all_on_all(rng: random.Random) -> tuple[int, list[dict[str, Any]]]:
    """Four to eight jobs that each train and generate on all of 16 GPUs."""
    count = rng.randint(4, 8)
    return 16, [
        _job(rng, f"job{n}", 0, 16, 16, tp=rng.choice([1, 1, 2]), steps=rng.randint(4, 12), arrive_s=n * 20.0)
        for n in range(count)
    ]


def _ahead(rng: random.Random) -> tuple[int, list[dict[str, Any]]]:
    """Eight jobs side by side on 32 GPUs that generate one or two steps ahead of training, with long tails."""
    jobs: list[dict[str, Any]] = []
    for number in range(8):
        keys = {"staleness": rng.choice([1, 2]), "tokens": {"median": 500, "sigma": 1.2, "max": 8192}}
        width = rng.choice([8, 16])
        start = min(number * 8 % 32, 32 - width)
        jobs.append(_job(rng, f"job{number}", start, width, width // 4, steps=rng.randint(6, 14), **keys))
    return 32, jobs


def _whole_pool(rng: random.Random) -> tuple[int, list[dict[str, Any]]]:
    """Six jobs as the launcher places them by default: each trains on GPUs of its own and generates on the whole
    pool.
    """
    jobs = []
    for number in range(6):
        job = _job(rng, f"job{number}", 0, 32, 4, size=0.5, steps=rng.randint(5, 15))
        jobs.append({**job, "train": list(range(number * 4, number * 4 + 4))})
    return 32, jobs


def _any(rng: random.Random) -> tuple[int, list[dict[str, Any]]]:
    """Anything: 2 to 24 jobs on 8 to 64 GPUs."""
    gpus = rng.choice([8, 16, 32, 64])
    span = rng.choice([0, 300, 1200, 4000])
    jobs = []
    for number in range(rng.randint(2, 24)):
        tp = rng.choice([1, 1, 1, 2, 4, 8])
        width = rng.choice([w for w in (8, 16, 32, 64) if w <= gpus])
        start = rng.randrange((gpus - width) // 8 + 1) * 8
        train = rng.choice([t for t in (1, 2, 4, 8, 16, 32, 64) if t <= width])
        offset = rng.randrange((width - train) // train + 1) * train
        job = _job(rng, f"job{number}", start, width, train, tp=tp, size=rng.choice([0.3, 1.0]))
        job["train"] = [gpu + offset for gpu in job["train"]]
        job["steps"] = rng.choice([rng.randint(2, 6), rng.randint(5, 20)])
        job["full_overlap"] = True
        job["staleness"] = rng.choice([0, 0, 0, 1])
        job["log_probs_s"] = rng.choice([0.0, 0.0, 8.0])
        job["arrive_s"] = round(rng.uniform(0, span), 1)
        jobs.append(job)
    return gpus, jobs


def _long_tail(rng: random.Random) -> tuple[int, list[dict[str, Any]]]:
    """A long-tailed job on half of 32 GPUs, and two dozen short ones with short answers that come over forty
    minutes.
    """
    tokens = {"median": 1000, "sigma": 1.4, "max": 16384}
    keys = {"steps": rng.randint(12, 20), "staleness": rng.choice([0, 1]), "tokens": tokens}
    jobs = [_job(rng, "tail", rng.choice([0, 8, 16]), 16, rng.choice([4, 8]), tp=rng.choice([1, 2]), **keys)]
    for number in range(24):
        tokens = {"median": 300, "sigma": 0.5, "max": 4096}
        keys = {"steps": rng.randint(2, 5), "arrive_s": round(rng.uniform(0, 2400), 1), "tokens": tokens}
        width = rng.choice([4, 8])
        jobs.append(_job(rng, f"short{number}", rng.randrange(32 // width) * width, width, width // 2, **keys))
    return 32, jobs


def _half_each(rng: random.Random) -> tuple[int, list[dict[str, Any]]]:
    """Six to ten jobs that each want 8 of 16 GPUs and train on 2 to 8 of these."""
    jobs = []
    for number in range(rng.randint(6, 10)):
        keys = {"steps": rng.randint(4, 12), "arrive_s": round(rng.uniform(0, 900), 1)}
        jobs.append(_job(rng, f"job{number}", rng.choice([0, 8]), 8, rng.choice([2, 4, 8]), **keys))
    return 16, jobs


def _on_policy_and_ahead(rng: random.Random) -> tuple[int, list[dict[str, Any]]]:
    """Ten jobs on 32 GPUs, every second one on-policy and the others one to three steps ahead."""
    jobs = []
    for number in range(10):
        keys = {"steps": rng.randint(6, 16), "arrive_s": round(rng.uniform(0, 600), 1)}
        keys["staleness"] = rng.randint(1, 3) if number % 2 else 0
        width = rng.choice([8, 8, 16])
        start = rng.randrange(32 // width) * width
        jobs.append(_job(rng, f"job{number}", start, width, width // rng.choice([2, 4]), **keys))
    return 32, jobs


def _long_training(rng: random.Random) -> tuple[int, list[dict[str, Any]]]:
    """Twelve jobs on 32 GPUs that train for two to five minutes after generation of less than one, on all of their GPUs
    or half.
    """
    jobs = []
    for number in range(12):
        keys = {"steps": rng.randint(4, 12), "arrive_s": round(rng.uniform(0, 900), 1)}
        keys["train_s"] = round(rng.uniform(120, 300), 1)
        width = rng.choice([4, 8, 8, 16])
        start, train = rng.randrange(32 // width) * width, width // rng.choice([1, 2])
        jobs.append(_job(rng, f"job{number}", start, width, train, size=0.3, **keys))
    return 32, jobs


def _steady_stream(rng: random.Random) -> tuple[int, list[dict[str, Any]]]:
    """Forty equal jobs on 8 of 32 GPUs that come one after the other, so that a pool which gave each its GPUs to itself
    would be busy for 80 to 90 % of the time.
    """
    alike = _job(rng, "job", 0, 8, rng.choice([2, 4, 8]), steps=rng.randint(4, 8))
    (median, sigma, _), per_rank = alike["tokens"].values(), alike["groups"]
    longest = median * math.exp(sigma * math.sqrt(2 * math.log(8 * per_rank)))
    generation_s = (min(longest, 8192) + per_rank / 32 * median * math.exp(sigma**2 / 2)) / 60
    alone_s = alike["steps"] * (generation_s + alike["train_s"] + 17) + alike["init_s"] + 50
    every_s = alone_s / 4 / rng.uniform(0.8, 0.9)
    jobs = []
    for number in range(40):
        start = rng.randrange(4) * 8
        gpus = {key: [gpu + start for gpu in alike[key]] for key in ("infer", "train")}
        jobs.append({**alike, **gpus, "name": f"job{number}", "arrive_s": round((number + rng.random()) * every_s, 1)})
    return 32, jobs


def _quarter_giant(rng: random.Random) -> tuple[int, list[dict[str, Any]]]:
    """A giant on a quarter of 64 GPUs, and thirty on four to sixteen GPUs all over the pool that come over half an
    hour.
    """
    keys = {"steps": rng.randint(16, 24), "train_s": round(rng.uniform(30, 90), 1)}
    jobs = [_job(rng, "giant", rng.randrange(4) * 16, 16, rng.choice([8, 16]), tp=rng.choice([1, 2, 4]), **keys)]
    for number in range(30):
        keys = {"steps": rng.randint(3, 8), "arrive_s": round(rng.uniform(0, 1800), 1)}
        width = rng.choice([4, 8, 16])
        start = rng.randrange(64 // width) * width
        jobs.append(_job(rng, f"small{number}", start, width, width // 2, size=rng.choice([0.3, 1.0]), **keys))
    return 64, jobs


DRAWN: dict[str, Draw] = {
    "giant_and_small": _giant_and_small,
    "day_of_bursts": _bursts,
    "mixed_tp": _mixed_tp,
    "three_on_eight": _three_on_eight,
    "all_train_on_all": _all_on_all,
    "ahead_of_training": _ahead,
    "whole_pool": _whole_pool,
    "anything": _any,
    "long_tail": _long_tail,
    "half_each": _half_each,
    "on_policy_and_ahead": _on_policy_and_ahead,
    "long_training": _long_training,
    "steady_stream": _steady_stream,
    "quarter_giant": _quarter_giant,
}
