"""The client over any storage: codec, tags, and waiting for space, written once.

An adapter only moves blocks of bytes; what the operations mean is decided here, so every backend means the same.
Invariant: a put either lands whole or raises and leaves earlier rows as they were.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nemo_rl.data_plane.blocks import (
    Column,
    Decoded,
    Jagged,
    Layout,
    Padded,
    decode_jagged,
    decode_padded,
    encode,
    holders,
    next_generation,
)
from nemo_rl.data_plane.codec import object_array
from nemo_rl.data_plane.field_schema import SCHEMA, TOKEN_ALIGNED_FIELDS
from nemo_rl.data_plane.interfaces import (
    Buffer,
    DataPlaneCapacityError,
    DataPlaneClient,
    DataPlaneClosedError,
    Storage,
)
from nemo_rl.data_plane.meta import KVBatchMeta
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

if TYPE_CHECKING:
    from tensordict import TensorDict

logger = logging.getLogger(__name__)


class StorageFull(Exception):
    """An adapter has no space right now; nothing of the put is visible."""


class StoredClient(DataPlaneClient):
    """A client that connects at first use.

    Args:
        connect: Opens the storage; must pickle.
        poll_s: Seconds between polls for space.
        full_wait_s: How long a put waits for space.
        on_close: Stops what this client started; not pickled.
    """

    def __init__(
        self,
        connect: Callable[[], Storage],
        *,
        poll_s: float = 0.5,
        full_wait_s: float = 60.0,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._connect = connect
        self._poll_s = poll_s
        self._full_wait_s = full_wait_s
        self._on_close = on_close
        self._storage: Storage | None = None
        self._closed = False
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        # A copy in another process attaches on its own and owns nothing.
        return self.__dict__ | {"_storage": None, "_on_close": None, "_lock": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @property
    def storage(self) -> Storage:
        """The storage, connected at first use. Raises DataPlaneClosedError: the client was closed."""
        with self._lock:
            if self._closed:
                raise DataPlaneClosedError("this data-plane client is closed; rows cannot be written or read any more")
            if self._storage is None:
                self._storage = self._connect()
            return self._storage

    # -- rows ---------------------------------------------------------------------------------------------------------

    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: Any | None = None,
        tags: Sequence[Mapping[str, object]] | None = None,
    ) -> KVBatchMeta:
        # A TensorDict iterates over rows.
        columns = {} if fields is None else {name: _column(name, fields[name]) for name in list(fields.keys())}
        return self._put(sample_ids, partition_id, columns, tags)

    def put_padded(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        columns: Mapping[str, object],
        lengths: Sequence[int],
        tags: Sequence[Mapping[str, object]] | None = None,
    ) -> KVBatchMeta:
        """See `DataPlaneClient`; columns go to bytes without a jagged tensor in between."""
        counts = tuple(int(length) for length in lengths)
        if len(counts) != len(sample_ids):
            raise ValueError(f"the number of lengths ({len(counts)}) must match batch size: {len(sample_ids)} ids")
        return self._put(
            sample_ids,
            partition_id,
            {name: _padded_column(name, value, counts) for name, value in columns.items()},
            tags,
        )

    def _put(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        columns: Mapping[str, Column],
        tags: Sequence[Mapping[str, object]] | None,
    ) -> KVBatchMeta:
        ids = list(sample_ids)
        if tags is not None and len(tags) != len(ids):
            raise ValueError(f"tags must align 1:1 with sample_ids: {len(tags)} tags for {len(ids)} ids")
        if len(set(ids)) != len(ids):
            raise ValueError(f"partition {partition_id!r}: sample ids repeat in one put: {_repeated(ids)}")
        for name, column in columns.items():
            _check_dtype(name, column)
        meta = KVBatchMeta(
            partition_id, None, ids, list(columns), tags=None if tags is None else [dict(tag) for tag in tags]
        )
        if ids and (columns or tags is not None):
            blocks = encode(columns, len(ids))
            self._when_there_is_room(lambda: self._write(ids, partition_id, blocks, tags), partition_id)
        return meta

    def _write(
        self,
        ids: list[str],
        partition_id: str,
        blocks: Mapping[Layout, Sequence[Buffer]],
        tags: Sequence[Mapping[str, object]] | None,
    ) -> None:
        rows = self.storage.locate(partition_id, ids, create=True)
        named = {next_generation(layout, rows.blocks).name: buffers for layout, buffers in blocks.items()}
        merged = None if tags is None else [dict(old) | dict(new) for old, new in zip(rows.tags, tags, strict=True)]
        self.storage.put(rows, named, merged)

    def _when_there_is_room(self, write: Callable[[], None], partition_id: str) -> None:
        deadline = time.monotonic() + self._full_wait_s
        waited = False
        while True:
            try:
                return write()
            except StorageFull as full:
                if time.monotonic() >= deadline:
                    raise DataPlaneCapacityError(
                        f"partition {partition_id!r}: no room for {self._full_wait_s:.0f} s ({full}); what "
                        "is stored is untouched. Clear rows sooner, "
                        "or raise data_plane.storage_capacity (simple) or data_plane.global_segment_size (mooncake_cpu)"
                    ) from full
                if not waited:
                    logger.warning(
                        "data_plane=full partition=%s waiting_s=%.0f reason=%s", partition_id, self._full_wait_s, full
                    )
                waited = True
            time.sleep(self._poll_s)

    def get_samples(self, sample_ids: Sequence[str], partition_id: str, select_fields: Sequence[str]) -> TensorDict:
        from tensordict import TensorDict

        found: dict[str, Decoded] = {}
        for layout, buffers, columns in self._fetch(sample_ids, partition_id, select_fields):
            found.update(decode_jagged(layout, buffers, columns))
        return TensorDict(
            {name: _wire_form(found[name]) for name in select_fields if name in found}, batch_size=[len(sample_ids)]
        )

    def get_padded(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str],
        *,
        width: int = 0,
        pad_value_dict: Mapping[str, float] | None = None,
    ) -> BatchedDataDict:
        """See `DataPlaneClient`; bytes go straight into the padded tensors."""
        found: dict[str, object] = {}
        for layout, buffers, columns in self._fetch(sample_ids, partition_id, select_fields):
            found.update(decode_padded(layout, buffers, columns, width, pad_value_dict or {}))
        return BatchedDataDict({name: found[name] for name in select_fields if name in found})

    def _fetch(
        self, sample_ids: Sequence[str], partition_id: str, columns: Sequence[str]
    ) -> Iterable[tuple[Layout, list[Buffer], list[str]]]:
        if not len(sample_ids) or not len(columns):
            return
        rows = self.storage.locate(partition_id, sample_ids, create=False)
        chosen = holders(
            rows.blocks, list(dict.fromkeys(columns)), where=f"the {len(sample_ids)} rows of partition {partition_id!r}"
        )
        buffers = self.storage.get(rows, list(chosen))
        for name, wanted in chosen.items():
            yield Layout.parse(name), buffers[name], wanted

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        ids = list(self.storage.tags(partition_id)) if sample_ids is None else list(sample_ids)
        if ids:
            self.storage.clear(partition_id, ids)
        elif sample_ids is None:
            warnings.warn(f"partition {partition_id!r} has no rows to clear", RuntimeWarning, stacklevel=2)

    def list_samples(self, partition_id: str) -> dict[str, dict[str, object]]:
        return self.storage.tags(partition_id)

    def close(self) -> None:
        with self._lock:
            storage, self._storage, self._closed = self._storage, None, True
            on_close, self._on_close = self._on_close, None
        if storage is not None:
            storage.close()
        if on_close is not None:
            on_close()


def _column(name: str, value: Any) -> Column:
    if isinstance(value, torch.Tensor):
        if not value.is_nested:
            return value
        rows = value.unbind()
        if all(row.shape[1:] == rows[0].shape[1:] for row in rows):
            return Jagged(torch.cat(rows).detach(), tuple(len(row) for row in rows))
        return [row.detach() for row in rows]
    if isinstance(value, np.ndarray) and value.dtype != object:
        return torch.from_numpy(value)
    if not isinstance(value, (list, tuple)) and not hasattr(value, "tolist"):
        raise TypeError(
            f"column {name!r}: a non-tensor value of type {type(value).__name__} cannot be stored; give one "
            "object per row"
        )
    return list(value) if isinstance(value, (list, tuple)) else value.tolist()


def _padded_column(name: str, value: Any, lengths: tuple[int, ...]) -> Column:
    aligned = name in TOKEN_ALIGNED_FIELDS and isinstance(value, torch.Tensor) and not value.is_nested
    if aligned and value.ndim >= 2 and value.shape[0] == len(lengths) and value.shape[1] >= max(lengths, default=0):
        return Padded(value, lengths)
    return _column(name, value)


def _check_dtype(name: str, column: Column) -> None:
    """A known column of whole numbers holds whole numbers, one of real numbers real ones; their width is the writer's
    choice.
    """
    values = column.values if isinstance(column, (Jagged, Padded)) else column
    expected = SCHEMA[name].dtype if name in SCHEMA else None
    if expected is None:
        return
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"column {name!r} holds {expected}, a tensor; {type(values).__name__} was given")
    if values.is_floating_point() != expected.startswith("float"):
        raise TypeError(
            f"column {name!r} holds {expected}, {str(values.dtype).removeprefix('torch.')} was given; "
            "convert it before it is put"
        )


def _wire_form(column: Decoded) -> object:
    if isinstance(column, Jagged):
        if len(set(column.lengths)) == 1:
            return column.values.view(len(column.lengths), column.lengths[0], *column.values.shape[1:])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(column.lengths).cumsum(0)])
        return torch.nested.nested_tensor_from_jagged(column.values, offsets)
    return column if isinstance(column, torch.Tensor) else object_array(list(column))


def _repeated(ids: Sequence[str]) -> list[str]:
    return sorted({identity for identity in ids if ids.count(identity) > 1})[:3]
