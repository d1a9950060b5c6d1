"""A group over NCCL is held beyond its deadline, and left by one member after the other.

Run where GPUs are: `python -m pytest tests/gpu -v`. Without two GPUs it is skipped; over gloo more of it is tested in
`tests/weight_sync/test_kept_group.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nemo_rl.distributed.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.mark.slow
@pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, {GPUS} here")
def test_a_group_is_held_beyond_its_deadline_and_gives_its_memory_back(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    outputs = [tmp_path / f"{rank}.json" for rank in range(2)]
    members = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.kept_group_rank", str(rank), str(port), str(output)],
            env=environment,
            cwd=ROOT,
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        assert [member.wait(timeout=200) for member in members] == [0, 0]
    finally:
        for member in members:
            member.kill()
            member.wait()
    for output in outputs:
        said = json.loads(output.read_text())
        assert said["received"] == [[1.0, 1.0], [2.0, 2.0]]
        assert said["freed"] > said["held"]
