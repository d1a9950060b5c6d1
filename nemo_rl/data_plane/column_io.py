"""Whole columns in and out, as the roles of a step move them: the first write of a rollout, reads and write-backs.

Invariant: a batch is padded to one width that follows from its rows' lengths alone, so that every reader of the same
rows sees the same tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nemo_rl.data_plane.codec import round_up
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.meta import KVBatchMeta
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

PAD_MULTIPLE = "pad_to_multiple"


def batch_width(meta: KVBatchMeta) -> int:
    """Width of token columns of a meta's rows: their longest, rounded up to the multiple that its producer recorded."""
    return round_up(max(meta.sequence_lengths or [0]), int(meta.extra_info.get(PAD_MULTIPLE, 1)))


def read_columns(
    client: DataPlaneClient,
    meta: KVBatchMeta,
    select_fields: Sequence[str],
    *,
    pad_value_dict: Mapping[str, float] | None = None,
    width: int | None = None,
) -> BatchedDataDict:
    """Columns of a meta's rows, in its order.

    Args:
        select_fields: Columns; nothing else is returned.
        pad_value_dict: Padding by column; 0 where absent.
        width: Width of token columns; by default `batch_width` of these rows.
    """
    wanted = batch_width(meta) if width is None else width
    return client.get_padded(
        meta.sample_ids, meta.partition_id, select_fields, width=wanted, pad_value_dict=pad_value_dict
    )


def write_columns(client: DataPlaneClient, meta: KVBatchMeta, fields: Mapping[str, object]) -> None:
    """Adds columns to a meta's rows; padding of token columns stays here. Raises ValueError: a column does not have one
    row per id, or the meta has no lengths to cut token columns by.
    """
    if not fields or not meta.size:
        return
    if meta.sequence_lengths is None:
        if any(isinstance(value, torch.Tensor) and value.ndim > 1 for value in fields.values()):
            raise ValueError(
                f"writing {sorted(fields)} needs the rows' lengths: this meta of partition "
                f"{meta.partition_id!r} has no sequence_lengths"
            )
        client.put_samples(meta.sample_ids, meta.partition_id, dict(fields))
        return
    client.put_padded(meta.sample_ids, meta.partition_id, fields, meta.sequence_lengths)


def kv_first_write(
    final_batch_cpu: Mapping[str, Any],
    *,
    sample_ids: Sequence[str],
    dp_client: DataPlaneClient,
    partition_id: str,
    extra_info: Mapping[str, object] | None = None,
    task_name: str | None = "train",
    pad_to_multiple: int = 1,
    tags: Sequence[Mapping[str, object]] | None = None,
) -> KVBatchMeta:
    """Writes a rollout once: every tensor and object column of the batch, known or not.

    Args:
        final_batch_cpu: `input_lengths` [N] and whatever else there is.
        sample_ids: The rows' ids, minted by the caller.
        pad_to_multiple: Readers round the width up to this.
        tags: Primitive values, one mapping per row.

    Raises ValueError: there are no rows, no `input_lengths`, or ids and tags do not match them.
    """
    if "input_lengths" not in final_batch_cpu:
        raise ValueError(f"a first write needs the column input_lengths; the batch has {sorted(final_batch_cpu)}")
    lengths = [int(length) for length in final_batch_cpu["input_lengths"]]
    if not lengths:
        raise ValueError(f"partition {partition_id!r}: there are no rows to write")
    for what, count in (("sample_ids", len(sample_ids)), ("tags", len(lengths) if tags is None else len(tags))):
        if count != len(lengths):
            raise ValueError(f"{what} must match batch size: {count} for {len(lengths)} rows")
    columns = {name: value for name, value in final_batch_cpu.items() if name != "message_log"}
    written = dp_client.put_padded(sample_ids, partition_id, columns, lengths, tags)
    info = dict(extra_info or {}) | ({PAD_MULTIPLE: pad_to_multiple} if pad_to_multiple > 1 else {})
    return KVBatchMeta(partition_id, task_name, list(sample_ids), list(columns), lengths, info, written.tags)
