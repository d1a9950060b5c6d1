"""The byte layout of a row: which columns share a block, in which order and with which types.

Columns written together share a block, since a store has costs per row and field. A block's name encodes its layout, so
any process can decode it. Invariant: `Layout.parse(layout.name) == layout`; if two blocks hold a column, the later
generation counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

import torch

from nemo_rl.data_plane.interfaces import MissingColumnsError

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
class Slot:
    """One column of a block."""

    column: str
    kind: Kind  # `t` one value per token, `r` one per row, `o` an object
    dtype: str = ""  # name of the torch dtype; empty for objects
    shape: tuple[int, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of one value."""
        return self.torch_dtype.itemsize * prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The columns of a block, in the order in which they lie in a row."""

    slots: tuple[Slot, ...]  # columns; rows' values first, then tokens'
    generation: int = 0  # counts how often a column of the block was already there in another block

    @property
    def name(self) -> str:
        return json.dumps(
            [self.generation, *([s.column, s.kind, s.dtype, *s.shape] for s in self.slots)], separators=(",", ":")
        )

    @property
    def columns(self) -> tuple[str, ...]:
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
            tuple(Slot(column, kind, dtype, tuple(shape)) for column, kind, dtype, *shape in slots), generation
        )


def next_generation(layout: Layout, present: Iterable[str]) -> Layout:
    """The layout for a block of rows that have the blocks `present`: later than any that shares a column."""
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
    newest = newest_blocks(present)
    missing = [column for column in columns if column not in newest]
    if missing:
        raise MissingColumnsError(f"columns {missing} are not written for all of {where}; there are {sorted(newest)}")
    chosen: dict[str, list[str]] = {}
    for column in columns:
        chosen.setdefault(newest[column], []).append(column)
    return chosen


def newest_blocks(present: Iterable[str]) -> Mapping[str, str]:
    """For each column the block that holds its latest value."""
    newest: dict[str, str] = {}
    for name in present:
        layout = Layout.parse(name)
        for column in layout.columns:
            if column not in newest or Layout.parse(newest[column]).generation < layout.generation:
                newest[column] = name
    return newest
