"""Padded batches of what `get_samples` returns, where token columns are jagged.

Invariant: padding is the consumer's choice and never stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from nemo_rl.distributed.batched_data_dict import BatchedDataDict


def round_up(value: int, multiple: int) -> int:
    """`value`, or the next multiple."""
    return value if multiple <= 1 else -(-value // multiple) * multiple


def object_array(values: Sequence[object] | NDArray[np.object_]) -> NDArray[np.object_]:
    """A one-dimensional array of objects; sequences among them stay objects, which numpy's own conversion would take
    apart.
    """
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array


def materialize(
    td: Any,
    layout: Literal["padded", "jagged"] = "padded",
    pad_value_dict: Mapping[str, float] | None = None,
    pad_to_seqlen: int = 0,
) -> BatchedDataDict:
    """A batch as consumers take it.

    Args:
        td: A TensorDict or mapping as `get_samples` returns it.
        layout: `padded` pads jagged columns; `jagged` leaves them.
        pad_value_dict: Padding by column; 0 where absent.
        pad_to_seqlen: Every tensor with a second dimension is padded to at least this width, rectangular ones too.

    Raises TypeError: a value is neither a tensor nor objects.
    """
    batch: BatchedDataDict = BatchedDataDict()
    for name in td.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        value = td[name]
        pad = (pad_value_dict or {}).get(name, 0)
        if isinstance(value, torch.Tensor):
            if layout == "padded":
                # torch's own padding of a jagged tensor made of offsets pads to its total length.
                if value.is_nested:
                    value = pad_sequence(list(value.unbind()), batch_first=True, padding_value=pad)
                value = _widened(value, pad_to_seqlen, pad)
            batch[name] = value
        elif isinstance(value, (list, np.ndarray)):
            batch[name] = object_array(value)
        elif hasattr(value, "tolist"):
            batch[name] = object_array(value.tolist())
        else:
            raise TypeError(f"column {name!r} arrived as {type(value).__name__}; tensors and objects were expected")
    return batch


def _widened(value: torch.Tensor, width: int, pad: float) -> torch.Tensor:
    if value.ndim < 2 or value.shape[1] >= width:
        return value
    filling = value.new_full((value.shape[0], width - value.shape[1], *value.shape[2:]), pad)
    return torch.cat([value, filling], dim=1)
