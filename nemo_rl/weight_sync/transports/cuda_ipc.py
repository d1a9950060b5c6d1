"""CUDA IPC transport: the receiver maps the sender's buffer on the same physical GPU, without a copy.

Right only where both processes see the same GPU; the session checks that by device UUID. Invariant: the receiver's
device index, not the sender's, is used to open a handle, since both see the GPU under numbers of their own.

torch counts the readers of a shared tensor in an unsigned number that starts at one: it expects exactly one reader per
tensor. A second reader takes the count below zero, a reader that died never takes it to zero, and either way the sender
keeps the buffer for ever. A sync session knows when its readers are done, so only the sender counts here: receivers get
the name of a counter that does not exist, and `close` takes the one count back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from torch.storage import UntypedStorage

from nemo_rl.weight_sync.transports.base import Handle, Opener, Staging, TransportError

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
# Counting down on a counter that does not exist does nothing.
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
        """Drops the mappings."""
        torch.cuda.synchronize(self._device)
        self._opened.clear()
        torch.cuda.ipc_collect()
