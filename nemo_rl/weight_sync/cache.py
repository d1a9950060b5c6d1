"""A copy of one weight version in host memory, from which any set of shards can be synced at any time.

Built from the collective export while the weights are resident. Two buffers in shared memory, one served, one being
built; bytes and version swap under one lock, and not while a session reads. Invariants: the served bytes are those of
the served version, checksummed when packed; there are never more than two copies.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from nemo_rl.config.errors import UserError
from nemo_rl.distributed.accelerator_slots import CPU
from nemo_rl.distributed.devices import device_uuid, free_memory, host_memory_of, in_host_memory
from nemo_rl.weight_sync.layout import (
    BucketLayout,
    LayoutError,
    TensorMeta,
    align,
    checksum,
    pack_bucket,
    plan_buckets,
    unpack,
)
from nemo_rl.weight_sync.sender import SendSpec, window_bytes
from nemo_rl.weight_sync.sync_session import WeightSource
from nemo_rl.weight_sync.transports import Handle, HostStaging, Published, TransportError, TransportName, map_segment

logger = logging.getLogger(__name__)

# Among a cached source's devices the cache in host memory is number 0, the GPU of the rank that owns it number 1.
CACHE_OWNER = 1
_MEMORY_SHARE = 0.8
_WINDOW_BYTES = 1 << 30
_CLOSE_S = 60.0


class CacheError(UserError, RuntimeError):
    """The cache lacks the requested version, or cannot be built."""


@dataclass(frozen=True)
class CacheManifest:
    """Contents of one built buffer, as plain values that can be sent."""

    version: int
    path: str
    mapped: int  # size of the segment in bytes
    buckets: tuple[BucketLayout, ...]
    starts: tuple[int, ...]  # where each bucket begins in the segment
    checksums: tuple[str, ...]  # of each bucket; empty where none are taken

    @property
    def metas(self) -> list[TensorMeta]:
        """All tensors in order."""
        return [meta for bucket in self.buckets for meta in bucket.tensors]

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """All tensors as views of the mapped segment."""
        buffer_B = map_segment(self.path, self.mapped)
        for bucket, start in zip(self.buckets, self.starts, strict=True):
            yield from unpack(buffer_B[start : start + bucket.nbytes], bucket)


class CacheBuilder:
    """Packs versions into two buffers in turn, in the rank that owns the cache.

    Args:
        bucket_bytes: Size of a bucket; a larger tensor gets its own.
        device: The rank's device: on a GPU the buffers are pinned.
        checksums: Whether buckets get checksums for sessions that verify. They take longer than the copies.
    """

    def __init__(self, bucket_bytes: int, device: torch.device, *, checksums: bool = True) -> None:
        self._bucket_bytes, self._checksums = bucket_bytes, checksums
        self._device = device
        self._buffers: list[HostStaging] = []
        self._capacity = 0

    @torch.no_grad()
    def build(
        self,
        version: int,
        metas: Sequence[TensorMeta],
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        served: str | None,
    ) -> CacheManifest:
        """Packs one version into the buffer that is not served.

        Args:
            served: Path of the buffer that sessions read.
            metas: The export's tensors, in order.

        Raises CacheError: two copies do not fit into host memory; LayoutError: the export and its description disagree,
        or the weights are not resident.
        """
        buckets = plan_buckets(metas, self._bucket_bytes)
        starts = [0]
        for bucket in buckets:
            starts.append(starts[-1] + align(bucket.nbytes))
        self._allocate(starts[-1])
        staging = next(buffer for buffer in self._buffers if buffer.path != served)
        export = iter(weights)
        for bucket, start in zip(buckets, starts, strict=False):
            pack_bucket(export, bucket, start, [staging.buffer_B])
        handle = staging.publish(starts[-1])
        sums = tuple(
            checksum(staging.buffer_B[start : start + bucket.nbytes], bucket.nbytes)
            for bucket, start in zip(buckets if self._checksums else (), starts, strict=False)
        )
        return CacheManifest(version, handle["path"], handle["mapped"], tuple(buckets), tuple(starts[:-1]), sums)

    def _allocate(self, nbytes: int) -> None:
        if self._buffers and nbytes <= self._capacity:
            return
        self.close()
        available = free_memory(CPU.torch_device())
        if 2 * nbytes > _MEMORY_SHARE * available:
            raise CacheError(
                f"the weight cache needs 2 x {nbytes >> 20} MiB of host memory, more than "
                f"{_MEMORY_SHARE:.0%} of the {available >> 20} MiB that are available"
            )
        with ExitStack() as undo:
            undo.callback(self.close)
            for _ in range(2):
                self._buffers.append(HostStaging(max(1, nbytes), self._device))
            undo.pop_all()
        self._capacity = nbytes

    def close(self) -> None:
        """Frees both buffers."""
        for staging in self._buffers:
            staging.close()
        self._buffers.clear()
        self._capacity = 0


class CacheOwner(Protocol):
    """The training rank that owns a cache, where bytes must be pushed (NCCL) or staged on a GPU (CUDA IPC)."""

    def devices(self) -> list[str]:
        """Device identity of every training rank, the owner first."""
        ...

    def rendezvous(self) -> tuple[str, int]:
        """Address of the owner and a free port there."""
        ...

    def on_first(self, method: str, timeout_s: float | None = None, **kwargs: object) -> Any:
        """Calls `kept_group`, `begin_cached_export`, `export_window`, `send_window` or `close_export` of the owner."""
        ...


class BucketCache:
    """The owner's side: the served version, the lock, and one build at a time.

    Args:
        build: Builds a version beside the served buffer, whose path it gets.
        timeout_s: How long a build or a session waits for the other.
        owner: The training rank that has the buffers; without one the cache serves targets on its own host only.
        may_stage: Whether sessions may use the owner's GPU: not on a pool, which lends it to others between steps.
    """

    def __init__(
        self,
        build: Callable[[int, str | None], CacheManifest],
        *,
        timeout_s: float = 150.0,
        owner: CacheOwner | None = None,
        may_stage: bool = True,
    ) -> None:
        self._build = build
        self._timeout_s = timeout_s
        self._owner, self._may_stage = owner, may_stage
        self._reading = threading.Lock()
        self._building = threading.Lock()
        self._manifest: CacheManifest | None = None

    @property
    def version(self) -> int | None:
        """The served version; None before the first."""
        return self._manifest.version if self._manifest is not None else None

    def build(self, version: int) -> CacheManifest:
        """Builds `version` while the served one is read, then serves it. Raises CacheError: another build is under way,
        the version is older than the served one, or sessions read on beyond the deadline.
        """
        if not self._building.acquire(blocking=False):
            raise CacheError(
                f"version {version} cannot be built: another build is under way, and there is room for one"
            )
        try:
            served = self.version
            if served is not None and version < served:
                raise CacheError(f"version {version} cannot be built: the cache already serves version {served}")
            manifest = self._build(version, self._manifest.path if self._manifest is not None else None)
            if not self._reading.acquire(timeout=self._timeout_s):
                raise CacheError(
                    f"version {version} is built, but a session has been reading version {served} for "
                    f"{self._timeout_s:.0f} s"
                )
            try:
                self._manifest = manifest
            finally:
                self._reading.release()
        finally:
            self._building.release()
        logger.info("cache=built version=%d mib=%d buckets=%d", version, manifest.mapped >> 20, len(manifest.buckets))
        return manifest

    def open(self, version: int) -> CacheManifest:
        """Begins a session's reading; `release` ends it. Raises CacheError: the cache serves another version, or
        another session reads beyond the deadline.
        """
        if not self._reading.acquire(timeout=self._timeout_s):
            raise CacheError(f"another session has been reading the weight cache for {self._timeout_s:.0f} s")
        if self._manifest is None or self._manifest.version != version:
            served = "nothing yet" if self._manifest is None else f"version {self._manifest.version}"
            self._reading.release()
            raise CacheError(f"version {version} was asked for, the weight cache serves {served}")
        return self._manifest

    def release(self) -> None:
        """Ends a session's reading."""
        self._reading.release()

    def manifest(self) -> CacheManifest:
        """The served version's description. Raises CacheError: nothing was built yet."""
        if self._manifest is None:
            raise CacheError("the weight cache is empty; build a version first")
        return self._manifest

    def source(self, version: int) -> CachedSource:
        """A session's source of `version`."""
        return CachedSource(self, version)

    def devices(self) -> list[str]:
        """The host memory of the cache and the owner's GPU, where sessions may use one."""
        if self._owner is None:
            return [device_uuid(CPU.torch_device())]
        owner = self._owner.devices()[0]
        here = host_memory_of(owner)
        return [here] if in_host_memory(owner) or not self._may_stage else [here, owner]

    def owner(self) -> CacheOwner:
        """The rank that pushes and stages. Raises TransportError: there is none."""
        if self._owner is None:
            raise TransportError(
                "this weight cache is not owned by a training rank: it serves targets on its own host only"
            )
        return self._owner


class CachedSource(WeightSource):
    """One session's source on a cache.

    By the host transport receivers map the cache itself: nothing is staged and no rank is disturbed. The owner rank
    takes part only where a target is reached by another one.
    """

    maps_host_memory = True

    def __init__(self, cache: BucketCache, version: int) -> None:
        self._cache = cache
        self._version = version
        self._manifest: CacheManifest | None = None
        self._spec: SendSpec | None = None

    def tensor_metas(self) -> list[TensorMeta]:
        return self._cache.manifest().metas

    def devices(self) -> list[str]:
        return self._cache.devices()

    def staging_budget(self) -> int:
        return max(_WINDOW_BYTES, max((bucket.nbytes for bucket in self._cache.manifest().buckets), default=0))

    def rendezvous(self) -> tuple[str, int]:
        return self._cache.owner().rendezvous()

    def kept_group(self, timeout_s: float) -> str | None:
        return self._cache.owner().on_first("kept_group", timeout_s)

    def begin(self, spec: SendSpec, timeout_s: float) -> None:
        """Begins to read. Raises CacheError: the cache serves another version; LayoutError: the session's buckets are
        not the cache's.
        """
        self._manifest = self._cache.open(self._version)
        if [bucket for window in spec.windows for bucket in window] != list(self._manifest.buckets):
            raise LayoutError(
                "the session plans other buckets than the cache has; both must use weight_sync.bucket_bytes"
            )
        self._spec = spec
        if lanes := _lanes_of_owner(spec):
            sent = replace(spec, lanes={CACHE_OWNER: lanes})
            self._cache.owner().on_first("begin_cached_export", timeout_s, spec=sent, manifest=self._manifest)

    def export_window(self, index: int, timeout_s: float) -> list[dict[str, Published] | None]:
        """The window's place in the cache, and the owner's staged copy if its lane is used."""
        if self._manifest is None or self._spec is None:
            raise CacheError("a window was asked for before the session began")
        first = sum(len(window) for window in self._spec.windows[:index])
        window = self._spec.windows[index]
        place: Handle = {
            "path": self._manifest.path,
            "mapped": self._manifest.mapped,
            "offset": self._manifest.starts[first],
            "nbytes": window_bytes(window),
            "keep": True,
        }
        sums = self._manifest.checksums[first : first + len(window)] if self._spec.verify else ()
        mapped: dict[str, Published] = {"host": {"handle": place, "checksums": list(sums)}}
        if not _lanes_of_owner(self._spec):
            return [mapped]
        staged = self._cache.owner().on_first("export_window", timeout_s, index=index) or {}
        # Bytes sent from host memory lie at the cache's own place.
        return [mapped | {name: staged[name] for name in staged if name == "tcp"}, staged]

    def send_window(self, index: int, timeout_s: float) -> None:
        self._cache.owner().on_first("send_window", timeout_s, index=index)

    def close(self, *, failed: bool = False) -> None:
        try:
            if self._spec is not None and _lanes_of_owner(self._spec):
                self._cache.owner().on_first("close_export", _CLOSE_S, failed=failed)
        finally:
            if self._manifest is not None:
                self._cache.release()
            self._manifest = self._spec = None


def _lanes_of_owner(spec: SendSpec) -> tuple[TransportName, ...]:
    """The transports for which the owner rank stages."""
    sent: tuple[TransportName, ...] = ("tcp",) if "tcp" in spec.lanes.get(0, ()) else ()
    return (*spec.lanes.get(CACHE_OWNER, ()), *sent)
