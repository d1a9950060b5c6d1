"""The report of a run: one page that carries its data, one picture, from a whole run or from little."""

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from nemo_rl.config import LoggerConfig
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.metrics_file import read_metrics
from nemo_rl.utils.plots import main_panels, more_panels, phase_series, smoothed, spanned
from nemo_rl.utils.record import RecordWriter
from nemo_rl.utils.record_events import GroupTrained
from nemo_rl.utils.report import LiveReport, log_report, main, write_page, write_report


def log_run(log_dir: Path, steps: range) -> None:
    with Logger(LoggerConfig(log_dir=str(log_dir))) as logger:
        logger.log_hyperparams({"policy": {"model_name": "models/tiny"}})
        for step in steps:
            logger.log_metrics(
                {
                    "reward": step / 10,
                    "filtered_reward": step / 10,
                    "kl_penalty": float("nan") if step == 2 else 0.1,
                    "lr": 1e-4,
                },
                step,
                "train",
            )
            timing = {
                "generation": 2.0,
                "policy_training": 1.0,
                "prepare_for_generation/total": 0.5,
                "prepare_for_generation/transfer_and_update_weights": 0.4,
            }
            logger.log_metrics(
                {"total_step_time": 4.0, "valid_tokens_per_sec_per_gpu": 9e4, "advantage_calculation": 0.001, **timing},
                step,
                "timing/train",
            )
        logger.log_metrics({"accuracy": 0.25 * (1 + steps.start % 2)}, steps[-1], "validation")
        hostile = ["What is 1+1?", "</script><script>alert(1)</script>"]
        logger.log_batched_dict_as_jsonl({"content": [hostile], "rewards": [0.5]}, f"val_data_step{steps[-1]}.jsonl")


def data_of(html: Path) -> dict[str, Any]:
    text = html.read_text()
    assert text.count("</script>") == 2  # the page's own two blocks: nothing a model wrote can close one
    assert not re.search(r'(src|href)="?(https?:)?//', text)
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_carries_its_data_and_nothing_in_it_is_markup(tmp_path: Path) -> None:
    log_dir = tmp_path / "arithmetic" / "exp_003"
    log_run(log_dir, range(1, 5))
    paths = write_report(log_dir)
    page = data_of(paths.html)
    assert page["title"] == "arithmetic, exp_003"
    assert page["subtitle"].startswith("GRPO of tiny  ·  4 steps in 16s")
    titles = [panel["title"] for panel in page["panels"]]
    assert titles == ["Reward", "Validation reward", "KL divergence", "Time per step"], "0.5 is a grade"
    assert page["panels"][2]["series"][0]["values"] == [0.1, None, 0.1, 0.1]
    assert page["samples"][0]["samples"][0] == {
        "text": "What is 1+1?\n\n</script><script>alert(1)</script>",
        "reward": 0.5,
    }
    assert matplotlib.image.imread(paths.png).shape[1] > 1000


def test_samples_on_the_page_have_turns_the_expected_answer_and_wrong_ones(tmp_path: Path) -> None:
    log_run(tmp_path, range(1, 3))
    turns = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    with Logger(LoggerConfig(log_dir=str(tmp_path))) as logger:
        columns = {
            "content": ["1+12"] * 40,
            "rewards": [1.0] * 39 + [0.0],
            "messages": [turns] * 40,
            "expected": ["2"] * 39 + [None],
        }
        logger.log_batched_dict_as_jsonl(columns, "val_data_step2.jsonl")
    samples = data_of(write_report(tmp_path).html)["samples"][-1]["samples"]
    assert [sample["reward"] for sample in samples] == [1.0, 1.0, 0.0]
    assert samples[0]["turns"] == [["user", "1+1"], ["assistant", "2"]]
    assert [sample.get("expected") for sample in samples] == ["2", "2", None]


def test_phases_add_up_to_the_step_and_parts_are_not_counted_twice(tmp_path: Path) -> None:
    log_run(tmp_path, range(1, 4))
    series = {one.label: one.values for one in phase_series(read_metrics(tmp_path))}
    assert list(series) == ["generation", "policy training", "prepare for generation", "other"]
    assert [sum(values) for values in zip(*series.values(), strict=True)] == pytest.approx([4.0] * 3)


def test_equal_curves_are_drawn_once(tmp_path: Path) -> None:
    log_run(tmp_path, range(1, 4))
    reward = main_panels(read_metrics(tmp_path))[0]
    assert [one.label for one in reward.series] == ["reward"]


def test_the_parts_of_a_resumed_run_make_one_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log_run(tmp_path / "exp_000", range(1, 4))
    log_run(tmp_path / "exp_001", range(3, 7))
    assert main([str(tmp_path), "--out", str(tmp_path / "out"), "--title", "Two parts"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "out" / name) for name in ("report.html", "report.png")]
    page = data_of(tmp_path / "out" / "report.html")
    assert page["title"] == "Two parts"
    assert page["panels"][0]["series"][0]["steps"] == [1, 2, 3, 4, 5, 6]


def test_another_run_in_the_same_directory_stays_out_of_it(tmp_path: Path) -> None:
    log_run(tmp_path / "exp_000", range(1, 9))
    log_run(tmp_path / "exp_001", range(1, 6))
    log_run(tmp_path / "exp_002", range(4, 5))
    steps = read_metrics(tmp_path).series["train/reward"]
    assert list(steps) == [1, 2, 3, 4], "the newest run and what it goes on from, without the step that was lost"
    assert list(read_metrics(tmp_path / "exp_001").series["train/reward"]) == [1, 2, 3, 4, 5]


def test_a_living_run_has_a_page_that_loads_itself_anew(tmp_path: Path) -> None:
    assert write_page(tmp_path) is None
    with Logger(LoggerConfig(log_dir=str(tmp_path))) as logger, LiveReport(tmp_path, every_s=0.01):
        logger.log_metrics({"reward": 0.5}, 1, "train")
        deadline = time.monotonic() + 120
        while not (tmp_path / "report.html").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert data_of(tmp_path / "report.html")["live"] is True
    assert data_of(write_report(tmp_path).html)["live"] is False


def test_the_axis_of_engines_that_agree_shows_no_rounding_noise(tmp_path: Path) -> None:
    with Logger(LoggerConfig(log_dir=str(tmp_path))) as logger:
        for step in (1, 2):
            logger.log_metrics({"token_mult_prob_error": 1.0 + step * 1e-7}, step, "train")
    (panel,) = main_panels(read_metrics(tmp_path))
    low, high = spanned(min(panel.series[0].values), max(panel.series[0].values), panel.min_span)
    assert high - low == pytest.approx(0.002) and low < 1.0 < high


def test_responses_over_the_whole_step_are_slower_than_generation(tmp_path: Path) -> None:
    with Logger(LoggerConfig(log_dir=str(tmp_path))) as logger:
        logger.log_metrics({"generation_tokens_per_sec": 100.0, "tokens_per_sec": 180.0}, 1, "performance")
        logger.log_metrics({"generation": 2.0, "total_step_time": 4.0}, 1, "timing/train")
    panel = next(one for one in more_panels(read_metrics(tmp_path)) if one.title.startswith("Response"))
    assert {one.label: one.values for one in panel.series} == {"generation": [100.0], "whole step": [50.0]}


def test_a_directory_without_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err
    with Logger(LoggerConfig(log_dir=str(tmp_path))) as logger:
        logger.log_metrics({"odd": 1.0}, 1, "train")
    assert main([str(tmp_path)]) == 2
    assert "train/odd" in capsys.readouterr().err


def test_smoothing_keeps_gaps_and_constants() -> None:
    values = [2.0] * 100
    values[50] = math.nan
    result = smoothed(values)
    assert math.isnan(result[50])
    assert result[:50] + result[51:] == [2.0] * 99


def test_trackers_get_the_reports_picture(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Logger(LoggerConfig(log_dir=str(tmp_path), tensorboard_enabled=True)) as logger:
        log_report(logger)  # nothing to show yet
        for step in (1, 2, 3):
            logger.log_metrics({"reward": step / 10}, step, "train")
        log_report(logger)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(image.step, image.width > 500) for image in events.Images("report")] == [(3, True)]


@pytest.mark.slow
def test_damage_in_a_record_or_in_samples_is_said_beside_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_run(tmp_path, range(1, 5))
    with (tmp_path / "samples" / "val_data_step4.jsonl").open("ab") as file:
        file.write(b'\xff{"content": ["torn')
    path = tmp_path / "record.jsonl"
    with RecordWriter(path, source="driver") as writer:
        for step in range(5):
            writer.emit(GroupTrained("g", step))
    whole = path.read_bytes()
    for content, line in ((whole, 0), (whole[:-9], 0), (whole.replace(b'"step":2', b'"step":3'), 4)):
        path.write_bytes(content)
        assert main([str(tmp_path)]) == (1 if line else 0)
        assert (f"{path}: line {line} has a wrong checksum" in capsys.readouterr().err) == bool(line)
    assert "What is 1+1?" in data_of(tmp_path / "report.html")["samples"][0]["samples"][0]["text"]


@pytest.mark.parametrize(("logged", "drawn"), [([0.0, 0.0], False), ([0.0, 1e-6], True), ([0.2, float("nan")], True)])
def test_a_divergence_that_was_not_measured_is_not_drawn(logged: list[float], drawn: bool, tmp_path: Path) -> None:
    with Logger(LoggerConfig(log_dir=str(tmp_path))) as logger:
        for step, value in enumerate(logged, start=1):
            logger.log_metrics({"reward": 1.0, "kl_penalty": value, "unverified_rate": value}, step, "train")
    run = read_metrics(tmp_path)
    assert ("KL divergence" in [panel.title for panel in main_panels(run)]) is drawn
    assert ("Unverified samples" in [panel.title for panel in more_panels(run)]) is drawn
