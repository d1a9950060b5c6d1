"""Process groups that are dropped and made again, under both training backends, over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.policy_ranks import MEGATRON, dropped_communicators
from tests.ranks import run_ranks

TP2 = "policy.megatron_cfg.tensor_model_parallel_size=2"


@pytest.mark.parametrize("overrides", [[], [*MEGATRON, TP2]], ids=["dtensor", "megatron"])
def test_training_goes_on_bit_for_bit_however_often_communicators_are_dropped(
    tiny_model: Path, overrides: list[str]
) -> None:
    for rank in run_ranks(dropped_communicators, 2, str(tiny_model), 2, overrides):
        assert rank["same"]
        without, with_them = set(rank["groups"][::2]), set(rank["groups"][1::2])
        assert len(without) == len(with_them) == 1 and without.pop() < with_them.pop()
        assert "a train step is open" in rank["refused"]
