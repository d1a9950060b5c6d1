"""What a pipeline gets and loses by sharing, told from the log alone, against simulations that know it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log.events import RankMoved, Released
from nemo_rl.time_sharing.log.sharing import SharingWatch
from nemo_rl.time_sharing.protocol.types import Phase
from nemo_rl.time_sharing.simulation.results import AloneTimes
from nemo_rl.time_sharing.simulation.scenario import Scenario
from nemo_rl.time_sharing.simulation.scenario_reading import load_scenario
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.utils.record import NullRecord

SCENARIOS = Path(__file__).parents[2] / "examples" / "time_sharing"


def played(scenario: Scenario) -> tuple[World, SharingWatch]:
    world = World(scenario, 0, lambda clock: NullRecord())
    world.run()
    watch = SharingWatch()
    for entry in world.entries:
        watch.take(entry.time, entry.event)
    return world, watch


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train": [0], "infer": [0, 1]},
        {"train": [1], "infer": [0, 1], "staleness": 1},
    ],
    ids=["each its own training GPU", "one training GPU, on-policy", "one training GPU, running ahead"],
)
def test_the_slowdown_is_that_against_the_job_alone(changes: dict[str, object]) -> None:
    scenario = load_scenario(SCENARIOS / "two_jobs.yaml")
    jobs = [type(job).model_validate(job.model_dump(exclude_unset=True) | changes) for job in scenario.jobs]
    scenario = scenario.model_copy(update={"jobs": jobs})
    world, watch = played(scenario)
    alone = AloneTimes(scenario)
    sharing = watch.so_far()
    assert 0.5 < sum(one.share for one in sharing.values()) <= len(sharing)
    for job in scenario.jobs:
        finished = world.jobs[job.name].finished_at
        assert finished is not None
        slowdown = (finished - job.arrive_s) / alone.of(job, 0)
        assert sharing[job.name].slowdown == pytest.approx(slowdown, rel=0.1), job.name


def test_a_job_that_measures_its_batch_wakes_the_ranks_that_it_needs_from_the_second_step_on() -> None:
    scenario = load_scenario(SCENARIOS / "two_jobs.yaml")
    engine = {"tokens_per_s": 130, "half_batch": 256, "max_running": 512}
    changes = {"groups": 8, "steps": 2, "engine": engine, "measures_batch": True}
    job = scenario.jobs[0]
    job = type(job).model_validate(job.model_dump(exclude_unset=True) | changes | {"infer": [0, 1, 2]})
    pool = scenario.pool.model_copy(update={"gpus_per_node": 3})
    changed = job.model_copy(update={"engine": job.engine.model_copy(update={"half_batch": 64})})
    for simulated, used in ((job, 1), (changed, 3)):
        world, _ = played(scenario.model_copy(update={"jobs": [simulated], "pool": pool}))
        ranks: dict[bool, set[int]] = {False: set(), True: set()}
        trained = False
        for entry in world.entries:
            match entry.event:
                case RankMoved(phase=Phase.SERVING):
                    ranks[trained].add(entry.event.rank)
                case Released(version=1):
                    trained = True
                case _:
                    pass
        assert len(ranks[False]) == 1
        assert len(ranks[False] | ranks[True]) == used
        assert check(world.entries) == []


@pytest.mark.slow
def test_who_shares_with_nobody_loses_nothing() -> None:
    scenario = load_scenario(SCENARIOS / "two_jobs.yaml")
    alone = scenario.model_copy(update={"jobs": scenario.jobs[:1]})
    _, watch = played(alone)
    (sharing,) = watch.so_far().values()
    assert sharing.slowdown == pytest.approx(1.0, abs=0.02) and 0 < sharing.share <= 1


@pytest.mark.slow
def test_nobody_waits_for_a_pipeline_that_is_gone() -> None:
    world, watch = played(load_scenario(SCENARIOS / "two_jobs.yaml"))
    ended = watch.so_far()
    assert watch.so_far(world.loop.now + 1000.0) == ended
