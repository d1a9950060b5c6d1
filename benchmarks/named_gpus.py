"""How long drawn mixes take at least where jobs name their GPUs, beside the ways that lay them out anew.

    python benchmarks/named_gpus.py [--mix giant_and_small long_tail] [--seeds 24]

A static split and a batch queue put jobs on GPUs of their own choice; sharing, and one after the other, leave them
where their files say.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from drawn_mixes import DRAWN, drawn

from nemo_rl.time_sharing.simulation.baselines import QUEUE, SERIAL, STATIC
from nemo_rl.time_sharing.simulation.named_gpus import least_s
from nemo_rl.time_sharing.simulation.results import AloneTimes, compose


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
