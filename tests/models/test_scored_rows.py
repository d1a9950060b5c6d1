"""Rows come back where they were, and each pass keeps to its own token budget, in process and on the data plane."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.config import PolicyConfig
from nemo_rl.data_plane import KVBatchMeta
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.batches import InProcessRows, microbatches
from nemo_rl.models.policy.tq_policy import StoredRows

TRAIN, SCORE, LONGEST = 24, 48, 16
BUDGETS = {"train_mb_tokens": TRAIN, "logprob_mb_tokens": SCORE}
KINDS: dict[str, dict[str, Any]] = {
    "equal": {"sequence_packing": {"enabled": False}},
    "packing": {"sequence_packing": {"enabled": True, **BUDGETS}},
    "dynamic": {
        "sequence_packing": {"enabled": False},
        "dynamic_batching": {"enabled": True, "sequence_length_round": 1, **BUDGETS},
    },
}
LENGTHS = st.lists(st.integers(1, LONGEST), min_size=1, max_size=13)
COLUMNS = {"get_logprobs": {"logprobs": "prev_logprobs"}}


def config(kind: str) -> PolicyConfig:
    return PolicyConfig(**KINDS[kind], max_total_sequence_length=LONGEST, make_sequence_length_divisible_by=1)


def batch(lengths: list[int]) -> BatchedDataDict:
    ids = torch.arange(len(lengths))[:, None].expand(-1, LONGEST).contiguous()
    return BatchedDataDict({"input_ids": ids, "input_lengths": torch.tensor(lengths, dtype=torch.int32)})


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 4))
def test_every_row_is_scored_once_and_its_scores_come_back_to_it(kind: str, lengths: list[int], ranks: int) -> None:
    cut = InProcessRows(batch(lengths), config(kind), ranks, share=False).cut_to_score("get_logprobs")
    # A rank answers for its rows in the order in which it has them.
    answers = [
        BatchedDataDict(
            {"logprobs": shard["input_ids"].float()} if len(shard) else {"logprobs": torch.zeros(0, LONGEST)}
        )
        for shard in cut.shards  # type: ignore[attr-defined]
    ]
    scores: Any = cut.scores(answers)
    assert scores["logprobs"][:, 0].tolist() == list(range(len(lengths)))


@pytest.mark.parametrize("kind", ["packing", "dynamic"])
@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(1, 3))
def test_microbatches_of_a_pass_keep_to_its_budget_and_use_it(kind: str, lengths: list[int], ranks: int) -> None:
    """Half of the budget is in use where there are rows for it: so the larger budget of scoring is not lost either."""
    policy, data = config(kind), batch(lengths)
    meta = KVBatchMeta(
        "train", None, [str(row) for row in range(len(lengths))], ["input_ids", "input_lengths"], lengths
    )
    here = InProcessRows(data, policy, ranks, share=False)
    stored = StoredRows(meta, policy, ranks, COLUMNS, share=False)
    passes = {
        (TRAIN, "chunk"): (here.cut_chunk(), stored.cut_chunk()),
        (SCORE, "score"): (here.cut_to_score("get_logprobs").shards, stored.cut_to_score("get_logprobs").shards),
    }
    if len(lengths) % ranks == 0:
        passes[TRAIN, "step"] = (here.cut(len(lengths)), stored.cut(len(lengths)))
    for (budget, _), (in_process, on_plane) in passes.items():
        plans: list[Any] = [shard.micro_batch_indices for shard in in_process if len(shard)]  # type: ignore[attr-defined]
        metas: list[Any] = [shard for shard in on_plane if shard.size]  # type: ignore[attr-defined]
        assert [shard.extra_info["micro_batch_indices"] for shard in metas] == plans
        sizes = []
        for shard in metas:
            (spans,) = shard.extra_info["micro_batch_indices"]
            own = shard.sequence_lengths
            for start, end in spans:
                rows = own[start:end]
                sizes.append(sum(rows) if kind == "packing" else max(rows) * len(rows))
            assert sorted(row for start, end in spans for row in range(start, end)) == list(range(shard.size))
        assert max(sizes) <= budget
        if ranks == 1:
            total = sum(lengths)
            # First fit leaves at most one bin half empty; so do rows of nearly the same length.
            assert len(sizes) <= 2 * (-(-total // budget)) + 1


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_last_microbatch_may_be_short_and_none_is_left_out(size: int) -> None:
    parts = microbatches(batch([3] * 5), config("equal"), size, replayed=())
    assert [row for part in parts for row in part["input_ids"][:, 0].tolist()] == [0, 1, 2, 3, 4]
    assert all(part.size == size for part in parts[:-1])
