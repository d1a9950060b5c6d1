"""Megatron's learning rate and weight decay, step by step."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from nemo_rl.config import PolicyConfig, load_master_config
from nemo_rl.models.megatron.megatron_optimizer import build_schedule
from nemo_rl.models.policy.optimizer import OptimizerConfigError

_SHAPE = "policy.megatron_cfg.scheduler"
_RATES = [
    "policy.dtensor_cfg.enabled=false",
    "policy.megatron_cfg.enabled=true",
    "policy.megatron_cfg.optimizer.lr=1.0",
    "policy.megatron_cfg.optimizer.min_lr=0.1",
    f"{_SHAPE}.lr_warmup_iters=2",
    f"{_SHAPE}.lr_warmup_init=0.0",
]


def policy(*overrides: str) -> PolicyConfig:
    return load_master_config(None, [*_RATES, *overrides]).policy


def rates(cfg: PolicyConfig, steps: int, last_step: int | None) -> list[float]:
    """Rate of each step of a run, which ends at `last_step`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = build_schedule(optimizer, cfg, last_step)  # type: ignore[arg-type]
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        schedule.step(increment=1)
    return seen


@pytest.mark.parametrize("style", ["linear", "cosine"])
@pytest.mark.parametrize(("length", "last_step"), [("null", 12), ("12", 40)])
def test_a_decay_ends_at_its_length_or_with_the_run(style: str, length: str, last_step: int) -> None:
    cfg = policy(f"{_SHAPE}.lr_decay_style={style}", f"{_SHAPE}.lr_decay_iters={length}")
    seen = rates(cfg, 14, last_step)
    assert seen[:3] == pytest.approx([0.0, 0.5, 1.0])
    assert seen[7] == pytest.approx(0.55) and seen[12:] == pytest.approx([0.1, 0.1])
    assert all(before > after for before, after in pairwise(seen[2:13]))


@pytest.mark.parametrize("style", ["constant", "cosine"])
def test_a_run_that_ends_in_its_warm_up_keeps_warming_up(style: str) -> None:
    cfg = policy(f"{_SHAPE}.lr_decay_style={style}", f"{_SHAPE}.lr_decay_iters=null", f"{_SHAPE}.lr_warmup_iters=4")
    assert rates(cfg, 4, 3) == pytest.approx([0.0, 0.25, 0.5, 0.75])


def test_a_constant_rate_needs_no_length_and_a_decay_does() -> None:
    assert rates(policy(f"{_SHAPE}.lr_decay_iters=null"), 5, None) == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0])
    with pytest.raises(OptimizerConfigError, match="lr_decay_iters"):
        rates(policy(f"{_SHAPE}.lr_decay_iters=null", f"{_SHAPE}.lr_decay_style=linear"), 1, None)
