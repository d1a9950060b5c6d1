"""Samples as JSON lines: one object per row, columns of numbers without a detour through Python's lists.

Knows columns, not what they mean. Invariant: line i is row i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS


def write_rows(path: Path, columns: Mapping[str, Any], *, append: bool = False) -> None:
    """Writes a batch.

    Args:
        path: the file; its directory exists.
        columns: tensors, or sequences of anything JSON can say, arrays and tensors, with one item per row.
        append: add to the file instead of replacing it.

    Raises:
        ValueError: the columns differ in length.
        OSError: the file cannot be written.
    """
    sizes = {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"columns of {path.name} differ in length: {sizes}")
    plain = {name: _rows(column) for name, column in columns.items()}
    with path.open("ab" if append else "wb") as file:
        for row in zip(*plain.values(), strict=True):
            file.write(orjson.dumps(dict(zip(plain, row, strict=True)), default=_plain, option=_OPTIONS))


def _rows(column: Any) -> Sequence[object]:
    if hasattr(column, "detach"):
        array = column.detach().cpu().numpy()
        return array.tolist() if array.ndim == 1 else [np.ascontiguousarray(row) for row in array]
    return column


def _plain(value: object) -> Any:
    if hasattr(value, "detach"):
        return np.ascontiguousarray(value.detach().cpu().numpy())
    return value.tolist() if hasattr(value, "tolist") else str(value)
