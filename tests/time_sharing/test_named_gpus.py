"""The least that a mix can take on the GPUs that its jobs name."""

from __future__ import annotations

import pytest

from benchmarks.composed_runs import compose
from benchmarks.named_gpus import least_s
from nemo_rl.time_sharing.simulation.baselines import GAP_RATIO, OURS, SERIAL
from nemo_rl.time_sharing.simulation.results import AloneTimes, run_way
from nemo_rl.time_sharing.simulation.scenario import Scenario
from nemo_rl.time_sharing.simulation.scenario_reading import parse_scenario


def _mix(*, small_at: int, arrive_s: float = 0.0) -> Scenario:
    """A wide job that trains on all of GPUs 0 to 3, and a small one on two GPUs."""
    job = {"staleness": 0, "train_s": 20.0, "groups": 8, "full_overlap": True}
    wide = {**job, "name": "wide", "infer": [0, 1, 2, 3], "train": [0, 1, 2, 3], "steps": 5}
    gpus = [small_at, small_at + 1]
    small = {**job, "name": "small", "infer": gpus, "train": gpus, "steps": 5, "arrive_s": arrive_s}
    return parse_scenario({"pool": {"gpus_per_node": 8}, "jobs": [wide, small]})


@pytest.mark.slow
@pytest.mark.parametrize("arrive_s", [0.0, 60.0])
def test_a_job_stands_still_while_another_trains_on_all_of_its_gpus(arrive_s: float) -> None:
    scenario = _mix(small_at=0, arrive_s=arrive_s)
    times = AloneTimes(scenario)
    least = least_s(scenario, 0, times)
    small_alone = arrive_s + times.of(scenario.jobs[1], 0)
    trains_s = 5 * 20.0 if arrive_s == 0.0 else 0.0
    assert least > small_alone + 0.8 * trains_s
    for way in (OURS, GAP_RATIO):
        assert run_way(scenario, way, 0, times).total_s >= least
    assert compose(scenario, SERIAL, 0, times).total_s >= least


def test_jobs_on_gpus_of_their_own_are_bounded_by_the_longest() -> None:
    scenario = _mix(small_at=4)
    times = AloneTimes(scenario)
    longest = max(times.of(job, 0) for job in scenario.jobs)
    assert least_s(scenario, 0, times) == longest
