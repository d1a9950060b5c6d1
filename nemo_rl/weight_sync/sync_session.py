"""One sync session: sends a weight version from a source to a set of targets, or fails as a whole.

Plans the layout, exports and loads window by window (window i+1 is packed while window i is loaded), finalises every
target once, and cleans up after errors. Invariants: targets change their version only in `finish`; a failure aborts
every target and leaves no buffer or group; the whole session has one deadline. One session mixes transports: a
target's follows from its own device alone, and at most one rank pushes.
"""

from __future__ import annotations

import hashlib
import logging
import statistics
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

from nemo_rl.distributed.devices import host_of, in_host_memory
from nemo_rl.weight_sync.layout import LayoutError, TensorMeta, plan_buckets, plan_windows
from nemo_rl.weight_sync.receiver import encode_buckets, place_of
from nemo_rl.weight_sync.sender import SendSpec
from nemo_rl.weight_sync.transports import (
    PUSHED,
    GroupMeeting,
    TransportError,
    TransportName,
    is_of,
    members_digest,
    new_group_id,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")


class SyncTimeoutError(TransportError):
    """The session did not finish within `weight_sync.timeout_s`."""


class WeightSource(Protocol):
    """A source of weights: all trainer ranks together, or a cache. `maps_host_memory`: targets on the host read its
    memory, so nothing is staged for them.
    """

    maps_host_memory: bool

    def tensor_metas(self) -> list[TensorMeta]:
        """Names, shapes and dtypes in export order."""
        ...

    def devices(self) -> list[str]:
        """Device identity of each source that can stage: GPUs of ranks, host memory."""
        ...

    def staging_budget(self) -> int:
        """Bytes that a rank may use for staging."""
        ...

    def rendezvous(self) -> tuple[str, int]:
        """Address of the first source on a GPU and a free port there."""
        ...

    def kept_group(self, timeout_s: float) -> str | None:
        """Id of the group that the first source on a GPU holds from a session before, if it does."""
        ...

    def begin(self, spec: SendSpec, timeout_s: float) -> None:
        """Starts the export on every rank."""
        ...

    def export_window(self, index: int, timeout_s: float) -> list[dict[str, Any] | None]:
        """Packs a window; each source's `{handle, checksums}` per lane, or None."""
        ...

    def send_window(self, index: int, timeout_s: float) -> None:
        """Pushes a packed window where the transport pushes."""
        ...

    def close(self, *, failed: bool = False) -> None:
        """Ends the export on every rank; after a failure no group is kept."""
        ...


class WeightTargets(Protocol):
    """The engine workers that receive."""

    def devices(self) -> list[str]:
        """Device identity of each receiving worker, in rank order."""
        ...

    def kept_groups(self, timeout_s: float) -> list[str | None]:
        """Id of the group that each receiving worker holds from a session before, in the order of `devices`."""
        ...

    def begin(self, session: dict[str, object], routes: Sequence[dict[str, Any]], timeout_s: float) -> None:
        """Opens the session on every target, each with its own route: the fields of `WeightReceiver.begin`'s message
        that `session` lacks.
        """
        ...

    def receive_window(self, window: dict[str, object], timeout_s: float) -> None:
        """Loads a window on every target."""
        ...

    def finish(self, version: int, timeout_s: float) -> list[float]:
        """Finalises every target, which then has the version; seconds for which each stopped serving."""
        ...

    def abort(self, session_id: str) -> None:
        """Ends the session on every target without changing the version; ignores other sessions."""
        ...


@dataclass
class SyncReport:
    """Result of a session. `seconds`: wall time of the phases begin, transfer, finish and of the whole (`total`)."""

    version: int  # the version that targets now have
    transport: str  # how bytes travelled, such as `cuda_ipc+host`
    nbytes: int  # bytes of one copy of the weights
    windows: int
    seconds: dict[str, float] = field(default_factory=dict)
    pauses_s: list[float] = field(default_factory=list)  # for how long each target stopped serving
    checksum: str = ""  # digest of the checksums that every target compared; empty without verification


@dataclass(frozen=True)
class SyncOptions:
    """The keys of `weight_sync.*` that a session uses, and whether its group stays for the next one."""

    transport: str = "auto"
    bucket_bytes: int = 256 << 20
    verify: bool = False
    timeout_s: float = 150.0
    # Not where a GPU is lent: a group would hold memory there when it has gone back.
    keep_group: bool = True


class SyncSession:
    """Sends version `version` from `source` to `targets`; call `run` once. `staged`: targets keep the windows beside
    their live weights and load all of them in one short pause.
    """

    def __init__(
        self, source: WeightSource, targets: WeightTargets, *, version: int, options: SyncOptions, staged: bool = False
    ) -> None:
        self._source = source
        self._targets = targets
        self.version = version
        self._options = options
        self._staged = staged
        self._deadline = 0.0
        self.session_id = uuid.uuid4().hex

    def run(self) -> SyncReport:
        """Runs the session. Raises SyncTimeoutError: the deadline passed; TransportError: the transport cannot serve
        these targets; WorkerError: a source or target worker failed; targets keep their old version.
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
        sources = self._source.devices()
        devices = self._targets.devices()
        plan = plan_routes(self._options.transport, sources, devices)
        # Shared memory is scarce in containers, and each session registers what it stages there with CUDA: two buckets
        # are enough.
        staged_on_host = not self._source.maps_host_memory and any("host" in names for names in plan.lanes.values())
        bucket_bytes = self._options.bucket_bytes
        windows = plan_windows(
            buckets, min(budget, bucket_bytes) if staged_on_host else steady_window(budget, bucket_bytes)
        )
        meeting = self._meeting(plan, sources, devices) if plan.group_size else None
        spec = SendSpec(windows, self._options.verify, self._options.timeout_s, plan.lanes, meeting)
        marks = {}
        failed = True
        try:
            self._begin(spec, plan)
            marks["begin"] = time.monotonic() - started
            checksum = self._transfer(spec, sources)
            marks["transfer"] = time.monotonic() - started - marks["begin"]
            pauses_s = self._targets.finish(self.version, self._left())
            failed = False
        except BaseException:
            self._targets.abort(self.session_id)
            raise
        finally:
            self._source.close(failed=failed)
        marks["total"] = time.monotonic() - started
        marks["finish"] = marks["total"] - marks["begin"] - marks["transfer"]
        nbytes = sum(meta.nbytes for meta in metas)
        logger.info(
            "sync=finished version=%d transport=%s mib=%d windows=%d seconds=%.3f",
            self.version,
            plan.summary,
            nbytes >> 20,
            len(windows),
            marks["total"],
        )
        return SyncReport(self.version, plan.summary, nbytes, len(windows), marks, pauses_s, checksum)

    def _meeting(self, plan: RoutePlan, sources: Sequence[str], devices: Sequence[str]) -> GroupMeeting:
        grouped = [number for number, route in enumerate(plan.routes) if route.transport in PUSHED]
        over, sender = plan.routes[grouped[0]].transport, sources[plan.routes[grouped[0]].source]
        members = members_digest(over, sender, [devices[number] for number in grouped], self._options.timeout_s)
        keep = self._options.keep_group
        kept = self._source.kept_group(self._left()) if keep else None
        if kept is not None and is_of(kept, members):
            held = self._targets.kept_groups(self._left())
            # A rank that was rebuilt or slept holds no group: then all ranks join a new one.
            if all(held[number] == kept for number in grouped):
                return GroupMeeting(kept, plan.group_size, held=True, keep=keep, over=over)
        address, port = self._source.rendezvous()
        return GroupMeeting(new_group_id(members), plan.group_size, address, port, keep=keep, over=over)

    def _begin(self, spec: SendSpec, plan: RoutePlan) -> None:
        session: dict[str, object] = {
            "id": self.session_id,
            "version": self.version,
            "staged": self._staged,
            "windows": len(spec.windows),
            "verify": spec.verify,
            "timeout_s": spec.timeout_s,
        }
        routes = []
        for route in plan.routes:
            meeting = None
            if spec.group is not None and route.transport in PUSHED:
                meeting = asdict(spec.group) | {"rank": route.group_rank}
            routes.append({"transport": route.transport, "group": meeting})
        with ThreadPoolExecutor(1) as pool:
            opened = pool.submit(self._source.begin, spec, self._left())
            # A source that cannot begin is found out before any target is touched; but sender and receivers of a group
            # meet in its rendezvous, where neither may wait for the other to return first.
            if spec.group is None:
                self._result(opened, "the sources to begin")
            self._targets.begin(session, routes, self._left())
            self._result(opened, "the sources to begin")

    def _transfer(self, spec: SendSpec, sources: Sequence[str]) -> str:
        """Moves every window; the digest of their checksums."""
        sums: list[str] = []
        with ThreadPoolExecutor(2) as pool:
            exported: Future[list[dict[str, object] | None]] = pool.submit(self._source.export_window, 0, self._left())
            for index, buckets in enumerate(spec.windows):
                published = self._result(exported, f"window {index} to be packed")
                if index + 1 < len(spec.windows):
                    # Double buffering needs window i-1 loaded before i+1 is packed over it; `receive_window` below
                    # waits for that.
                    exported = (
                        pool.submit(self._source.export_window, index + 1, self._left())
                        if spec.group is None
                        else exported
                    )
                sent = pool.submit(self._source.send_window, index, self._left()) if spec.group is not None else None
                senders: dict[str, Any] = {}
                for source, lanes in spec.lanes.items():
                    senders |= {place_of(name, sources[source]): (published[source] or {})[name] for name in lanes}
                sums += next(iter(senders.values()))["checksums"]
                self._targets.receive_window(
                    {"index": index, "buckets": encode_buckets(buckets), "senders": senders}, self._left()
                )
                if sent is not None:
                    self._result(sent, f"window {index} to be sent")
                    if index + 1 < len(spec.windows):
                        exported = pool.submit(self._source.export_window, index + 1, self._left())
        return hashlib.blake2b("".join(sums).encode(), digest_size=8).hexdigest() if sums else ""

    def _result(self, future: Future[T], what: str) -> T:
        done, _ = wait([future], timeout=self._left())
        if not done:
            raise SyncTimeoutError(
                f"session {self.session_id} for version {self.version} waited for {what} until "
                f"weight_sync.timeout_s={self._options.timeout_s:.0f} had passed"
            )
        return future.result()

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise SyncTimeoutError(
                f"session {self.session_id} for version {self.version} passed "
                f"weight_sync.timeout_s={self._options.timeout_s:.0f}"
            )
        return left


def steady_window(budget: int, bucket_bytes: int) -> int:
    """A window size that stays the same while the budget, a share of free memory, varies between sessions: receivers
    recognise windows by their layout.
    """
    return budget if budget < bucket_bytes else bucket_bytes << (budget // bucket_bytes).bit_length() - 1


def pause_quantiles(pauses_s: Sequence[float]) -> dict[str, float]:
    """p50 and p99 of the seconds for which a serving shard stood still per refit; nothing where none ever did."""
    serving = [pause for pause in pauses_s if pause > 0]
    if not serving:
        return {}
    cuts = statistics.quantiles(serving, n=100, method="inclusive") if len(serving) > 1 else serving * 99
    return {"pause_s/p50": cuts[49], "pause_s/p99": cuts[98]}


_ANSWERS = ("auto", "cuda_ipc", "nccl", "host", "tcp")


@dataclass(frozen=True)
class Route:
    """Route of the bytes to one target."""

    transport: TransportName
    source: int  # number of the source that stages them
    group_rank: int = 0  # the target's rank in the session's group, whose rank 0 sends; 0 for a target outside it


@dataclass(frozen=True)
class RoutePlan:
    """The routes of all targets, in their order."""

    routes: tuple[Route, ...]

    @property
    def group_size(self) -> int:
        """Members of the session's group with its sender; 0 when there is no group."""
        members = sum(route.transport in PUSHED for route in self.routes)
        return members + 1 if members else 0

    @property
    def lanes(self) -> dict[int, tuple[TransportName, ...]]:
        """Which transports each source stages for; sources that stage nothing are left out."""
        found: dict[int, set[TransportName]] = {}
        for route in self.routes:
            found.setdefault(route.source, set()).add(route.transport)
        return {source: tuple(sorted(names)) for source, names in sorted(found.items())}

    @property
    def summary(self) -> str:
        """The transports in use, such as `cuda_ipc+host`."""
        return "+".join(sorted({route.transport for route in self.routes}))


def plan_routes(configured: str, sources: Sequence[str], targets: Sequence[str]) -> RoutePlan:
    """Chooses for every target.

    `auto` takes, in this order: host memory that already holds the weights, the target's own GPU, pinned host memory, a
    group: between GPUs over NCCL; for CPU slots, and where no source may use a GPU, between host memories over TCP.

    Args:
        configured: `weight_sync.transport`.
        sources: Device identity of each source.
        targets: Device identity of each target.

    Returns one route per target. Raises TransportError: a target cannot be reached as configured.
    """
    if configured not in _ANSWERS:
        raise TransportError(f"weight_sync.transport={configured} is unknown; choose {', '.join(_ANSWERS)}")
    routes: list[Route] = []
    grouped: list[str] = []
    for device in targets:
        transport = _transport_for(configured, sources, device)
        if transport == "nccl" and device in grouped:
            raise TransportError(
                f"two targets share {device}, and NCCL cannot put two ranks on one GPU; use weight_sync.transport=host"
            )
        pushed = transport in PUSHED
        grouped += [device] if pushed else []
        routes.append(Route(transport, _source_for(transport, sources, device), len(grouped) if pushed else 0))
    return RoutePlan(tuple(routes))


def _transport_for(configured: str, sources: Sequence[str], device: str) -> TransportName:
    """The transport for a target on `device`. Raises TransportError: the configured one does not reach it."""
    same_host = [source for source in sources if host_of(source) == host_of(device)]
    if in_host_memory(device) and configured in ("cuda_ipc", "nccl"):
        raise TransportError(f"weight_sync.transport={configured} needs GPUs; on CPU slots use auto, host or tcp")
    if configured == "tcp":
        return "tcp"
    if configured == "host" or in_host_memory(device):
        if same_host:
            return "host"
        if configured == "host":
            raise TransportError(
                "weight_sync.transport=host reaches only targets on the source's own nodes; use auto, nccl or tcp "
                "across nodes"
            )
        return "tcp"
    # A rank cannot broadcast to its own GPU, so a target there is reached by IPC whatever the others use.
    if configured in ("cuda_ipc", "nccl"):
        if device in sources:
            return "cuda_ipc"
        if configured == "cuda_ipc":
            raise TransportError(
                "weight_sync.transport=cuda_ipc reaches only targets on the source's own GPUs; use auto or "
                "nccl for separate placement"
            )
        return "nccl"
    if any(in_host_memory(source) for source in same_host):
        # One copy from memory that is there already, and no training rank takes part.
        return "host"
    if device in sources:
        return "cuda_ipc"
    # Pinned shared memory reaches every GPU of a host without a communicator; NCCL is for what lies beyond it.
    if same_host:
        return "host"
    return "tcp" if all(in_host_memory(source) for source in sources) else "nccl"


def _source_for(transport: TransportName, sources: Sequence[str], device: str) -> int:
    if transport == "cuda_ipc":
        return sources.index(device)
    if transport == "tcp":
        # Rank 0 sends, or the owner of a cache from the memory that it lies in.
        return 0
    if transport == "host":
        near = [number for number, source in enumerate(sources) if host_of(source) == host_of(device)]
        return min(near, key=lambda number: (not in_host_memory(sources[number]), number))
    pushing = [number for number, source in enumerate(sources) if not in_host_memory(source)]
    if not pushing:
        raise TransportError(
            f"{device} is reached by NCCL alone, and no source is on a GPU that could send; sources are on "
            f"{sorted(set(sources))}"
        )
    return pushing[0]
