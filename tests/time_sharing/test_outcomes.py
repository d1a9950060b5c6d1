"""What a simulation says of its jobs: who finished, who did not and why, and which numbers that leaves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.time_sharing.__main__ import main
from nemo_rl.time_sharing.simulation import simulation_commands
from nemo_rl.time_sharing.simulation.baselines import OURS, SERIAL
from nemo_rl.time_sharing.simulation.results import AloneTimes, SimulatedOutcome, run_way
from nemo_rl.time_sharing.simulation.scenario_reading import load_scenario, parse_scenario
from nemo_rl.time_sharing.simulation.tables import way_table
from nemo_rl.time_sharing.viewing.timeline import percentile
from nemo_rl.utils.record import read_record

EXAMPLES = Path(__file__).parents[2] / "examples" / "time_sharing"
JOB: dict[str, Any] = {"name": "a", "train": [0], "infer": [0, 1, 2], "steps": 3, "groups": 2, "train_s": 2.0}


def outcome(**given: Any) -> SimulatedOutcome:
    scenario = parse_scenario({"pool": {"gpus_per_node": 4}, "jobs": [JOB], **given})
    return run_way(scenario, OURS, 0, AloneTimes(scenario))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            {"faults": {"agent_crashes": 2000, "restarts": 2}},
            "after 3 starts (faults.restarts allows no more); the last one crashed",
        ),
        ({"network": {"loss": 1.0}}, "0 of 3 steps trained, given up"),
        ({"limits": {"max_hold_s": 0}}, "0 of 3 steps trained, given up"),
        ({"horizon_s": 6.0}, "steps trained when the simulation ended at 6 s (horizon_s)"),
    ],
)
def test_a_job_that_did_not_train_all_its_steps_is_unfinished_and_has_no_slowdown(
    given: dict[str, Any], why: str
) -> None:
    found = outcome(**given)
    assert found.unfinished == ("a",) and found.slowdown == {} and why in found.fates["a"]
    assert way_table([(OURS, [found])])[1][2:5] == ["-", "-", "-"]


def test_a_job_that_its_user_stops_is_not_unfinished() -> None:
    found = outcome(jobs=[{**JOB, "steps": 1000, "leaves_s": 30.0}])
    assert found.unfinished == () and found.slowdown == {}


def test_unfinished_jobs_are_told_below_the_table_and_by_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(
        json.dumps({"pool": {"gpus_per_node": 4}, "jobs": [JOB], "faults": {"agent_crashes": 2000, "restarts": 2}})
    )
    assert main(["simulate", str(path), "--only-ours"]) == 1
    told = capsys.readouterr().out
    assert "unfinished in time_sharing, seed 0: job 'a': " in told and "agent crashes" in told
    assert not caplog.records, "planned faults are counted, not logged"


def test_jobs_that_come_at_once_run_one_after_the_other_in_the_order_of_the_file() -> None:
    jobs = [{**JOB, "name": name} for name in ("z", "a")]
    scenario = parse_scenario({"pool": {"gpus_per_node": 4}, "jobs": jobs})
    found = run_way(scenario, SERIAL, 0, AloneTimes(scenario))
    assert found.seconds["z"] < found.seconds["a"]


@pytest.mark.slow
def test_the_shipped_scenario_with_faults_runs_with_every_invariant_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "one.jsonl"
    assert main(["simulate", str(EXAMPLES / "with_faults.yaml"), "--only-ours", "--log", str(log)]) == 0
    told = capsys.readouterr().out
    assert "every invariant holds" in told and "faults in time_sharing" in told


def test_the_record_ends_with_the_tables_that_were_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, log = tmp_path / "s.yaml", tmp_path / "s.jsonl"
    path.write_text(json.dumps({"name": "mix", "pool": {"gpus_per_node": 4}, "jobs": [JOB]}))
    assert main(["simulate", str(path), "--log", str(log)]) == 0
    printed = capsys.readouterr().out
    said = list(read_record(log))[-1].event
    assert said.scenario == "mix" and len(said.ways) == 7
    for line in (*said.ways, *said.jobs):
        assert all(cell in printed for cell in line)


def test_percentiles_are_interpolated() -> None:
    assert (
        percentile([], 50) == 0.0
        and percentile([3.0, 1.0], 50) == 2.0
        and percentile([1.0, 2.0, 3.0], 99) == pytest.approx(2.98)
    )


def test_a_long_simulation_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation_commands, "_SAID_EVERY_S", 0.002)
    scenario = load_scenario(EXAMPLES / "two_jobs.yaml")
    said: list[str] = []
    progress = simulation_commands.SimulationProgress(scenario, ways=2, runs=1, say=said.append)
    assert progress.line(7.0) == f"simulating {scenario.name}: 0% after 7s"
    alone = AloneTimes(scenario, watch=progress.begins)
    for name in (OURS, SERIAL):
        progress.way = name
        run_way(scenario, name, 0, alone)
    assert f"({SERIAL}): 100% after 7s" in progress.line(7.0)
    progress.end()
    shares = [int(re.search(r"(\d+)% after", line)[1]) for line in said]  # type: ignore[index]
    assert len(shares) > 1 and shares == sorted(shares) and any(" left" in line for line in said)
