"""Moves training memory between the device and the host, storage by storage.

A storage is copied to pinned host memory and shrunk to nothing in place, then grown and refilled, so every view of it
(parameters in Megatron's large buffers, FSDP's shards, an optimizer's copies) stays valid. On CPU slots nothing moves.
Invariant: values are unchanged, except those declared unneeded, which come back as zeros.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

# A power of two: PyTorch rounds pinned memory up to one, and keeps blocks for the next time.
_CHUNK_BYTES = 256 << 20


class Piece(NamedTuple):
    """Bytes of a storage and their place on the host."""

    storage: int
    start: int  # first byte within it
    stop: int  # byte after the last
    chunk: int  # number of the chunk of host memory
    offset: int  # first byte within that


def pieces(sizes: Iterable[int], chunk_bytes: int) -> Iterator[Piece]:
    """Lays storages end to end in chunks of one size. `sizes`: of the storages, in bytes."""
    end = 0
    for storage, size in enumerate(sizes):
        start = 0
        while start < size:
            chunk, offset = divmod(end, chunk_bytes)
            stop = min(size, start + chunk_bytes - offset)
            yield Piece(storage, start, stop, chunk, offset)
            end += stop - start
            start = stop


class MovableStorages:
    """Storages that move together. `tensors`: their tensors; several may share a storage. `chunk_bytes`: size of one
    piece of host memory.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], chunk_bytes: int = _CHUNK_BYTES) -> None:
        unique = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._storages = [storage for storage in unique.values() if storage.nbytes() > 0]
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._chunk_bytes = chunk_bytes
        self._host: list[torch.Tensor] | None = None

    @classmethod
    def on_gpu(cls, tensors: Iterable[torch.Tensor]) -> MovableStorages:
        """Of those tensors that are on a GPU."""
        return cls(tensor for tensor in tensors if tensor.is_cuda)

    def to_host(self, *, keep: bool = True) -> None:
        """Frees the device's memory; without `keep` the values are forgotten. Nothing to do when they are there."""
        if self._host is not None:
            return
        self._host = self._chunks() if keep else []
        for storage, device, host in self._pairs(self._host):
            host.copy_(_bytes(self._storages[storage])[device], non_blocking=True)
        _synchronize()
        for storage in self._storages:
            storage.resize_(0)

    def to_device(self) -> None:
        """Takes the memory again. Nothing to do when it is there."""
        if self._host is None:
            return
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
            if not self._host:
                _bytes(storage).zero_()
        for storage, device, host in self._pairs(self._host):
            _bytes(self._storages[storage])[device].copy_(host, non_blocking=True)
        _synchronize()
        self._host = None

    def _chunks(self) -> list[torch.Tensor]:
        total, pinned = sum(self._sizes), torch.cuda.is_available()
        starts = range(0, total, self._chunk_bytes)
        sizes = [min(self._chunk_bytes, total - start) for start in starts]
        return [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]

    def _pairs(self, host: list[torch.Tensor]) -> Iterator[tuple[int, slice, torch.Tensor]]:
        if host:
            for storage, start, stop, chunk, offset in pieces(self._sizes, self._chunk_bytes):
                yield storage, slice(start, stop), host[chunk][offset : offset + stop - start]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class ReferenceWeights:
    """A copy of weights on the host, and the swap that puts it in for a while. `weights`: this rank's parts."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        copies = (weight.detach().to("cpu", copy=True) for weight in weights)
        self._copies = [copy.pin_memory() if torch.cuda.is_available() else copy for copy in copies]

    @contextmanager
    @torch.no_grad()
    def swapped_in(self, weights: Sequence[torch.Tensor]) -> Generator[None]:
        """These have the reference's values inside the block; their own come back bit for bit."""
        current = [weight.detach().clone() for weight in weights]
        try:
            for weight, copy in zip(weights, self._copies, strict=True):
                weight.detach().copy_(copy, non_blocking=True)
            yield
        finally:
            for weight, own in zip(weights, current, strict=True):
                weight.detach().copy_(own)
