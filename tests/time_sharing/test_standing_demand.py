"""Demand is what needs an engine: not the finished samples of open groups, nor those whose environment answers."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.time_sharing.agents.standing_demand import OpenSamples, RecentPeak, StandingDemand, standing_demand
from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.simulation.scenario import Scenario
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.utils.record import MemoryRecord


class Heard:
    """What a scheduler hears: remaining samples, one number for each message."""

    def __init__(self) -> None:
        self.remaining: list[int] = []
        self.changed = threading.Condition()

    def set_demand(self, target: int, done: int) -> None:
        with self.changed:
            self.remaining.append(target - done)
            self.changed.notify_all()

    def until(self, remaining: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.remaining[-1] == remaining, timeout=30.0), self.remaining


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from((0.0, 0.5, 1.0, 2.5))), max_size=30))
def test_the_recent_peak_is_the_largest_count_of_the_window(steps: list[tuple[int, float]]) -> None:
    peak, now, seen = RecentPeak(2.0), 0.0, [(0, float("-inf"))]
    for count, pause in steps:
        peak.add(count, now)
        seen.append((count, now))
        now += pause
        ends = [begun for _, begun in seen[1:]] + [float("inf")]
        assert peak.at(now) == max(
            count for (count, _), end in zip(seen, ends, strict=True) if end > now - 2.0 and (count, end) != seen[0]
        )


def test_demand_is_what_is_open_until_requests_begin_and_what_runs_from_then_on() -> None:
    heard = Heard()
    demand = StandingDemand(heard.set_demand, falls_after_s=2.0)
    demand.open_groups(0, 4, 8, now=0.0)
    demand.under_way(0, now=0.1)
    demand.under_way(32, now=0.2)
    demand.open_groups(1, 4, 8, now=5.0)
    demand.under_way(3, now=5.1)
    assert heard.remaining == [32, 24]
    # Three stragglers of three groups; then their environments answer, and one has another turn.
    demand.under_way(3, now=7.2)
    demand.under_way(0, now=8.0)
    demand.under_way(0, now=10.1)
    demand.under_way(1, now=10.2)
    demand.open_groups(4, 4, 8, now=11.0)
    assert heard.remaining == [32, 24, 3, 0, 1, 0]


def test_a_count_above_what_is_open_asks_for_no_more() -> None:
    """Requests of later steps run beside those that are waited for."""
    heard = Heard()
    demand = StandingDemand(heard.set_demand)
    demand.open_groups(3, 4, 2, now=0.0)
    demand.under_way(50, now=0.1)
    assert heard.remaining == [2]


def test_requests_are_counted_on_a_thread_while_the_wait_lasts() -> None:
    heard, running = Heard(), 16
    with standing_demand(heard.set_demand, lambda: running, 8) as report:
        report(0, 2)
        heard.until(16)
        running = 2
        heard.until(2)
        running = 5
        heard.until(5)
        report(1, 2)
    assert heard.remaining[-1] == 0


def test_batches_of_several_students_count_what_is_not_scored() -> None:
    heard = Heard()
    demand = OpenSamples(heard.set_demand)
    assert not demand
    with demand.batch(8) as first:
        with demand.batch(4) as second:
            for finished in (first, first, second):
                finished()
            demand.report()
        assert demand
        assert heard.remaining == [8, 12, 9, 6], "the three samples of the batch that ended early count no more"
    assert heard.remaining[-1] == 0 and not demand
    demand.report()
    assert heard.remaining == [8, 12, 9, 6, 0]


def test_a_batch_that_failed_leaves_no_demand_and_hides_none() -> None:
    """A teacher whose engines all failed, and that is asked again."""
    heard = Heard()
    demand = OpenSamples(heard.set_demand)
    for _ in range(2):
        with pytest.raises(ValueError, match="no engine"), demand.batch(8):
            raise ValueError("no engine")
    with demand.batch(4) as other:
        with pytest.raises(ValueError, match="no engine"), demand.batch(8) as failing:
            failing()
            other()
            raise ValueError("no engine")
        assert heard.remaining[-1] == 3
        other()
        demand.report()
    assert heard.remaining == [8, 0, 8, 0, 4, 12, 3, 2, 0]


@pytest.mark.slow
def test_engines_of_an_agents_job_are_lent_while_its_environment_answers() -> None:
    """The neighbour generates on both GPUs in the meantime, and nothing is lost or trained twice."""
    both = {
        "infer": [0, 1],
        "groups": 64,
        "samples_per_group": 4,
        "staleness": 0,
        "train_s": 1.0,
        "tokens": {"median": 200, "sigma": 0.1},
    }
    agent = {"name": "agent", "train": [0], "steps": 2, "turns": 4, "environment_s": 60.0, **both}
    other = {"name": "other", "train": [1], "steps": 12, **both}
    ended_s = []
    for jobs in ([other], [agent | {"turns": 1, "tokens": {"median": 8000, "sigma": 0.1}}, other], [agent, other]):
        scenario = Scenario.model_validate(
            {"name": "agents", "pool": {"gpus_per_node": 2}, "costs": {"jitter": 0.0}, "jobs": jobs}
        )
        world = World(scenario, 0, lambda clock: MemoryRecord(clock=clock))
        world.run()
        assert [job.fate for job in world.jobs.values()] == [""] * len(jobs)
        assert check(world.entries) == []
        ended_s.append(world.jobs["other"].finished_at)
    alone, beside_one_that_generates, beside_an_agent = ended_s
    assert beside_an_agent < 1.2 * alone < beside_one_that_generates
