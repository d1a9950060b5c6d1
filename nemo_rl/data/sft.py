"""Batches of conversations for supervised fine-tuning.

B is conversations, S tokens of the longest one, padded. Knows the columns that the NLL loss reads; invariant: a padded
token has mask 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nemo_rl.data.interfaces import DatumSpec
from nemo_rl.data.llm_message_utils import add_loss_mask_to_message_log, batched_message_log_to_flat_message
from nemo_rl.distributed.batched_data_dict import BatchedDataDict


def sft_collate_fn(
    data_batch: Sequence[DatumSpec],
    pad_token_id: int,
    make_sequence_length_divisible_by: int = 1,
    roles_to_train_on: Sequence[str] = ("assistant",),
    only_unmask_final: bool = False,
) -> BatchedDataDict[Any]:
    """Joins conversations into padded columns.

    Returns:
        `input_ids` (int64 [B, S]), `input_lengths` (int32 [B]), `token_mask` (int64 [B, S], 1 on tokens of trained
        roles), `sample_mask` (float32 [B], 0 for conversations that were too long).
    """
    logs = [datum["message_log"] for datum in data_batch]
    add_loss_mask_to_message_log(logs, roles_to_train_on, only_unmask_final)
    flat, lengths = batched_message_log_to_flat_message(
        logs, {"token_ids": pad_token_id}, make_sequence_length_divisible_by
    )
    return BatchedDataDict(
        input_ids=flat["token_ids"],
        input_lengths=lengths,
        token_mask=flat["token_loss_mask"],
        sample_mask=torch.tensor([datum["loss_multiplier"] for datum in data_batch], dtype=torch.float32),
    )


def sft_collate(
    pad_token_id: int, make_sequence_length_divisible_by: int = 1, only_unmask_final: bool = False
) -> Callable[[Sequence[DatumSpec]], BatchedDataDict[Any]]:
    """`sft_collate_fn` with its settings bound, as a loader takes it."""
    return functools.partial(
        sft_collate_fn,
        pad_token_id=pad_token_id,
        make_sequence_length_divisible_by=make_sequence_length_divisible_by,
        only_unmask_final=only_unmask_final,
    )
