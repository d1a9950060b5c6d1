"""What a run's checkpoint asks of the policy."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from nemo_rl.algorithms import evaluation, training_loop
from nemo_rl.algorithms.resume import begin_checkpoint
from nemo_rl.algorithms.sft import driver
from nemo_rl.config import CheckpointingConfig, EvalMasterConfig, MasterConfig
from nemo_rl.experience.rollouts import Trajectory
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.metrics_file import MetricsLost
from nemo_rl.utils.timer import Timer


class Policy:
    def save_checkpoint(
        self, weights_path: str, optimizer_path: str | None, tokenizer_path: str | None, save_format: str
    ) -> None:
        self.save_format = save_format
        Path(weights_path).mkdir(parents=True)

    def finalize_async_save(self) -> None:
        pass


class Loader:
    def state_dict(self) -> dict[str, int]:
        return {"batches": 3}


class Sections(SimpleNamespace):
    """A configuration whose sections are attributes and items, as those of the real ones."""

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


@pytest.mark.parametrize(
    ("configured", "asked"), [("torch_save", "torch_save"), ("safetensors", "safetensors"), (None, "safetensors")]
)
def test_weights_are_saved_in_the_configured_format(configured: Any, asked: str, tmp_path: Path) -> None:
    checkpointing = CheckpointingConfig(checkpoint_dir=str(tmp_path), model_save_format=configured)
    policy: Any = Policy()
    with CheckpointManager(checkpointing) as manager:
        begin_checkpoint(
            manager, policy, Loader(), 1, {}, MasterConfig.model_validate({"checkpointing": checkpointing.to_dict()})
        )
    assert policy.save_format == asked
    assert (tmp_path / "step_1" / "policy" / "weights").is_dir()


@pytest.mark.parametrize("full_from", [1, 2, 4])
@pytest.mark.parametrize("what", ["train", "validation", "timing/train"])
def test_sft_that_cannot_write_its_logs_saves_its_last_step_and_ends(
    full_from: int, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Any = Sections(
        checkpointing=CheckpointingConfig(checkpoint_dir=str(tmp_path), save_period=100),
        sft=SimpleNamespace(val_at_start=False, val_period=1, val_at_end=False, max_num_steps=4, max_num_epochs=9),
    )

    def log_metrics(metrics: object, step: int, prefix: str = "", **_: object) -> None:
        if step >= full_from and prefix == what:
            raise MetricsLost("metrics.jsonl cannot be written: no space left on the disk")

    batches = [{"input_lengths": torch.ones(2)}] * 3
    run: Any = MagicMock(config=config, state=driver.SFTState(), train_loader=batches, timer=Timer())
    run.checkpointer = CheckpointManager(config.checkpointing)
    run.logger.log_metrics = log_metrics
    run.timeout.check_save.return_value = False
    saved: list[int] = []

    def step(run: Any, batch: object) -> dict[str, float]:
        run.state.step += 1
        return {"loss": 1.0}

    def validate(run: Any) -> dict[str, float]:
        run.logger.log_metrics({}, run.state.step, prefix="validation")
        return {}

    monkeypatch.setattr(driver, "_step", step)
    monkeypatch.setattr(driver, "validate", validate)
    monkeypatch.setattr(training_loop, "begin_checkpoint", lambda *arguments: saved.append(arguments[3]))
    with pytest.raises(MetricsLost, match="no space left"):
        driver.sft_train(run)
    assert saved[-1] == run.state.step == full_from


def test_sft_ends_although_its_loader_gives_fewer_batches_than_its_length(tmp_path: Path) -> None:
    config: Any = Sections(
        checkpointing=CheckpointingConfig(checkpoint_dir=str(tmp_path), enabled=False),
        sft=SimpleNamespace(val_at_start=False, val_period=0, val_at_end=False, max_num_steps=4, max_num_epochs=3),
    )
    loader = MagicMock()
    loader.__len__.return_value = 2
    loader.__iter__.side_effect = lambda: iter(())
    run: Any = MagicMock(config=config, state=driver.SFTState(), train_loader=loader, timer=Timer())
    run.checkpointer = CheckpointManager(config.checkpointing)
    driver.sft_train(run)
    assert run.state.step == 0 and run.state.epoch == 3


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_result_that_cannot_be_written_is_said(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(code, "No space left on device" if code == errno.ENOSPC else "no")

    monkeypatch.setattr(Path, "write_text", full)
    score = evaluation.Score("pass@1", 0.25, 2.0, 8, 2, 0.5, 0.125, 3.0)
    with pytest.raises(evaluation.ResultNotWritten, match=r"pass@1 0\.2500 of 8 problems with 2 answers .* 12\.5%"):
        evaluation.save(tmp_path, EvalMasterConfig(), score, [])


def test_an_evaluation_keeps_the_result_that_was_there_and_writes_what_was_expected(tmp_path: Path) -> None:
    score = evaluation.Score("pass@1", 0.0, 0.0, 1, 1, 0.0, 0.0, 3.0)
    log: Any = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "3"}]
    answers = [[Trajectory(log, metadata={"ground_truth": "2"}, answer="3")]]
    assert evaluation.save(tmp_path, EvalMasterConfig(), score, answers) is None
    row = json.loads((tmp_path / "samples.jsonl").read_text())
    assert (row["answer"], row["expected"]) == ("3", "2")
    first = (tmp_path / "summary.json").read_text()
    for number in (1, 2):
        assert evaluation.save(tmp_path, EvalMasterConfig(), score, answers) == tmp_path / f"earlier_{number}"
        assert (tmp_path / f"earlier_{number}" / "summary.json").read_text() == first
    assert len(list((tmp_path / "earlier_2").iterdir())) == 4 and (tmp_path / "samples.jsonl").exists()
