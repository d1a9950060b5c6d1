"""Transports make the bytes of a staging buffer readable in another process.

A sender stages bytes in a buffer and publishes a small picklable `handle`; the receiver opens the handle and gets the
bytes as a tensor on its device. Invariant: the bytes stay unchanged until the receiver has answered.

- `host`: bytes in POSIX shared memory, mapped by every receiver on the node. Serves CPU slots, and GPUs in containers
  that forbid CUDA IPC: there the receiver pins the mapping once and copies to its device at full PCIe speed. The sender
  created the segment and removes it; receivers only map it.
- `cuda_ipc`: the receiver maps the sender's buffer on the same physical GPU, without a copy. Right only where both
  processes see the same GPU; the session checks that by device UUID. The receiver's device index is used to open a
  handle, since both see the GPU under numbers of their own.
- `nccl` between GPUs and `tcp` (gloo) between host memories: one sender broadcasts its staging buffer. Needs no default
  process group. The creator of a group closes it: `KeptGroup` for sessions, which reuse the group of the last one,
  since creating one takes seconds. Every member broadcasts the same windows in the same order, which the session's
  layout fixes; no rank waits for a member that holds another group.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import importlib
import mmap
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Required, TypedDict

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from torch.storage import UntypedStorage

from nemo_rl.config.errors import UserError
from nemo_rl.distributed.accelerator_slots import CPU
from nemo_rl.distributed.devices import SHARED_MEMORY_DIR
from nemo_rl.utils.directory_lock import abandoned

TransportName = Literal["host", "cuda_ipc", "nccl", "tcp"]
PUSHED: tuple[TransportName, ...] = ("nccl", "tcp")
"""Transports whose bytes one sender broadcasts to a session's group; a session has one of them at most."""


class TransportError(UserError, RuntimeError):
    """Bytes could not be staged, published or opened."""


class Handle(TypedDict, total=False):
    """Published bytes, as their transport finds them."""

    nbytes: Required[int]
    path: str  # host: the segment
    mapped: int  # host: the segment's size
    offset: int  # host: where in the segment the bytes start
    keep: bool  # host: later sessions read the segment too
    ipc: dict[str, Any]  # cuda_ipc: arguments that map the buffer
    capacity: int  # cuda_ipc: the buffer's size


class Published(TypedDict):
    """A window at one place, with the checksums of its buckets where they are compared."""

    handle: Handle
    checksums: list[str]


class Staging(ABC):
    """A sender's staging buffer."""

    buffer_B: torch.Tensor  # uint8 tensor that the sender packs into

    @abstractmethod
    def publish(self, nbytes: int) -> Handle:
        """Makes the first `nbytes` visible to receivers; the handle they open, which can be pickled."""

    @abstractmethod
    def close(self) -> None:
        """Frees the buffer. No receiver may still read it."""


class Opener(ABC):
    """A receiver's side: opens handles. Buffers may be kept mapped between calls until `close`.

    Attributes:
        copies: Whether opened bytes are the receiver's own, which it may read after it has answered. They may still be
            on their way: whatever is enqueued on the device's stream after `open` finds them there.
    """

    copies: bool = False

    @abstractmethod
    def open(self, handle: Handle) -> torch.Tensor:
        """The published bytes as a uint8 tensor on the receiver's device."""

    @abstractmethod
    def close(self) -> None:
        """Drops every mapping."""


# Mappings of segments that outlive a session, registered once per process and device: registering costs more than a
# copy.
_kept: dict[tuple[str, torch.device], torch.Tensor] = {}

_PREFIX = "nemo_rl-"
_STALE_AFTER_S = 60.0


class HostStaging(Staging):
    """A segment of shared memory of `nbytes` bytes. Raises TransportError: shared memory is full."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        remove_stale_segments()
        self.path = os.path.join(SHARED_MEMORY_DIR, f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex}")
        stat = os.statvfs(SHARED_MEMORY_DIR)
        available = stat.f_bavail * stat.f_frsize
        if nbytes > available:
            raise TransportError(
                f"{SHARED_MEMORY_DIR} has {available >> 20} MiB free, a staging buffer needs {nbytes >> 20} "
                "MiB, of which a session may have two; lower "
                "weight_sync.bucket_bytes (the largest tensor must still fit), or give the container more "
                "shared memory (docker run --shm-size)"
            )
        # Stays open: the lock on it is what tells a living sender's segment from a dead one's.
        self._descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        with ExitStack() as undo:
            undo.callback(os.close, self._descriptor)
            undo.callback(os.unlink, self.path)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                # A hole that finds no memory when it is written to ends the process.
                os.posix_fallocate(self._descriptor, 0, nbytes)
                self._map = mmap.mmap(self._descriptor, nbytes)
            except OSError as error:
                raise TransportError(
                    f"{SHARED_MEMORY_DIR} cannot hold {nbytes >> 20} MiB more: {error.strerror}; lower "
                    "weight_sync.bucket_bytes"
                ) from error
            self._device = device
            self.buffer_B = torch.frombuffer(self._map, dtype=torch.uint8)
            _pin(self.buffer_B, device)
            undo.pop_all()

    def publish(self, nbytes: int) -> Handle:
        """Path and size of the segment; on a GPU, after the copies into it have finished."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return {"path": self.path, "nbytes": nbytes, "mapped": len(self._map)}

    def close(self) -> None:
        """Removes the segment."""
        _unpin(self.buffer_B, self._device)
        if os.path.exists(self.path):
            os.unlink(self.path)
            os.close(self._descriptor)
        self.buffer_B = torch.empty(0, dtype=torch.uint8)


class HostOpener(Opener):
    """Maps segments once per session and copies to `device` where that is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.copies = device.type == "cuda"
        self._mapped: dict[str, torch.Tensor] = {}

    def open(self, handle: Handle) -> torch.Tensor:
        """The bytes on this process's device.

        A handle with `keep` names a segment that later sessions read too.

        Raises TransportError: the segment is gone.
        """
        path, start = handle["path"], handle.get("offset", 0)
        mapped_B = self._keep(path, handle["mapped"]) if handle.get("keep") else self._mapped.get(path)
        if mapped_B is None:
            mapped_B = self._mapped[path] = map_segment(path, handle["mapped"])
            _pin(mapped_B, self._device)
        host_B = mapped_B[start : start + handle["nbytes"]]
        return host_B.to(self._device, non_blocking=True) if self._device.type == "cuda" else host_B

    def _keep(self, path: str, nbytes: int) -> torch.Tensor:
        for known in [key for key in _kept if not os.path.exists(key[0])]:
            _unpin(_kept.pop(known), known[1])
        key = (path, self._device)
        if key not in _kept:
            mapped_B = map_segment(path, nbytes)
            _pin(mapped_B, self._device)
            _kept[key] = mapped_B
        return _kept[key]

    def close(self) -> None:
        """Unmaps everything but segments that outlive the session."""
        for tensor_B in self._mapped.values():
            _unpin(tensor_B, self._device)
        self._mapped.clear()
        if self._device.type == "cuda":
            # The windows' copies would count as the engine's memory when it sleeps.
            torch.cuda.empty_cache()


def map_segment(path: str, nbytes: int) -> torch.Tensor:
    """A segment as a uint8 tensor. Raises TransportError: the segment is gone."""
    if not os.path.exists(path):
        raise TransportError(f"shared-memory segment {path} does not exist: its sender ended, or runs on another node")
    with open(path, "r+b") as segment:
        return torch.frombuffer(mmap.mmap(segment.fileno(), nbytes), dtype=torch.uint8)


def remove_stale_segments() -> int:
    """Removes segments whose sender was killed (a live one holds a lock on its own); returns how many."""
    removed = 0
    for path in glob.glob(os.path.join(SHARED_MEMORY_DIR, f"{_PREFIX}*")):
        # One that was made a moment ago may not be locked yet.
        with abandoned(path, stale_after_s=_STALE_AFTER_S) as left, suppress(OSError):
            if left:
                os.unlink(path)
                removed += 1
    return removed


def _pin(tensor_B: torch.Tensor, device: torch.device) -> None:
    # Registered memory copies at 55 GB/s on an H200 host, pageable memory at 8.
    if device.type == "cuda":
        result = _cudart().cudaHostRegister(tensor_B.data_ptr(), tensor_B.numel(), 0)
        if int(result) != 0:
            raise TransportError(
                f"CUDA refused to register {tensor_B.numel()} bytes of shared memory (error {int(result)})"
            )


def _unpin(tensor_B: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda" and tensor_B.numel():
        torch.cuda.synchronize(device)
        _cudart().cudaHostUnregister(tensor_B.data_ptr())


def _cudart() -> Any:
    return torch.cuda.cudart()


# torch's reduction of a CUDA tensor is these arguments of `rebuild_cuda_tensor`; only plain values cross the process
# border.
_PLAIN = (
    "storage_device",
    "storage_handle",
    "storage_size_bytes",
    "storage_offset_bytes",
    "requires_grad",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)
# torch counts the readers of a shared tensor in an unsigned number that starts at one: it expects exactly one reader
# per tensor. A second reader takes the count below zero, a reader that died never takes it to zero, and either way the
# sender keeps the buffer for ever. A session knows when its readers are done, so only the sender counts: receivers get
# the name of a counter that does not exist, where counting down does nothing; `close` takes the one count back.
_NO_COUNTER: dict[str, Any] = {"ref_counter_handle": b"/nemo_rl-no-counter", "ref_counter_offset": 0}


class CudaIpcStaging(Staging):
    """A buffer of `nbytes` bytes on the sender's GPU."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        if device.type != "cuda":
            raise TransportError("weight_sync.transport=cuda_ipc needs GPUs; use host on CPU slots")
        self._device = device
        self.buffer_B = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._handle: dict[str, Any] | None = None

    def publish(self, nbytes: int) -> Handle:
        """The IPC handle of the buffer, once the copies into it have finished."""
        torch.cuda.synchronize(self._device)
        if self._handle is None:
            self._handle = dict(zip(_PLAIN, reduce_tensor(self.buffer_B)[1][6:], strict=True))
        return {"ipc": self._handle | _NO_COUNTER, "capacity": self.buffer_B.numel(), "nbytes": nbytes}

    def close(self) -> None:
        """Frees the buffer, whatever became of its readers."""
        if self._handle is not None:
            counter = self._handle["ref_counter_handle"], self._handle["ref_counter_offset"]
            UntypedStorage._release_ipc_counter(*counter, device=self._device)
            self._handle = None
        self.buffer_B = torch.empty(0, dtype=torch.uint8)


class CudaIpcOpener(Opener):
    """Opens handles on `device`; a handle that was seen before in this session is not mapped again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._opened: dict[bytes, torch.Tensor] = {}

    def open(self, handle: Handle) -> torch.Tensor:
        """The sender's buffer, as a view. Raises TransportError: the driver or the container forbids IPC."""
        plain = handle["ipc"] | {"storage_device": self._device.index or 0}
        key = bytes(plain["storage_handle"]) + str(plain["storage_offset_bytes"]).encode()
        if key not in self._opened:
            size = (handle["capacity"],)
            try:
                self._opened[key] = rebuild_cuda_tensor(
                    torch.Tensor, size, (1,), 0, UntypedStorage, torch.uint8, *(plain[name] for name in _PLAIN)
                )
            except RuntimeError as error:
                raise TransportError(
                    f"a CUDA IPC handle cannot be opened on {self._device}: {error}; where IPC is forbidden "
                    "set weight_sync.transport=host"
                ) from error
        return self._opened[key][: handle["nbytes"]]

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._opened.clear()
        torch.cuda.ipc_collect()


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
