"""Message logs as columns: lengths, roles and contents per turn, instead of pickled messages.

The tokens are in the row already; a reader cuts its own columns into messages again, without copying. Knows no store.
Invariant: the messages of a row cover its tokens in order.

Shapes: B rows, T turns of the longest log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nemo_rl.data_plane.schema import MESSAGE_LOG_BULK_FIELDS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict


def decompose_message_log(message_logs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, object]:
    """Columns of message logs.

    Returns:
        `turn_lengths` [B, T] (0 where there is no turn), `turn_roles` and `turn_contents` (lists of texts), and
        `response_token_lengths` [B]: tokens of the first assistant turn, 0 without one.

    Raises:
        KeyError: A message has no role.
    """
    turns = max((len(log) for log in message_logs), default=0)
    lengths_BT = torch.zeros((len(message_logs), turns), dtype=torch.int64)
    responses_B = torch.zeros(len(message_logs), dtype=torch.int64)
    roles: list[list[str]] = []
    contents: list[list[str]] = []
    for row, log in enumerate(message_logs):
        for turn, message in enumerate(log):
            if "role" not in message:
                raise KeyError(f"message {turn} of row {row} has no role; it has {sorted(message)}")
            lengths_BT[row, turn] = len(message.get("token_ids", ()))
        roles.append([str(message["role"]) for message in log])
        contents.append([str(message.get("content", "")) for message in log])
        responses_B[row] = next(
            (int(lengths_BT[row, turn]) for turn, role in enumerate(roles[-1]) if role == "assistant"), 0
        )
    return {
        "turn_lengths": lengths_BT,
        "turn_roles": roles,
        "turn_contents": contents,
        "response_token_lengths": responses_B,
    }


def attach_message_log_view(batch: BatchedDataDict) -> None:
    """Adds `message_log`, whose tensors are views into the batch's own token columns; nothing to do without the columns
    of `decompose_message_log`.
    """
    if "message_log" in batch or any(name not in batch for name in (*MESSAGE_LOG_BULK_FIELDS, "input_ids")):
        return
    logprobs = batch.get("generation_logprobs")
    batch["message_log"] = [
        _messages(row, batch["turn_lengths"][row].tolist(), roles, contents, batch["input_ids"], logprobs)
        for row, (roles, contents) in enumerate(zip(batch["turn_roles"], batch["turn_contents"], strict=True))
    ]


def _messages(
    row: int,
    lengths: list[int],
    roles: list[str],
    contents: list[str],
    ids_BS: torch.Tensor,
    logprobs_BS: torch.Tensor | None,
) -> list[dict[str, object]]:
    messages: list[dict[str, object]] = []
    start = 0
    for length, role, content in zip(lengths, roles, contents, strict=False):
        message: dict[str, Any] = {"role": role, "content": content, "token_ids": ids_BS[row, start : start + length]}
        if role == "assistant" and logprobs_BS is not None:
            message["generation_logprobs"] = logprobs_BS[row, start : start + length]
        messages.append(message)
        start += length
    return messages
