"""A resumed run's learning rate: the configuration's, at the step where the run is, on both backends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.policy_ranks import MEGATRON
from tests.models.schedule_ranks import resumed_rates
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

LINEAR = "policy.scheduler={{name: torch.optim.lr_scheduler.LinearLR, kwargs: {{start_factor: 0.1, total_iters: {}}}}}"
_RATES, _SHAPE = "policy.megatron_cfg.optimizer", "policy.megatron_cfg.scheduler"
CASES = {
    "dtensor, another rate": ([LINEAR.format(4)], ["policy.optimizer.kwargs.lr=0.003"]),
    "dtensor, a longer warm-up": ([LINEAR.format(4)], [LINEAR.format(8)]),
    "megatron, another rate": ([*MEGATRON], [f"{_RATES}.lr=0.02"]),
    "megatron, a longer warm-up": ([*MEGATRON], [f"{_SHAPE}.lr_warmup_iters=4"]),
    "megatron, a longer decay": (
        [*MEGATRON, f"{_SHAPE}.lr_warmup_iters=0", f"{_SHAPE}.lr_decay_style=linear", f"{_SHAPE}.lr_decay_iters=4"],
        [f"{_SHAPE}.lr_decay_iters=8", f"{_RATES}.min_lr=0.001"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_has_the_rate_of_its_step_and_its_configuration(
    case: str, tiny_model: Path, tmp_path: Path
) -> None:
    overrides, changed = CASES[case]
    seen = run_ranks(resumed_rates, 1, str(tiny_model), str(tmp_path), overrides, changed)[0]
    assert seen["changed"][:2] != seen["unchanged"] and seen["changed"][2] not in seen["changed"][:2]
    assert seen["with state"] == seen["without state"] == pytest.approx(seen["changed"][2:], rel=1e-9)
