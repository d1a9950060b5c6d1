"""A real policy worker computes the same from rows it fetches as from a batch it is given, with prompts shared within a
batch: what `test_same_numbers` trains in whole runs has other cuts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data_plane.plane_ranks import both_ways
from tests.ranks import run_ranks

SHARED = [
    "loss_fn.reference_policy_kl_penalty=0",
    "policy.sequence_packing.enabled=true",
    "policy.sequence_packing.share_prompts=true",
    "policy.sequence_packing.train_mb_tokens=64",
]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], ["policy.dtensor_cfg.tensor_parallel_size=2"]], ids=["dp2", "tp2"])
def test_fetched_rows_train_the_same(overrides: list[str], tiny_model: Path) -> None:
    for rank, answer in enumerate(run_ranks(both_ways, 2, str(tiny_model), 2, [*SHARED, *overrides])):
        direct, fetched = answer["direct"], answer["fetched"]
        assert direct["train"] == fetched["train"], rank
        assert direct["weights"] == fetched["weights"], rank
        assert "scores" not in fetched or direct["scores"] == fetched["scores"], rank
