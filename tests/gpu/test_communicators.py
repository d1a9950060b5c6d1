"""Communicators on two GPUs: dropped, their memory comes back; made again, training goes on as if nothing had been.

Run where GPUs are: `python -m pytest tests/gpu -v`. Without two GPUs every test is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.distributed.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.slow, pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, {GPUS} here")]

TIMES = 5
CASES = {
    "dtensor": ["policy.dtensor_cfg.tensor_parallel_size=2"],
    "megatron": ["policy.megatron_cfg.tensor_model_parallel_size=2"],
}


@pytest.mark.parametrize("backend", CASES)
def test_dropped_communicators_give_their_memory_back_as_often_as_wanted(backend: str, tmp_path: Path) -> None:
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    ranks = _measured(backend, tmp_path)
    for rank in ranks:
        held = rank["without"][0] - rank["with"][0]
        assert held > 0, "communicators held nothing that could come back"
        for free_with, free_without in zip(rank["with"], rank["without"], strict=True):
            assert free_without - free_with >= 0.7 * held
        # Nothing grows: what is free without communicators stays within a few MiB.
        assert rank["without"][-1] >= rank["without"][0] - (32 << 20)
        assert rank["losses"] == rank["losses kept"]
        assert rank["weights"] == rank["weights kept"]


def _measured(backend: str, tmp_path: Path) -> list[dict[str, Any]]:
    model = tmp_path / "model"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    make = [sys.executable, str(ROOT / "examples" / "make_tiny_model.py"), str(model), "--hidden", "128"]
    subprocess.run(make, check=True, timeout=120, env=os.environ | {"PYTHONPATH": path})
    (port,) = free_ports(1)
    ranks = []
    for rank in range(2):
        environment = os.environ | {
            "PYTHONPATH": path,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[rank],
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }
        line = [
            sys.executable,
            "-m",
            "tests.gpu.communicator_rank",
            backend,
            str(model),
            str(tmp_path / f"{rank}.json"),
        ]
        ranks.append(subprocess.Popen(line, env=environment, cwd=ROOT))
    try:
        assert [process.wait(timeout=400) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
