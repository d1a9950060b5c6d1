"""The store of a step's columns, and the token stages that run on them. Here: finished trajectories as columns, the
interface and the in-process store.

Trajectories become token columns that training reads, and row columns that the driver decides on. Trained are tokens of
responses generated in this rollout, never the prompt's own history. Drivers write rollouts, read columns, run token
stages and clear rows through an `ExperienceStore`. A stage sees some rows of a batch, writes per-token columns for them
and returns scalars per row; it never sees other rows, so it gives the same bits everywhere. A statistic over all rows
is two stages with a reduction by the driver between them. Invariants: a handle never changes; a verb that changes rows
returns a new one and invalidates the old; token columns are aligned and right-padded to one width, the longest row's
rounded up to one multiple; row columns never grow with sequence length.
"""

from __future__ import annotations

import json
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message
from nemo_rl.data_plane.field_schema import TAG, pad_values
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import expected_of
from nemo_rl.experience.rollouts import Trajectory
from nemo_rl.models.generation.decisions import RecordedDecisionsError, Recording, route_dtype

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import Message
    from nemo_rl.models.policy.interfaces import BatchHandle, Scores


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
    """Columns of generation's decisions, beside the token columns; see `ROUTE_FIELDS` and `SAMPLING_MASK_FIELDS`.

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


@dataclass(frozen=True)
class StageOutput:
    """Result of a stage."""

    columns: dict[str, torch.Tensor]  # new per-token columns [B, S], which stay with the rows
    rows: dict[str, torch.Tensor]  # scalars per row [B], which travel to the driver


@dataclass(frozen=True)
class TokenStage:
    """A stage with the columns it declares. Can be pickled: `run` is a module-level function, `params` are plain
    values.
    """

    run: Callable[..., StageOutput]  # called with the columns it reads and `params`
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    params: Mapping[str, object] = field(default_factory=dict)  # keyword arguments of `run`

    @property
    def name(self) -> str:
        """For logs and timers."""
        return self.run.__name__

    def __call__(self, columns: BatchedDataDict) -> StageOutput:
        """Run on some rows. Raises KeyError: a declared column is missing."""
        missing = [name for name in self.reads if name not in columns]
        if missing:
            raise KeyError(f"stage {self.name} reads {missing}, which the batch lacks; it has {sorted(columns)}")
        return self.run(columns, **self.params)


class SpentHandleError(RuntimeError):
    """The handle's rows were changed or cleared since."""


class SpentHandles:
    """Handles that were replaced; weak references, compared by identity."""

    def __init__(self) -> None:
        self._verbs: dict[int, tuple[weakref.ref[BatchHandle], str]] = {}

    def spend(self, handle: BatchHandle, verb: str) -> None:
        """No verb takes this handle from now on. From any thread."""
        key = id(handle)
        self._verbs[key] = weakref.ref(handle, lambda _: self._verbs.pop(key, None)), verb

    def check(self, handle: BatchHandle) -> None:
        """Whether verbs take the handle. Raises SpentHandleError: one of them gave a new handle in its place, or
        cleared its rows.
        """
        spent = self._verbs.get(id(handle))
        if spent is not None and spent[0]() is handle:
            instead = "its rows are gone" if spent[1] == "clear" else f"use the handle that `{spent[1]}` returned"
            raise SpentHandleError(f"the handle was spent by `{spent[1]}`: {instead}")


class Applied(NamedTuple):
    """Result of `apply`: the new handle, and the stage's row scalars [B]."""

    handle: BatchHandle
    rows: dict[str, torch.Tensor]


class ExperienceStore(Protocol):
    """Holds the columns of a step's rows. Every verb but `write` raises `SpentHandleError` for a replaced handle."""

    def step(self) -> AbstractContextManager[None]:
        """Clears rows at the end that were written inside, except kept ones, also after an error."""
        ...

    def write(self, columns: BatchHandle) -> BatchHandle:
        """Stores new rows, or takes over those that a rollout stored already; the handle under which they are known."""
        ...

    def write_pending(self, columns: RolloutColumns) -> BatchHandle:
        """Stores rows that wait for a later step, whichever ends meanwhile; `write` takes their handle over. From any
        thread.
        """
        ...

    def update(self, handle: BatchHandle, columns: Mapping[str, object]) -> BatchHandle:
        """Adds columns (or replaces them) for all rows of a handle."""
        ...

    def commit(self, handle: BatchHandle, result: Scores, **renamed: str) -> BatchHandle:
        """Adds the columns of a policy call's result: `column=name_in_result`."""
        ...

    def read(self, handle: BatchHandle, columns: Sequence[str]) -> BatchedDataDict:
        """The named columns, in row order. Raises KeyError: a column was never written."""
        ...

    def columns(self, handle: BatchHandle) -> list[str]:
        """Names of the columns that a handle's rows have."""
        ...

    def annotate(self, handle: BatchHandle, tags: Mapping[str, torch.Tensor]) -> BatchHandle:
        """Notes numbers about rows, [B] each, to decide by; they go wherever `select` and `concat` take the rows, and
        cost no call.
        """
        ...

    def tag(self, handle: BatchHandle, name: str) -> torch.Tensor:
        """Values of an annotation, [B]. Raises KeyError: some row was never annotated with it."""
        ...

    def apply(self, handle: BatchHandle, stage: TokenStage) -> Applied:
        """Runs a stage where the rows are. From any thread. Raises whatever the stage raised."""
        ...

    def select(self, handle: BatchHandle, rows: Sequence[int]) -> BatchHandle:
        """A handle on some of the rows."""
        ...

    def select_columns(self, handle: BatchHandle, columns: Sequence[str]) -> BatchHandle:
        """A handle that shows a reader only the named columns."""
        ...

    def concat(self, handles: Sequence[BatchHandle]) -> BatchHandle:
        """One handle on the rows of several."""
        ...

    def keep(self, handle: BatchHandle) -> None:
        """Lets rows outlive their step; the caller clears them."""
        ...

    def clear(self, handle: BatchHandle) -> None:
        """Drops the rows of a handle. Thread-safe."""
        ...

    def close(self) -> None:
        """Ends the processes that the store started. Safe to call twice."""
        ...


class InProcessStore:
    """Rows in this process; the handle is the batch. `pad_token_id`: padding of `input_ids` when batches of different
    width are joined. `multiple`: widths are rounded up to a multiple of this.
    """

    def __init__(self, pad_token_id: int, multiple: int = 1) -> None:
        self._pad_values = pad_values(pad_token_id)
        self._multiple = multiple
        self._spent = SpentHandles()

    def step(self) -> AbstractContextManager[None]:
        """Frees rows when their batch is no longer referenced."""
        return nullcontext()

    def write(self, columns: BatchHandle) -> BatchedDataDict:
        """Takes the columns over."""
        return BatchedDataDict(in_process(columns).get_dict())

    def write_pending(self, columns: RolloutColumns) -> BatchedDataDict:
        """The columns wait as they are."""
        return in_process(columns.tokens)

    def update(self, handle: BatchHandle, columns: Mapping[str, object]) -> BatchedDataDict:
        """Adds columns."""
        return self._changed("update", handle, columns)

    def commit(self, handle: BatchHandle, result: Scores, **renamed: str) -> BatchedDataDict:
        """Takes the result's columns under their new names. Raises TypeError: the result lies on a data plane."""
        if not isinstance(result, BatchedDataDict):
            raise TypeError(f"expected the columns of a result, got {result}: they are not in this process")
        return self._changed("commit", handle, {column: result[name] for column, name in renamed.items()})

    def read(self, handle: BatchHandle, columns: Sequence[str]) -> BatchedDataDict:
        """The named columns. Raises KeyError: a column was never written."""
        batch = self._current(handle)
        missing = [name for name in columns if name not in batch]
        if missing:
            raise KeyError(f"columns {missing} were never written; there are {sorted(batch)}")
        return BatchedDataDict({name: batch[name] for name in columns})

    def columns(self, handle: BatchHandle) -> list[str]:
        """The batch's keys, but for tags."""
        return [name for name in self._current(handle) if not name.startswith(TAG)]

    def annotate(self, handle: BatchHandle, tags: Mapping[str, torch.Tensor]) -> BatchedDataDict:
        """Tags are columns that no stage sees."""
        return self._changed("annotate", handle, {TAG + name: value for name, value in tags.items()})

    def tag(self, handle: BatchHandle, name: str) -> torch.Tensor:
        batch = self._current(handle)
        if TAG + name not in batch:
            raise KeyError(
                f"no row has a tag {name!r}; there are "
                f"{sorted(column.removeprefix(TAG) for column in batch if column.startswith(TAG))}"
            )
        return batch[TAG + name]

    def apply(self, handle: BatchHandle, stage: TokenStage) -> Applied:
        """Runs the stage here."""
        output = stage(self._current(handle))
        changed = self._changed("apply", handle, output.columns) if stage.writes else handle
        return Applied(changed, output.rows)

    def select(self, handle: BatchHandle, rows: Sequence[int]) -> BatchedDataDict:
        """Some of the rows."""
        return self._trimmed(self._current(handle).select_indices(list(rows)))

    def select_columns(self, handle: BatchHandle, columns: Sequence[str]) -> BatchedDataDict:
        """Only the named columns, and the tags."""
        tags = {name: column for name, column in self._current(handle).items() if name.startswith(TAG)}
        return BatchedDataDict({**self.read(handle, columns), **tags})

    def concat(self, handles: Sequence[BatchHandle]) -> BatchedDataDict:
        """All rows, padded to the widest."""
        # Parts are trimmed, so the widest of them is as wide as the longest row needs.
        return BatchedDataDict.from_batches(
            [self._current(handle) for handle in handles], pad_value_dict=self._pad_values
        )

    def keep(self, handle: BatchHandle) -> None:
        """The rows live as long as the batch is referenced."""
        self._current(handle)

    def clear(self, handle: BatchHandle) -> None:
        """Lets go of the columns."""
        batch = self._current(handle)
        self._spent.spend(batch, "clear")
        batch.clear()

    def close(self) -> None:
        """Nothing was started."""

    def _current(self, handle: BatchHandle) -> BatchedDataDict:
        self._spent.check(handle)
        return in_process(handle)

    def _changed(self, verb: str, handle: BatchHandle, columns: Mapping[str, object]) -> BatchedDataDict:
        changed = BatchedDataDict({**self._current(handle), **columns})
        self._spent.spend(handle, verb)
        return changed

    def _trimmed(self, batch: BatchedDataDict) -> BatchedDataDict:
        """The batch without the columns of padding that only rows left out needed."""
        if not batch.size or "input_ids" not in batch:
            return batch
        full = batch["input_ids"].shape[1]
        width = -(-int(batch["input_lengths"].max()) // self._multiple) * self._multiple
        for name, column in batch.items():
            if width < full and isinstance(column, torch.Tensor) and column.ndim >= 2 and column.shape[1] == full:
                batch[name] = column[:, :width].contiguous()
        return batch
