"""Pretrained models on a machine without a GPU.

`NRL_REAL_MODELS` names a folder with Hugging Face directories (`smollm2-135m`, `gemma3-270m`); without it, or where one
is missing, these tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl.config.layers import merge_mappings

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "NRL_REAL_MODELS"


def _model(name: str) -> Path:
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"{VARIABLE} names no folder of pretrained models")
    path = Path(folder) / name
    if not (path / "config.json").exists():
        pytest.skip(f"{VARIABLE}={folder} holds no {name}")
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, with its own chat template."""
    return _model("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M: tied and scaled embeddings, sliding windows, no chat template."""
    return _model("gemma3-270m")


JUDGE = """
import re


def right(response, expected):
    numbers = re.findall(r"-?[0-9]+", response)
    return float(bool(numbers) and numbers[-1] == str(expected))
"""
JUDGED = {"sums": {"function": "summing.right"}}
SUMS = {"dataset_name": "reasoning_gym", "task": "chain_sum", "num_problems": 100, "held_out": 64}
# Two numbers of one digit: what the small models can sometimes add.
SUMS |= {"task_config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


def settings(model: Path, folder: Path, samples: int, **sections: dict[str, Any]) -> dict[str, Any]:
    """A small run of `samples` samples a step on one CPU slot: sums of two digits, judged by the last number of an
    answer. `folder` gets the judge, and is where the run is started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summing.py").write_text(JUDGE)
    config: dict[str, Any] = {
        "defaults": str(ROOT / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"),
        "grpo": {
            "num_prompts_per_step": samples // 4,
            "num_generations_per_prompt": 4,
            "max_num_steps": 1,
            "val_at_start": False,
            "val_at_end": False,
            "val_period": 0,
        },
        "loss_fn": {"reference_policy_kl_penalty": 0.0},
        "policy": {
            "model_name": str(model),
            "max_total_sequence_length": 96,
            "train_global_batch_size": samples,
            "train_micro_batch_size": 4,
            "logprob_batch_size": 8,
            "tokenizer": {"name": str(model), "chat_template": "default"},
            "optimizer": {"kwargs": {"lr": 1.0e-5}},
            "sequence_packing": {"train_mb_tokens": 512, "logprob_mb_tokens": 1024},
            "generation": {"max_new_tokens": 24, "vllm_cfg": {"max_model_len": 96}},
        },
        "data": {
            "max_input_seq_length": 64,
            "train": SUMS | {"split": "train", "env_name": "sums"},
            "validation": None,
        },
        "env": dict(JUDGED),
        "cluster": {"cpu_slots": 1},
        "logger": {"log_dir": str(folder / "logs"), "tensorboard_enabled": False},
        "checkpointing": {"enabled": False, "checkpoint_dir": str(folder / "checkpoints")},
        "weight_sync": {"verify": False},
    }
    return merge_mappings(config, sections)


def start(command: Sequence[str], folder: Path, config: dict[str, Any] | None = None) -> str:
    """Runs a script of `examples/` in a folder, with a configuration of its own; what it printed. Where it waits for
    ever, the test's own deadline ends it.
    """
    script, *arguments = command
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        arguments += ["--config", str(folder / "config.yaml")]
    paths = os.pathsep.join([str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[[str, dict[str, Any]], str]:
    """Runs a file of `examples/`."""
    return lambda name, config: start([name], tmp_path, config)
