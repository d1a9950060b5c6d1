"""Thirty steps of each kind of run: after the second, neither the trainer nor a sleeping engine keeps more than before.

Run where GPUs are: `python -m pytest tests/gpu/test_memory_over_steps.py -v`. Without a GPU every test is skipped. A
copy of the model's weights in half precision, which is the least that a leak of weights keeps, is 100 MiB.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.utils.metrics_file import read_metrics
from tests.gpu.test_grpo_on_gpus import ROOT, needs, run_grpo

STEPS = 30
MOST_GIB = 64 / 1024
ON_A_GPU = (
    "policy.precision=bfloat16",
    "policy.generation.vllm_cfg.gpu_memory_utilization=0.2",
    "policy.generation.vllm_cfg.enforce_eager=true",
    "~policy.generation.vllm_kwargs.kv_cache_memory_bytes",
    "cluster.device=cuda",
    "checkpointing.enabled=false",
)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wide")
    command = [sys.executable, str(ROOT / "examples" / "make_tiny_model.py"), str(directory)]
    command += ["--hidden", "1024", "--layers", "5", "--heads", "8"]
    subprocess.run(command, check=True, timeout=120, env=_environment())
    return directory


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def assert_steady(metrics: Any, name: str, first: int = 2, period: int = 1) -> None:
    """The figure of every step from `first` on is within 64 MiB of the highest of the first `period` of them."""
    steps, values = metrics.scalars(name)
    kept = [value for step, value in zip(steps, values, strict=True) if step >= first]
    assert len(kept) >= STEPS // 2, (name, steps)
    shown = ", ".join(f"{value:.3f}" for value in kept)
    logging.getLogger(__name__).info("%s: %s", name, shown)
    assert max(kept) - max(kept[:period]) <= MOST_GIB, f"{name} grew: {shown} GiB"


KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "without scoring": {"loss_fn": {"reference_policy_kl_penalty": 0.0, "force_on_policy_ratio": True}},
    "scored, with reference": {"loss_fn": {"reference_policy_kl_penalty": 0.01}},
    "two engines on the GPU": {"policy": {"generation": {"vllm_cfg": {"engines_per_gpu": 2}}}},
    "three engines, by host memory": {
        "policy": {"generation": {"vllm_cfg": {"engines_per_gpu": 3}}},
        "weight_sync": {"transport": "host"},
    },
    "lora": {"policy": {"dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 16, "alpha": 32}}}},
    "validation and checkpoints": {
        "grpo": {"val_period": 3, "max_val_samples": 32, "val_batch_size": 32},
        "checkpointing": {"enabled": True, "save_period": 5, "keep_top_k": 1, "metric_name": None},
    },
    "state leaves the GPU every step": {
        "policy": {"offload_optimizer_for_logprob": True},
        "loss_fn": {"reference_policy_kl_penalty": 0.01},
    },
}


@needs[1]
@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_run_keeps_no_more_memory_after_thirty_steps(tmp_path: Path, wide_model: Path, kind: str) -> None:
    sections = {name: dict(section) for name, section in KINDS[kind].items()}
    sections["grpo"] = {"max_num_steps": STEPS, "max_num_epochs": 100} | sections.get("grpo", {})
    if "checkpointing" in sections:
        sections["checkpointing"]["checkpoint_dir"] = str(tmp_path / "checkpoints")
    metrics = run_grpo(tmp_path, wide_model, **sections)
    assert_steady(metrics, "gpu/trainer_allocated_gib")
    # After a validation engines are awake.
    assert_steady(metrics, "gpu/engine_allocated_gib", first=4, period=sections["grpo"].get("val_period", 1))


@needs[1]
@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("kind", ["megatron", "distillation"])
def test_other_kinds_of_runs_keep_no_more_memory(tmp_path: Path, wide_model: Path, kind: str) -> None:
    configs = {"megatron": "grpo_arithmetic_megatron_cpu.yaml", "distillation": "distillation_arithmetic_cpu.yaml"}
    section = "distillation" if kind == "distillation" else "grpo"
    settings = [
        f"policy.model_name={wide_model}",
        *([f"teacher.model_name={wide_model}"] if kind == "distillation" else []),
        f"{section}.num_prompts_per_step=8",
        f"{section}.num_generations_per_prompt=4",
        "policy.train_global_batch_size=32",
    ]
    script = "run_distillation.py" if kind == "distillation" else "run_grpo.py"
    metrics = _run(tmp_path, script, configs[kind], section, settings)
    assert_steady(metrics, "gpu/trainer_allocated_gib")
    assert_steady(metrics, "gpu/engine_allocated_gib", first=4)


def _run(tmp_path: Path, script: str, config: str, section: str, settings: Sequence[str]) -> Any:
    command = [
        *(sys.executable, str(ROOT / "examples" / script), "--config", str(ROOT / "examples" / "configs" / config)),
        *settings,
        f"{section}.max_num_steps={STEPS}",
        f"{section}.val_at_start=false",
        f"{section}.val_at_end=false",
        f"{section}.val_period=0",
        *ON_A_GPU,
        "policy.generation.vllm_kwargs.max_num_seqs=64",
        f"logger.log_dir={tmp_path / 'logs'}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=_environment(), check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return read_metrics(tmp_path / "logs")


@needs[1]
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_adapters_that_train_side_by_side_keep_no_more_memory(tmp_path: Path, wide_model: Path) -> None:
    configs = ROOT / "examples" / "configs" / "multi_lora"
    command = [
        *(sys.executable, str(ROOT / "examples" / "run_multi_lora.py"), "--config", str(configs / "base.yaml")),
        f"policy.model_name={wide_model}",
        f"grpo.max_num_steps={STEPS}",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
        "grpo.num_prompts_per_step=8",
        "grpo.num_generations_per_prompt=4",
        "policy.train_global_batch_size=32",
        *ON_A_GPU,
        f"logger.log_dir={tmp_path / 'logs'}",
        *("--adapters", str(configs / "add.yaml"), str(configs / "reverse.yaml")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=_environment(), check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    found = sorted((tmp_path / "logs").rglob("metrics.jsonl"))
    adapters = [path for path in found if '"gpu"' in path.read_text()]
    assert adapters, found
    for path in adapters:
        assert_steady(read_metrics(path.parent), "gpu/trainer_allocated_gib", first=4)


@needs[2]
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_jobs_that_hand_a_gpu_over_keep_no_more_memory(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "time_sharing.py"), "--shape", "tiny", "--jobs", "2"]
    command += ["--gpus", "2", "--steps", str(STEPS), "--ways", "slots", "--eager", "--work", str(tmp_path)]
    command += ["--prompts", "4", "--generations", "4", "--prompt-tokens", "16", "--new-tokens", "16"]
    command += ["--mean-tokens", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, env=_environment(), check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    jobs = [path for path in sorted(tmp_path.rglob("metrics.jsonl")) if '"gpu"' in path.read_text()]
    assert jobs, list(tmp_path.rglob("metrics.jsonl"))
    for path in jobs:
        assert_steady(read_metrics(path.parent), "gpu/trainer_allocated_gib")
        assert_steady(read_metrics(path.parent), "gpu/engine_allocated_gib", first=4)
