"""Batches of prompts for the rollout.

Knows the columns of `DatumSpec` only. Invariant: row i of every column is prompt i of the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nemo_rl.data.interfaces import DatumSpec
from nemo_rl.distributed.batched_data_dict import BatchedDataDict


def rl_collate_fn(data_batch: Sequence[DatumSpec]) -> BatchedDataDict[Any]:
    """Joins prompts into columns.

    Returns:
        `message_log`, `extra_env_info`, `task_name`, `stop_strings` (lists of B), `length` and `idx` (int64 [B] and
        list), `loss_multiplier` (float32 [B]), and `batch_max_length` (int64 [B], the longest prompt in every row).
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
