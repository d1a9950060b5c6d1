"""vLLM's own loaders of dense models and of experts are replayed bit for bit."""

from __future__ import annotations

import os

import pytest

from tests import forks

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_plans_of_vllms_own_models_leave_what_their_loaders_leave() -> None:
    environment = os.environ | {"PYTHONPATH": str(forks.ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}
    run = forks.run(["-m", "tests.models.planned_loaders"], environment, timeout_s=280.0)
    assert run.returncode == 0, run.stdout + run.stderr
