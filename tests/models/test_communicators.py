"""Process groups that are dropped and made again, under both training backends, over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.policy_ranks import MEGATRON, dropped_communicators
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

CASES = {
    "dtensor": ["policy.dtensor_cfg.tensor_parallel_size=2"],
    "megatron": [*MEGATRON, "policy.megatron_cfg.tensor_model_parallel_size=2"],
}


@pytest.fixture(scope="module")
def two(tiny_model: Path) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(dropped_communicators, 2, str(tiny_model), 2, CASES)


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_bit_for_bit_however_often_communicators_are_dropped(
    two: list[dict[str, dict[str, Any]]], case: str
) -> None:
    for rank in two:
        seen = rank[case]
        assert seen["same"]
        assert seen["searches"] == 1, "whoever holds a group is remembered"
        without, with_them = set(seen["groups"][::2]), set(seen["groups"][1::2])
        assert len(without) == len(with_them) == 1 and without.pop() < with_them.pop()
        assert "a train step is open" in seen["refused"]
