"""Scenario files as a user meets them: mistakes come in plain words with their place; every key has a meaning."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.time_sharing.__main__ import main
from nemo_rl.time_sharing.protocol.types import Limits
from nemo_rl.time_sharing.simulation.scenario_reading import ScenarioError, load_scenario, parse_scenario
from tools.pages import scenarios_page

POOL = {"gpus_per_node": 4}
JOB: dict[str, Any] = {"name": "a", "train": [0], "infer": [0, 1]}
FLEET: dict[str, Any] = {"count": 6, "width": 2, "train_gpus": 1, "stride": 1}
INF = float("inf")


def mistakes(given: object) -> list[str]:
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(given)
    return str(caught.value).splitlines()


def test_every_key_and_limit_has_a_meaning() -> None:
    assert scenarios_page.MEANING.keys() == {field.name for field in dataclasses.fields(Limits)}
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", scenarios_page.page(), re.MULTILINE)
    assert len(rows) > 80 and all(len(meaning) > 5 for _, meaning in rows)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"weight": INF}, "jobs.0.weight: must be a finite number (given: inf)"),
        ({"tokens": {"median": INF}}, "jobs.0.tokens.median: must be a finite number (given: inf)"),
        ({"engine": {"half_batch": INF}}, "jobs.0.engine.half_batch: must be a finite number (given: inf)"),
        ({"engine": {"tokens_per_s": INF}}, "jobs.0.engine.tokens_per_s: must be a finite number (given: inf)"),
        ({"steps": True}, "jobs.0.steps: must be a whole number (given: true)"),
        ({"steps": "6"}, "jobs.0.steps: must be a whole number (given: '6')"),
        ({"train": "0-7"}, "jobs.0.train: must be a list (given: '0-7')"),
        ({"tokens": 5}, "jobs.0.tokens: must be a mapping of keys (median, sigma, max) (given: 5)"),
        (
            {"arrive_s": 5.0, "leaves_s": 3.0},
            "jobs.0.leaves_s: job 'a': 3 s is before it arrives (arrive_s: 5); give a later time, or null for never",
        ),
        (
            {"arrive_s": 2e6},
            "jobs.0.arrive_s: job 'a': 2e+06 s is not before the end of the simulation (horizon_s: 1e+06)",
        ),
        ({"tokens": {"max": 3}}, "jobs.0.tokens.max: job 'a': 3 is less than the median of 256 tokens"),
        (
            {"groups": 100_000, "samples_per_group": 1000},
            "jobs.0.groups: job 'a': 100000 groups of 1000 samples, 2 steps at a time, are more than the "
            "1,000,000 samples that are simulated at once; "
            "give fewer groups, or less staleness",
        ),
        ({"train": [9]}, "jobs.0.train: job 'a': GPU 9 is outside the pool of 4 GPUs (0..3)"),
        ({"tp": 3}, "jobs.0.infer: job 'a': 2 GPUs cannot be divided into ranks of tp=3"),
    ],
)
def test_a_mistake_in_a_job_is_one_line_with_its_key_and_value(job: dict[str, Any], message: str) -> None:
    assert mistakes({"pool": POOL, "jobs": [{**JOB, **job}]}) == [f"scenario: {message}"]


@pytest.mark.parametrize("jobs", [None, 5])
def test_jobs_that_are_no_list_are_refused_beside_fleets_too(jobs: object) -> None:
    assert mistakes({"pool": POOL, "jobs": jobs, "fleets": {"f": FLEET}})[0].startswith(
        "scenario: jobs: must be a list (given: "
    )


def test_an_end_before_the_beginning_is_refused() -> None:
    assert mistakes({"pool": POOL, "jobs": [JOB], "horizon_s": 0}) == [
        "scenario: horizon_s: must be more than 0 (given: 0)"
    ]


def test_a_mistake_that_all_jobs_of_a_fleet_share_is_told_once_and_at_the_fleet() -> None:
    assert mistakes({"pool": POOL, "fleets": {"f": {**FLEET, "job": {"steps": 0}}}}) == [
        "scenario: fleets.f.job.steps: must be at least 1 (given: 0)"
    ]
    (told,) = mistakes({"pool": POOL, "fleets": {"f": {**FLEET, "train_gpus": 2}}})
    assert told.startswith(
        "scenario: fleets.f: job 'f0': train: training on GPUs (0, 1) touches each of the 2 inference ranks"
    )
    assert mistakes({"pool": POOL, "fleets": {"f": {**FLEET, "job": {"train": [0]}}}})[0].startswith(
        "scenario: fleets.f.job.train: each job of a fleet gets its own"
    )


def test_an_unknown_key_is_answered_with_the_nearest_one_and_all_that_are_valid() -> None:
    (told,) = mistakes({"pool": POOL, "jobs": [JOB], "faults": {"agent_crash": 3}})
    assert told.startswith(
        "scenario: faults.agent_crash: unknown key. Did you mean 'agent_crashes'? Valid here: agent_crashes, "
        "scheduler_crashes"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty; a scenario has at least `jobs`"),
        (b"name: \xff\n", "not readable as YAML: 'utf-8' codec can't decode byte 0xff in position 6"),
        (b"name: a\njobs: []\nname: b\n", "line 3: the key name is given twice in this mapping"),
        (b"jobs:\n  - {name: a, steps: 1, steps: 2}\n", "the key steps is given twice"),
        (b"jobs: [\n", "not readable as YAML: while parsing"),
        (b"- 1\n", "a scenario is a mapping of keys, this is a list"),
    ],
)
def test_a_file_that_cannot_be_a_scenario_is_one_line_and_status_two(
    text: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.yaml"
    path.write_bytes(text)
    assert main(["simulate", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"{path}: ") and message in told and told.count("\n") == 1


def test_numbers_are_read_as_people_write_them(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        "pool: {gpus_per_node: 2}\nhorizon_s: 1e5\njobs: [{name: a, train: [0], infer: [0, 1], train_s: 2}]\n"
    )
    scenario = load_scenario(tmp_path / "s.yaml")
    assert scenario.horizon_s == 1e5 and scenario.jobs[0].train_s == 2.0
