"""The sending side of a sync session, inside one trainer rank.

Consumes the collective weight export in layout order, packs it window by window into staging buffers and publishes
their handles. Every rank consumes the export, since it is collective; only ranks told to stage pack. It knows no
engine. Invariants: tensors leave in exactly the order of the layout; at most two windows are staged at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_rl.weight_sync.checksum import checksum
from nemo_rl.weight_sync.layout import BucketLayout, LayoutError, align, pack_tensor
from nemo_rl.weight_sync.transports.base import Staging, TransportError, TransportName
from nemo_rl.weight_sync.transports.factory import make_staging
from nemo_rl.weight_sync.transports.nccl import NcclGroup


@dataclass(frozen=True)
class NcclSpec:
    """Where a session's NCCL group meets: the sender's address, a free port there, and the number of members."""

    address: str
    port: int
    world_size: int


@dataclass(frozen=True)
class SendSpec:
    """One session as the sender sees it.

    Attributes:
        transport: How bytes travel.
        windows: Buckets of each window, in export order.
        verify: Whether checksums are taken.
        timeout_s: Deadline of collectives, in seconds.
        nccl: The session's group; only for the nccl transport.
    """

    transport: TransportName
    windows: Sequence[Sequence[BucketLayout]]
    verify: bool
    timeout_s: float
    nccl: NcclSpec | None = None


def window_bytes(buckets: Sequence[BucketLayout]) -> int:
    """Size of a window's buckets laid one after the other."""
    return sum(align(bucket.nbytes) for bucket in buckets)


class WeightSender:
    """One session's sender.

    Args:
        spec: The session.
        weights: The collective export: (name, full tensor) in layout order.
        device: This rank's device.
        stages: Whether this rank packs and publishes, or only takes part in the export.
    """

    def __init__(self, spec: SendSpec, weights: Iterator[tuple[str, torch.Tensor]], device: torch.device, *, stages: bool) -> None:
        self._spec = spec
        self._weights = weights
        self._stagings: list[Staging] = []
        self._published: dict[int, int] = {}
        self._group: NcclGroup | None = None
        if not stages:
            return
        size = max((window_bytes(window) for window in spec.windows), default=0)
        slots = min(2, len(spec.windows))
        self._stagings = [make_staging(spec.transport, size, device) for _ in range(slots)]
        if spec.nccl is not None:
            self._group = NcclGroup(spec.nccl.address, spec.nccl.port, 0, spec.nccl.world_size, spec.timeout_s, device)

    @torch.no_grad()
    def export_window(self, index: int) -> dict[str, Any] | None:
        """Packs window `index` and publishes it.

        Returns:
            `{handle, checksums}`, or None on a rank that does not stage.

        Raises:
            LayoutError: The export and the layout disagree.
        """
        buckets = self._spec.windows[index]
        staging = self._stagings[index % len(self._stagings)] if self._stagings else None
        start = 0
        sums: list[str] = []
        for bucket in buckets:
            for meta, offset in zip(bucket.tensors, bucket.offsets, strict=True):
                name, tensor = next(self._weights, ("<end of export>", torch.empty(0)))
                if name != meta.name:
                    raise LayoutError(f"the export gave {name!r} where the layout has {meta.name!r}")
                if staging is not None:
                    pack_tensor(staging.buffer_B, start + offset, meta, tensor)
            if staging is not None and self._spec.verify:
                sums.append(checksum(staging.buffer_B[start : start + bucket.nbytes], bucket.nbytes))
            start += align(bucket.nbytes)
        if staging is None:
            return None
        self._published[index] = start
        return {"handle": staging.publish(start), "checksums": sums}

    def send_window(self, index: int) -> None:
        """Broadcasts a published window where the transport pushes; receivers pull otherwise.

        Raises:
            TransportError: The window was not exported.
        """
        if self._group is None:
            return
        if index not in self._published:
            raise TransportError(f"window {index} was sent before it was exported")
        self._group.broadcast(self._stagings[index % len(self._stagings)].buffer_B[: self._published[index]])

    def close(self) -> None:
        """Drains the export and frees buffers and group."""
        for _ in self._weights:
            pass
        for staging in self._stagings:
            staging.close()
        self._stagings = []
        if self._group is not None:
            self._group.close()
            self._group = None
