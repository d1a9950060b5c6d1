"""Runs mixes of jobs in every way of running them, and prints one table per mix.

    python benchmarks/time_sharing_mixes.py [--mix two_jobs twelve_jobs two_hundred_jobs] [--seeds 20] [--processes 2]
    [--keep FOLDER]
    python benchmarks/time_sharing_mixes.py --mix drawn --seeds 6    # all mixes of drawn_mixes.py; or by name
    python benchmarks/time_sharing_mixes.py --mix drawn --seeds 6 --placed    # where their jobs name no GPUs

The shipped mixes run over generation : train ratios and length spreads; the ratio is that of the job's own generation
time alone on its GPUs to its training time. Of a drawn mix each seed draws other jobs. The last line of each mix says
whether the promises hold: total time against one after the other, the static split, the batch queue and the gap-ratio
rule, p99 slowdown against the last three. Seeds run in turn over all cells, so with `--keep` a run that was cut short
can be shown, with fewer seeds, or gone on with later.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from composed_runs import compose
from drawn_mixes import CHEAP, DRAWN, drawn

from nemo_rl.time_sharing.simulation.baselines import (
    GAP_RATIO,
    GAP_RATIO_DECISIONS,
    OURS,
    QUEUE,
    QUEUE_LIMITS,
    QUEUES,
    SERIAL,
    STATIC,
    WAYS,
)
from nemo_rl.time_sharing.simulation.results import AloneTimes, SimulatedOutcome, run_way
from nemo_rl.time_sharing.simulation.scenario import Scenario, ScenarioJob
from nemo_rl.time_sharing.simulation.scenario_reading import load_scenario
from nemo_rl.time_sharing.simulation.tables import way_table

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "time_sharing"
MIXES = ("two_jobs", "twelve_jobs", "two_hundred_jobs")
RATIOS, SIGMAS = (1.0, 3.0, 8.0), (0.8, 1.2)
COMPOSED_FROM = 50
"""From so many jobs on, the ways in which no two jobs share a GPU at a time are put together from each job alone
instead of simulated as a whole."""


class Cell(NamedTuple):
    """One column of the table: a mix at one generation : train ratio and length spread (0 for a drawn mix); `keep` is
    where its runs are kept. `cheap`: a drawn mix with the hand-overs of a small model; `placed`: one whose jobs lie
    where the least goes on when they come.
    """

    mix: str
    ratio: float
    sigma: float
    keep: Path | None
    ways: tuple[str, ...] = WAYS
    cheap: bool = False
    placed: bool = False

    def scenario(self, seed: int) -> Scenario:
        if self.mix in DRAWN:
            scenario = drawn(self.mix, seed, CHEAP if self.cheap else None)
            jobs = tuple(job.model_copy(update={"placed": self.placed}) for job in scenario.jobs)
            return scenario.model_copy(update={"jobs": jobs})
        return variant(load_scenario(EXAMPLES / f"{self.mix}.yaml"), self.ratio, self.sigma)

    @property
    def title(self) -> str:
        return self.mix if self.mix in DRAWN else f"{self.mix}: generation:train {self.ratio:g}:1, sigma {self.sigma:g}"


def variant(scenario: Scenario, ratio: float, sigma: float) -> Scenario:
    """The scenario with lengths of spread `sigma`, and training times that make `ratio` of each job's own generation
    time.
    """
    known: dict[str, float] = {}
    jobs = []
    for job in scenario.jobs:
        spread = job.model_copy(update={"tokens": job.tokens.model_copy(update={"sigma": sigma})})
        kind = job.name.rstrip("0123456789")
        if kind not in known:
            known[kind] = _generation_s(scenario, spread)
        jobs.append(spread.model_copy(update={"train_s": known[kind] / ratio}))
    return scenario.model_copy(update={"jobs": tuple(jobs)})


def _generation_s(scenario: Scenario, job: ScenarioJob) -> float:
    """Seconds of generation per step when the job has all its GPUs to itself."""
    steps = 5
    bare = job.model_copy(update={"train_s": 0.0, "init_s": 0.0, "steps": steps})
    whole = AloneTimes(scenario.model_copy(update={"jobs": (bare,)})).of(bare, 0)
    return max(whole - scenario.costs.start_s, 0.1) / steps


def run_seed(cell: Cell, seed: int) -> dict[str, SimulatedOutcome]:
    """One seed in all ways, with the same prompts and training times. Runs that are kept already are not repeated."""
    scenario: Scenario | None = None
    alone: AloneTimes | None = None
    found: dict[str, SimulatedOutcome] = {}
    for name in cell.ways:
        kept = _load(cell, seed, name)
        if kept is None:
            if scenario is None or alone is None:
                scenario = cell.scenario(seed)
                alone = AloneTimes(
                    scenario, {(job, seed): run for job, run in (_load(cell, seed, "alone") or {}).items()}
                )
            composed = name in (SERIAL, STATIC, *QUEUES) and (cell.mix in DRAWN or len(scenario.jobs) >= COMPOSED_FROM)
            kept = {name: compose(scenario, name, seed, alone) if composed else run_way(scenario, name, seed, alone)}
            _save(cell, seed, name, kept)
            _save(cell, seed, "alone", {job: run for (job, _), run in alone.known.items()})
        found[name] = kept[name]
    return found


def _file(cell: Cell, seed: int, name: str) -> Path | None:
    if cell.keep is None:
        return None
    variant_of = f"{cell.ratio:g}-{cell.sigma:g}{'-cheap' * cell.cheap}{'-placed' * cell.placed}"
    return cell.keep / f"{cell.mix}-{variant_of}-{seed}-{name}.json"


def _load(cell: Cell, seed: int, name: str) -> dict[str, SimulatedOutcome] | None:
    path = _file(cell, seed, name)
    return (
        None
        if path is None or not path.exists()
        else {key: SimulatedOutcome(**run) for key, run in json.loads(path.read_text()).items()}
    )


def _save(cell: Cell, seed: int, name: str, runs: dict[str, SimulatedOutcome]) -> None:
    path = _file(cell, seed, name)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps({key: asdict(run) for key, run in runs.items()}))
        unfinished.rename(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mix", nargs="*", default=list(MIXES), choices=(*MIXES, "drawn", *DRAWN))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--ratio", nargs="*", type=float, default=list(RATIOS))
    parser.add_argument("--sigma", nargs="*", type=float, default=list(SIGMAS))
    parser.add_argument("--keep", type=Path, help="folder in which each run is kept, and looked for")
    parser.add_argument("--decisions", action="store_true", help="also the gap-ratio rule without its serial cycles")
    parser.add_argument("--cheap", action="store_true", help="drawn mixes with the hand-overs of a small model")
    parser.add_argument("--placed", action="store_true", help="drawn mixes whose jobs name no GPUs")
    chosen = parser.parse_args(arguments)
    ways = (*WAYS, GAP_RATIO_DECISIONS) if chosen.decisions else WAYS
    with ProcessPoolExecutor(chosen.processes, initializer=gc.set_threshold, initargs=(200_000, 20, 20)) as pool:
        for mix in [name for given in chosen.mix for name in (DRAWN if given == "drawn" else (given,))]:
            cells = [Cell(mix, ratio, sigma, chosen.keep, ways) for sigma in chosen.sigma for ratio in chosen.ratio]
            if mix in DRAWN:
                cells = [Cell(mix, 0.0, 0.0, chosen.keep, ways, chosen.cheap, chosen.placed)]
            run_mix(pool, cells, chosen.seeds)


def run_mix(pool: ProcessPoolExecutor, cells: Sequence[Cell], seeds: int) -> None:
    began = time.perf_counter()
    todo = [(cell, seed) for seed in range(seeds) for cell in cells]
    runs = dict(zip(todo, pool.map(run_seed, *zip(*todo, strict=True)), strict=True))
    worst = {"serial": float("inf")}
    others = {"static": STATIC, "queue": QUEUE, "queue_limits": QUEUE_LIMITS, "gap": GAP_RATIO}
    if GAP_RATIO_DECISIONS in cells[0].ways:
        others["decisions"] = GAP_RATIO_DECISIONS
    unfinished = 0
    for cell in cells:
        outcome = {name: [runs[cell, seed][name] for seed in range(seeds)] for name in cell.ways}
        print(f"{cell.title}, {seeds} seeds", flush=True)
        show(way_table(list(outcome.items())))
        total = {name: statistics.fmean(o.total_s for o in outcome[name]) for name in cell.ways}
        p99 = {name: statistics.fmean(o.p99_slowdown for o in outcome[name]) for name in cell.ways}
        line = {"serial": total[SERIAL] / total[OURS]}
        for key, other in others.items():
            line |= {key: total[OURS] / total[other], f"p99_{key}": p99[OURS] / p99[other]}
        print("  ours: " + ", ".join(f"{key} {value:.4f}" for key, value in line.items()))
        for key, value in line.items():
            worst[key] = (min if key == "serial" else max)(value, worst.get(key, value))
        unfinished += sum(len(o.unfinished) for o in outcome[OURS])
    print(
        f"{cells[0].mix}: at least {worst['serial']:.2f}x better than one after the other; total at most "
        f"{worst['static']:.3f} of static split, {worst['queue']:.3f} and {worst['queue_limits']:.3f} of the queue, "
        f"{worst['gap']:.3f} of gap-ratio; p99 slowdown at most {worst['p99_static']:.4f} of static split, "
        f"{worst['p99_queue']:.4f} and {worst['p99_queue_limits']:.4f} of the queue, {worst['p99_gap']:.4f} of "
        f"gap-ratio; {unfinished} jobs unfinished; {seeds} seeds in {time.perf_counter() - began:.0f} s\n",
        flush=True,
    )


def show(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


if __name__ == "__main__":
    main()
