"""Each tracker writes with its real package and is read back; one that is out of reach does not stop the run."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.config import LoggerConfig
from nemo_rl.utils import log_backends
from nemo_rl.utils.logger import Logger, ReachableTracker
from nemo_rl.utils.metrics_file import read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _nobody_is_logged_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "SWANLAB_API_KEY", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / ".netrc"))


def log_two_steps(logger: Logger) -> None:
    for step in (1, 2):
        logger.log_metrics({"loss": 0.5 * step, "lengths": [1.0, 2.0, 2.0 * step]}, step, "train")
        logger.log_metrics({"total_step_time": 2.0 * step}, step, "timing/train", step_finished=True)
    logger.log_hyperparams({"grpo": {"seed": 42}})
    logger.log_table({"sample": ["1+1=\n2 | <3>"], "reward": [1.0]}, 2, "validation/samples")


def leveldb_records(path: Path) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format with a header of seven bytes, as W&B writes it."""
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def test_wandb_without_credentials_is_recorded_offline_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from wandb.proto import wandb_internal_pb2

    with Logger(
        LoggerConfig(log_dir=str(tmp_path), wandb_enabled=True, wandb={"project": "p", "name": "n", "tags": ["x"]})
    ) as logger:
        log_two_steps(logger)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    history: list[dict[str, Any]] = []
    for data in leveldb_records(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            history.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
    assert [(row["_step"], row["train/loss"], row["timing/train/total_step_time"]) for row in history[:2]] == [
        (1, 0.5, 2.0),
        (2, 1.0, 4.0),
    ]
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/validation/samples_*.table.json")
    assert json.loads(table.read_text())["data"] == [["1+1=\n2 | <3>", 1.0]]
    assert caplog.text.count("tracker=wandb mode=offline: there are no credentials") == 1


def test_mlflow_keeps_metrics_summaries_and_parameters(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    with Logger(LoggerConfig(log_dir=str(tmp_path), mlflow_enabled=True)) as logger:
        log_two_steps(logger)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("grpo-dev")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "train/loss")] == [
        (1, 0.5),
        (2, 1.0),
    ]
    assert run.data.metrics["train/lengths/max"] == 4.0
    assert run.data.params == {"grpo.seed": "42"}
    (table,) = tmp_path.glob("mlflow/artifacts/**/validation.samples_2.json")
    assert json.loads(table.read_text())["data"] == [["1+1=\n2 | <3>", 1.0]]


def test_swanlab_without_credentials_is_recorded_offline(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Logger(
        LoggerConfig(log_dir=str(tmp_path), swanlab_enabled=True, swanlab={"project": "p", "name": "n"})
    ) as logger:
        log_two_steps(logger)
    (file,) = tmp_path.glob("swanlab/run-*/run-*.swanlab")
    written = b"".join(leveldb_records(file))
    assert b"train/loss" in written
    assert struct.pack("<d", 1.0) in written or struct.pack("<f", 1.0) in written
    assert "tracker=swanlab mode=offline" in caplog.text


def test_a_tracking_server_out_of_reach_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unreachable = {"tracking_uri": "http://127.0.0.1:9"}
    with Logger(LoggerConfig(log_dir=str(tmp_path), mlflow_enabled=True, mlflow=unreachable)) as logger:
        log_two_steps(logger)
    assert caplog.text.count("tracker=mlflow event=switched_off") == 1
    assert read_metrics(tmp_path).scalars("train/loss") == ([1, 2], [0.5, 1.0])


def test_a_tracker_that_fails_on_the_way_is_switched_off_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Flaky:
        calls, failures = 0, (OSError,)

        def log_metrics(self, *_: Any) -> None:
            Flaky.calls += 1
            raise ConnectionError("gone\nand more")

    tracker = ReachableTracker("flaky", Flaky, tmp_path)
    for step in (1, 2, 3):
        tracker.log_metrics({"loss": 1.0}, step)
    tracker.close()
    assert Flaky.calls == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"tracker=flaky event=switched_off: gone; the run goes on, its metrics are in {tmp_path}/metrics.jsonl"
    ]


def test_a_mistake_in_a_tracker_is_not_hidden(tmp_path: Path) -> None:
    class Broken:
        failures = (OSError,)

        def log_metrics(self, *_: Any) -> None:
            raise TypeError("a mistake of ours")

    with pytest.raises(TypeError, match="a mistake of ours"):
        ReachableTracker("broken", Broken, tmp_path).log_metrics({}, 1)


class FakeRun:
    """What W&B does with steps: it drops what lies below its newest."""

    def __init__(self, step: int = 0) -> None:
        self.step, self.rows, self.dropped = step, [], []

    def define_metric(self, *_: object, **__: object) -> None:
        pass

    def finish(self) -> None:
        pass

    def log(self, payload: dict[str, Any], step: int | None = None, commit: bool = False) -> None:
        if step is not None and step < self.step:
            self.dropped.append(payload)
            return
        self.step = self.step if step is None else step
        self.rows.append((self.step, payload))
        self.step += commit


def wandb_logger(monkeypatch: pytest.MonkeyPatch, run: FakeRun, log_dir: Path) -> Logger:
    module = SimpleNamespace(
        init=lambda **_: run,
        Settings=lambda **_: None,
        login=lambda **_: True,
        teardown=lambda: None,
        Error=RuntimeError,
        Image=lambda figure: figure,
        Histogram=list,
        Table=lambda columns, data: data,
    )
    monkeypatch.setattr(log_backends, "require", lambda package, switch: module)
    return Logger(LoggerConfig(log_dir=str(log_dir), wandb_enabled=True))


@pytest.mark.parametrize("newest", [0, 7])
def test_wandb_drops_nothing_that_comes_late_and_keeps_its_step(
    newest: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = FakeRun(newest)
    with wandb_logger(monkeypatch, run, tmp_path) as logger:
        for step in (3, 4):
            logger.log_metrics({"accuracy": step}, step, "validation")
            logger.log_metrics({"reward": step}, step, "train", step_finished=True)
        logger.log_metrics({"accuracy": 5}, 4, "validation")
        logger.log_plot("picture", 4, "report")  # type: ignore[arg-type]
        logger.log_table({"sample": ["a"]}, 4, "samples")
        logger.log_metrics({"gpu": 1.0}, 900, "ray", step_metric="ray/seconds")
        logger.log_metrics({"reward": 5}, 5, "train", step_finished=True)
    assert run.dropped == []
    steps = [row for row, _ in run.rows]
    assert steps == sorted(steps)
    assert [payload["step"] for _, payload in run.rows if "step" in payload] == [3, 3, 4, 4, 4, 4, 4, 5]
    for row in set(steps):
        # A row has one step, or what is logged later would rename what was logged before.
        assert len({payload["step"] for step, payload in run.rows if step == row and "step" in payload}) == 1
