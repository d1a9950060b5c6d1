"""Runs random scenarios by the thousand and has the checker judge each: `python -m nemo_rl.time_sharing.simulation.soak --events 50000000`.

Every scenario is named by its seed, so a failure is repeated with `--first SEED --runs 1`. Exit status 1 when any run broke an invariant or got stuck.
"""
from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from nemo_rl.time_sharing.history.check import check
from nemo_rl.time_sharing.simulation.random_scenarios import random_scenario
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.utils.record import MemoryRecord, Record

_BATCH = 200


class Verdict(NamedTuple):
    """One scenario: how many events it took, how long it lasted (virtual seconds), the first violations, and jobs that never ended."""

    seed: int
    events: int
    ended_s: float
    violations: tuple[str, ...]
    stuck: tuple[str, ...]

    @property
    def clean(self) -> bool:
        return not self.violations and not self.stuck


def run_scenario(seed: int) -> Verdict:
    """Simulates one random scenario and checks its record."""
    logging.disable(logging.CRITICAL)
    records: list[MemoryRecord] = []

    def remember(clock: Callable[[], float]) -> Record:
        records.append(MemoryRecord(clock=clock))
        return records[0]

    world = World(random_scenario(seed), seed, remember)
    world.run()
    violations = check(records[0].entries)
    stuck = tuple(name for name, job in world.jobs.items() if job.finished_at is None)
    return Verdict(seed, world.loop.events, world.loop.now, tuple(str(v) for v in violations[:3]), stuck)


def run_many(first: int, runs: int, processes: int) -> Iterator[Verdict]:
    """Verdicts of consecutive seeds, in order."""
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(run_scenario, range(first, first + runs), chunksize=10)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=float, default=5e7, help="stop after that many simulated events")
    parser.add_argument("--runs", type=int, help="stop after that many scenarios instead")
    parser.add_argument("--first", type=int, default=1_000_000, help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    chosen = parser.parse_args(arguments)
    began, events, counts, bad, seed = time.perf_counter(), 0, [], 0, chosen.first
    while (len(counts) < chosen.runs) if chosen.runs else (events < chosen.events):
        batch = min(_BATCH, chosen.runs - len(counts)) if chosen.runs else _BATCH
        for verdict in run_many(seed, batch, chosen.processes):
            events += verdict.events
            counts.append(verdict.events)
            if not verdict.clean:
                bad += 1
                print(f"seed {verdict.seed}: {verdict.violations[0] if verdict.violations else f'never ended: {verdict.stuck}'}", flush=True)
        seed += batch
        print(f"{len(counts)} scenarios, {events:,} events, median {statistics.median(counts):.0f}, {bad} bad, {time.perf_counter() - began:.0f} s", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
