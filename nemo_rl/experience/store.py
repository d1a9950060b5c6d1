"""The store of a step's columns, and the token stages that run on them. Here: the interface and the in-process store.

Drivers write rollouts, read columns, run token stages and clear rows through an `ExperienceStore`. A stage sees some
rows of a batch, writes per-token columns for them and returns scalars per row; it never sees other rows, so it gives
the same bits everywhere. A statistic over all rows is two stages with a reduction by the driver between them.
Invariants: a handle never changes; a verb that changes rows returns a new one and invalidates the old; token columns
are as wide as the longest row, rounded up to one multiple.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from nemo_rl.data_plane.schema import TAG, pad_values
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.columns import RolloutColumns, in_process

if TYPE_CHECKING:
    from nemo_rl.models.policy.interfaces import BatchHandle, Scores


@dataclass(frozen=True)
class StageOutput:
    """What a stage made of its rows."""

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
    """What `apply` gives: the handle from then on, and the stage's row scalars [B]."""

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
        """Takes over what a policy call returned: `column=name_in_result`."""
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
        """What was noted, [B]. Raises KeyError: some row was never annotated with it."""
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
        """Ends what the store started. Safe to call twice."""
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
