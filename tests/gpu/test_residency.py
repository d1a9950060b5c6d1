"""Training state that leaves the GPU between steps, and comes back bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.policy_ranks import moved_steps
from tests.ranks import run_ranks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_steps_between_which_everything_leaves_the_gpu_train_the_same_bits(tiny_model: Path) -> None:
    settings = ["cluster.device=cuda", "policy.precision=bfloat16", "policy.dtensor_cfg.torch_compile=false"]
    (stayed, _), *_ = run_ranks(moved_steps, 1, str(tiny_model), 1, settings, False)
    (moved, used), *_ = run_ranks(moved_steps, 1, str(tiny_model), 1, settings, True)
    assert moved == stayed
    assert all(between < resident for resident, between in used)
