"""The load-balancing loss of Megatron's routers: its gradient is the loss's own, whatever divides the step's gradient
and however ranks share the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.policy_ranks import MEGATRON
from tests.models.replay_ranks import balanced_steps, balancing_gradient
from tests.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

KEY, WEIGHT = "policy.megatron_cfg", 0.5
CORE = [*MEGATRON, f"{KEY}.optimizer.use_distributed_optimizer=false", "policy.sequence_packing.enabled=false"]
BALANCED = [f"{KEY}.moe_router_load_balancing_type=aux_loss", f"{KEY}.moe_aux_loss_coeff={WEIGHT}"]
LEVELS = {"tokens": "loss_fn.token_level_loss=true", "sequences": "loss_fn.token_level_loss=false"}
TP2 = [f"{KEY}.tensor_model_parallel_size=2", f"{KEY}.sequence_parallel=true", f"{KEY}.expert_tensor_parallel_size=2"]
TWO = {
    "dp 2": [],
    "tp 2": TP2,
    "cp 2": [f"{KEY}.context_parallel_size=2"],
    "ep 2": [f"{KEY}.expert_model_parallel_size=2"],
    "pp 2, layers recomputed": [f"{KEY}.pipeline_model_parallel_size=2", f"{KEY}.activation_checkpointing=true"],
}
# What divides the gradient is a count over data-parallel ranks: other splits meet one of the two.
BOTH = [
    *(("dp 2", level) for level in LEVELS),
    ("tp 2", "tokens"),
    ("cp 2", "sequences"),
    ("ep 2", "sequences"),
    ("pp 2, layers recomputed", "tokens"),
]


def _cases(how: dict[str, list[str]]) -> dict[str, list[str]]:
    return {
        f"{name} by {level}{extra}": [*CORE, *overrides, switch, *(BALANCED if extra else [])]
        for name, overrides in how.items()
        for level, switch in LEVELS.items()
        for extra in ("", ", balanced")
    }


@pytest.fixture(scope="module")
def one(tiny_moe_model: Path) -> dict[str, Any]:
    return run_ranks(balanced_steps, 1, str(tiny_moe_model), 1, _cases({"one": []}))[0]


@pytest.fixture(scope="module")
def two(tiny_moe_model: Path) -> list[dict[str, Any]]:
    cases = _cases(TWO)
    chosen = {name: cases[name] for name in (f"{case} by {level}, balanced" for case, level in BOTH)}
    return run_ranks(balanced_steps, 2, str(tiny_moe_model), 2, chosen)


@pytest.mark.parametrize("level", LEVELS)
def test_the_gradient_is_that_of_the_loss_weighed_by_what_divides_it(
    one: dict[str, Any], tiny_moe_model: Path, level: str
) -> None:
    want, mean = balancing_gradient(str(tiny_moe_model), tokens=level == "tokens")
    plain, balanced = one[f"one by {level}"], one[f"one by {level}, balanced"]
    compared = [name for name in want if ".experts." not in name]
    assert len([name for name in compared if name.endswith("mlp.gate.weight")]) == 2
    for name in compared:
        got = (balanced["gradient"][name].astype(np.float64) - plain["gradient"][name]) / WEIGHT
        # The difference of two gradients is as exact as they are.
        exact = 1e-6 * np.abs(plain["gradient"][name]).max() / WEIGHT
        np.testing.assert_allclose(got, want[name], rtol=1e-3, atol=exact + 1e-3 * np.abs(want[name]).max())
    assert plain["measured"] == {}
    assert balanced["measured"]["moe/load_balancing_loss"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize(("case", "level"), BOTH)
def test_two_ranks_have_the_gradient_of_one(
    one: dict[str, Any], two: list[dict[str, Any]], case: str, level: str
) -> None:
    want = one[f"one by {level}, balanced"]
    for rank in two:
        got = rank[f"{case} by {level}, balanced"]
        assert got["measured"]["moe/load_balancing_loss"] == pytest.approx(
            want["measured"]["moe/load_balancing_loss"], rel=1e-5
        )
        for name, gradient in want["gradient"].items():
            error = np.linalg.norm(got["gradient"][name] - gradient)
            assert error <= 2e-5 * np.linalg.norm(gradient) + 1e-6, name
