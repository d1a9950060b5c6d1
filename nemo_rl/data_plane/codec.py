"""Padded batches to jagged tensors and back, in the forms that NeMo-RL's data plane has.

On the wire and in TensorDicts token columns are jagged; consumers get them padded. Invariant: padding is the consumer's
choice and never stored.

Shapes: N rows, S padded width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from nemo_rl.data_plane.field_schema import TOKEN_ALIGNED_FIELDS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

if TYPE_CHECKING:
    from tensordict import TensorDict


def round_up(value: int, multiple: int) -> int:
    """`value`, or the next multiple."""
    return value if multiple <= 1 else -(-value // multiple) * multiple


def to_nested_by_length(padded: torch.Tensor, lengths: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """A padded tensor [N, S, ...] as a jagged one whose row i has its first `lengths[i]` values. Raises ValueError: the
    tensor has no second dimension, or there is not one length per row.
    """
    counts = torch.as_tensor(lengths)
    if padded.ndim < 2 or counts.shape != (padded.shape[0],):
        raise ValueError(
            f"a padded tensor [N, S, ...] and lengths [N] are needed, got {tuple(padded.shape)} and "
            f"{tuple(counts.shape)}"
        )
    counts = counts.to("cpu", torch.int64)
    rows = [row[:n] for row, n in zip(padded.detach(), counts.tolist(), strict=True)]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(padded.device)
    values = torch.cat(rows) if rows else padded.new_empty((0, *padded.shape[2:]))
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def pack_per_token_field(val: torch.Tensor, lengths: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """A jagged tensor if the tensor has a token axis at least as long as the rows, else the tensor itself."""
    counts = torch.as_tensor(lengths)
    wide_enough = (
        val.ndim >= 2 and len(counts) > 0 and val.shape[0] == len(counts) and val.shape[1] >= int(counts.max())
    )
    return to_nested_by_length(val, counts) if wide_enough else val.detach().contiguous()


def pack_jagged_fields(
    fields: Mapping[str, object],
    *,
    lengths: torch.Tensor | Sequence[int] | None,
    token_aligned_fields: Collection[str] = TOKEN_ALIGNED_FIELDS,
) -> TensorDict:
    """Columns as a TensorDict for the wire.

    Args:
        fields: Tensors and object arrays by name.
        lengths: Tokens of each row; None leaves everything rectangular.
        token_aligned_fields: Names of the columns that become jagged.

    Raises TypeError: a value is neither a tensor nor an array or list of objects.
    """
    from tensordict import TensorDict

    packed: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, torch.Tensor):
            aligned = lengths is not None and name in token_aligned_fields and not value.is_nested
            packed[name] = pack_per_token_field(value, lengths) if aligned and lengths is not None else value.detach()
        elif isinstance(value, (list, np.ndarray)):
            packed[name] = object_array(value)
        else:
            raise TypeError(
                f"column {name!r} is a {type(value).__name__}; tensors and arrays or lists of objects can be stored"
            )
    size = len(lengths) if lengths is not None else next((len(value) for value in packed.values()), 0)
    return TensorDict(packed, batch_size=[size])


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
