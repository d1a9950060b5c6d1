"""What a policy refuses before anything moves, whether the batch is here or on the data plane."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_rl.config import PolicyConfig
from nemo_rl.data_plane import KVBatchMeta
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.batches import UnsupportedColumnsError, refuse_model_inputs
from nemo_rl.models.policy.tq_policy import TQPolicy

MEDIA = ["input_ids", "input_lengths", "pixel_values", "a_column_of_mine", "image_grid_thw"]


def policy_without_workers() -> Any:
    policy = object.__new__(TQPolicy)
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
