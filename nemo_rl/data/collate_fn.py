"""Batches of prompts for the rollout, and of conversations for supervised fine-tuning.

B is rows, S tokens of the longest one, padded. Invariants: row i of every column is datum i of the list; a padded token
has mask 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from nemo_rl.data.interfaces import DatumSpec
from nemo_rl.data.llm_message_utils import add_loss_mask_to_message_log, batched_message_log_to_flat_message
from nemo_rl.distributed.batched_data_dict import BatchedDataDict


def rl_collate_fn(data_batch: Sequence[DatumSpec]) -> BatchedDataDict:
    """Joins prompts into columns. Returns `message_log`, `extra_env_info`, `task_name`, `stop_strings` (lists of B),
    `length` and `idx` (int64 [B] and list), `loss_multiplier` (float32 [B]), and `batch_max_length` (int64 [B], the
    longest prompt in every row).
    """
    length = torch.tensor([datum["length"] for datum in data_batch], dtype=torch.int64)
    return BatchedDataDict(
        message_log=[datum["message_log"] for datum in data_batch],
        length=length,
        loss_multiplier=torch.tensor([datum["loss_multiplier"] for datum in data_batch], dtype=torch.float32),
        extra_env_info=[datum["extra_env_info"] for datum in data_batch],
        task_name=[datum.get("task_name") for datum in data_batch],
        idx=[datum["idx"] for datum in data_batch],
        batch_max_length=torch.ones_like(length) * (length.max() if len(data_batch) else 0),
        stop_strings=[datum.get("stop_strings") for datum in data_batch],
    )


# Problems of an evaluation are prompts as others are; NeMo-RL has a name for them.
eval_collate_fn = rl_collate_fn


def sft_collate_fn(
    data_batch: Sequence[DatumSpec],
    pad_token_id: int,
    make_sequence_length_divisible_by: int = 1,
    roles_to_train_on: Sequence[str] = ("assistant",),
    only_unmask_final: bool = False,
) -> BatchedDataDict:
    """Joins conversations into padded columns. Returns `input_ids` (int64 [B, S]), `input_lengths` (int32 [B]),
    `token_mask` (int64 [B, S], 1 on tokens of trained roles), `sample_mask` (float32 [B], 0 for conversations that were
    too long).
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
) -> Callable[[Sequence[DatumSpec]], BatchedDataDict]:
    """`sft_collate_fn` with its settings bound, as a loader takes it."""
    return functools.partial(
        sft_collate_fn,
        pad_token_id=pad_token_id,
        make_sequence_length_divisible_by=make_sequence_length_divisible_by,
        only_unmask_final=only_unmask_final,
    )
