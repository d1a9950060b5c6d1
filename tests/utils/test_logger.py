"""The logger: what every run writes, backends that are switched on, and what happens when one is missing."""

import json
import math
import sys
from pathlib import Path

import matplotlib.figure
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nemo_rl.config import ConfigError, LoggerConfig
from nemo_rl.utils.log_backends import BackendMissing
from nemo_rl.utils.logger import Logger, flatten_dict, get_next_experiment_dir, print_message_log_samples
from nemo_rl.utils.metrics_file import MetricsLost, NoMetrics, read_metrics


def log_two_steps(logger: Logger) -> None:
    for step in (1, 2):
        logger.log_metrics(
            {"loss": torch.tensor(0.5 * step), "lr": 1e-3, "histogram/gen_tokens_length": [1, 2, 2 * step]},
            step,
            "train",
        )
        logger.log_metrics({"total_step_time": 2.0 * step}, step, "timing/train", step_finished=True)


def test_every_run_writes_one_json_line_per_call(tmp_path: Path) -> None:
    # A plain mapping, as NeMo-RL's scripts give it, is the section.
    with Logger({"log_dir": str(tmp_path), "wandb_enabled": False}) as logger:
        log_two_steps(logger)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prefix"]) for line in lines] == [
        (1, "train"),
        (1, "timing/train"),
        (2, "train"),
        (2, "timing/train"),
    ]
    assert lines[2]["loss"] == 1.0
    assert lines[2]["histogram/gen_tokens_length"] == [1, 2, 4]
    run = read_metrics(tmp_path)
    assert run.scalars("train/loss") == ([1, 2], [0.5, 1.0])
    assert run.last("timing/train/total_step_time") == 4.0
    assert run.last("train/reward") is None


def test_values_that_are_not_finite_stay_valid_json(tmp_path: Path) -> None:
    with Logger(LoggerConfig(log_dir=str(tmp_path))) as logger:
        logger.log_metrics({"loss": float("nan")}, 1, "train")
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] is None
    assert math.isnan(read_metrics(tmp_path).last("train/loss"))


def test_what_is_no_number_is_left_out_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Logger(LoggerConfig(log_dir=str(tmp_path))) as logger:
        for step in (1, 2):
            logger.log_metrics({"loss": 1.0, "answer": "42"}, step, "train")
        with pytest.raises(ValueError, match="prefix"):
            logger.log_metrics({"prefix": 1.0}, 1, "train")
    assert caplog.text.count("metric_ignored name=train/answer type=str") == 1


def test_a_torn_last_line_and_a_resumed_run_read_as_one(tmp_path: Path) -> None:
    for part, steps in (("exp_000", (1, 2, 3)), ("exp_001", (3, 4))):
        with Logger(LoggerConfig(log_dir=str(tmp_path / part))) as logger:
            for step in steps:
                logger.log_metrics({"loss": step + (0.5 if part == "exp_001" else 0)}, step, "train")
    with (tmp_path / "exp_000" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "ti')
    assert read_metrics(tmp_path).scalars("train/loss") == ([1, 2, 3, 4], [1.0, 2.0, 3.5, 4.5])
    with pytest.raises(NoMetrics, match="neither"):
        read_metrics(tmp_path / "exp_002")


def test_tensorboard_gets_scalars_histograms_and_figures(tmp_path: Path) -> None:
    with Logger(LoggerConfig(log_dir=str(tmp_path), tensorboard_enabled=True)) as logger:
        log_two_steps(logger)
        logger.log_hyperparams({"grpo": {"seed": 42}})
        logger.log_plot(matplotlib.figure.Figure(), 2, "train/plot")
        logger.log_table({"sample": ["1|2\n<3>"], "reward": [0.5]}, 2, "validation/samples")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("train/loss")] == [0.5, 1.0]
    assert [event.step for event in events.Scalars("timing/train/total_step_time")] == [1, 2]
    assert events.Tags()["histograms"] == ["train/histogram/gen_tokens_length"]
    assert events.Tags()["images"] == ["train/plot"]
    (table,) = events.Tensors("validation/samples/text_summary")
    text = table.tensor_proto.string_val[0].decode()
    assert text == "| sample | reward |\n| --- | --- |\n| 1&#124;2<br>&lt;3> | 0.5 |"
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"grpo": {"seed": 42}}


def test_arguments_that_a_tracker_does_not_take_are_named(tmp_path: Path) -> None:
    wrong = LoggerConfig(log_dir=str(tmp_path), tensorboard_enabled=True, tensorboard={"logdir": "x"})
    with pytest.raises(ConfigError, match=r"logger.tensorboard: .*logdir"):
        Logger(wrong)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab"])
def test_a_missing_backend_says_which_package_and_which_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BackendMissing, match=f"logger.{name}_enabled=true needs the package '{name}'"):
        Logger(LoggerConfig(log_dir=str(tmp_path), **{f"{name}_enabled": True}))


def test_experiment_directories_are_numbered_upwards(tmp_path: Path) -> None:
    assert [get_next_experiment_dir(tmp_path).name for _ in range(2)] == ["exp_000", "exp_001"]
    assert (tmp_path / "latest").resolve() == tmp_path / "exp_001"
    (tmp_path / "exp_041").mkdir()
    (tmp_path / "exp_old").mkdir()
    assert get_next_experiment_dir(tmp_path).name == "exp_042"


def test_nested_configuration_becomes_flat() -> None:
    assert flatten_dict({"a": {"b": {"c": 1}}, "l": [1, {"x": 2}], "empty": {}}) == {
        "a.b.c": 1,
        "l.0": 1,
        "l.1.x": 2,
        "empty": {},
    }


def test_a_batch_is_dumped_row_by_row(tmp_path: Path) -> None:
    with Logger(LoggerConfig(log_dir=str(tmp_path))) as logger:
        path = logger.log_batched_dict_as_jsonl(
            {"reward": torch.tensor([1.0, 0.0]), "content": ["a", "b"], "ids": [torch.tensor([1, 2]), [3]]},
            "rows.jsonl",
        )
        with pytest.raises(ValueError, match="differ in length"):
            logger.log_batched_dict_as_jsonl({"a": [1], "b": []}, "rows.jsonl")
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"reward": 1.0, "content": "a", "ids": [1, 2]},
        {"reward": 0.0, "content": "b", "ids": [3]},
    ]


def test_a_sample_on_the_terminal_cannot_steer_it(capsys: pytest.CaptureFixture[str]) -> None:
    log = [{"role": "assistant", "content": "red \x1b[31m"}]
    print_message_log_samples([log], [0.0], expected=["four \x1b[2J"])
    shown = capsys.readouterr().err
    assert "\x1b[31m" not in shown and "\x1b[2J" not in shown and r"four \x1b[2J" in shown


def test_samples_shown_span_best_to_worst(capsys: pytest.CaptureFixture[str]) -> None:
    logs = [
        [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": f"[answer {i}]"}]
        for i in range(5)
    ]
    print_message_log_samples(logs, [0.0, 1.0, 0.5, 0.2, 0.8], num_samples=2, step=7)
    shown = capsys.readouterr().err
    assert "question 1" in shown
    assert "[answer 0]" in shown  # brackets are not markup
    assert "question 2" not in shown
    with pytest.raises(ValueError, match="5 conversations but 1 rewards"):
        print_message_log_samples(logs, [0.0])


def test_metrics_that_cannot_be_written_end_the_run_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    logger = Logger({"log_dir": str(tmp_path)})
    with pytest.raises(MetricsLost, match=rf"{tmp_path}/metrics.jsonl cannot be written: no space left on the disk"):
        logger.log_metrics({"loss": 1.0}, 1, "train")
    logger.close()
