"""Sharding by lengths alone gives the very shards and microbatches that sharding the batch gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.data_plane import KVBatchMeta
from nemo_rl.data_plane.sharding import PLAN, WIDTH, shard_meta_for_dp
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

PACKING: Any = {"max_tokens_per_microbatch": 4096, "input_key": "input_ids", "input_lengths_key": "input_lengths"}
PACKING |= {"algorithm": "modified_first_fit_decreasing", "sequence_length_pad_multiple": 64}
DYNAMIC: Any = {
    "max_tokens_per_microbatch": 4096,
    "sequence_length_round": 64,
    "input_key": "input_ids",
    "input_lengths_key": "input_lengths",
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": {"sequence_packing_args": PACKING},
    "dynamic": {"dynamic_batching_args": DYNAMIC},
}


def rows(lengths: list[int]) -> tuple[KVBatchMeta, BatchedDataDict[Any]]:
    meta = KVBatchMeta(
        "train", None, [str(n) for n in range(len(lengths))], ["input_ids"], lengths, {"pad_to_multiple": 64}
    )
    width = -(-max(lengths) // 64) * 64
    batch = BatchedDataDict(
        input_ids=torch.zeros(len(lengths), width, dtype=torch.int64),
        input_lengths=torch.tensor(lengths),
        row=torch.arange(len(lengths)),
    )
    return meta, batch


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(st.lists(st.integers(1, 1500), min_size=64, max_size=64))
def test_shards_and_microbatches_equal_those_of_the_batch(kind: str, lengths: list[int]) -> None:
    meta, batch = rows(lengths)
    shards, order = shard_meta_for_dp(meta, dp_world=4, batch_size=64, **KINDS[kind])
    direct: Any = batch.shard_by_batch_size(4, batch_size=64, **KINDS[kind])
    expected, permutation = direct if KINDS[kind] else (direct, None)
    for shard, want in zip(shards, expected, strict=True):
        assert shard.sample_ids == [str(n) for n in want["row"].tolist()]
        assert [shard.extra_info.get(name) for name in PLAN] == [getattr(want, name) for name in PLAN]
        assert shard.extra_info[WIDTH] == batch["input_ids"].shape[1]
    joined = [identity for shard in shards for identity in shard.sample_ids]
    assert sorted(joined, key=int) == meta.sample_ids
    assert order == (permutation if permutation != list(range(64)) else None)
    restored = BatchedDataDict(row=torch.tensor([int(i) for i in joined]))
    assert (restored if order is None else restored.reorder_data(order))["row"].tolist() == list(range(64))
    assert len({sum(map(len, shard.extra_info.get("micro_batch_lengths", []))) for shard in shards}) == 1
    assert meta.extra_info == {"pad_to_multiple": 64}, "a plan must not stick to the caller's meta"


def test_every_rank_pads_to_one_width_whatever_its_own_rows_are() -> None:
    meta, _ = rows([100, 1, 1, 1])
    shards, _ = shard_meta_for_dp(meta, dp_world=4)
    assert {shard.extra_info[WIDTH] for shard in shards} == {128}


def test_what_cannot_be_sharded_is_named() -> None:
    meta, _ = rows([4, 4, 4])
    with pytest.raises(ValueError, match="no rows"):
        shard_meta_for_dp(meta.subset([]), dp_world=1)
    with pytest.raises(ValueError, match="needs sequence_lengths"):
        shard_meta_for_dp(KVBatchMeta("train", None, ["a"]), dp_world=1)
    with pytest.raises(ValueError, match="not a multiple of shards=2"):
        shard_meta_for_dp(meta, dp_world=2)
    with pytest.raises(ValueError, match="exclude each other"):
        shard_meta_for_dp(meta, dp_world=1, sequence_packing_args=PACKING, dynamic_batching_args=DYNAMIC)
