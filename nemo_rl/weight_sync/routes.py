"""Chooses each target's transport, and the source rank that stages its bytes.

A pure function of devices and `weight_sync.transport`. One session mixes transports. Invariants: a target's transport
follows from its own device alone; a target can reach its bytes; at most one rank pushes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl.distributed.devices import host_of, in_host_memory
from nemo_rl.weight_sync.transports.base import PUSHED, TransportError, TransportName

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


def place_of(transport: TransportName, device: str) -> str:
    """Place from which a staged copy can be read, as a key that source and target compute alike: its device, its host,
    or the members of the group.
    """
    if transport in PUSHED:
        return f"{transport}:group"
    return f"{transport}:{device if transport == 'cuda_ipc' else host_of(device)}"


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
