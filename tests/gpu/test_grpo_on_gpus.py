"""The whole loop on real GPUs, small: each placement and weight transport once.

Run where GPUs are: `python -m pytest tests/gpu -v`. Without a GPU every test is skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nemo_rl.config.layers import merge_mappings
from nemo_rl.utils.metrics_file import read_metrics

ROOT = Path(__file__).resolve().parents[2]
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
needs = {count: pytest.mark.skipif(count > GPUS, reason=f"needs {count} GPUs, {GPUS} here") for count in (1, 2)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    command = [sys.executable, str(ROOT / "examples" / "make_tiny_model.py"), str(directory), "--hidden", "128"]
    subprocess.run(command, check=True, timeout=120, env=os.environ | {"PYTHONPATH": _path()})
    return directory


def _path() -> str:
    return os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


def run_grpo(tmp_path: Path, model: Path, **sections: dict[str, Any]) -> Any:
    config: dict[str, Any] = {
        "defaults": str(ROOT / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"),
        "grpo": {
            "num_prompts_per_step": 8,
            "num_generations_per_prompt": 4,
            "max_num_steps": 3,
            "val_at_start": False,
            "val_at_end": False,
            "val_period": 0,
        },
        "policy": {
            "model_name": str(model),
            "precision": "bfloat16",
            "train_global_batch_size": 32,
            "generation": {
                "vllm_cfg": {"gpu_memory_utilization": 0.2, "enforce_eager": True},
                "vllm_kwargs": {"max_num_seqs": 64},
            },
        },
        "cluster": {"device": "cuda", "gpus_per_node": 1},
        "logger": {"log_dir": str(tmp_path / "logs"), "tensorboard_enabled": False},
        "checkpointing": {"enabled": False},
        "weight_sync": {"verify": True},
    }
    config = merge_mappings(config, sections)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [
        sys.executable,
        str(ROOT / "examples" / "run_grpo.py"),
        "--config",
        str(file),
        "~policy.generation.vllm_kwargs.kv_cache_memory_bytes",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=os.environ | {"PYTHONPATH": _path()}, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return read_metrics(tmp_path / "logs")


def assert_engines_agree(metrics: Any) -> None:
    _, values = metrics.scalars("train/token_mult_prob_error")
    # Two bfloat16 implementations of one model differ by rounding only.
    assert len(values) == 3 and max(values) < 1.05, values


@needs[1]
@pytest.mark.parametrize("engines", [1, 3])
def test_colocated_weights_travel_by_cuda_ipc(tmp_path: Path, model: Path, engines: int) -> None:
    shared = {"generation": {"vllm_cfg": {"engines_per_gpu": engines}}}
    assert_engines_agree(run_grpo(tmp_path, model, policy=shared))


@needs[1]
@pytest.mark.parametrize("executor", ["mp", "uni"])
def test_colocated_weights_travel_through_host_memory(tmp_path: Path, model: Path, executor: str) -> None:
    vllm = {"engines_per_gpu": 2, "distributed_executor_backend": executor}
    assert_engines_agree(
        run_grpo(tmp_path, model, policy={"generation": {"vllm_cfg": vllm}}, weight_sync={"transport": "host"})
    )


@needs[2]
@pytest.mark.parametrize(("transport", "engines"), [("auto", 1), ("auto", 2), ("nccl", 1)])
def test_separate_placement(tmp_path: Path, model: Path, transport: str, engines: int) -> None:
    colocated = {"enabled": False, "resources": {"gpus_per_node": 1}}
    placement = {"generation": {"colocated": colocated, "vllm_cfg": {"engines_per_gpu": engines}}}
    assert_engines_agree(
        run_grpo(tmp_path, model, policy=placement, cluster={"gpus_per_node": 2}, weight_sync={"transport": transport})
    )


@needs[2]
def test_one_session_reaches_a_rank_by_cuda_ipc_and_another_by_its_group(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "weight_sync.py"),
        "--shape",
        "tiny",
        "--tp",
        "2",
        "--transport",
        "nccl",
        "--share",
        "--verify",
    ]
    command += ["--cycles", "2", "--refreshes", "0", "--work", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=os.environ | {"PYTHONPATH": _path()}, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert "transport cuda_ipc+nccl, 2 cycles" in done.stdout


@needs[2]
def test_two_ranks_shard_the_policy_and_generation_is_tensor_parallel(tmp_path: Path, model: Path) -> None:
    parallel = {"generation": {"vllm_cfg": {"tensor_parallel_size": 2}}}
    assert_engines_agree(run_grpo(tmp_path, model, policy=parallel, cluster={"gpus_per_node": 2}))


@needs[2]
def test_the_policy_is_tensor_parallel_too(tmp_path: Path, model: Path) -> None:
    parallel = {"dtensor_cfg": {"tensor_parallel_size": 2, "sequence_parallel": True}}
    assert_engines_agree(run_grpo(tmp_path, model, policy=parallel, cluster={"gpus_per_node": 2}))
