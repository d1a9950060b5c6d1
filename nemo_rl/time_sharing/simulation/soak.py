"""Runs random scenarios by the thousand and has the checker judge each; `python -m nemo_rl.time_sharing soak` is its
command.

Every scenario is named by its seed, so that a failure can be repeated.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from nemo_rl.time_sharing.history.check import check
from nemo_rl.time_sharing.simulation.coverage import reached
from nemo_rl.time_sharing.simulation.random_scenarios import random_scenario
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.utils.record import MemoryRecord, Record


class Verdict(NamedTuple):
    """One scenario: how many events it took, how long it lasted (virtual seconds), the first violations, jobs that
    never ended, and what the scheduler decided how often.
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


def run_scenario(seed: int) -> Verdict:
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
    return Verdict(seed, world.loop.events, world.loop.now, said, stuck, reached(world.entries))


def run_many(first: int, runs: int, processes: int) -> Iterator[Verdict]:
    """Verdicts of consecutive seeds, in order."""
    with ProcessPoolExecutor(processes, initializer=_quiet) as pool:
        yield from pool.map(run_scenario, range(first, first + runs), chunksize=10)


def _quiet() -> None:
    logging.disable()
    # A record is a hundred thousand small objects without cycles, which the collector would look through again and
    # again.
    gc.set_threshold(200_000, 20, 20)
