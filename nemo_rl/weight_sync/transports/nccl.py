"""One sender broadcasts its staging buffer: over NCCL between GPUs (`nccl`), over gloo between host memories (`tcp`).

Needs no default process group. The creator of a group closes it: `KeptGroup` for sessions, which reuse the group of the
last one, since creating one takes seconds. Invariants: every member broadcasts the same windows in the same order,
which the session's layout fixes; no rank waits for a member that holds another group.
"""

from __future__ import annotations

import hashlib
import importlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl.distributed.accelerator_slots import CPU
from nemo_rl.weight_sync.transports.base import Handle, Opener, Staging, TransportError, TransportName


class BroadcastGroup:
    """A group of one sender (rank 0) and its receivers.

    Args:
        rank: 0 for the sender.
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


def nccl_group(
    address: str, port: int, rank: int, world_size: int, timeout_s: float, device: torch.device
) -> BroadcastGroup:
    """A group of sessions; see `BroadcastGroup`. Raises TransportError: the device is no GPU."""
    if device.type != "cuda":
        raise TransportError("weight_sync.transport=nccl needs GPUs; use host on CPU slots")
    return BroadcastGroup(address, port, rank, world_size, timeout_s, device)


class GroupStaging(Staging):
    """A sender's buffer that `send` broadcasts."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.buffer_B = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def publish(self, nbytes: int) -> Handle:
        """Only the size: the bytes travel by the collective."""
        return {"nbytes": nbytes}

    def close(self) -> None:
        """Frees the buffer."""
        self.buffer_B = torch.empty(0, dtype=torch.uint8)


class GroupOpener(Opener):
    """Receives into its own buffer, and copies to `device` if the group's device is of another type."""

    def __init__(self, group: BroadcastGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self.copies = group.device.type != device.type
        self._buffer_B = torch.empty(0, dtype=torch.uint8, device=group.device)

    def open(self, handle: Handle) -> torch.Tensor:
        """Takes part in the broadcast; the received bytes."""
        if self._buffer_B.numel() < handle["nbytes"]:
            self._buffer_B = torch.empty(handle["nbytes"], dtype=torch.uint8, device=self._group.device)
        received = self._buffer_B[: handle["nbytes"]]
        self._group.broadcast(received)
        return received.to(self._device) if self.copies else received

    def close(self) -> None:
        """Frees the buffer."""
        self._buffer_B = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class GroupMeeting:
    """A session's group."""

    group_id: str  # see `new_group_id`
    world_size: int  # the sender and its receivers
    address: str = ""  # of the sender, and `port` a free one there; of no use where the group is held already
    port: int = 0
    held: bool = False  # whether every member holds it from a session before
    keep: bool = False  # whether members hold it for sessions to come
    over: TransportName = "nccl"


def members_digest(over: TransportName, sender: str, receivers: Sequence[str], timeout_s: float) -> str:
    """Prefix of a group's id: digest of transport, sender, receivers in rank order, and the deadline of its
    collectives.
    """
    return hashlib.blake2b(repr((over, sender, list(receivers), timeout_s)).encode(), digest_size=8).hexdigest()


def new_group_id(members: str) -> str:
    """An id that no other meeting of the same members has."""
    return f"{members}-{uuid.uuid4().hex}"


def is_of(group_id: str | None, members: str) -> bool:
    """Whether an id is that of a group of these members."""
    return group_id is not None and group_id.startswith(f"{members}-")


class KeptGroup:
    """The group that one member keeps between sessions; empty at first."""

    def __init__(self) -> None:
        self._group: BroadcastGroup | None = None
        self.group_id: str | None = None

    def join(self, meeting: GroupMeeting, rank: int, timeout_s: float, device: torch.device) -> BroadcastGroup:
        """The session's group: the one that is held, or a new one in its place. Raises TransportError: the session
        counts on a group that is not held, or the device is no GPU.
        """
        if self._group is not None and self.group_id == meeting.group_id:
            return self._group
        self.drop()
        if meeting.held:
            raise TransportError(f"rank {rank} does not hold group {meeting.group_id}, which the session counts on")
        place = (meeting.address, meeting.port, rank, meeting.world_size, timeout_s)
        self._group = (
            BroadcastGroup(*place, CPU.torch_device()) if meeting.over == "tcp" else nccl_group(*place, device)
        )
        self.group_id = meeting.group_id
        return self._group

    def drop(self) -> None:
        """Leaves the group, without waiting for the others; nothing to do where none is held."""
        group, self._group, self.group_id = self._group, None, None
        if group is not None:
            group.close()
