"""Host transport: bytes in POSIX shared memory, mapped by every receiver on the node.

Serves CPU slots, and GPUs in containers that forbid CUDA IPC: there the receiver pins the mapping once and copies to
its device at full PCIe speed. Invariant: the sender created the segment and removes it; receivers only map it.
"""

from __future__ import annotations

import fcntl
import glob
import mmap
import os
import uuid
from contextlib import ExitStack, suppress
from typing import Any

import torch

from nemo_rl.distributed.devices import SHARED_MEMORY_DIR
from nemo_rl.utils.directory_lock import abandoned
from nemo_rl.weight_sync.transports.base import Handle, Opener, Staging, TransportError

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
