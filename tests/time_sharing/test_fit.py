"""A scenario made of a run's record behaves like the run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from nemo_rl.time_sharing.__main__ import main
from nemo_rl.time_sharing.simulation.fit import FitError, fit
from nemo_rl.time_sharing.simulation.scenario import Scenario, Validation
from nemo_rl.time_sharing.simulation.scenario_reading import load_scenario
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.utils.record import MemoryRecord

SCENARIOS = Path(__file__).parents[2] / "examples" / "time_sharing"


def played(scenario: Scenario) -> tuple[World, MemoryRecord]:
    records: list[MemoryRecord] = []
    world = World(scenario, 0, partial(_remember, records))
    world.run()
    return world, records[0]


def _remember(records: list[MemoryRecord], clock):  # type: ignore[no-untyped-def]
    records.append(MemoryRecord(clock=clock))
    return records[0]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_fitted_scenario_takes_as_long_as_the_run_that_it_is_made_of(staleness: int) -> None:
    scenario = load_scenario(SCENARIOS / "two_jobs.yaml")
    validation = Validation(samples=400, at_start=True, period=5, at_end=True)
    own = {"staleness": staleness, "begin_s": 9.0, "builds_ahead": True, "validation": validation, "compile_s": 40.0}
    jobs = [job.model_copy(update={**own, "arrive_s": 7.0 * n}) for n, job in enumerate(scenario.jobs)]
    run, record = played(scenario.model_copy(update={"jobs": jobs}))
    fitted = fit(record.entries)
    again, _ = played(fitted.scenario)
    assert [job.validation for job in fitted.scenario.jobs] == [validation] * 2
    assert [job.compile_s for job in fitted.scenario.jobs] == pytest.approx([40.0] * 2, rel=0.1)
    for job in jobs:
        ended, repeated = run.jobs[job.name].finished_at, again.jobs[job.name].finished_at
        assert ended is not None and repeated is not None
        begun = fitted.scenario.jobs[[j.name for j in fitted.scenario.jobs].index(job.name)].arrive_s
        assert repeated - begun == pytest.approx(ended - job.arrive_s, rel=0.1), job.name
        assert fitted.measured[job.name] == pytest.approx(ended - job.arrive_s, rel=0.02)


@pytest.mark.slow
def test_the_command_writes_a_scenario_that_can_be_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, mine = tmp_path / "two.jsonl", tmp_path / "mine.yaml"
    assert main(["simulate", str(SCENARIOS / "two_jobs.yaml"), "--only-ours", "--log", str(log)]) == 0
    assert main(["fit", str(log), "-o", str(mine)]) == 0
    said = capsys.readouterr().out
    assert "measured" in said and "games" in said
    assert {job.name for job in load_scenario(mine).jobs} == {"math", "games"}


def test_a_record_without_training_cannot_be_fitted() -> None:
    with pytest.raises(FitError, match="no pipeline of these records trained a step"):
        fit([])
