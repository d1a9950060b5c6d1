"""Supervised fine-tuning on real parts: a tiny model on Ray workers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.grpo.run import GRPOState
from nemo_rl.algorithms.resume import NothingToDo, ResumeError
from nemo_rl.algorithms.sft.assembly import setup
from nemo_rl.algorithms.sft.driver import SFTRun, SFTState, sft_train
from nemo_rl.config import SFTMasterConfig
from nemo_rl.config.errors import UserError
from nemo_rl.data.interfaces import DataError
from nemo_rl.distributed import ray_runtime
from nemo_rl.utils.checkpoint import INFO_FILE
from nemo_rl.utils.checkpoint_manifest import write_manifest
from nemo_rl.utils.convert import from_hugging_face
from nemo_rl.utils.metrics_file import read_metrics
from tests.glossary import undocumented


def configured(root: Path, model: Path, **sft: Any) -> SFTMasterConfig:
    problems = {"dataset_name": "arithmetic", "num_problems": 40, "held_out": 10, "max_operand": 9}
    return SFTMasterConfig(
        sft={
            "max_num_steps": 6,
            "max_num_epochs": 10,
            "val_period": 3,
            "val_batches": 0,
            "val_global_batch_size": 4,
            "val_micro_batch_size": 2,
            **sft,
        },
        policy={
            "model_name": str(model),
            "precision": "float32",
            "max_total_sequence_length": 32,
            "train_global_batch_size": 8,
            "train_micro_batch_size": 4,
            "tokenizer": {"chat_template": None},
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 3e-3, "weight_decay": 0.0}},
        },
        data={
            "num_workers": 0,
            "max_input_seq_length": 32,
            "train": {**problems, "split": "train"},
            "validation": {**problems, "split": "validation"},
        },
        cluster={"gpus_per_node": 1, "device": "cpu", "cpu_slots": 4},
        logger={"log_dir": str(root / "logs"), "monitor_gpus": False},
        checkpointing={
            "checkpoint_dir": str(root / "checkpoints"),
            "metric_name": "val:val_loss",
            "higher_is_better": False,
            "save_period": 3,
        },
    )


def trained(config: SFTMasterConfig) -> SFTRun:
    """A finished run; its workers are ended, the session's Ray is not."""
    run = setup(config)
    try:
        sft_train(run)
    finally:
        run.close()
    return run


def weights(checkpoints: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(checkpoints / "latest").state_dict()


@pytest.mark.ray
@pytest.mark.slow
def test_loss_falls_and_a_resumed_run_ends_with_the_same_weights(
    ray_session: None, tiny_model: Path, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run = trained(configured(whole, tiny_model))
    metrics = read_metrics(Path(run.config.logger.log_dir))
    assert undocumented(metrics.series) == []
    validation = metrics.series["validation/val_loss"]
    assert list(validation) == [0, 3, 6], "before the first step, then every val_period"
    assert validation[6] < validation[3] < validation[0]
    assert metrics.series["train/loss"][6] < metrics.series["train/loss"][1]
    assert {"train/grad_norm", "train/lr", "train/global_valid_toks", "timing/train/total_step_time"} <= set(
        metrics.series
    )
    assert "validation/accuracy" not in metrics.series
    info = json.loads((whole / "checkpoints" / "step_6" / "training_info.json").read_text())
    assert (
        info["total_steps"] == 6
        and info["consumed_samples"] == 48
        and info["epoch"] == 1
        and info["val:val_loss"] == validation[6]
    )

    trained(configured(parts, tiny_model, max_num_steps=3))
    resumed = trained(configured(parts, tiny_model))
    assert list(read_metrics(Path(resumed.config.logger.log_dir)).series["train/loss"]) == [1, 2, 3, 4, 5, 6]
    expected, found = weights(whole / "checkpoints"), weights(parts / "checkpoints")
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
    initial = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    assert not all(torch.equal(expected[name], initial[name]) for name in expected)

    # A finished run that is started again has nothing to do, and leaves what it finds.
    before = (parts / "checkpoints" / "step_6" / "training_info.json").stat().st_mtime_ns
    (parts / "checkpoints" / "latest").unlink()
    with pytest.raises(NothingToDo, match=r"already at step 6 of 6; nothing to do.*raise sft\.max_num_steps"):
        setup(configured(parts, tiny_model))
    assert (parts / "checkpoints" / "latest").exists() and not (parts / "logs" / "exp_002").exists()
    assert (parts / "checkpoints" / "step_6" / "training_info.json").stat().st_mtime_ns == before
    shutil.rmtree(parts / "checkpoints" / "step_6")
    assert not (parts / "checkpoints" / "latest").exists(), "latest is a link into the checkpoint, not a copy"

    # Rows that are others than those that it was written with, under the same keys, make another run.
    written = parts / "checkpoints" / "step_3" / "training_info.json"
    info = json.loads(written.read_text())
    assert info["data_contents"].keys() == {"data.train", "data.validation"}
    written.write_text(json.dumps({**info, "data_contents": {"data.train": "40 rows, digest of others"}}))
    write_manifest(written.parent)
    with pytest.raises(ResumeError, match=r"data: data.train: 40 rows, digest of others -> 40 rows, digest [0-9a-f]+"):
        setup(configured(parts, tiny_model))


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray that would not come up: what fails here fails without it."""

    def fail(**_: Any) -> None:
        raise AssertionError("Ray was needed")

    monkeypatch.setattr(ray_runtime, "init_ray", fail)


@pytest.mark.usefixtures("no_ray")
def test_prompts_without_answers_are_refused_before_ray_starts(tiny_model: Path, tmp_path: Path) -> None:
    config = configured(tmp_path, tiny_model)
    config.data.train[0].processor = "math_hf_data_processor"
    with pytest.raises(
        DataError,
        match=r"data\.train\.processor makes prompts without an answer.*set data\.train\.processor: sft_processor",
    ):
        setup(config)


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("where", "value", "says"),
    [
        ("checkpointing.checkpoint_dir", "/dev/null/here", "checkpointing.checkpoint_dir=/dev/null/here"),
        ("logger.log_dir", "/dev/null/logs", "logger.log_dir: /dev/null/logs cannot be written"),
        ("policy.optimizer.name", "torch.optim.AdamV", "has no 'AdamV'"),
        ("policy.dtensor_cfg.tensor_parallel_size", 4, "num_key_value_heads=2"),
    ],
)
def test_what_is_not_there_is_found_before_ray_starts(
    where: str, value: Any, says: str, tiny_model: Path, tmp_path: Path
) -> None:
    config = configured(tmp_path, tiny_model)
    *path, key = where.split(".")
    section: Any = config
    for part in path:
        section = section[part]
    section[key] = value
    with pytest.raises(UserError) as caught:
        setup(config)
    assert says in str(caught.value)


def test_sft_starts_from_a_model_that_was_put_into_a_checkpoint(tiny_model: Path, tmp_path: Path) -> None:
    step = from_hugging_face(tiny_model, tmp_path)
    info = json.loads((step / INFO_FILE).read_text())
    assert (SFTState.from_training_info(info), GRPOState.from_training_info(info)) == (SFTState(), GRPOState())


@pytest.mark.usefixtures("no_ray")
def test_validation_without_data_is_refused_before_ray_starts(tiny_model: Path, tmp_path: Path) -> None:
    config = configured(tmp_path, tiny_model)
    config.data.validation = None
    with pytest.raises(DataError, match=r"validation needs data\.validation"):
        setup(config)
