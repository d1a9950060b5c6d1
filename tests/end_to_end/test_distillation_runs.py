"""Whole distillation runs of kinds that GRPO's tests do not reach: teachers on slots of their own and in engines, with
each way to train and to generate once.
"""

from __future__ import annotations

import os
import string
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from nemo_rl.utils.metrics_file import read_metrics
from tests import forks
from tests.conftest import ROOT
from tests.glossary import undocumented

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, PROMPTS = 2, 8
# Megatron trains while groups still generate on a slot of their own, and the teacher scores them on a third.
STREAMED: dict[str, Any] = {
    "async_rl": {"min_groups_for_streaming_train": 4, "max_inflight_prompts": 16, "max_buffered_rollouts": 16},
    "policy": {
        "dtensor_cfg": {"enabled": False},
        "megatron_cfg": {"enabled": True},
        "optimizer": None,
        "scheduler": None,
        "generation": {"colocated": {"enabled": False, "resources": {"gpus_per_node": 1}}},
    },
    "teacher": {"colocated": {"enabled": False, "resources": {"gpus_per_node": 1}}},
    "cluster": {"gpus_per_node": 3, "cpu_slots": 4},
}
# An adapter learns from engines on its own slot, on the data plane, on samples of two turns.
TURNS: dict[str, Any] = {
    "distillation": {"max_rollout_turns": 2},
    "policy": {
        "max_total_sequence_length": 512,
        "dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 4}},
        "generation": {
            "max_new_tokens": 8,
            "vllm_cfg": {"max_model_len": 512},
            # A model that knows nothing ends no response by itself, and one that is cut ends its sample.
            "stop_strings": [*string.ascii_letters],
        },
    },
    "teacher": {"backend": "vllm"},
    "data": {
        "max_input_seq_length": 384,
        "train": {
            "_override_": True,
            "dataset_name": "sliding_puzzle",
            "env_name": "sliding_puzzle",
            "num_problems": 8,
            "held_out": 0,
            "task_config": {"size": 2, "shuffle_moves": 6},
            "prompt_file": None,
        },
    },
    "env": {"sliding_puzzle": {"max_moves": 2}},
    "data_plane": {"enabled": True},
}


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    merged = dict(one)
    for key, value in other.items():
        inner = merged.get(key)
        merged[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


@pytest.mark.parametrize("kind", [STREAMED, TURNS], ids=["streamed", "turns"])
def test_a_distillation_trains_with_every_kind_of_teacher(
    kind: dict[str, Any], tiny_model: Path, tmp_path: Path, ray_session: None
) -> None:
    small = {
        "defaults": str(ROOT / "examples" / "configs" / "distillation_arithmetic_cpu.yaml"),
        "distillation": {"num_prompts_per_step": PROMPTS, "max_num_steps": STEPS, "val_at_start": False}
        | {"val_period": 0, "val_at_end": False},
        "policy": {"model_name": str(tiny_model), "train_global_batch_size": PROMPTS, "train_micro_batch_size": 4},
        "teacher": {"model_name": str(tiny_model)},
        "data": {"validation": None},
        "logger": {"log_dir": str(tmp_path / "logs"), "tensorboard_enabled": False},
        "checkpointing": {"enabled": False},
    }
    file = tmp_path / "distillation.yaml"
    file.write_text(yaml.safe_dump(_merged(small, kind)))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = ["examples/run_distillation.py", "--config", str(file)]
    done = forks.run(command, environment, timeout_s=500)
    assert done.returncode == 0, done.stderr[-5000:]
    metrics = read_metrics(tmp_path / "logs")
    steps, losses = metrics.scalars("train/loss")
    assert steps == [*range(1, STEPS + 1)] and undocumented(metrics.series) == []
    # Student and teacher are one model, so that they agree before the first step.
    assert losses[0] == pytest.approx(0.0, abs=1e-5)
    assert all(count > 0 for count in metrics.scalars("train/global_valid_toks")[1])
    if kind is TURNS:
        assert min(metrics.scalars("train/total_turns")[1]) > PROMPTS
    assert all(seconds > 0 for seconds in metrics.scalars("timing/train/teacher_scoring")[1])
