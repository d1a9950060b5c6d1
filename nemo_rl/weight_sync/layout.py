"""The one byte layout in which weights travel: named tensors packed into buckets at aligned offsets, and their
checksum.

Decides which tensor goes where, packs tensors into a buffer and views them back out. The checksum is two 64-bit sums
over the bytes as 32-bit words, a plain one and one weighted by position, so that swapped blocks are seen as well as
changed words; it guards against lost, stale and misplaced bytes, not against malice. Invariant: unpacking a packed
bucket gives back every tensor bit for bit, whatever carried the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from nemo_rl.config.errors import UserError

ALIGNMENT = 512
_CHUNK_WORDS = 4 << 20
_PERIOD = 8191


class LayoutError(UserError, ValueError):
    """A tensor does not fit the layout that both sides agreed on."""


@dataclass(frozen=True)
class TensorMeta:
    """Name, shape and dtype name (such as `bfloat16`) of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * dtype_of(self.dtype).itemsize


@dataclass(frozen=True)
class BucketLayout:
    """The offset of each tensor in one bucket."""

    tensors: tuple[TensorMeta, ...]  # the tensors in the order they were packed
    offsets: tuple[int, ...]  # start of each in bytes, a multiple of 512
    nbytes: int  # bytes of the bucket up to the end of its last tensor


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype called `name`. Raises LayoutError: torch has no such dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"unknown dtype name {name!r}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16: names cross process borders, dtype objects do not always."""
    return str(dtype).removeprefix("torch.")


def align(offset: int) -> int:
    """The next multiple of the alignment."""
    return (offset + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def plan_buckets(tensors: Iterable[TensorMeta], bucket_bytes: int) -> list[BucketLayout]:
    """Fills buckets of at most `bucket_bytes` in order; a larger tensor gets its own. Raises LayoutError:
    `bucket_bytes` is not positive or a name appears twice.
    """
    if bucket_bytes <= 0:
        raise LayoutError(f"weight_sync.bucket_bytes must be positive, got {bucket_bytes}")
    buckets: list[BucketLayout] = []
    members: list[TensorMeta] = []
    offsets: list[int] = []
    end = 0
    seen: set[str] = set()

    def close() -> None:
        if members:
            buckets.append(BucketLayout(tuple(members), tuple(offsets), end))
            members.clear()
            offsets.clear()

    for meta in tensors:
        if meta.name in seen:
            raise LayoutError(f"tensor {meta.name!r} is exported twice")
        seen.add(meta.name)
        start = align(end) if members else 0
        if members and start + meta.nbytes > bucket_bytes:
            close()
            start = 0
        members.append(meta)
        offsets.append(start)
        end = start + meta.nbytes
    close()
    return buckets


def plan_windows(buckets: Sequence[BucketLayout], window_bytes: int) -> list[list[BucketLayout]]:
    """Groups consecutive buckets so that each group fits `window_bytes` (one bucket at least)."""
    windows: list[list[BucketLayout]] = []
    used = 0
    for bucket in buckets:
        size = align(bucket.nbytes)
        if windows and used + size <= window_bytes:
            windows[-1].append(bucket)
            used += size
        else:
            windows.append([bucket])
            used = size
    return windows


def pack_tensor(buffer_B: torch.Tensor, offset: int, meta: TensorMeta, tensor: torch.Tensor) -> None:
    """Copies one tensor into a byte buffer, converting to the layout's dtype. Raises LayoutError: the shape differs
    from the layout's, or the tensor has no storage (it was offloaded).
    """
    if tuple(tensor.shape) != meta.shape:
        raise LayoutError(f"{meta.name}: exported with shape {tuple(tensor.shape)}, the layout says {meta.shape}")
    if tensor.numel() and not tensor.untyped_storage().size():
        raise LayoutError(f"{meta.name}: its storage is empty; weights must be resident while they are exported")
    if tensor.device != buffer_B.device:
        # Converted where it lies: half the bytes travel, and the copy is a plain one.
        tensor = tensor.detach().to(dtype_of(meta.dtype))
    view(buffer_B, offset, meta).copy_(tensor.detach(), non_blocking=True)
    end = offset + meta.nbytes
    # What lies between two tensors counts in checksums, which have to be equal wherever the same weights are packed.
    if end != align(end):
        buffer_B[end : align(end)].zero_()


def pack_bucket(
    weights: Iterator[tuple[str, torch.Tensor]], bucket: BucketLayout, start: int, buffers: Iterable[torch.Tensor]
) -> None:
    """Takes a bucket's tensors from an export and packs them into byte buffers, from `start` on. Raises LayoutError:
    see `pack_tensor`, or the export gives another tensor.
    """
    for meta, offset in zip(bucket.tensors, bucket.offsets, strict=True):
        name, tensor = next(weights, ("<end of export>", torch.empty(0)))
        if name != meta.name:
            raise LayoutError(f"the export gave {name!r} where the layout has {meta.name!r}")
        for buffer_B in buffers:
            pack_tensor(buffer_B, start + offset, meta, tensor)


def view(buffer_B: torch.Tensor, offset: int, meta: TensorMeta) -> torch.Tensor:
    """One tensor of the bucket as a view of the byte buffer."""
    return buffer_B[offset : offset + meta.nbytes].view(dtype_of(meta.dtype)).view(meta.shape)


def unpack(buffer_B: torch.Tensor, layout: BucketLayout) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the bucket as a named view."""
    for meta, offset in zip(layout.tensors, layout.offsets, strict=True):
        yield meta.name, view(buffer_B, offset, meta)


@dataclass(frozen=True)
class Window:
    """Buckets that arrived together; iterating gives every tensor as a named view."""

    bytes_B: torch.Tensor  # uint8, the buckets one after the other, each at an aligned start
    buckets: tuple[BucketLayout, ...]

    def parts(self) -> Iterator[tuple[torch.Tensor, BucketLayout]]:
        """The bytes of each bucket, and its layout."""
        start = 0
        for bucket in self.buckets:
            yield self.bytes_B[start : start + bucket.nbytes], bucket
            start += align(bucket.nbytes)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for part_B, bucket in self.parts():
            yield from unpack(part_B, bucket)


def checksum(buffer_B: torch.Tensor, nbytes: int) -> str:
    """Checksum of the first `nbytes` bytes of a uint8 tensor, as text."""
    whole = nbytes // 4 * 4
    words = buffer_B[:whole].view(torch.int32)
    weights = torch.arange(1, _PERIOD + 1, device=buffer_B.device, dtype=torch.int64)
    plain = torch.zeros((), dtype=torch.int64, device=buffer_B.device)
    weighted = torch.zeros((), dtype=torch.int64, device=buffer_B.device)
    step = _CHUNK_WORDS // _PERIOD * _PERIOD
    for start in range(0, words.numel(), step):
        chunk = words[start : start + step].to(torch.int64)
        plain += chunk.sum()
        full = chunk.numel() // _PERIOD * _PERIOD
        columns = chunk[:full].view(-1, _PERIOD)
        rows = torch.arange(columns.shape[0], device=buffer_B.device, dtype=torch.int64) + start // _PERIOD
        # A word's weight is its position, row * period + column: unlike row * column, no two words share one.
        weighted += (columns * weights).sum() + _PERIOD * (columns.sum(dim=1) * rows).sum()
        tail = chunk[full:]
        weighted += (tail * (weights[: tail.numel()] + full + start)).sum()
    rest = int(buffer_B[whole:nbytes].to(torch.int64).sum()) if nbytes > whole else 0
    return f"{nbytes}:{int(plain) & 0xFFFFFFFFFFFFFFFF:016x}:{int(weighted) & 0xFFFFFFFFFFFFFFFF:016x}:{rest}"
