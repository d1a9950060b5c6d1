"""Engines that quantise to fp8 agree with their policy after every refit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.skipif(not FP8, reason="needs a GPU that multiplies fp8")
def test_fp8_generation_follows_the_weights_of_its_policy(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.fp8_generation", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    sys.stdout.write(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
