"""NCCL transport: one sender broadcasts its staging buffer to receivers on other GPUs.

Invariant: every member broadcasts the same windows in the same order, which the session's fixed layout guarantees.
"""

from __future__ import annotations

from typing import Any

import torch

from nemo_rl.weight_sync.transports.base import Opener, Staging, TransportError
from nemo_rl.weight_sync.transports.broadcast_group import BroadcastGroup


def nccl_group(
    address: str, port: int, rank: int, world_size: int, timeout_s: float, device: torch.device
) -> BroadcastGroup:
    """The group of a session; see `BroadcastGroup`.

    Raises:
        TransportError: The device is no GPU.
    """
    if device.type != "cuda":
        raise TransportError("weight_sync.transport=nccl needs GPUs; use host on CPU slots")
    return BroadcastGroup(address, port, rank, world_size, timeout_s, device)


class NcclStaging(Staging):
    """A sender's buffer that `send` broadcasts."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.buffer_B = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def publish(self, nbytes: int) -> dict[str, Any]:
        """Only the size: the bytes travel by the collective."""
        return {"nbytes": nbytes}

    def close(self) -> None:
        """Frees the buffer."""
        self.buffer_B = torch.empty(0, dtype=torch.uint8)


class NcclOpener(Opener):
    """Receives into a buffer of its own."""

    def __init__(self, group: BroadcastGroup) -> None:
        self._group = group
        self._buffer_B = torch.empty(0, dtype=torch.uint8, device=group.device)

    def open(self, handle: dict[str, Any]) -> torch.Tensor:
        """Takes part in the broadcast; the received bytes."""
        if self._buffer_B.numel() < handle["nbytes"]:
            self._buffer_B = torch.empty(handle["nbytes"], dtype=torch.uint8, device=self._group.device)
        received = self._buffer_B[: handle["nbytes"]]
        self._group.broadcast(received)
        return received

    def close(self) -> None:
        """Frees the buffer and leaves the group."""
        self._buffer_B = torch.empty(0, dtype=torch.uint8)
        self._group.close()
