"""What needs four GPUs: engines over all of them that share a pool with training over two, and the backends' splits.

Run where GPUs are: `python -m pytest tests/gpu -v`. Without four GPUs every test is skipped. `share_a_pool` and
`compare_backends` also run on CPU slots.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from nemo_rl.distributed.ports import free_ports
from nemo_rl.time_sharing.log.reading import merge_by_machine_time
from nemo_rl.utils.metrics_file import read_metrics
from nemo_rl.utils.record_events import ShardSlept, StepFinished, VersionPublished
from tests.gpu.conftest import short_run
from tests.models.policy_ranks import MEGATRON

ROOT = Path(__file__).resolve().parents[2]
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.slow, pytest.mark.skipif(GPUS < 4, reason=f"needs 4 GPUs, {GPUS} here")]

STEPS = 4
_MEGATRON = "policy.megatron_cfg"
_FOUR_PARTS = [
    *MEGATRON,
    f"{_MEGATRON}.optimizer.use_distributed_optimizer=false",
    f"{_MEGATRON}.tensor_model_parallel_size=2",
    f"{_MEGATRON}.pipeline_model_parallel_size=2",
]
PLAIN = ["policy.scheduler=null", "policy.optimizer.kwargs={lr: 0.005, weight_decay: 0.0, betas: [0.9, 0.999]}"]
SPLITS = {
    "DTensor, tensor parallel": [*PLAIN, "policy.dtensor_cfg.tensor_parallel_size=2"],
    "Megatron, tensor and pipeline parallel": _FOUR_PARTS,
    "Megatron, the same, packed and sequence parallel": [
        *_FOUR_PARTS,
        f"{_MEGATRON}.sequence_parallel=true",
        "policy.sequence_packing.enabled=true",
    ],
}


def test_an_engine_over_all_gpus_and_training_over_two_share_a_pool_with_another_job(tmp_path: Path) -> None:
    share_a_pool(tmp_path, "cuda", 4)


def test_both_backends_split_over_four_gpus_compute_the_step_of_one(tmp_path: Path) -> None:
    compare_backends(tmp_path, "cuda", 4)


def share_a_pool(folder: Path, device: str, gpus: int) -> None:
    """Two jobs train on halves of the GPUs, tensor parallel; one generates with an engine over all of them, which is
    the only one that it has, the other with an engine on each.
    """
    half = gpus // 2
    model = _model(folder)
    wide = {"tensor_parallel_size": gpus}
    files = [
        _job(folder, model, "wide", device, wide, list(range(half)), gpus),
        _job(folder, model, "narrow", device, {}, list(range(half, gpus)), gpus),
    ]
    line = [sys.executable, "examples/run_time_sharing.py", "--gpus", str(gpus), "--device", device, "--port", "0"]
    line += ["--log-dir", str(folder / "pool"), "--pipelines", *map(str, files)]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=500, env=_environment(), cwd=ROOT, check=False)
    assert ended.returncode == 0, ended.stderr[-6000:]
    assert "record kept every invariant" in ended.stderr

    entries = list(merge_by_machine_time(sorted((folder / "pool" / "latest").glob("*.jsonl"))))
    for name in ("wide", "narrow"):
        events = [entry.event for entry in entries if entry.source.startswith(f"{name}/")]
        steps = [event.version for event in events if isinstance(event, StepFinished)]
        assert steps == list(range(1, STEPS + 1))
        assert {event.version for event in events if isinstance(event, VersionPublished)} >= set(steps[:-1])
        slept = [event for event in events if isinstance(event, ShardSlept)]
        assert slept
        if name == "wide":
            # It has one shard, which leaves as a whole whenever its job trains.
            assert len(slept) >= STEPS and {event.shard for event in slept} == {0}
        # Nothing grows: what an engine gives back stays what it was.
        freed = [event.freed_bytes for event in slept if event.shard == slept[0].shard]
        assert min(freed) >= 0.9 * max(freed), freed
        (logged,) = (folder / name).glob("exp_*")
        _, errors = read_metrics(logged).scalars("train/token_mult_prob_error")
        # Every refit is verified by checksums; beside them two implementations differ by rounding only.
        assert len(errors) == STEPS and max(errors) < 1.05, errors


def compare_backends(folder: Path, device: str, ranks: int) -> None:
    """A step of a fixed batch in float32: loss, norm and every gradient of each split against DTensor's on one."""
    model = str(_model(folder))
    ((alone,),) = _steps(folder, model, device, 1, [PLAIN])
    for rank in _steps(folder, model, device, ranks, list(SPLITS.values())):
        for name, got in zip(SPLITS, rank, strict=True):
            assert got["loss"] == pytest.approx(alone["loss"], abs=1e-5), name
            assert got["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4), name
            error = np.linalg.norm(got["gradient"] - alone["gradient"]) / np.linalg.norm(alone["gradient"])
            assert error < 1e-4, name


def _steps(folder: Path, model: str, device: str, ranks: int, cases: list[list[str]]) -> list[Any]:
    """What every rank found in each case. Ranks are processes of their own: a fork cannot use CUDA that its parent has
    touched, and importing Megatron-Core touches it.
    """
    (port,) = free_ports(1)
    outputs = [folder / f"{rank}_of_{ranks}.pickle" for rank in range(ranks)]
    seen = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(ranks)))).split(",")
    processes = []
    for rank, output in enumerate(outputs):
        environment = _environment() | {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }
        if device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = seen[rank]
        line = [sys.executable, "-m", "tests.gpu.split_ranks", model, device, str(output), json.dumps(cases)]
        processes.append(subprocess.Popen(line, env=environment, cwd=ROOT))
    try:
        assert [process.wait(timeout=300) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [pickle.loads(output.read_bytes()) for output in outputs]


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def _model(folder: Path) -> Path:
    model = folder / "model"
    make = [sys.executable, str(ROOT / "examples" / "make_tiny_model.py"), str(model), "--hidden", "128"]
    subprocess.run(make, check=True, timeout=120, env=_environment())
    return model


def _job(
    folder: Path, model: Path, name: str, device: str, vllm: dict[str, Any], trains_on: list[int], gpus: int
) -> Path:
    """A wrapper and its configuration; the path of the wrapper."""
    cuda = {"enforce_eager": True} if device == "cuda" else {}
    memory = {"kv_cache_memory_bytes": 4 << 30} if device == "cuda" else {}
    config = {
        "defaults": str(ROOT / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"),
        "grpo": short_run(STEPS),
        "policy": {
            "model_name": str(model),
            "precision": "bfloat16" if device == "cuda" else "float32",
            "train_global_batch_size": 32,
            "dtensor_cfg": {"tensor_parallel_size": len(trains_on), "sequence_parallel": True},
            "generation": {"vllm_cfg": cuda | vllm, "vllm_kwargs": {"max_num_seqs": 64} | memory},
        },
        "cluster": {"device": device, "gpus_per_node": gpus, "cpu_slots": gpus},
        "logger": {"log_dir": str(folder / name), "tensorboard_enabled": False},
        "checkpointing": {"enabled": False},
        "weight_sync": {"verify": True},
    }
    (folder / f"{name}_config.yaml").write_text(yaml.safe_dump(config))
    wrapper = {
        "exp_name": name,
        "nemo_config_path": f"{name}_config.yaml",
        "train_device_mapping": trains_on,
        "infer_device_mapping": list(range(gpus)),
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(wrapper))
    return path
