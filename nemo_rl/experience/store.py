"""Where the columns of a step live, behind data verbs only.

Drivers write rollouts, read columns, run token stages and clear rows through an `ExperienceStore`; whether rows lie in
this process or on a data plane is the store's business. Here is the interface and the in-process store, whose handle is
the batch itself. Knows no stage by name. Invariants: after `clear` a handle's rows are gone; token columns are as wide
as the longest row needs, rounded up to one multiple, so that a batch's width follows from its rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch

from nemo_rl.data_plane.schema import pad_values
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.columns import RolloutColumns
from nemo_rl.experience.stage import TokenStage

Handle = TypeVar("Handle")
_TAG = "tag/"


class ExperienceStore(Protocol[Handle]):
    """Holds the columns of a step's rows."""

    def step(self) -> AbstractContextManager[None]:
        """The span in which the rows of a step live: those written in it and not cleared are cleared at its end,
        however it ends.
        """
        ...

    def write(self, columns: Any) -> Handle:
        """Stores new rows, or takes over those that a rollout stored already; the handle under which they are known."""
        ...

    def write_pending(self, columns: RolloutColumns) -> Handle:
        """Stores rows that wait for a later step, whichever ends meanwhile; `write` takes their handle over. From any
        thread.
        """
        ...

    def update(self, handle: Handle, columns: Mapping[str, Any]) -> Handle:
        """Adds columns (or replaces them) for all rows of a handle."""
        ...

    def commit(self, handle: Handle, result: Any, **renamed: str) -> Handle:
        """Takes over what a policy call returned: `column=name_in_result`."""
        ...

    def read(self, handle: Handle, columns: Sequence[str]) -> BatchedDataDict[Any]:
        """The named columns, in row order.

        Raises:
            KeyError: A column was never written.
        """
        ...

    def columns(self, handle: Handle) -> list[str]:
        """Names of the columns that a handle's rows have."""
        ...

    def stamp(self, handle: Handle, tags: Mapping[str, torch.Tensor]) -> None:
        """Notes numbers about rows, [B] each, to decide by; they go wherever `select` and `concat` take the rows, and
        cost no call.
        """
        ...

    def tag(self, handle: Handle, name: str) -> torch.Tensor:
        """What was noted, [B].

        Raises:
            KeyError: Some row was never stamped with it.
        """
        ...

    def apply(self, handle: Handle, stage: TokenStage) -> dict[str, torch.Tensor]:
        """Runs a stage where the rows are; its row scalars [B]. From any thread.

        Raises:
            Whatever the stage raised.
        """
        ...

    def select(self, handle: Handle, rows: Sequence[int]) -> Handle:
        """A handle on some of the rows."""
        ...

    def select_columns(self, handle: Handle, columns: Sequence[str]) -> Handle:
        """A handle that shows a reader only the named columns."""
        ...

    def concat(self, handles: Sequence[Handle]) -> Handle:
        """One handle on the rows of several."""
        ...

    def keep(self, handle: Handle) -> None:
        """The rows outlive their step: whoever keeps them clears them."""
        ...

    def clear(self, handle: Handle) -> None:
        """Forgets the rows of a handle. From any thread."""
        ...

    def close(self) -> None:
        """Ends what the store started. Safe to call twice."""
        ...


class InProcessStore:
    """Rows in this process; the handle is the batch.

    Args:
        pad_token_id: Padding of `input_ids` when batches of different width are joined.
        multiple: Widths are rounded up to a multiple of this.
    """

    def __init__(self, pad_token_id: int, multiple: int = 1) -> None:
        self._pad_values = pad_values(pad_token_id)
        self._multiple = multiple

    def step(self) -> AbstractContextManager[None]:
        """Rows go when nobody holds their batch any more."""
        return nullcontext()

    def write(self, columns: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        """Takes the columns over."""
        return BatchedDataDict(columns.get_dict())

    def write_pending(self, columns: RolloutColumns) -> BatchedDataDict[Any]:
        """The columns wait as they are."""
        return columns.tokens

    def update(self, handle: BatchedDataDict[Any], columns: Mapping[str, Any]) -> BatchedDataDict[Any]:
        """Adds columns."""
        handle.update(columns)
        return handle

    def commit(
        self, handle: BatchedDataDict[Any], result: BatchedDataDict[Any], **renamed: str
    ) -> BatchedDataDict[Any]:
        """Copies the result's columns under their new names."""
        return self.update(handle, {column: result[name] for column, name in renamed.items()})

    def read(self, handle: BatchedDataDict[Any], columns: Sequence[str]) -> BatchedDataDict[Any]:
        """The named columns.

        Raises:
            KeyError: A column was never written.
        """
        missing = [name for name in columns if name not in handle]
        if missing:
            raise KeyError(f"columns {missing} were never written; there are {sorted(handle)}")
        return BatchedDataDict({name: handle[name] for name in columns})

    def columns(self, handle: BatchedDataDict[Any]) -> list[str]:
        """The batch's keys, but for tags."""
        return [name for name in handle if not name.startswith(_TAG)]

    def stamp(self, handle: BatchedDataDict[Any], tags: Mapping[str, torch.Tensor]) -> None:
        """Tags are columns that no stage sees."""
        handle.update({_TAG + name: value for name, value in tags.items()})

    def tag(self, handle: BatchedDataDict[Any], name: str) -> torch.Tensor:
        """See `ExperienceStore`."""
        if _TAG + name not in handle:
            raise KeyError(
                f"no row has a tag {name!r}; there are "
                f"{sorted(column.removeprefix(_TAG) for column in handle if column.startswith(_TAG))}"
            )
        return handle[_TAG + name]

    def apply(self, handle: BatchedDataDict[Any], stage: TokenStage) -> dict[str, torch.Tensor]:
        """Runs the stage here."""
        output = stage(handle)
        handle.update(output.columns)
        return output.rows

    def select(self, handle: BatchedDataDict[Any], rows: Sequence[int]) -> BatchedDataDict[Any]:
        """Some of the rows."""
        return self._trimmed(handle.select_indices(list(rows)))

    def select_columns(self, handle: BatchedDataDict[Any], columns: Sequence[str]) -> BatchedDataDict[Any]:
        """Only the named columns."""
        return self.read(handle, columns)

    def concat(self, handles: Sequence[BatchedDataDict[Any]]) -> BatchedDataDict[Any]:
        """All rows, padded to the widest."""
        # Parts are trimmed, so the widest of them is as wide as the longest row needs.
        return BatchedDataDict.from_batches(list(handles), pad_value_dict=self._pad_values)

    def keep(self, handle: BatchedDataDict[Any]) -> None:
        """Whoever holds the batch has its rows."""

    def clear(self, handle: BatchedDataDict[Any]) -> None:
        """Drops the columns."""
        handle.clear()

    def close(self) -> None:
        """Nothing was started."""

    def _trimmed(self, batch: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        """The batch without the columns of padding that only rows left out needed."""
        if not batch.size or "input_ids" not in batch:
            return batch
        full = batch["input_ids"].shape[1]
        width = -(-int(batch["input_lengths"].max()) // self._multiple) * self._multiple
        for name, column in batch.items():
            if width < full and isinstance(column, torch.Tensor) and column.ndim >= 2 and column.shape[1] == full:
                batch[name] = column[:, :width].contiguous()
        return batch
