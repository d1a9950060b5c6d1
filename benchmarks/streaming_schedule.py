"""What the schedule of a streaming run costs, on a virtual clock: step times, and how much training hides.

    python benchmarks/streaming_schedule.py [--steps 12] [--seed 0]

The real prompt queue and sampler decide; a rollout lasts as long as the longest of its samples, with geometric lengths
(mean 600, longest 3,968) or equal ones, however many run beside it; training takes so much of a synchronous step's
longest rollout as the table says, plus a hundredth of that for every pass. Generation and training have accelerators of
their own. The share of training that ran under generation comes from the run record that the simulated run writes.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from nemo_rl.experience.prompt_queue import PromptQueue, QueueLimits, worth_a_pass  # noqa: E402
from nemo_rl.experience.prompts import GroupKey, group_name  # noqa: E402
from nemo_rl.experience.samplers import InOrder  # noqa: E402
from nemo_rl.utils.record import MemoryRecord  # noqa: E402
from nemo_rl.utils.record_events import (  # noqa: E402
    GroupTrained,
    RequestFinished,
    RequestSubmitted,
    StepBegun,
    StepFinished,
    StepSpan,
)
from nemo_rl.utils.step_timeline import TRAINING, RunTimeline, read_timeline  # noqa: E402

PROMPTS, SAMPLES, MEAN, LONGEST = 64, 8, 600, 3968
_PASS = 0.01
_REFIT = 0.01


@dataclass(frozen=True)
class Workload:
    """Seconds of everything, a synchronous step's longest rollout being about 1.

    Attributes:
        durations: Of every rollout, step by step.
        train_s: Training of a whole step.
        pass_s: Cost of every pass besides.
        refit_s: From new weights to generation with them.
    """

    durations: list[list[float]]
    train_s: float
    pass_s: float
    refit_s: float

    def generation_s(self) -> float:
        """A step's generation alone."""
        return statistics.mean(max(step) for step in self.durations)

    def synchronous_s(self) -> float:
        """A step in turns."""
        return self.generation_s() + self.train_s + self.pass_s + self.refit_s

    def slower_s(self) -> float:
        """The slower of generation and training."""
        return max(self.generation_s(), self.train_s + self.pass_s)


def workload(steps: int, share: float, *, even: bool, seed: int = 0) -> Workload:
    """Rollouts whose lengths have a long tail, or are equal to 2 %; training takes `share` of their generation."""
    draw = random.Random(seed)

    def tokens() -> float:
        if even:
            return LONGEST * draw.uniform(0.98, 1.0)
        return min(LONGEST, 1 + math.log(1 - draw.random()) / math.log(1 - 1 / MEAN))

    rollouts = [[max(tokens() for _ in range(SAMPLES)) / LONGEST for _ in range(PROMPTS)] for _ in range(steps)]
    return Workload(rollouts, share, _PASS * share, _REFIT)


class Schedule:
    """One simulated run, strictly in order.

    Args:
        load: Its rollouts and costs.
        lookahead: `async_rl.sampler.max_lookahead_versions`.
        least: `async_rl.min_groups_for_streaming_train`.
    """

    def __init__(self, load: Workload, lookahead: int, least: int) -> None:
        self._load, self._least = load, least
        limits = QueueLimits(PROMPTS, len(load.durations), PROMPTS * (lookahead + 1))
        self._queue = PromptQueue(InOrder(lookahead), limits)
        self._now = 0.0
        self._running: list[tuple[float, GroupKey]] = []
        self._record = MemoryRecord(clock=lambda: self._now)
        self.step_s: list[float] = []
        self.passes: list[int] = []

    def run(self) -> RunTimeline:
        """Trains every step; what the record says of it."""
        while self._queue.version < len(self._load.durations):
            self._step()
        return read_timeline(self._record.entries)

    def _step(self) -> None:
        step, begun = self._queue.version, self._now
        self._record.emit(StepBegun(step))
        self._launch()
        passes = 0
        while keys := self._take():
            self._train(step, len(keys))
            passes += 1
        done = self._queue.finish_step()
        for key in done.taken:
            self._record.emit(GroupTrained(group_name(key), step))
        self._record.emit(StepFinished(step, step + 1, len(done.taken)))
        self._pass_until(self._now + self._load.refit_s)
        self.step_s.append(self._now - begun)
        self.passes.append(passes)

    def _launch(self) -> None:
        while self._queue.wants_batch():
            self._queue.draw(PROMPTS)
        for key in self._queue.to_launch(self._queue.version):
            self._queue.launched(key, self._queue.version)
            heapq.heappush(self._running, (self._now + self._load.durations[key.target][key.number], key))
            self._record.emit(RequestSubmitted(group_name(key), 0, group_name(key)))

    def _take(self) -> list[GroupKey]:
        while True:
            keys = self._queue.select(lambda keys: worth_a_pass(len(keys), self._queue.step, self._least))
            if keys is not None:
                return keys
            self._pass_until(self._running[0][0])

    def _train(self, step: int, groups: int) -> None:
        begun = self._now
        self._pass_until(begun + self._load.pass_s + self._load.train_s * groups / PROMPTS)
        self._record.emit(StepSpan(step, TRAINING, begun, self._now))

    def _pass_until(self, moment: float) -> None:
        while self._running and self._running[0][0] <= moment:
            self._now, key = heapq.heappop(self._running)
            self._record.emit(RequestFinished(group_name(key), 0, "done", 1))
            self._queue.ready(key)
            self._launch()
        self._now = moment


@dataclass(frozen=True)
class Row:
    """What one schedule came to, over the steps after the second; times of a step in longest rollouts.

    Attributes:
        step_s: A step.
        of_slower: The same, divided by the slower of generation and training.
        of_synchronous: Divided by a step in turns.
        hidden: Share of training under generation.
        passes: Of a step.
    """

    step_s: float
    of_slower: float
    of_synchronous: float
    hidden: float
    passes: float


def measure(load: Workload, lookahead: int, least: int = PROMPTS // 4) -> Row:
    """Runs one schedule."""
    schedule = Schedule(load, lookahead, least)
    timeline = schedule.run()
    # The last steps have nothing behind them to generate.
    steps = timeline.steps[2 : len(load.durations) - lookahead]
    timeline = RunTimeline(steps, timeline.generating)
    step_s = statistics.mean(schedule.step_s[2 : len(load.durations) - lookahead])
    return Row(
        step_s,
        step_s / load.slower_s(),
        step_s / load.synchronous_s(),
        timeline.hidden_share(),
        statistics.mean(schedule.passes[2:]),
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print("| lengths | training / generation | lookahead | step / slower | step / synchronous | hidden | passes |")
    print("|---|---|---|---|---|---|---|")
    for even in (False, True):
        for share in (0.25, 0.5, 0.7, 1.0):
            load = workload(args.steps, share, even=even, seed=args.seed)
            for lookahead in (0, 1):
                row = measure(load, lookahead)
                print(
                    f"| {'equal' if even else 'long tail'} | {share} | {lookahead} | {row.of_slower:.2f} | "
                    f"{row.of_synchronous:.2f} | {row.hidden:.0%} | {row.passes:.1f} |"
                )


if __name__ == "__main__":
    main()
