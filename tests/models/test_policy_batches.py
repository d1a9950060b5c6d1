"""What a policy refuses before anything moves, whether the batch is here or on the data plane."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.config import PolicyConfig
from nemo_rl.data_plane import KVBatchMeta
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.models.policy.batches import (
    UnsupportedColumnsError,
    chunk_rows,
    microbatch_arguments,
    refuse_model_inputs,
)
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.packed import RowSlice, logprob_rows, pack
from nemo_rl.models.policy.scoring import TokenScores
from nemo_rl.models.policy.tq_policy import TQPolicy

MEDIA = ["input_ids", "input_lengths", "pixel_values", "a_column_of_mine", "image_grid_thw"]


def policy_without_workers() -> Any:
    policy: Any = object.__new__(TQPolicy)
    policy.sharding_annotations = NamedSharding(np.zeros((1, 1), dtype=int), ["pipeline_parallel", "data_parallel"])
    policy.shares_prompts, policy._columns = False, {}
    policy.cfg = PolicyConfig.model_construct(train_global_batch_size=4, train_micro_batch_size=2)
    return policy


@pytest.mark.parametrize(
    "batch",
    [
        BatchedDataDict({name: torch.zeros(4, 2) for name in MEDIA}),
        KVBatchMeta("train", None, list("abcd"), MEDIA, [2] * 4),
    ],
    ids=["batch", "meta"],
)
@pytest.mark.parametrize(
    "call",
    [
        "get_logprobs",
        "get_reference_policy_logprobs",
        "get_policy_and_reference_logprobs",
        "train",
        "train_microbatches",
    ],
)
def test_images_are_refused_by_name_instead_of_training_on_the_text_alone(batch: Any, call: str) -> None:
    arguments = (batch, None) if call == "train" else (batch,)
    with pytest.raises(
        UnsupportedColumnsError, match=r"model inputs \['pixel_values', 'image_grid_thw'\].* takes token ids only"
    ):
        getattr(policy_without_workers(), call)(*arguments)


def test_columns_that_nobody_knows_are_not_taken_for_inputs_of_the_model() -> None:
    refuse_model_inputs(["input_ids", "content", "a_column_of_mine"])


def test_rows_that_do_not_divide_into_global_batches_are_refused_on_the_data_plane_too() -> None:
    meta = KVBatchMeta("train", None, list("abc"), ["input_ids"], [2] * 3)
    with pytest.raises(
        ValueError, match="3 samples do not divide into global batches of policy.train_global_batch_size=4"
    ):
        policy_without_workers().train(meta, None)


@pytest.mark.parametrize(("training", "budget"), [(True, 48), (False, 64)])
def test_token_budgets_are_those_of_the_pass(training: bool, budget: int) -> None:
    budgets = {"train_mb_tokens": 48, "logprob_mb_tokens": 64}
    packed = PolicyConfig(sequence_packing={"enabled": True, **budgets})
    dynamic = PolicyConfig(sequence_packing={"enabled": False}, dynamic_batching={"enabled": True, **budgets})
    for config, name in ((packed, "sequence_packing_args"), (dynamic, "dynamic_batching_args")):
        assert microbatch_arguments(config, training=training)[name]["max_tokens_per_microbatch"] == budget
    plain = PolicyConfig(sequence_packing={"enabled": False})
    assert microbatch_arguments(plain, training=training) == {}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(2, 4))
def test_a_chunk_that_does_not_divide_is_shared_out_by_tokens(lengths: list[int], ranks: int) -> None:
    rows = chunk_rows(lengths, ranks)
    if len(lengths) % ranks == 0:
        assert rows is None
        return
    assert rows is not None and sorted(row for own in rows for row in own) == list(range(len(lengths)))
    tokens = [sum(lengths[row] for row in own) for own in rows]
    # Longest first: a rank got its last and shortest row when none had fewer tokens.
    assert all(
        sum(lengths[row] for row in own) - min(lengths[row] for row in own) <= min(tokens) for own in rows if own
    )


def test_what_gives_no_loss_is_not_scored_and_scores_stay_off_padding() -> None:
    data = {
        "input_ids": torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]]),
        "input_lengths": torch.tensor([3, 4]),
        "token_mask": torch.tensor([[0, 0, 1, 0], [0, 1, 1, 1]]),
        "sample_mask": torch.tensor([1.0, 0.0]),
    }
    batch = pack(data, torch.device("cpu"), trained_only=True)
    assert batch.wanted_W is not None and batch.wanted_W.tolist() == [1]
    assert batch.target_ids_T.tolist() == [2, 3, 0, 5, 6, 7, 0]
    scores = torch.full((7,), -2.0)
    rows = logprob_rows(data, batch, TokenScores(scores, scores))
    assert rows.tolist() == [[0, -2, -2, 0], [0, -2, -2, -2]]
    # A rank whose slice trains nothing still runs the projection, on one position.
    halves = [RowSlice(group=object(), rank=rank, ranks=2) for rank in (0, 1)]  # type: ignore[arg-type]
    wanted = [cut.wanted(pack(data, torch.device("cpu"), multiple=8, trained_only=True)) for cut in halves]
    assert [positions.tolist() for positions in wanted if positions is not None] == [[1], [0]]


def test_workers_that_still_load_their_model_are_ended_at_once() -> None:
    forced: list[bool] = []
    policy: Any = object.__new__(Policy)
    policy.worker_group = SimpleNamespace(shutdown=lambda cleanup_method, force: forced.append(force))
    for policy._devices in (None, ["cpu"]):
        policy.shutdown()
    assert forced == [True, False]
