"""Columns to bytes and back: padded batches, jagged tensors and objects as one buffer per row, without padding on the
wire.

Packs token columns of equal lengths and row columns into one block; rows are copied as plain bytes, so every dtype
comes back bit for bit. Columns written together share a block, since a store has costs per row and field. A block's
name encodes its layout, so any process can decode it. Invariants: decode(encode(x)) == x, whatever the row order in
between; `Layout.parse(layout.name) == layout`; if two blocks hold a column, the later generation counts.

Shapes: N rows, S padded width.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

import numpy as np
import torch

from nemo_rl.data_plane.interfaces import Buffer, MissingColumnsError

# Every row starts with the number of its tokens (or of its object bytes); eight bytes keep what follows aligned.
HEADER_BYTES = 8
Kind = Literal["t", "r", "o"]
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype that can travel. Raises TypeError: it cannot."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise TypeError(f"tensors of {dtype} cannot be stored; these can: {sorted(_DTYPES)}")
    return name


@dataclass(frozen=True)
class ColumnSlot:
    """One column of a block."""

    column: str
    kind: Kind  # `t` one value per token, `r` one per row, `o` an object
    dtype: str = ""  # name of the torch dtype; empty for objects
    shape: tuple[int, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype."""
        return _DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of one value."""
        return self.torch_dtype.itemsize * prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The columns of a block, in the order in which they lie in a row."""

    slots: tuple[ColumnSlot, ...]  # columns; rows' values first, then tokens'
    generation: int = 0  # counts how often a column of the block was already there in another block

    @property
    def name(self) -> str:
        """The layout as text."""
        return json.dumps(
            [self.generation, *([s.column, s.kind, s.dtype, *s.shape] for s in self.slots)], separators=(",", ":")
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """Column names."""
        return tuple(slot.column for slot in self.slots)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row before its tokens, header included."""
        return HEADER_BYTES + sum(slot.nbytes for slot in self.slots if slot.kind == "r")

    @staticmethod
    @lru_cache(maxsize=4096)
    def parse(name: str) -> Layout:
        """The layout behind a block's name."""
        generation, *slots = json.loads(name)
        return Layout(
            tuple(ColumnSlot(column, kind, dtype, tuple(shape)) for column, kind, dtype, *shape in slots), generation
        )


def next_generation(layout: Layout, present: Iterable[str]) -> Layout:
    """The layout under which a block is written to rows that have the blocks `present`: later than any of them that
    shares a column.
    """
    wanted = set(layout.columns)
    later = 0
    for name in present:
        other = Layout.parse(name)
        if wanted & set(other.columns):
            later = max(later, other.generation if other.slots == layout.slots else other.generation + 1)
    return Layout(layout.slots, later)


def holders(present: Iterable[str], columns: Sequence[str], *, where: str) -> dict[str, list[str]]:
    """The blocks to fetch, each with the columns to take from it. `present`: names of the blocks that all rows have.
    `where`: the rows in words, for the message. Raises MissingColumnsError: a column lies in no block.
    """
    newest = _newest_blocks(present)
    missing = [column for column in columns if column not in newest]
    if missing:
        raise MissingColumnsError(f"columns {missing} are not written for all of {where}; there are {sorted(newest)}")
    chosen: dict[str, list[str]] = {}
    for column in columns:
        chosen.setdefault(newest[column], []).append(column)
    return chosen


def _newest_blocks(present: Iterable[str]) -> Mapping[str, str]:
    """For each column the block that holds its latest value."""
    newest: dict[str, str] = {}
    for name in present:
        layout = Layout.parse(name)
        for column in layout.columns:
            if column not in newest or Layout.parse(newest[column]).generation < layout.generation:
                newest[column] = name
    return newest


_JSON, _TORCH = 0, 1
_LEAVES = (torch.Tensor, str, bytes, int, float, bool, type(None))


@dataclass(frozen=True)
class Jagged:
    """Rows of different lengths without padding."""

    values: torch.Tensor  # all rows after each other, [sum of lengths, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Padded:
    """Rows of different lengths in a padded tensor [N, S, ...]."""

    values: torch.Tensor
    lengths: tuple[int, ...]


Decoded = torch.Tensor | Jagged | Sequence[object]
Column = Decoded | Padded


def encode(columns: Mapping[str, Column], rows: int) -> dict[Layout, list[Buffer]]:
    """Blocks of a batch.

    Args:
        columns: Tensors [N, ...] with one value per row, `Jagged` and `Padded` token columns, sequences of N objects.

    Raises ValueError: a column does not have N rows; TypeError: a tensor's dtype or an object's type cannot travel.
    """
    per_row: list[tuple[ColumnSlot, Buffer]] = []
    per_token: dict[tuple[int, ...], list[tuple[ColumnSlot, Jagged | Padded]]] = {}
    blocks: dict[Layout, list[Buffer]] = {}
    for name, column in columns.items():
        if isinstance(column, Jagged | Padded):
            _check_rows(name, len(column.lengths), rows)
            inner = column.values.shape[1:] if isinstance(column, Jagged) else column.values.shape[2:]
            slot = ColumnSlot(name, "t", dtype_name(column.values.dtype), tuple(inner))
            per_token.setdefault(column.lengths, []).append((slot, column))
        elif isinstance(column, torch.Tensor):
            _check_rows(name, len(column), rows)
            per_row.append(
                (ColumnSlot(name, "r", dtype_name(column.dtype), tuple(column.shape[1:])), _as_bytes(column, rows))
            )
        else:
            _check_rows(name, len(column), rows)
            blocks[Layout((ColumnSlot(name, "o"),))] = [
                _encode_object(name, row, value) for row, value in enumerate(column)
            ]
    if per_row and not per_token:
        per_token[(0,) * rows] = []
    for lengths, group in per_token.items():
        layout = Layout((*(slot for slot, _ in per_row), *(slot for slot, _ in group)))
        blocks[layout] = _pack(lengths, [values for _, values in per_row], group)
        per_row = []
    return blocks


def decode_padded(
    layout: Layout, buffers: Sequence[Buffer], columns: Collection[str], width: int, pad: Mapping[str, float]
) -> dict[str, Decoded]:
    """Columns of a block as tensors [N, ...]; token columns are padded to `width`, or to their longest row where that
    is longer. `width`: wanted width; 0 for the longest row. `pad`: padding by column; 0 where absent.
    """
    return _decode(
        layout,
        buffers,
        columns,
        lambda slot, parts, lengths: _padded(slot, parts, max(width, max(lengths, default=0)), pad.get(slot.column, 0)),
    )


def decode_jagged(layout: Layout, buffers: Sequence[Buffer], columns: Collection[str]) -> dict[str, Decoded]:
    """Columns of a block: token columns as `Jagged`, rows' as tensors, objects as lists."""
    return _decode(
        layout, buffers, columns, lambda slot, parts, lengths: Jagged(_typed(parts, slot, sum(lengths)), tuple(lengths))
    )


def _decode(
    layout: Layout,
    buffers: Sequence[Buffer],
    columns: Collection[str],
    of_tokens: Callable[[ColumnSlot, list[Buffer], list[int]], torch.Tensor | Jagged],
) -> dict[str, Decoded]:
    """Columns of a block; `of_tokens` makes a token column of its rows' bytes."""
    rows = [np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers]
    lengths = [int(row[:HEADER_BYTES].view(np.int64)[0]) for row in rows]
    decoded: dict[str, Decoded] = {}
    for slot, offset, steps in _placed(layout):
        if slot.column not in columns:
            continue
        if slot.kind == "o":
            decoded[slot.column] = [_decode_object(row) for row in rows]
        elif slot.kind == "r":
            decoded[slot.column] = _typed([row[offset : offset + slot.nbytes] for row in rows], slot, len(rows))
        else:
            until = steps + slot.nbytes
            parts = [row[offset + steps * n : offset + until * n] for row, n in zip(rows, lengths, strict=True)]
            decoded[slot.column] = of_tokens(slot, parts, lengths)
    return decoded


def _check_rows(name: str, found: int, rows: int) -> None:
    if found != rows:
        raise ValueError(f"column {name!r} has {found} rows, the number of sample ids must match batch size: {rows}")


def _as_bytes(tensor: torch.Tensor, rows: int) -> Buffer:
    return _byte_matrix(tensor.detach().cpu().contiguous()).reshape(rows, -1)


def _byte_matrix(tensor: torch.Tensor) -> Buffer:
    flat = tensor.reshape(len(tensor), -1) if tensor.numel() else tensor.new_empty((len(tensor), 0))
    return flat.view(torch.uint8).numpy()


def _pack(
    lengths: Sequence[int], heads: Sequence[Buffer], group: Sequence[tuple[ColumnSlot, Jagged | Padded]]
) -> list[Buffer]:
    count = len(lengths)
    header = np.asarray(lengths, dtype=np.int64).reshape(count, 1).view(np.uint8)
    head = np.concatenate([header, *heads], axis=1) if count else np.empty((0, HEADER_BYTES), np.uint8)
    per_token = sum(slot.nbytes for slot, _ in group)
    sizes = [head.shape[1] + per_token * length for length in lengths]
    ends = np.cumsum([0, *sizes]).tolist()
    flat = np.empty(ends[-1], dtype=np.uint8)
    buffers = [flat[start:end] for start, end in itertools.pairwise(ends)]
    for row, buffer in enumerate(buffers):
        buffer[: head.shape[1]] = head[row]
    done = 0
    for slot, column in group:
        size = slot.nbytes
        if isinstance(column, Padded):
            source = _as_bytes(column.values, count)
            for row, (buffer, length) in enumerate(zip(buffers, lengths, strict=True)):
                start = head.shape[1] + done * length
                buffer[start : start + size * length] = source[row, : size * length]
        else:
            source = _byte_matrix(column.values.detach().cpu().contiguous()).reshape(-1)
            at = 0
            for buffer, length in zip(buffers, lengths, strict=True):
                start = head.shape[1] + done * length
                buffer[start : start + size * length] = source[at : at + size * length]
                at += size * length
        done += size
    return buffers


def _placed(layout: Layout) -> list[tuple[ColumnSlot, int, int]]:
    """Each column with its byte offset in a row: the second number, and the third once per token."""
    placed: list[tuple[ColumnSlot, int, int]] = []
    offset, per_token = HEADER_BYTES, 0
    for slot in layout.slots:
        if slot.kind == "t":
            placed.append((slot, layout.row_bytes, per_token))
            per_token += slot.nbytes
        else:
            placed.append((slot, offset, 0))
            offset += slot.nbytes if slot.kind == "r" else 0
    return placed


def _padded(slot: ColumnSlot, parts: Sequence[Buffer], width: int, pad: float) -> torch.Tensor:
    """Rows of tokens [N, width, ...]."""
    shape = (width, *slot.shape)
    padding = _byte_matrix(torch.full((1, *shape), pad, dtype=slot.torch_dtype))[0]
    tensor = torch.empty((len(parts), *shape), dtype=slot.torch_dtype)
    # Each byte is touched once: the first touch of fresh memory is what costs.
    for out, part in zip(_byte_matrix(tensor), parts, strict=True):
        out[: len(part)] = part
        out[len(part) :] = padding[len(part) :]
    return tensor


def _typed(parts: Sequence[Buffer], slot: ColumnSlot, values: int) -> torch.Tensor:
    """The bytes of `values` values as a tensor."""
    if not values * slot.nbytes:
        return torch.empty((values, *slot.shape), dtype=slot.torch_dtype)
    return torch.from_numpy(np.concatenate(parts)).view(slot.torch_dtype).view(values, *slot.shape)


def _encode_object(name: str, row: int, value: object) -> Buffer:
    if _is_plain(value):
        mark, payload = _JSON, json.dumps(value).encode()
    else:
        stream = io.BytesIO()
        torch.save(_storable(name, row, value), stream)
        mark, payload = _TORCH, stream.getvalue()
    header = np.array([len(payload)], dtype=np.int64).tobytes()
    return np.frombuffer(header + bytes([mark]) + payload, dtype=np.uint8)


def _decode_object(row: Buffer) -> object:
    payload = row[HEADER_BYTES + 1 :].tobytes()
    if row[HEADER_BYTES] == _JSON:
        return json.loads(payload)
    return torch.load(io.BytesIO(payload), weights_only=True)


def _is_plain(value: object) -> bool:
    """Whether JSON gives back the very value."""
    if isinstance(value, dict):
        return (
            type(value) is dict and all(isinstance(key, str) for key in value) and all(map(_is_plain, value.values()))
        )
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


def _storable(name: str, row: int, value: object) -> object:
    """The object with tensors copied: pickling a view would store its whole base tensor."""
    if isinstance(value, torch.Tensor):
        own = value.detach().cpu()
        return own.clone() if own.untyped_storage().nbytes() > own.nbytes else own
    if isinstance(value, dict):
        pairs = {_storable(name, row, key): _storable(name, row, item) for key, item in value.items()}
        return pairs if type(value) is dict else value
    if isinstance(value, (list, tuple, set)):
        items = [_storable(name, row, item) for item in value]
        return type(value)(items) if type(value) in (list, tuple, set) else value
    if not isinstance(value, _LEAVES) or isinstance(value, np.generic):
        raise TypeError(
            f"column {name!r}, row {row}: non-tensor value of type "
            f"{type(value).__module__}.{type(value).__name__} cannot be stored; "
            "tensors, text, numbers and lists, tuples and dicts of them can"
        )
    return value
