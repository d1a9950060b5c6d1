"""One sender and its receivers, standalone: NCCL between GPUs, gloo between CPU slots.

Made for one session or update and torn down with it; needs no default process group on either side. Invariant: every
member broadcasts the same tensors in the same order.
"""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class BroadcastGroup:
    """A group of one sender (rank 0) and its receivers.

    Args:
        address: Host of the sender.
        port: Free port there.
        rank: 0 for the sender.
        world_size: Sender and receivers.
        timeout_s: Deadline of rendezvous and collectives.
        device: Where this member's tensors are.
    """

    def __init__(
        self, address: str, port: int, rank: int, world_size: int, timeout_s: float, device: torch.device
    ) -> None:
        self.device = device
        limit = timedelta(seconds=timeout_s)
        self._store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=limit)
        store = dist.PrefixStore("weights", self._store)
        backends: Any = importlib.import_module("torch.distributed")
        if device.type != "cuda":
            self._group = backends.ProcessGroupGloo(store, rank, world_size, timeout=limit)
            return
        options = backends.ProcessGroupNCCL.Options()
        options._timeout = limit
        self._group = backends.ProcessGroupNCCL(store, rank, world_size, options)
        # The communicator is made by the first collective.
        self.broadcast(torch.zeros(1, device=device))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Sends from rank 0 into everyone's `tensor`, and waits."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Leaves, without waiting for the other members."""
        if self.device.type == "cuda":
            # Receivers leave when they are finalised, the sender after them; `shutdown` is collective among ranks of
            # one host and would wait for it.
            self._group.abort()
        del self._group
