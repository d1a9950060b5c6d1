"""How long drawn mixes take at least where jobs name their GPUs, beside the ways that lay them out anew.

    python benchmarks/named_gpus.py [--mix giant_and_small long_tail] [--seeds 24]

A static split and a batch queue put jobs on GPUs of their own choice; sharing, and one after the other, leave them
where their files say. The bound holds for every schedule that leaves the jobs where they are: a job takes no less than
alone, and where another trains on all of its GPUs, it stands still for each of that one's holds that are left when it
comes. It knows nothing of hand-overs, of jobs that share a part of their GPUs, or of how much a GPU can do, so it is
seldom reached.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from composed_runs import compose
from drawn_mixes import DRAWN, drawn

from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.simulation.baselines import QUEUE, SERIAL, STATIC, alone
from nemo_rl.time_sharing.simulation.results import AloneTimes
from nemo_rl.time_sharing.simulation.scenario import Scenario, ScenarioJob
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.utils.record import NullRecord


class _Hold(NamedTuple):
    """Seconds after a job's start between which it holds its training GPUs, when it runs alone."""

    begin: float
    end: float


def least_s(scenario: Scenario, seed: int, alone_times: AloneTimes) -> float:
    """Seconds before which no schedule that leaves the jobs on their GPUs can have ended."""
    holds: dict[str, list[_Hold]] = {}
    least = 0.0
    for job in scenario.jobs:
        end = job.arrive_s + alone_times.of(job, seed)
        for other in scenario.jobs:
            # Holds of two such others exclude each other too, since both cover the job's GPUs.
            if other is not job and set(job.infer) <= set(other.train):
                if other.name not in holds:
                    holds[other.name] = _holds(scenario, other, seed)
                # By then it has come no further than it would have alone.
                there_for = max(job.arrive_s - other.arrive_s, 0.0)
                end += sum(hold.end - max(hold.begin, there_for) for hold in holds[other.name] if hold.end > there_for)
        least = max(least, end)
    return least


def _holds(scenario: Scenario, job: ScenarioJob, seed: int) -> list[_Hold]:
    world = World(alone(scenario, job), seed, lambda clock: NullRecord())
    world.run()
    found: list[_Hold] = []
    began = 0.0
    for entry in world.entries:
        if isinstance(entry.event, ev.Granted):
            began = entry.time
        elif isinstance(entry.event, ev.Released):
            found.append(_Hold(began, entry.time))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mix", nargs="*", default=["giant_and_small"], choices=tuple(DRAWN))
    parser.add_argument("--seeds", type=int, default=24)
    chosen = parser.parse_args(arguments)
    for mix in chosen.mix:
        least: list[float] = []
        total: dict[str, list[float]] = {way: [] for way in (STATIC, QUEUE, SERIAL)}
        for seed in range(chosen.seeds):
            scenario = drawn(mix, seed)
            times = AloneTimes(scenario)
            least.append(least_s(scenario, seed, times))
            for way, seconds in total.items():
                seconds.append(compose(scenario, way, seed, times).total_s)
        beyond = [bound > min(pair) for bound, *pair in zip(least, total[STATIC], total[QUEUE], strict=True)]
        print(
            f"{mix}, {chosen.seeds} seeds: at least {statistics.fmean(least):.0f} s on the GPUs that the jobs name; "
            + ", ".join(f"{way} {statistics.fmean(seconds):.0f} s" for way, seconds in total.items())
            + f"; in {sum(beyond)} seeds that least is longer than the static split or the queue takes",
            flush=True,
        )


if __name__ == "__main__":
    main()
