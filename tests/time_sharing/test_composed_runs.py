"""What is put together from each job alone is what a simulation of all jobs says, where no two jobs use a GPU at the
same time.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.composed_runs import compose
from nemo_rl.time_sharing.simulation.baselines import OURS, QUEUE, QUEUE_LIMITS, SERIAL, STATIC
from nemo_rl.time_sharing.simulation.results import AloneTimes, run_way
from nemo_rl.time_sharing.simulation.scenario import Scenario
from nemo_rl.time_sharing.simulation.scenario_reading import parse_scenario


def four_jobs(**more: Any) -> Scenario:
    drawn = {"tokens": {"median": 200}, "engine": {"half_batch": 16}}
    job = {"steps": 2, "groups": 4, "samples_per_group": 4, "staleness": 0, "train_s": 5.0, **drawn}
    mappings = ([0, 1], [1, 2, 3], [4, 5], [0, 4])
    jobs = [{"name": f"job{i}", "train": [gpus[0]], "infer": gpus, **job} for i, gpus in enumerate(mappings)]
    return parse_scenario({"pool": {"gpus_per_node": 6}, "jobs": jobs, **more})


@pytest.mark.parametrize("way", [SERIAL, STATIC, QUEUE, QUEUE_LIMITS])
def test_a_composed_run_is_the_simulated_one(way: str) -> None:
    scenario = four_jobs()
    alone = AloneTimes(scenario)
    composed, simulated = compose(scenario, way, 0, alone), run_way(scenario, way, 0, alone)
    assert composed.total_s == pytest.approx(simulated.total_s, rel=0.01)
    assert composed.seconds == pytest.approx(simulated.seconds, rel=0.01)
    assert composed.gpu_busy == pytest.approx(simulated.gpu_busy, rel=0.02)
    assert not composed.unfinished


def test_what_cannot_be_composed_is_refused() -> None:
    scenario = four_jobs(faults={"agent_crashes": 5.0})
    with pytest.raises(ValueError, match="only one_after_the_other, static_split and batch_queue"):
        compose(four_jobs(), OURS, 0, AloneTimes(four_jobs()))
    with pytest.raises(ValueError, match="without faults"):
        compose(scenario, SERIAL, 0, AloneTimes(scenario))
