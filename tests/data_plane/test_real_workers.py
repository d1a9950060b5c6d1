"""A real policy worker computes the same from rows it fetches as from a batch it is given, however the batch is cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data_plane.plane_ranks import both_ways
from tests.ranks import run_ranks

NO_KL = "loss_fn.reference_policy_kl_penalty=0"
CUTS = {
    "plain": [],
    "packed": ["policy.sequence_packing.enabled=true"],
    "packed, prompts shared": [
        "policy.sequence_packing.enabled=true",
        "policy.sequence_packing.share_prompts=true",
        "policy.sequence_packing.train_mb_tokens=64",
    ],
    "dynamic": ["policy.dynamic_batching.enabled=true"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "overrides"), [(2, []), (2, ["policy.dtensor_cfg.tensor_parallel_size=2"])], ids=["dp2", "tp2"]
)
def test_fetched_rows_train_the_same(world: int, overrides: list[str], tiny_model: Path) -> None:
    cases = {name: [NO_KL, *cut, *overrides] for name, cut in CUTS.items()}
    for rank, answers in enumerate(run_ranks(both_ways, world, str(tiny_model), world, cases)):
        for name, answer in answers.items():
            direct, fetched = answer["direct"], answer["fetched"]
            assert direct["train"] == fetched["train"], (name, rank)
            assert direct["weights"] == fetched["weights"], (name, rank)
            assert "scores" not in fetched or direct["scores"] == fetched["scores"], (name, rank)
