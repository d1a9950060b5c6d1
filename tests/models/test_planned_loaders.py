"""vLLM's own loaders of dense models and of experts are replayed bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_plans_of_vllms_own_models_leave_what_their_loaders_leave() -> None:
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-m", "tests.models.planned_loaders"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120.0,
    )
    assert run.returncode == 0, run.stdout + run.stderr
