"""Finished trajectories as columns: token columns that training reads, and row columns that the driver decides on.

Decides which tokens are trained: those of responses generated in this rollout, never the prompt's own history.
Invariant: token columns are aligned and right-padded to one width; row columns never grow with sequence length.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import expected_of
from nemo_rl.experience.trajectories import Trajectory
from nemo_rl.models.generation.decisions import route_dtype
from nemo_rl.models.generation.recording import RecordedDecisionsError, Recording

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import Message
    from nemo_rl.models.policy.interfaces import BatchHandle


@dataclass(frozen=True)
class RolloutColumns:
    """A rollout in columns.

    Attributes:
        tokens: `input_ids`, `token_mask`, `generation_logprobs` [B, S], `input_lengths` [B], and `content`, the text of
            each row, for logs; where rows live elsewhere, a reference to them. Each sample is a row, but for an
            agent's, whose branches are rows side by side (see `sample_starts`).
        rows: `total_reward`, `truncated`, `sample_mask`, `prompt_lengths`, `response_lengths`, `prompt_number`,
            `sample_number`, `weight_version` and `newest_version` [B] (oldest and newest of the sample's tokens, -1
            without any), `mask_sample` and `invalid_tool_call` [B] (whether the environment flagged the sample),
            `mixed_kv` [B] (whether tokens attended to keys of older weights), `task_name` (list of B), and
            `reward/<name>` where given.
    """

    tokens: BatchHandle
    rows: BatchedDataDict


def in_process(handle: BatchHandle) -> BatchedDataDict:
    """The batch that a handle is. Raises TypeError: it refers to rows that are stored elsewhere."""
    if not isinstance(handle, BatchedDataDict):
        raise TypeError(f"expected a batch in this process, got a reference to {handle.size} rows of a data plane")
    return handle


def sample_starts(rows: BatchedDataDict) -> torch.Tensor:
    """Which rows [B] are the first of their sample; the others are further branches of an agent's session. `rows`: row
    columns, or a part of them that begins with a sample.
    """
    starts_B = torch.ones(rows.size, dtype=torch.bool)
    if "sample_number" in rows:
        for name in ("prompt_number", "sample_number"):
            starts_B[1:] &= rows[name][1:] == rows[name][:-1]
        starts_B[1:] = ~starts_B[1:]
    return starts_B


def sample_of_row(rows: BatchedDataDict) -> torch.Tensor:
    """Number of each row's sample [B], from 0. See `sample_starts`."""
    return sample_starts(rows).long().cumsum(0) - 1


def rollout_columns(
    batch: BatchedDataDict,
    trajectories: Sequence[Trajectory],
    *,
    pad_token_id: int,
    branches: bool = True,
    multiple: int = 1,
    token_versions: bool = False,
    conversations: bool = False,
    recording: Recording | None = None,
) -> RolloutColumns:
    """Columns of a finished batch.

    Args:
        batch: The numbered input batch; `loss_multiplier` becomes the sample mask.
        trajectories: One for each row of it.
        branches: Whether the further branches of agents' sessions become rows as well.
        multiple: The width is rounded up to a multiple of this.
        token_versions: Whether to add `token_versions` [B, S], the weight version of each trained token (-1 elsewhere).
        conversations: Whether to add `conversation`, each sample's messages and expected answer as JSON.
        recording: Which of `routed_experts`, `routed_experts_valid`, `sampling_mask_counts` and `sampling_mask_ids` to
            add; none of them by default.
    """
    if branches and any(trajectory.further_branches for trajectory in trajectories):
        counts = torch.tensor([len(trajectory.branches) for trajectory in trajectories])
        batch = batch.select_indices(torch.arange(batch.size).repeat_interleave(counts).tolist())
        trajectories = [branch for trajectory in trajectories for branch in trajectory.branches]
    logs = [_training_messages(trajectory, token_versions) for trajectory in trajectories]
    flat, lengths_B = batched_message_log_to_flat_message(
        logs, {"token_ids": pad_token_id, "token_versions": -1}, make_sequence_length_divisible_by=multiple
    )
    tokens = BatchedDataDict(
        input_ids=flat["token_ids"],
        input_lengths=lengths_B,
        token_mask=flat["token_loss_mask"],
        generation_logprobs=flat["generation_logprobs"],
        content=["".join(str(message["content"]) for message in trajectory.message_log) for trajectory in trajectories],
    )
    if token_versions:
        tokens["token_versions"] = flat["token_versions"]
    if conversations:
        tokens["conversation"] = [
            conversation_text(trajectory.message_log, known)
            for trajectory, known in zip(trajectories, batch["extra_env_info"], strict=True)
        ]
    if recording is not None:
        tokens.update(decision_columns(trajectories, tokens["token_mask"], recording))
    names = sorted({name for trajectory in trajectories for name in trajectory.components})
    rows = BatchedDataDict(
        total_reward=torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
        truncated=torch.tensor([t.truncated for t in trajectories]),
        mask_sample=torch.tensor([_is_flagged(t, "mask_sample") for t in trajectories]),
        invalid_tool_call=torch.tensor([_is_flagged(t, "invalid_tool_call") for t in trajectories]),
        sample_mask=batch["loss_multiplier"].clone(),
        prompt_lengths=torch.tensor(
            [
                int(length) if t.prompt_length is None else t.prompt_length
                for t, length in zip(trajectories, batch["length"], strict=True)
            ]
        ),
        response_lengths=torch.tensor([t.generated[0] if t.generated else 0 for t in trajectories]),
        generated_lengths=torch.tensor([sum(t.generated) for t in trajectories]),
        total_lengths=lengths_B.clone(),
        prompt_number=batch["prompt_number"].clone(),
        sample_number=batch["sample_number"].clone(),
        weight_version=torch.tensor([min((span.version for span in t.spans), default=-1) for t in trajectories]),
        newest_version=torch.tensor([max((span.version for span in t.spans), default=-1) for t in trajectories]),
        mixed_kv=torch.tensor([any(span.mixed_kv for span in t.spans) for t in trajectories]),
        task_name=[str(name) for name in batch["task_name"]] if "task_name" in batch else [""] * len(trajectories),
        **{
            name: torch.tensor([t.components.get(name, 0.0) for t in trajectories], dtype=torch.float32)
            for name in names
        },
    )
    return RolloutColumns(tokens, rows)


def decision_columns(
    trajectories: Sequence[Trajectory], token_mask_BS: torch.Tensor, recording: Recording
) -> dict[str, object]:
    """What generation decided, beside the token columns; see `ROUTE_FIELDS` and `SAMPLING_MASK_FIELDS`.

    Raises RecordedDecisionsError: routes are not those of as many layers and experts as the model has.
    """
    columns: dict[str, object] = {}
    size, width = token_mask_BS.shape
    if recording.layers:
        shape = (len(recording.layers), recording.per_token)
        dtype = torch.from_numpy(np.zeros(0, route_dtype(recording.experts))).dtype
        experts = torch.zeros((size, width, *shape), dtype=dtype)
        valid = torch.zeros((size, width), dtype=torch.bool)
        for row, trajectory in enumerate(trajectories):
            routes = trajectory.routes.since(0)
            if routes is None:
                continue
            if routes.experts.shape[1:] != shape:
                raise RecordedDecisionsError(
                    f"row {row}: the engine returned routes of {routes.experts.shape[1]} layers x "
                    f"{routes.experts.shape[2]} experts per token, and policy.model_name has {shape[0]} layers with "
                    f"experts, of which a token takes {shape[1]}"
                )
            experts[row, : routes.end] = torch.from_numpy(routes.experts)
            valid[row, : routes.end] = torch.from_numpy(routes.valid)
        columns |= {"routed_experts": experts, "routed_experts_valid": valid}
    if recording.masks:
        counts = torch.zeros((size, width), dtype=torch.int32)
        counts[token_mask_BS != 0] = torch.from_numpy(np.concatenate([t.masks.counts for t in trajectories]))
        ids = [torch.from_numpy(trajectory.masks.ids.copy()) for trajectory in trajectories]
        columns |= {"sampling_mask_counts": counts, "sampling_mask_ids": ids}
    return columns


def conversation_text(message_log: LLMMessageLogType, metadata: object) -> str:
    """Messages of a sample and the answer expected of it, as JSON."""
    messages = [{"role": message["role"], "content": str(message["content"])} for message in message_log]
    return json.dumps({"messages": messages, "expected": expected_of(metadata)}, default=str)


def _is_flagged(trajectory: Trajectory, flag: str) -> bool:
    """Whether the environment's last metadata hold a flag."""
    return isinstance(trajectory.metadata, Mapping) and bool(trajectory.metadata.get(flag))


def joined_rows(parts: Sequence[BatchedDataDict]) -> BatchedDataDict:
    """The row columns of several batches in one; a reward component that a batch's environments do not give is 0 there.
    `parts`: row columns of rollouts; components are named `reward/<name>`.
    """
    names = sorted({name for part in parts for name in part if name.startswith("reward/")})
    filled = [BatchedDataDict({**dict.fromkeys(names, torch.zeros(part.size)), **part.get_dict()}) for part in parts]
    return BatchedDataDict.from_batches(filled)


def _training_messages(trajectory: Trajectory, token_versions: bool) -> list[dict[str, object]]:
    messages = [_training_message(message) for message in trajectory.message_log]
    if token_versions:
        versions = torch.full((sum(trajectory.generated),), -1, dtype=torch.int32)
        for span in trajectory.spans:
            versions[span.start : span.end] = span.version
        start = 0
        for message in messages:
            count = len(message["token_ids"])
            trained = bool(message["token_loss_mask"].any())
            message["token_versions"] = (
                versions[start : start + count] if trained else torch.full((count,), -1, dtype=torch.int32)
            )
            start += count if trained else 0
    return messages


def mint_ids(groups: Sequence[int]) -> list[str]:
    """Row ids: one random name per prompt, and the number of the sample within it."""
    names: dict[int, str] = {}
    counts: dict[int, int] = {}
    ids: list[str] = []
    for group in groups:
        name = names.setdefault(group, uuid.uuid4().hex)
        counts[group] = counts.get(group, -1) + 1
        ids.append(f"{name}_g{counts[group]}")
    return ids


def _training_message(message: Message) -> Message:
    ids = message["token_ids"]
    logprobs = message.get("generation_logprobs")
    # A response of this rollout carries its log-probabilities; assistant messages of the prompt's history do not.
    trained = message["role"] == "assistant" and logprobs is not None
    return {
        "token_ids": ids,
        "token_loss_mask": torch.full_like(ids, int(trained)),
        "generation_logprobs": logprobs if logprobs is not None else torch.zeros(len(ids), dtype=torch.float32),
    }
