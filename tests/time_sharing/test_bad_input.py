"""Input that cannot be used is refused with the place and what is allowed: every field of a scenario and of a
registration, logs, and messages.
"""

from __future__ import annotations

import inspect
import json
import zlib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from bench import Bench
from pydantic import BaseModel

from nemo_rl.time_sharing.__main__ import main
from nemo_rl.time_sharing.protocol.topology import Pool, RegistrationError, register
from nemo_rl.time_sharing.protocol.types import (
    ACTOR_TRAIN,
    Answer,
    CommandOutcome,
    Demand,
    GivenBack,
    Held,
    PipelineOptions,
    Priority,
    Status,
    Verb,
    Want,
)
from nemo_rl.time_sharing.scheduling.scheduler import Scheduler
from nemo_rl.time_sharing.simulation.scenario import (
    Costs,
    EngineSpeed,
    Faults,
    Fleet,
    Network,
    PoolSection,
    Scenario,
    ScenarioJob,
    Tokens,
)
from nemo_rl.time_sharing.simulation.scenario_reading import ScenarioError, parse_scenario
from nemo_rl.utils.record import RecordWriter
from nemo_rl.utils.record_events import SCHEMA_VERSION, StepBegun

JOB = {"name": "a", "train": [0], "infer": [0, 1]}
FLEET = {"count": 1, "width": 2, "train_gpus": 1, "stride": 1}
SECTIONS: dict[str, type[BaseModel]] = {"pool": PoolSection, "costs": Costs, "network": Network, "faults": Faults}


def _fields() -> Iterator[tuple[str, dict[str, Any]]]:
    """The path of every key of a scenario, and a scenario in which just that one holds something of the wrong kind."""
    wrong = {"of": ["the", "wrong", "kind"]}
    base: dict[str, Any] = {"pool": {"gpus_per_node": 2}, "jobs": [JOB]}
    for name in Scenario.model_fields:
        yield name, {**base, name: 7 if name in ("limits", "fleets", "jobs", *SECTIONS) else wrong}
    for section, model in SECTIONS.items():
        for name in model.model_fields:
            yield f"{section}.{name}", {**base, section: {**base.get(section, {}), name: wrong}}
    nested: dict[str, type[BaseModel]] = {"tokens": Tokens, "engine": EngineSpeed}
    for name in ScenarioJob.model_fields:
        yield f"jobs.0.{name}", {**base, "jobs": [{**JOB, name: 7 if name in nested else wrong}]}
    for part, model in nested.items():
        for name in model.model_fields:
            yield f"jobs.0.{part}.{name}", {**base, "jobs": [{**JOB, part: {name: wrong}}]}
    for name in Fleet.model_fields:
        yield f"fleets.f.{name}", {**base, "fleets": {"f": {**FLEET, name: 7 if name == "job" else wrong}}}


@pytest.mark.parametrize(
    ("path", "scenario"), list(_fields()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_key_of_a_scenario_is_named_when_its_value_is_of_the_wrong_kind(
    path: str, scenario: dict[str, Any]
) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(scenario)
    assert path in str(caught.value)


@pytest.mark.parametrize(
    "path",
    [
        "pool.gpus",
        "costs.sleep",
        "network.jitter",
        "faults.fire",
        "jobs.0.gpus",
        "jobs.0.tokens.mean",
        "jobs.0.engine.speed",
        "job",
    ],
)
def test_a_key_that_does_not_exist_is_named(path: str) -> None:
    scenario: Any = {
        "pool": {"gpus_per_node": 2},
        "jobs": [{**JOB, "tokens": {}, "engine": {}}],
        "costs": {},
        "network": {},
        "faults": {},
    }
    *parents, last = path.split(".")
    place = scenario
    for parent in parents:
        place = place[int(parent) if parent.isdigit() else parent]
    place[last] = 1
    with pytest.raises(ScenarioError, match=path.replace(".", r"\.") + r": unknown key\..* Valid here: "):
        parse_scenario(scenario)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"aging_s": float("nan")}, "limits.aging_s: nan is not a finite number"),
        ({"lease_s": float("inf")}, "limits.lease_s: inf is not a finite number"),
        ({"drain_s": -1}, "limits.drain_s: -1 is negative"),
        ({"max_initialising": 1.5}, "limits.max_initialising: 1.5 is not a whole number"),
        ({"heartbeat_s": 0}, "limits.heartbeat_s: 0 s must be at least 0.01 s"),
        ({"heartbeat_s": 60}, "limits.heartbeat_s: 60 s must be less than lease_s"),
    ],
)
def test_limits_under_which_nothing_could_run_are_refused(limits: dict[str, float], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        parse_scenario({"limits": limits, "jobs": [{"name": "a", "train": [0], "infer": [0, 1]}]})


def test_a_mistake_in_the_job_of_a_fleet_is_found_in_the_fleet() -> None:
    fleets = {"first": FLEET, "second": {**FLEET, "job": {"steps": 0}}}
    with pytest.raises(ScenarioError, match=r"^scenario: fleets\.second\.job\.steps: must be at least 1 \(given: 0\)$"):
        parse_scenario({"pool": {"gpus_per_node": 2}, "jobs": [JOB], "fleets": fleets})


GOOD: dict[str, Any] = {
    "pipeline": "p",
    "namespace": "ns",
    "cluster_tp_configs": {"actor_train": 1, "actor_infer": 1},
    "cluster_device_mappings": {"actor_train": [0], "actor_infer": [0, 1]},
}
BAD: dict[str, tuple[Any, str]] = {
    "pipeline": ("", "id must match"),
    "namespace": ("", "namespace is empty"),
    "cluster_tp_configs": ({"actor_train": 1, "actor_infer": -1}, "cluster 'actor_infer': tp=-1"),
    "cluster_device_mappings": (
        {"actor_train": [0], "actor_infer": [0, 9]},
        "cluster 'actor_infer': GPU 9 is outside the pool",
    ),
    "weight": (float("nan"), "weight=nan must be positive"),
    "min_share": (-0.1, "min_share=-0.1"),
    "max_share": (1.5, "max_share=1.5"),
    "staleness": (-1, "staleness=-1 must be at least 0"),
    "rank_batch": (0, "rank_batch=0"),
    "slice_s": (-1, "slice_s=-1 must be from 0 to 3600 seconds"),
    "drain_s": (3601.0, "drain_s=3601.0 must be from 0 to 3600 seconds"),
    "user": ("a\nb", "user='a.*must be text of at most 64 characters"),
    "group": (7, "group=7 must be text"),
    "priority": ("urgent", "priority='urgent' must be high, normal or scavenger"),
    "full_overlap": (False, "touches each of the 2 inference ranks"),
}


FIELDS = [*inspect.signature(register).parameters, *(option.name for option in fields(PipelineOptions))]


@pytest.mark.parametrize("field", [name for name in FIELDS if name not in ("pool", "options")])
def test_every_field_of_a_registration_is_checked_and_named(field: str) -> None:
    register(Pool(1, 4), **GOOD)
    value, message = BAD[field]
    others = (
        {"cluster_device_mappings": {"actor_train": [0, 1], "actor_infer": [0, 1]}} if field == "full_overlap" else {}
    )
    with pytest.raises(RegistrationError, match=message):
        register(Pool(1, 4), **{**GOOD, **others, field: value})


def test_a_registration_that_can_never_fit_is_refused_by_the_scheduler() -> None:
    bench = Bench(2)
    with pytest.raises(
        RegistrationError, match=r"pipeline 'wide', cluster 'actor_infer': GPU 2 is outside the pool of 2 GPUs \(0..1\)"
    ):
        bench.register("wide", [0], [0, 1, 2])
    assert not bench.state.pipelines


# Logs.


def _log(path: Path, lines: int = 5) -> list[bytes]:
    with RecordWriter(path, source="scheduler", clock=lambda: 1.0) as writer:
        for count in range(lines - 1):
            writer.emit(StepBegun(count))
    return path.read_bytes().splitlines(keepends=True)


def test_a_log_of_a_newer_schema_is_refused_with_its_line_and_both_versions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new.jsonl"
    lines = _log(path)
    body = json.loads(lines[2])
    del body["crc"]
    rest = json.dumps({**body, "v": SCHEMA_VERSION + 1}, separators=(",", ":"))[1:].encode()
    lines[2] = b'{"crc":"%08x",%b\n' % (zlib.crc32(rest), rest)
    path.write_bytes(b"".join(lines))
    for command in ("check", "trace", "report"):
        assert main([command, str(path)]) == 2
        shown = capsys.readouterr().err
        assert f"line 3 has schema {SCHEMA_VERSION + 1}" in shown and f"reads up to {SCHEMA_VERSION}" in shown


def test_a_corrupted_log_says_which_line_and_what_survives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.jsonl"
    lines = _log(path)
    lines[3] = lines[3].replace(b"scheduler", b"sChEduler")
    path.write_bytes(b"".join(lines))
    assert main(["check", str(path)]) == 2
    shown = capsys.readouterr().err
    assert "line 4" in shown and "has a wrong checksum" in shown and "the 3 lines before it are intact" in shown
    assert main(["check", str(path), "--recover", "--running"]) == 0
    assert "3 events" in capsys.readouterr().out


def _resealed(line: bytes, **changes: object) -> bytes:
    """The line with some of its fields changed (None: left out), and a checksum that fits again."""
    body = {
        name: value for name, value in {**json.loads(line), **changes}.items() if name != "crc" and value is not None
    }
    rest = json.dumps(body, separators=(",", ":"))[1:].encode()
    return b'{"crc":"%08x",%b\n' % (zlib.crc32(rest), rest)


def test_a_line_without_its_kind_and_one_of_a_newer_schema_with_another_sum_are_told_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.jsonl"
    lines = _log(path)
    path.write_bytes(b"".join([*lines[:3], _resealed(lines[3], kind=None)]))
    assert main(["check", str(path)]) == 2
    assert "line 4" in (shown := capsys.readouterr().err) and "lacks its 'kind'" in shown
    path.write_bytes(b"".join([*lines[:3], lines[3].replace(b'"v":%d' % SCHEMA_VERSION, b'"v":99')]))
    assert main(["check", str(path)]) == 2
    assert "has a wrong checksum, and says that it has schema 99" in capsys.readouterr().err


def test_a_log_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err


# Messages.


def test_a_demand_that_goes_backwards_counts_only_with_a_larger_number() -> None:
    bench = Bench(2)
    bench.register("a", [0], [0, 1])
    bench.status("a", demand=Demand(100, 50, 1, 5))
    bench.status("a", demand=Demand(100, 10, 1, 4))
    assert bench.state.pipelines["a"].demand.done == 50
    bench.status("a", demand=Demand(100, 10, 1, 6))
    assert bench.state.pipelines["a"].demand.done == 10
    bench.status("a", demand=Demand(10, 100, 1, 7))
    assert bench.state.pipelines["a"].demand.remaining == 0, "more done than wanted is all done"


def test_what_an_agent_says_of_clusters_ranks_and_requests_that_do_not_exist_changes_nothing() -> None:
    bench = Bench(2)
    bench.register("a", [0], [0, 1])
    bench.status(
        "a",
        wants=(Want("critic", Priority.CRITIC_TRAINING, 1, 0), Want("judge", Priority.CRITIC_TRAINING, 2, 0)),
        holds=(Held("critic", 7, Priority.CRITIC_TRAINING),),
        given_back=(GivenBack("critic", 7, 0), GivenBack(ACTOR_TRAIN, 99, 0)),
        awake=((17, 3), (-1, 4)),
        broken=(17,),
    )
    pipeline = bench.state.pipelines["a"]
    assert not pipeline.wants and not pipeline.held and not pipeline.awake and bench.state.owner == [None, None]


def test_answers_to_commands_that_were_never_given_change_nothing() -> None:
    bench = Bench(2)
    bench.register("a", [0], [0, 1])
    bench.status("a", demand=Demand(100, 0, 1, 1))
    before = len(bench.record.entries)
    for command in ("9.9", "", "1.1"):
        for pipeline in ("a", "nobody"):
            bench.scheduler.answer(Answer(command, pipeline, 0, CommandOutcome.FAILED), bench.now)
    assert len(bench.record.entries) == before


def test_statuses_of_unknown_pipelines_and_incarnations_are_told_so() -> None:
    bench = Bench(2)
    bench.register("a", [0], [0, 1], incarnation=3)
    assert not bench.scheduler.status(Status("nobody", 0, 1), 0.0).registered
    assert not bench.scheduler.status(Status("a", 2, 1), 0.0).registered
    assert bench.scheduler.status(Status("a", 3, 1), 0.0).registered


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
def test_a_clock_that_jumps_ends_no_lease(jump: float) -> None:
    bench = Bench(2)
    bench.register("a", [0], [0, 1])
    bench.status("a", demand=Demand(100, 0, 1, 1))
    scheduler: Scheduler = bench.scheduler
    scheduler.state.limits = type(scheduler.state.limits)(lease_s=30.0, isolation_s=0.0)
    bench.now += jump
    scheduler.tick(bench.now)
    bench.settle(10.0)
    assert not scheduler.state.pipelines["a"].fenced
    assert any(type(entry.event).__name__ == "ClockJumped" for entry in bench.record.entries)
    bench.settle(60.0)
    assert "a" not in scheduler.state.pipelines, "real silence still ends it"
    assert any(command.verb is Verb.REAP for command in bench.sent)
