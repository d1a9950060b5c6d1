"""One fetch for the ranks that need the same rows: the leader reads, the others receive.

Works on host memory over one host-side group, whatever the devices train with. Knows no store. Invariant: a failed
fetch fails on every rank of the group at once, instead of leaving the others in a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl.data_plane.errors import DataPlaneError
from nemo_rl.distributed.batched_data_dict import BatchedDataDict


def broadcast_batch(fetch: Callable[[], BatchedDataDict], group: dist.ProcessGroup) -> BatchedDataDict:
    """What `fetch` gives on the group's first rank, on all of its ranks.

    Args:
        fetch: Called on the group's first rank only.
        group: A host-side group (gloo).

    Raises:
        DataPlaneError: The leader's fetch failed; on the leader its own error.
    """
    leader = dist.get_process_group_ranks(group)[0]
    if dist.get_rank() == leader:
        return _lead(fetch, group, leader)
    (said,) = _receive_header(group, leader)
    if isinstance(said, str):
        raise DataPlaneError(f"rank {leader} could not fetch the rows that this rank shares: {said}")
    batch: BatchedDataDict = BatchedDataDict()
    for name, value in said:
        if isinstance(value, _TensorForm):
            tensor = torch.empty(value.shape, dtype=value.dtype)
            _send(tensor, group, leader)
            batch[name] = tensor
        else:
            batch[name] = value
    return batch


class _TensorForm:
    """Shape and dtype of a tensor that follows."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _lead(fetch: Callable[[], BatchedDataDict], group: dist.ProcessGroup, leader: int) -> BatchedDataDict:
    try:
        batch = fetch()
    except Exception as error:
        dist.broadcast_object_list([f"{type(error).__name__}: {error}"], src=leader, group=group)
        raise
    header = [
        (name, _TensorForm(value) if isinstance(value, torch.Tensor) else value)
        for name, value in batch.items()
        if name != "message_log"
    ]
    dist.broadcast_object_list([header], src=leader, group=group)
    for value in batch.values():
        if isinstance(value, torch.Tensor):
            _send(value.contiguous(), group, leader)
    return batch


def _receive_header(group: dist.ProcessGroup, leader: int) -> list[Any]:
    said: list[object] = [None]
    dist.broadcast_object_list(said, src=leader, group=group)
    return said


def _send(tensor: torch.Tensor, group: dist.ProcessGroup, leader: int) -> None:
    if tensor.numel():
        # As bytes: every dtype travels, also those that the collective does not know.
        dist.broadcast(tensor.view(-1).view(torch.uint8), src=leader, group=group)
