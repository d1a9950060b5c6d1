"""The sending side of a sync session, inside one trainer rank.

Consumes the collective weight export in layout order, packs it window by window into staging buffers, one for each
transport that it stages for, and publishes their handles. Every rank consumes the export, since it is collective; only
ranks with a lane pack. Invariants: tensors leave in exactly the order of the layout; at most two windows are staged at
once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from nemo_rl.distributed.accelerator_slots import CPU
from nemo_rl.distributed.devices import allowed_memory
from nemo_rl.weight_sync.layout import BucketLayout, align, checksum, pack_bucket
from nemo_rl.weight_sync.transports import (
    BroadcastGroup,
    CudaIpcStaging,
    GroupMeeting,
    GroupStaging,
    HostStaging,
    KeptGroup,
    Published,
    Staging,
    TransportError,
    TransportName,
)

_BESIDE: Mapping[TransportName, TransportName] = {"nccl": "cuda_ipc", "tcp": "host"}
"""The lane whose buffer a pushed one sends from, where a source has both."""
_COMMUNICATOR_BYTES = 1 << 30
"""Device memory that is kept free for NCCL: a communicator between hosts takes some hundred MiB."""


@dataclass(frozen=True)
class SendSpec:
    """One session as the sender sees it. `lanes`: the transports that each source stages for, by its number."""

    windows: Sequence[Sequence[BucketLayout]]  # buckets of each window, in export order
    verify: bool
    timeout_s: float  # deadline of collectives, in seconds
    lanes: Mapping[int, tuple[TransportName, ...]] = field(default_factory=dict)
    group: GroupMeeting | None = None  # the session's group, where a lane is pushed


def window_bytes(buckets: Sequence[BucketLayout]) -> int:
    """Size of a window's buckets laid one after the other."""
    return sum(align(bucket.nbytes) for bucket in buckets)


def make_staging(name: TransportName, nbytes: int, device: torch.device) -> Staging:
    """A sender's buffer of `nbytes` bytes. Raises TransportError: the transport does not work on this device, or memory
    is short.
    """
    if name == "host":
        return HostStaging(nbytes, device)
    if name == "cuda_ipc":
        return CudaIpcStaging(nbytes, device)
    return GroupStaging(nbytes, CPU.torch_device() if name == "tcp" else device)


def check_room(spec: SendSpec, source: int, device: torch.device) -> None:
    """Checks that a session's buffers and group fit into the memory that is free on a source's device. Raises
    TransportError: they do not.
    """
    lanes = [name for name in spec.lanes.get(source, ()) if name in ("cuda_ipc", "nccl")]
    if not lanes or device.type != "cuda":
        return
    window = max((window_bytes(window) for window in spec.windows), default=0)
    buffers = window * min(2, len(spec.windows))
    group = _COMMUNICATOR_BYTES if "nccl" in lanes and (spec.group is None or not spec.group.held) else 0
    free = allowed_memory(device)
    if buffers + group > free:
        raise TransportError(
            f"weights cannot be staged on {device} for targets elsewhere: two windows take {buffers >> 20} MiB and a "
            f"communicator {group >> 20} MiB, and {free >> 20} MiB are free; set weight_sync.transport=auto or tcp, "
            "which stage in host memory, or lower weight_sync.bucket_bytes"
        )


class WeightSender:
    """One session's sender.

    Args:
        weights: The collective export: (name, full tensor) in layout order.
        source: This rank's number among the session's sources: without a lane it only takes part in the export.
        groups: Holds the group between this rank's sessions; without it each session makes its own.
    """

    def __init__(
        self,
        spec: SendSpec,
        weights: Iterator[tuple[str, torch.Tensor]],
        device: torch.device,
        *,
        source: int,
        groups: KeptGroup | None = None,
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._published: dict[int, int] = {}
        self._group: BroadcastGroup | None = None
        self._groups = groups or KeptGroup()
        self._keeps = groups is not None and spec.group is not None and spec.group.keep
        self._lanes = spec.lanes.get(source, ())
        # A collective sends from any memory of the device: beside another lane there it needs no buffer of its own.
        self._staged: list[TransportName] = [name for name in self._lanes if _BESIDE.get(name) not in self._lanes]
        self._stagings: list[list[Staging]] = []
        try:
            self._open(device)
        except BaseException:
            self._free(failed=True)
            raise

    def _open(self, device: torch.device) -> None:
        size = max((window_bytes(window) for window in self._spec.windows), default=0)
        for _ in range(min(2, len(self._spec.windows)) if self._staged else 0):
            slot: list[Staging] = []
            self._stagings.append(slot)
            for name in self._staged:
                slot.append(make_staging(name, size, device))
        meeting = self._spec.group
        if meeting is not None and meeting.over in self._lanes:
            self._group = self._groups.join(meeting, 0, self._spec.timeout_s, device)
        else:
            self._groups.drop()

    @torch.no_grad()
    def export_window(self, index: int) -> dict[str, Published] | None:
        """Packs window `index` and publishes it. Returns `{handle, checksums}` per lane, or None on a rank without one.
        Raises LayoutError: the export and the layout disagree.
        """
        buckets = self._spec.windows[index]
        stagings = self._stagings[index % len(self._stagings)] if self._stagings else []
        start = 0
        sums: list[str] = []
        for bucket in buckets:
            pack_bucket(self._weights, bucket, start, [staging.buffer_B for staging in stagings])
            if stagings and self._spec.verify:
                sums.append(checksum(stagings[0].buffer_B[start : start + bucket.nbytes], bucket.nbytes))
            start += align(bucket.nbytes)
        if not stagings:
            return None
        self._published[index] = start
        handles = {name: staging.publish(start) for name, staging in zip(self._staged, stagings, strict=True)}
        return {name: {"handle": handles.get(name, {"nbytes": start}), "checksums": sums} for name in self._lanes}

    def send_window(self, index: int) -> None:
        """Broadcasts a published window where the transport pushes; receivers pull otherwise. Raises TransportError:
        the window was not exported.
        """
        if self._group is None or self._spec.group is None:
            return
        if index not in self._published:
            raise TransportError(f"window {index} was sent before it was exported")
        stagings = self._stagings[index % len(self._stagings)]
        over = self._spec.group.over
        pushed = stagings[self._staged.index(over if over in self._staged else _BESIDE[over])]
        self._group.broadcast(pushed.buffer_B[: self._published[index]])

    def close(self, *, failed: bool = False) -> None:
        """Drains the export and frees the buffers, and the group where it is not to be kept or the session failed."""
        for _ in self._weights:
            pass
        self._free(failed)

    def _free(self, failed: bool) -> None:
        for staging in (staging for slot in self._stagings for staging in slot):
            staging.close()
        self._stagings = []
        self._group = None
        if failed or not self._keeps:
            self._groups.drop()
