"""A foreign sync service brings weights to a live engine on another GPU over NCCL, by the receiver's methods.

Run where GPUs are: `python -m pytest tests/gpu -v`. Without two GPUs it is skipped; over gloo the same is tested on CPU
slots in `tests/stress/test_elastic_engines.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.mark.slow
@pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, {GPUS} here")
def test_weights_that_are_broadcast_are_those_that_draw_the_next_tokens(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    model = tmp_path / "model"
    make = [sys.executable, str(ROOT / "examples" / "make_tiny_model.py"), str(model), "--hidden", "128"]
    subprocess.run(make, check=True, timeout=120, env=environment)
    line = [sys.executable, "-m", "tests.gpu.broadcast_to_engine", str(model)]
    done = subprocess.run(line, check=False, capture_output=True, text=True, timeout=400, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-6000:]
