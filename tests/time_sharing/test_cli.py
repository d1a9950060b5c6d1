"""The command line: simulate, check, trace, report, and what it says to input that cannot be used."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from nemo_rl.time_sharing.__main__ import main
from nemo_rl.time_sharing.log.comparison import LEGEND
from nemo_rl.time_sharing.simulation.scenario_reading import ScenarioError, load_scenario, parse_scenario
from nemo_rl.utils.record import Entry, encode_entry, read_record

EXAMPLES = Path(__file__).parents[2] / "examples" / "time_sharing"
JOB = {"name": "a", "train": [0], "infer": [0, 1], "steps": 2, "groups": 2, "train_s": 2.0}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "two.jsonl"
    assert main(["simulate", str(EXAMPLES / "two_jobs.yaml"), "--log", str(path), "--only-ours"]) == 0
    return path


def test_simulate_prints_jobs_and_ways_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = tmp_path / "s.yaml"
    scenario.write_text(json.dumps({"name": "one", "pool": {"gpus_per_node": 2}, "jobs": [JOB]}))
    assert main(["simulate", str(scenario), "--runs", "2"]) == 0
    shown = capsys.readouterr().out
    for word in (
        "time_sharing",
        "one_after_the_other",
        "static_split",
        "gap_ratio",
        "slowdown",
        "hand-over p50 / p99",
        "preemptions",
        "service spread",
    ):
        assert word in shown


@pytest.mark.slow
def test_check_says_that_a_good_log_keeps_every_invariant(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(log)]) == 0
    assert "keep all 11 invariants" in capsys.readouterr().out


@pytest.mark.slow
def test_the_records_of_several_processes_are_checked_as_one(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts: dict[str, list[Entry]] = {}
    for entry in read_record(log):
        part = parts.setdefault(entry.source.replace("/", "_"), [])
        part.append(Entry(len(part), entry.time, entry.source, entry.event))
    for name, entries in parts.items():
        (tmp_path / f"{name}.jsonl").write_bytes(b"".join(encode_entry(entry) for entry in entries))
    assert main(["check", *map(str, sorted(tmp_path.glob("*.jsonl")))]) == 0
    assert "keep all 11 invariants" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "scheduler.jsonl")]) == 0, "what the scheduler wrote is sound by itself"


@pytest.mark.slow
def test_check_shows_the_first_violation(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = [entry for entry in read_record(log) if type(entry.event).__name__ != "VersionPublished"]
    broken = tmp_path / "broken.jsonl"
    broken.write_bytes(
        b"".join(
            encode_entry(entry.__class__(i, entry.time, entry.source, entry.event)) for i, entry in enumerate(entries)
        )
    )
    assert main(["check", str(broken)]) == 1
    assert "invariant 3 (no token under a wrong version or adapter) broken at entry" in capsys.readouterr().out


@pytest.mark.slow
def test_a_torn_log_is_reported_with_its_line_and_can_be_read_up_to_there(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(log.read_bytes()[:-700])
    assert main(["check", str(torn)]) == 2
    assert "is torn" in capsys.readouterr().err
    assert main(["check", str(torn), "--recover", "--running"]) == 0


@pytest.mark.slow
def test_a_check_of_a_run_that_is_not_over_says_how_far_it_looked(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole lines that are missing at its end leave no trace in a record."""
    lines = log.read_bytes().splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"".join(lines[:-40]))
    assert main(["check", str(cut), "--running"]) == 0
    assert f"judged up to entry {len(lines) - 41} of " in capsys.readouterr().out
    assert main(["check", str(cut)]) == 1
    assert main(["check", str(log)]) == 0
    assert "judged up to" not in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow
def test_the_trace_has_a_track_for_each_gpu_and_slices_with_their_labels(log: Path, tmp_path: Path) -> None:
    output = tmp_path / "t.json"
    assert main(["trace", str(log), "-o", str(output)]) == 0
    events = json.loads(output.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    assert {"GPU 0 (node 0, local 0)", "GPU 1 (node 0, local 1)", "enqueue", "execution", "release"} <= names
    slices = [event for event in events if event["ph"] == "X"]
    assert any(event["name"].startswith("TRN math actor_train") for event in slices) and any(
        event["name"] == "serving" for event in slices
    )
    assert all(event["dur"] > 0 for event in slices)
    assert any(event["ph"] == "C" and event["name"] == "active GPUs" for event in events)


@pytest.mark.slow
def test_slices_of_one_gpu_nest_and_never_overlap(log: Path, tmp_path: Path) -> None:
    output = tmp_path / "t.json"
    main(["trace", str(log), "-o", str(output)])
    holds: dict[int, list[tuple[int, int]]] = {}
    for event in json.loads(output.read_text())["traceEvents"]:
        if event["ph"] == "X" and event["pid"] == 2 and event["name"][:3] in ("TRN", "INI", "GEN"):
            holds.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in holds.values():
        ordered = sorted(set(spans))
        assert all(before[1] <= after[0] + 1 for before, after in pairwise(ordered))


@pytest.mark.slow
def test_the_report_is_one_file_that_loads_nothing(log: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.html"
    assert main(["report", str(log), "-o", str(output)]) == 0
    page = output.read_text()
    assert "src=" not in page and 'href="http' not in page and "__DATA__" not in page
    data = json.loads(page.split("let D=", 1)[1].split(";\n", 1)[0])
    assert (
        data["pipelines"] == ["math", "games"]
        and data["steps"] == [10, 14]
        and data["violations"] == []
        and data["gpus"] == 2
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"jobs": [{**JOB, "train": [5]}]}, "jobs.0.train: job 'a': GPU 5 is outside the pool of 2"),
        ({"jobs": [{**JOB, "steps": 0}]}, "jobs.0.steps: must be at least 1"),
        ({"jobs": [{**JOB, "stepz": 3}]}, "jobs.0.stepz: unknown key. Did you mean 'steps'"),
        ({"jobs": [{**JOB, "tokens": {"sigma": "wide"}}]}, "jobs.0.tokens.sigma: .*given: 'wide'"),
        ({"jobs": [JOB, JOB]}, "two jobs are called 'a'"),
        ({"jobs": []}, "needs at least one job"),
        ({"jobs": [JOB], "limits": {"wait_bound": 3}}, "limits.wait_bound: unknown key. The limits are aging_s"),
        ({"jobs": [JOB], "limits": {"lease_s": -1}}, "limits.lease_s: -1 is negative"),
        ({"jobs": [JOB], "network": {"loss": 2}}, "network.loss: must be at most 1"),
        ({"jobs": [JOB], "faults": {"agent_crashes": -1}}, "faults.agent_crashes"),
        ({"jobs": [JOB], "pool": {"nodes": 0}}, "pool.nodes"),
        (
            {"fleets": {"f": {"count": 1, "width": 64, "train_gpus": 1, "stride": 1}}},
            "fleets.f.width: 64 GPUs do not fit the pool of 2 GPUs",
        ),
        ({"jobs": [{**JOB, "train": [0, 1]}]}, "touches each of the 2 inference ranks"),
    ],
)
def test_each_mistake_in_a_scenario_is_named_by_its_key(change: dict[str, object], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        parse_scenario({"pool": {"gpus_per_node": 2}, **change})


def test_a_file_that_is_no_scenario_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ScenarioError, match="cannot be read"):
        load_scenario(tmp_path / "nothing.yaml")
    (tmp_path / "list.yaml").write_text("[1, 2]")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ScenarioError, match="is a list"):
        load_scenario(tmp_path / "list.yaml")
    assert main(["simulate", str(tmp_path / "bad.yaml")]) == 2
    assert "not readable as YAML" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["two_jobs", "twelve_jobs", "two_hundred_jobs", "with_faults"])
def test_shipped_scenarios_load(name: str) -> None:
    scenario = load_scenario(EXAMPLES / f"{name}.yaml")
    assert len(scenario.jobs) == {"two_jobs": 2, "twelve_jobs": 12, "two_hundred_jobs": 200, "with_faults": 3}[name]


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "s.yaml", "--runs", "0"],
        ["simulate", "s.yaml", "--runs", "-1"],
        ["soak", "--runs", "0"],
        ["soak", "--processes", "0"],
    ],
)
def test_numbers_that_would_run_nothing_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and "expected a whole number from 1" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--report", "--log"])
def test_a_place_that_cannot_be_written_is_found_before_the_simulation(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(EXAMPLES / "two_hundred_jobs.yaml"), option, str(tmp_path / "none" / "x.html")]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"{option} ") and "there is no folder" in told.err and not told.out


def test_a_record_is_never_written_over_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = tmp_path / "s.yaml"
    scenario.write_text(json.dumps({"pool": {"gpus_per_node": 2}, "jobs": [JOB]}))
    before = scenario.read_text()
    assert main(["simulate", str(scenario), "--log", str(scenario)]) == 2
    assert "is not a record of nemo_rl" in capsys.readouterr().err and scenario.read_text() == before


def test_verbose_is_understood_after_the_command(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scenario = tmp_path / "s.yaml"
    scenario.write_text(json.dumps({"pool": {"gpus_per_node": 2}, "jobs": [JOB]}))
    assert main(["simulate", str(scenario), "--only-ours", "-v"]) == 0
    assert "event=run way=time_sharing seed=0" in caplog.text


def _data(page: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(page.read_text().split("let D=", 1)[1].split(";\n", 1)[0])
    return found


@pytest.mark.slow
def test_the_report_and_the_table_say_the_same_and_a_later_report_is_the_same_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "two.html"
    assert main(["simulate", str(EXAMPLES / "two_jobs.yaml"), "--report", str(page)]) == 0
    printed = capsys.readouterr().out
    data = _data(page)
    assert f"{data['busy']:.0%}" in printed and f"{data['handoverP50']:.2f} / {data['handoverP99']:.2f}" in printed
    assert [line[0] for line in data["wayTable"]] == [
        "way",
        "time_sharing",
        "one_after_the_other",
        "static_split",
        "batch_queue",
        "batch_queue_limits",
        "gap_ratio",
    ]
    assert [line[0] for line in data["jobTable"]] == ["job", "math", "games"] and data[
        "title"
    ] == "two jobs on two GPUs"
    assert "<title>two jobs on two GPUs: time-sharing report</title>" in page.read_text()
    before = page.read_bytes()
    assert main(["report", str(page.with_suffix(".jsonl"))]) == 0
    assert page.read_bytes() == before


def test_the_columns_of_the_table_are_explained_below_it_and_in_the_documentation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = tmp_path / "s.yaml"
    scenario.write_text(json.dumps({"pool": {"gpus_per_node": 2}, "jobs": [JOB]}))
    assert main(["simulate", str(scenario)]) == 0
    printed = capsys.readouterr().out
    documented = (EXAMPLES.parents[1] / "docs" / "time_sharing_scheduler.md").read_text()
    for word, meaning in LEGEND:
        assert meaning in printed and f"| {word} | {meaning} |" in documented
    header = next(line for line in printed.splitlines() if line.startswith("way"))
    for column in (
        header.replace("hand-over p50 / p99 s", "hand-over").replace("slowdown mean", "slowdown").split("  ")[1:]
    ):
        assert not column.strip() or column.strip() == "p99" or column.strip() in dict(LEGEND)


@pytest.fixture(scope="module")
def faulty_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faulty")
    job = {**JOB, "infer": [0, 1, 2, 3], "steps": 30, "groups": 8}
    faults = {"agent_crashes": 60, "scheduler_crashes": 60, "operation_fails": 0.1, "reap_fails": 0.5, "restarts": 1000}
    limits = {"lease_s": 12.0, "quarantine_s": 20.0}
    scenario = {
        "pool": {"gpus_per_node": 4},
        "jobs": [job, {**job, "name": "b", "train": [3]}],
        "faults": faults,
        "limits": limits,
    }
    (folder / "s.yaml").write_text(json.dumps(scenario))
    assert main(["simulate", str(folder / "s.yaml"), "--log", str(folder / "faults.jsonl"), "--only-ours"]) == 0
    return folder / "faults.jsonl"


@pytest.mark.slow
def test_the_report_draws_what_is_out_of_service_and_tells_each_fault(faulty_log: Path, tmp_path: Path) -> None:
    assert main(["report", str(faulty_log), "-o", str(tmp_path / "f.html")]) == 0
    data = _data(tmp_path / "f.html")
    kinds = {bar[5] for bar in data["bars"]}
    assert {"fenced", "quarantined", "cooling"} <= kinds
    told = " ".join(text for _, text in data["faults"])
    for words in ("is cut off", "quarantined", "is taken out of service", "the scheduler restarts"):
        assert words in told


@pytest.mark.slow
def test_queue_depths_of_the_trace_are_never_negative_and_slices_say_what_they_are_for(
    faulty_log: Path, tmp_path: Path
) -> None:
    assert main(["trace", str(faulty_log), "-o", str(tmp_path / "t.json")]) == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    depths = [event["args"]["waiting"] for event in events if event["name"].endswith(" depth")]
    assert depths and min(depths) == 0
    assert not any("gets 1 GPUs" in event["name"] for event in events) and any(
        "gets 1 GPU" in event["name"] for event in events
    )
    about = [event["args"] for event in events if event["ph"] == "X" and event["pid"] == 2]
    assert all(slice_["pipeline"] and slice_["cluster"] and slice_["plan"] >= 1 for slice_ in about)
    assert {slice_["kind"] for slice_ in about} >= {"request", "initial", "proactive"}
    assert any(slice_["cluster"] == "actor_train" and slice_.get("step") == 3 for slice_ in about) and any(
        slice_.get("rank") == 1 for slice_ in about
    )


@pytest.mark.slow
def test_a_record_that_was_cut_off_is_judged_and_drawn_up_to_there(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
    for command in ("check", "trace", "report"):
        assert main([command, str(torn)]) == 2
        assert "with --recover, check, trace and report read up to there" in capsys.readouterr().err
        assert main([command, str(torn), "--recover"]) == 0, "what its missing end would have brought is not missing"
        assert "as a run that did not end" in capsys.readouterr().err
    assert _data(tmp_path / "torn.html")["violations"] == [] and (tmp_path / "torn.trace.json").exists()


@pytest.mark.parametrize("text", [b"name: two jobs\npool: {nodes: 1}\n", b"\x89PNG\r\n\x1a\n", b"no line end"])
@pytest.mark.parametrize("more", [[], ["--recover"]])
def test_a_file_that_is_no_record_is_told_so(
    text: bytes, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").write_bytes(text)
    assert main(["check", str(tmp_path / "x"), *more]) == 2
    assert "is not a record of nemo_rl" in capsys.readouterr().err


def test_an_empty_file_proves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_bytes(b"")
    assert main(["check", str(tmp_path / "x")]) == 2
    assert "there is no record in it" in capsys.readouterr().err


def test_a_folder_stands_for_the_records_in_it(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "pool"
    folder.mkdir()
    assert main(["account", str(folder)]) == 2
    assert f"{folder}: has no records" in capsys.readouterr().err
    (folder / "scheduler.jsonl").write_bytes(log.read_bytes())
    (folder / "pool.json").write_text("{}")
    for command in ("account", "check"):
        said = []
        for given in (folder, log):
            assert main([command, str(given)]) == 0
            said.append(capsys.readouterr().out.replace(str(given), "").rpartition("(")[0])
        assert said[0] == said[1]


@pytest.mark.parametrize("wrong", ["-1", "0", "nan", "inf", "soon"])
def test_a_time_for_which_failed_gpus_are_left_alone_is_seconds_above_zero(
    wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--gpus", "1", "--quarantine", wrong])
    assert ended.value.code == 2
    assert f"argument --quarantine: {wrong}: expected seconds above 0" in capsys.readouterr().err
