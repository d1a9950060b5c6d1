"""What has to hold on GPUs before scenarios are run there: engines and training that take turns, alone and on a pool.

`python -m pytest tests/gpu -m gate` runs them on two GPUs. NRL_GATES_DEVICE=cpu runs them on two CPU slots instead,
which shows everything but memory. docs/benchmarks.md has the table of what passed where.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nemo_rl.time_sharing.log.reading import merge_by_machine_time
from nemo_rl.utils.metrics_file import read_metrics
from nemo_rl.utils.record_events import ShardSlept, ShardWoken, StepFinished, SyncFinished, VersionPublished
from tests.gpu.conftest import save_model, short_run

ROOT = Path(__file__).resolve().parents[2]
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
DEVICE = os.environ.get("NRL_GATES_DEVICE", "cuda")
CUDA = DEVICE == "cuda"
pytestmark = [
    pytest.mark.gate,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(CUDA and GPUS < 2, reason=f"needs 2 GPUs, {GPUS} here; NRL_GATES_DEVICE=cpu needs none"),
]

STEPS = 3
_MEGATRON = {"dtensor_cfg": {"enabled": False}, "megatron_cfg": {"enabled": True}}


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_gates_2_and_2_5_and_memory_an_engine_and_training_take_turns_on_two_gpus(backend: str, tmp_path: Path) -> None:
    """The engine sleeps and wakes with the right weights (2); train, cache, drop groups, wake, sync, rebuild, with
    equal SHA-256 of cache and engine, and 70 % of what groups held comes back (2.5); 90 % of training state comes
    back, and the cache is the same bits after the round trip (memory).
    """
    said = _run([sys.executable, "-m", "tests.gpu.gate_engine", str(tmp_path), DEVICE, backend], 600)
    assert "gates 2, 2.5 and memory: 3 cycles, SHA-256 equal" in said
    sys.stdout.write(said[said.index("gates 2") :])


@pytest.mark.parametrize("adapters", [False, True], ids=["alone", "beside adapters"])
@pytest.mark.parametrize("gate", [3, 4])
def test_gates_3_and_4_jobs_of_megatron_core_take_turns_on_a_pool(gate: int, adapters: bool, tmp_path: Path) -> None:
    """One job (3) or two (4) that train on a GPU each and generate ahead of training on both: the engine on the
    training GPU sleeps while it trains and wakes with the new weights, the other is refreshed while it serves.
    """
    save_model(tmp_path / "model", **({"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 4} if CUDA else {}))
    files = [_fine_tuning(tmp_path, f"job{gpu}", gpu) for gpu in range(gate - 2)]
    files += [_adapters(tmp_path)] if adapters else []
    line = [sys.executable, "examples/run_time_sharing.py", "--gpus", "2", "--device", DEVICE, "--port", "0"]
    said = _run([*line, "--log-dir", str(tmp_path / "pool"), "--pipelines", *map(str, files)], 840)
    assert "record kept every invariant" in said
    entries = list(merge_by_machine_time(sorted((tmp_path / "pool" / "latest").glob("*.jsonl"))))
    for gpu in range(gate - 2):
        events = [entry.event for entry in entries if entry.source.startswith(f"job{gpu}/")]
        assert [event.version for event in events if isinstance(event, StepFinished)] == list(range(1, STEPS + 1))
        assert {event.version for event in events if isinstance(event, VersionPublished)} >= {*range(1, STEPS)}
        # Its own engine leaves for training and comes back; sessions bring each version, none of them half.
        slept = [event for event in events if isinstance(event, ShardSlept) and event.shard == gpu]
        assert slept and any(isinstance(event, ShardWoken) and event.shard == gpu for event in events)
        synced = [event.outcome for event in events if isinstance(event, SyncFinished)]
        assert len(synced) >= STEPS - 1 and set(synced) == {"done"}
        if CUDA:
            freed = [event.freed_bytes for event in slept]
            assert min(freed) >= 0.9 * max(freed), freed
        (logged,) = (tmp_path / f"job{gpu}" / "logs").glob("exp_*")
        _, errors = read_metrics(logged).scalars("train/token_mult_prob_error")
        assert len(errors) == STEPS and max(errors) < 1.05, errors
    if adapters:
        steps = [entry.source for entry in entries if isinstance(entry.event, StepFinished)]
        assert all(steps.count(f"adapters:{name}/driver") == STEPS for name in ("one", "two")), steps
        assert "one 3/3, two 3/3" in said


def _run(line: list[str], timeout_s: float) -> str:
    """What a command says; it has to end well."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"RAY_ADDRESS": "local"}
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=timeout_s, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return f"{done.stderr}\n{done.stdout}"


def _recipe(
    folder: Path, name: str, defaults: str, gpus: int, policy: Mapping[str, Any], **sections: Any
) -> dict[str, Any]:
    generation: dict[str, Any] = {"vllm_kwargs": {"max_num_seqs": 64}}
    if CUDA:
        generation["vllm_cfg"] = {"enforce_eager": True, "gpu_memory_utilization": 0.3}
        generation["vllm_kwargs"]["kv_cache_memory_bytes"] = 2 << 30
    return {
        "defaults": str(ROOT / "examples" / "configs" / defaults),
        "grpo": short_run(STEPS),
        "policy": {
            "model_name": str(folder / "model"),
            "precision": "bfloat16" if CUDA else "float32",
            "train_global_batch_size": 32,
            "train_micro_batch_size": 8,
            "generation": generation,
            **policy,
        },
        "cluster": {"device": DEVICE, "gpus_per_node": gpus},
        "logger": {"log_dir": str(folder / name / "logs"), "tensorboard_enabled": False},
        "checkpointing": {"checkpoint_dir": str(folder / name / "checkpoints"), "save_period": 1, "metric_name": None},
        **sections,
    }


def _fine_tuning(folder: Path, name: str, trains_on: int) -> Path:
    """A wrapper of a job with Megatron-Core that generates ahead of training; its path."""
    recipe = _recipe(folder, name, "grpo_arithmetic_async_cpu.yaml", 2, _MEGATRON, weight_sync={"verify": True})
    # Samples of a step are few: at eight of them to an engine both are of use.
    wrapper = {"train_device_mapping": [trains_on], "infer_device_mapping": [0, 1], "rank_batch": 8}
    return _wrapped(folder, name, recipe, wrapper)


def _adapters(folder: Path) -> Path:
    """A wrapper of a job of two adapters on the second GPU; its path."""
    for name in ("one", "two"):
        task = ROOT / "examples" / "configs" / "multi_lora" / f"{ {'one': 'add', 'two': 'sort'}[name] }.yaml"
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"defaults": str(task)}))
    recipe = _recipe(folder, "adapters", "multi_lora/base.yaml", 1, {}, multi_lora={"slots": 2})
    wrapper = {"adapters": ["one.yaml", "two.yaml"], "infer_device_mapping": [1]}
    return _wrapped(folder, "adapters", recipe, wrapper)


def _wrapped(folder: Path, name: str, recipe: Mapping[str, Any], wrapper: Mapping[str, Any]) -> Path:
    (folder / f"{name}_recipe.yaml").write_text(yaml.safe_dump(recipe))
    path = folder / f"{name}_job.yaml"
    path.write_text(yaml.safe_dump({"exp_name": name, "nemo_config_path": f"{name}_recipe.yaml", **wrapper}))
    return path
