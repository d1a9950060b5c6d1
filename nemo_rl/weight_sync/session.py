"""One sync session: a version of the weights goes from a source to a set of targets, or not at all.

Plans the layout, drives export and load window by window (window i+1 is packed while window i is loaded), finalises
every target once, and tears everything down whatever happens. Source and targets are seen through protocols, so the
same session serves live weights and a cache, all shards and some. Invariants: targets change their version only in
`finish`; a failure aborts every target and leaves no buffer or group behind; the whole session has one deadline.
"""

from __future__ import annotations

import hashlib
import logging
import statistics
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from nemo_rl.distributed.devices import host_of
from nemo_rl.utils.record_events import SyncFinished
from nemo_rl.weight_sync.layout import LayoutError, TensorMeta, plan_buckets, plan_windows
from nemo_rl.weight_sync.receiver import encode_bucket
from nemo_rl.weight_sync.sender import NcclSpec, SendSpec
from nemo_rl.weight_sync.transports.base import TransportError, TransportName
from nemo_rl.weight_sync.transports.factory import choose_transport

logger = logging.getLogger(__name__)


class SyncTimeoutError(TransportError):
    """The session did not finish within `weight_sync.timeout_s`."""


class WeightSource(Protocol):
    """Where weights come from: all trainer ranks together, or a cache."""

    def tensor_metas(self) -> list[TensorMeta]:
        """Names, shapes and dtypes in export order."""
        ...

    def devices(self) -> list[str]:
        """Device identity of each rank that can stage."""
        ...

    def staging_budget(self) -> int:
        """Bytes that a rank may use for staging."""
        ...

    def rendezvous(self) -> tuple[str, int]:
        """Address of the first rank and a free port there."""
        ...

    def begin(self, spec: SendSpec, staging_ranks: Sequence[int], timeout_s: float) -> None:
        """Starts the export on every rank."""
        ...

    def export_window(self, index: int, timeout_s: float) -> list[dict[str, Any] | None]:
        """Packs a window; each rank's `{handle, checksums}` or None."""
        ...

    def send_window(self, index: int, timeout_s: float) -> None:
        """Pushes a packed window where the transport pushes."""
        ...

    def close(self) -> None:
        """Ends the export on every rank."""
        ...


class WeightTargets(Protocol):
    """The engine workers that receive."""

    def devices(self) -> list[str]:
        """Device identity of each receiving worker, in rank order."""
        ...

    def begin(self, session: dict[str, Any], first_nccl_rank: int, timeout_s: float) -> None:
        """Opens the session on every target."""
        ...

    def receive_window(self, window: dict[str, Any], timeout_s: float) -> None:
        """Loads a window on every target."""
        ...

    def finish(self, version: int, timeout_s: float) -> list[float]:
        """Finalises every target, which then has the version; seconds for which each stopped serving."""
        ...

    def abort(self, session_id: str) -> None:
        """Ends the session on every target, version unchanged; a session of another id goes on."""
        ...


@dataclass
class SyncReport:
    """What a session did.

    Attributes:
        version: The version that targets now have.
        transport: How bytes travelled.
        nbytes: Bytes of one copy of the weights.
        windows: Number of windows.
        seconds: Wall time of the phases begin, transfer, finish and of the whole (`total`).
        pauses_s: For how long each target stopped serving.
        checksum: Digest of the checksums that every target compared; empty without verification.
    """

    version: int
    transport: str
    nbytes: int
    windows: int
    seconds: dict[str, float] = field(default_factory=dict)
    pauses_s: list[float] = field(default_factory=list)
    checksum: str = ""


@dataclass(frozen=True)
class SyncOptions:
    """The keys of `weight_sync.*` that a session uses."""

    transport: str = "auto"
    bucket_bytes: int = 256 << 20
    verify: bool = False
    timeout_s: float = 150.0


class SyncSession:
    """Sends version `version` from `source` to `targets`; call `run` once.

    Args:
        source: Where weights come from.
        targets: Who receives.
        version: Of the weights.
        options: `weight_sync.*`.
        cuda: Whether slots are GPUs.
        staged: Whether targets keep the windows beside their live weights and load all of them in one short pause.
    """

    def __init__(self, source: WeightSource, targets: WeightTargets, *, version: int, options: SyncOptions, cuda: bool, staged: bool = False) -> None:
        self._source = source
        self._targets = targets
        self.version = version
        self._options = options
        self._cuda = cuda
        self._staged = staged
        self._deadline = 0.0
        self.session_id = uuid.uuid4().hex

    def run(self) -> SyncReport:
        """Runs the session.

        Raises:
            SyncTimeoutError: The deadline passed.
            TransportError: The transport cannot serve these targets.
            WorkerError: A source or target worker failed; targets keep their old version.
        """
        started = time.monotonic()
        self._deadline = started + self._options.timeout_s
        metas = self._source.tensor_metas()
        budget = self._source.staging_budget()
        buckets = plan_buckets(metas, min(self._options.bucket_bytes, budget))
        for bucket in buckets:
            if bucket.nbytes > budget:
                raise LayoutError(
                    f"{bucket.tensors[0].name} alone needs {bucket.nbytes} bytes of staging, {budget} are allowed; "
                    "raise policy.refit_buffer_size_gb or free device memory"
                )
        windows = plan_windows(buckets, budget)
        spec, staging_ranks = self._plan_transport(windows)
        marks = {}
        try:
            self._begin(spec, staging_ranks)
            marks["begin"] = time.monotonic() - started
            checksum = self._transfer(spec, staging_ranks)
            marks["transfer"] = time.monotonic() - started - marks["begin"]
            pauses_s = self._targets.finish(self.version, self._left())
        except BaseException:
            self._targets.abort(self.session_id)
            raise
        finally:
            self._source.close()
        marks["total"] = time.monotonic() - started
        marks["finish"] = marks["total"] - marks["begin"] - marks["transfer"]
        nbytes = sum(meta.nbytes for meta in metas)
        logger.info(
            "sync=finished version=%d transport=%s mib=%d windows=%d seconds=%.3f", self.version, spec.transport, nbytes >> 20, len(windows), marks["total"]
        )
        return SyncReport(self.version, spec.transport, nbytes, len(windows), marks, pauses_s, checksum)

    def _plan_transport(self, windows: Sequence[Sequence[Any]]) -> tuple[SendSpec, list[int]]:
        senders, receivers = self._source.devices(), self._targets.devices()
        transport = choose_transport(self._options.transport, sender_devices=set(senders), target_devices=set(receivers), cuda=self._cuda)
        nccl = None
        if transport == "nccl":
            address, port = self._source.rendezvous()
            nccl = NcclSpec(address, port, 1 + len(receivers))
            staging_ranks = [0]
        else:
            # One copy per device that a target shares, or one per host where any process of the host can map it.
            places, wanted = ([_place(transport, device) for device in group] for group in (senders, receivers))
            staging_ranks = [rank for rank, place in enumerate(places) if place in set(wanted) and places.index(place) == rank]
        if not staging_ranks:
            raise TransportError(f"transport {transport} reaches no target: senders on {senders}, targets on {receivers}")
        return SendSpec(transport, windows, self._options.verify, self._options.timeout_s, nccl), staging_ranks

    def _begin(self, spec: SendSpec, staging_ranks: Sequence[int]) -> None:
        session: dict[str, Any] = {
            "id": self.session_id,
            "version": self.version,
            "staged": self._staged,
            "transport": spec.transport,
            "windows": len(spec.windows),
            "verify": spec.verify,
            "timeout_s": spec.timeout_s,
            "nccl": None,
        }
        if spec.nccl is not None:
            session["nccl"] = {"address": spec.nccl.address, "port": spec.nccl.port, "world_size": spec.nccl.world_size}
        with ThreadPoolExecutor(1) as pool:
            # Sender and receivers meet in the group's rendezvous, so neither may wait for the other to return first.
            opened = pool.submit(self._source.begin, spec, staging_ranks, self._left())
            self._targets.begin(session, 1, self._left())
            opened.result(timeout=self._left())

    def _transfer(self, spec: SendSpec, staging_ranks: Sequence[int]) -> str:
        """Moves every window; the digest of their checksums."""
        devices = self._source.devices()
        sums: list[str] = []
        with ThreadPoolExecutor(2) as pool:
            exported: Future[list[dict[str, Any] | None]] = pool.submit(self._source.export_window, 0, self._left())
            for index, buckets in enumerate(spec.windows):
                published = exported.result(timeout=self._left())
                if index + 1 < len(spec.windows):
                    # Double buffering needs window i-1 loaded before i+1 is packed over it; `receive_window` below waits for that.
                    exported = pool.submit(self._source.export_window, index + 1, self._left()) if spec.nccl is None else exported
                sent = pool.submit(self._source.send_window, index, self._left()) if spec.nccl is not None else None
                senders = {_place(spec.transport, devices[rank]): published[rank] for rank in staging_ranks}
                sums += (published[staging_ranks[0]] or {}).get("checksums", [])
                self._targets.receive_window({"index": index, "buckets": [encode_bucket(b) for b in buckets], "senders": senders}, self._left())
                if sent is not None:
                    sent.result(timeout=self._left())
                    if index + 1 < len(spec.windows):
                        exported = pool.submit(self._source.export_window, index + 1, self._left())
        return hashlib.blake2b("".join(sums).encode(), digest_size=8).hexdigest() if sums else ""

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise SyncTimeoutError(f"session {self.session_id} for version {self.version} passed weight_sync.timeout_s={self._options.timeout_s:.0f}")
        return left


def _place(transport: TransportName, device: str) -> str:
    """Where a staged copy can be read: on its device, on its host, or (a collective) by every member."""
    return {"cuda_ipc": device, "host": host_of(device), "nccl": "any"}[transport]


def pause_quantiles(pauses_s: Sequence[float]) -> dict[str, float]:
    """p50 and p99 of the seconds for which a serving shard stood still per refit; nothing where none ever did."""
    serving = [pause for pause in pauses_s if pause > 0]
    if not serving:
        return {}
    cuts = statistics.quantiles(serving, n=100, method="inclusive") if len(serving) > 1 else serving * 99
    return {"pause_s/p50": cuts[49], "pause_s/p99": cuts[98]}


def finished_event(session: SyncSession, shards: Sequence[int], report: SyncReport | None) -> SyncFinished:
    """What the run record says of an ended session; without a report it failed."""
    if report is None:
        return SyncFinished(session.session_id, session.version, "failed")
    checksums = {str(shard): report.checksum for shard in shards} if report.checksum else {}
    return SyncFinished(session.session_id, session.version, "done", report.nbytes, checksums)
