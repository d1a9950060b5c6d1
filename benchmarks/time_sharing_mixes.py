"""Runs the shipped mixes of jobs in four ways over generation : train ratios, length spreads and seeds, and prints one table per mix.

    python benchmarks/time_sharing_mixes.py [--mix two_jobs twelve_jobs two_hundred_jobs] [--seeds 20] [--processes 2]

The ratio is that of the job's own generation time alone on its GPUs to its training time. The last line of each mix says whether the
promises hold: total time against one after the other, the static split and the gap-ratio rule, p99 slowdown against the last two.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from nemo_rl.time_sharing.scenario import Job, Scenario, load_scenario
from nemo_rl.time_sharing.simulation.baselines import GAP_RATIO, OURS, SERIAL, STATIC, WAYS
from nemo_rl.time_sharing.simulation.results import AloneTimes, Outcome, run_way, table

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "time_sharing"
MIXES = ("two_jobs", "twelve_jobs", "two_hundred_jobs")
RATIOS, SIGMAS = (1.0, 3.0, 8.0), (0.8, 1.2)


def variant(scenario: Scenario, ratio: float, sigma: float) -> Scenario:
    """The scenario with lengths of spread `sigma`, and training times that make `ratio` of each job's own generation time."""
    known: dict[str, float] = {}
    jobs = []
    for job in scenario.jobs:
        spread = job.model_copy(update={"tokens": job.tokens.model_copy(update={"sigma": sigma})})
        kind = job.name.rstrip("0123456789")
        if kind not in known:
            known[kind] = _generation_s(scenario, spread)
        jobs.append(spread.model_copy(update={"train_s": known[kind] / ratio}))
    return scenario.model_copy(update={"jobs": tuple(jobs)})


def _generation_s(scenario: Scenario, job: Job) -> float:
    """Seconds of generation per step when the job has all its GPUs to itself."""
    steps = 5
    bare = job.model_copy(update={"train_s": 0.0, "init_s": 0.0, "steps": steps})
    whole = AloneTimes(scenario.model_copy(update={"jobs": (bare,)})).of(bare, 0)
    return max(whole - scenario.costs.start_s, 0.1) / steps


def run_seed(scenario: Scenario, seed: int) -> list[tuple[str, Outcome]]:
    alone = AloneTimes(scenario)
    return [(name, run_way(scenario, name, seed, alone)) for name in WAYS]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mix", nargs="*", default=list(MIXES), choices=MIXES)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--ratio", nargs="*", type=float, default=list(RATIOS))
    parser.add_argument("--sigma", nargs="*", type=float, default=list(SIGMAS))
    chosen = parser.parse_args(arguments)
    with ProcessPoolExecutor(chosen.processes) as pool:
        for mix in chosen.mix:
            run_mix(pool, mix, chosen.seeds, chosen.ratio, chosen.sigma)


def run_mix(pool: ProcessPoolExecutor, mix: str, seeds: int, ratios: Sequence[float], sigmas: Sequence[float]) -> None:
    base = load_scenario(EXAMPLES / f"{mix}.yaml")
    worst = {"serial": float("inf"), "static": 0.0, "gap": 0.0, "p99_static": 0.0, "p99_gap": 0.0}
    unfinished = 0
    for sigma in sigmas:
        for ratio in ratios:
            began = time.perf_counter()
            scenario = variant(base, ratio, sigma)
            runs = list(pool.map(run_seed, [scenario] * seeds, range(seeds)))
            rows = [(name, [dict(run)[name] for run in runs]) for name in WAYS]
            print(f"{mix}: generation:train {ratio:g}:1, sigma {sigma:g}, {seeds} seeds ({time.perf_counter() - began:.0f} s)", flush=True)
            show(table(rows))
            outcome = dict(rows)
            total = {name: statistics.fmean(o.total_s for o in outcome[name]) for name in WAYS}
            p99 = {name: statistics.fmean(o.p99_slowdown for o in outcome[name]) for name in WAYS}
            worst["serial"] = min(worst["serial"], total[SERIAL] / total[OURS])
            for key, other in (("static", STATIC), ("gap", GAP_RATIO)):
                worst[key] = max(worst[key], total[OURS] / total[other])
                worst[f"p99_{key}"] = max(worst[f"p99_{key}"], p99[OURS] / p99[other])
            unfinished += sum(len(o.unfinished) for o in outcome[OURS])
    print(
        f"{mix}: at least {worst['serial']:.2f}x better than one after the other; total at most {worst['static']:.3f} of static split, "
        f"{worst['gap']:.3f} of gap-ratio; p99 slowdown at most {worst['p99_static']:.3f} of static split, {worst['p99_gap']:.3f} of gap-ratio; "
        f"{unfinished} jobs unfinished\n",
        flush=True,
    )


def show(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


if __name__ == "__main__":
    main()
