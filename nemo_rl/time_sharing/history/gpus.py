"""Invariants 1 and 10: no GPU is granted twice, and none is lost or given on while its memory is occupied.

Two ledgers are kept side by side: what the scheduler's events say, and what pipelines and reapers say about memory. Each must be sound by itself, and
the books may call a GPU free only when its memory is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from nemo_rl.time_sharing import events as ev
from nemo_rl.time_sharing.types import ACTOR_INFER, ClusterSpec, Phase
from nemo_rl.utils.record import Entry


class GpuChecks:
    """Watches leases, memory and quarantine."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self._size = 0
        self._clusters: dict[str, dict[str, ClusterSpec]] = {}
        self._leases: dict[int, str] = {}
        self._memory: dict[int, str] = {}
        self._quarantined: set[int] = set()
        self._epochs: dict[str, int] = {}
        self._newest_epoch = 0

    def handlers(self) -> dict[type, Callable[[Entry, Any], None]]:
        return {
            ev.PoolOpened: self._opened,
            ev.Registered: self._registered,
            ev.Granted: self._granted,
            ev.Released: self._released,
            ev.RankMoved: self._rank,
            ev.Unregistered: self._unregistered,
            ev.GpusQuarantined: self._quarantine,
            ev.GpusCleared: self._cleared,
            ev.MemoryTaken: self._taken,
            ev.MemoryFreed: self._freed,
            ev.PlanRejected: self._rejected,
        }

    def finish(self) -> None:
        for gpu, holder in sorted(self._leases.items()):
            self._bad(10, f"GPU {gpu} is still held by {holder} at the end of the run")
        for gpu, holder in sorted(self._memory.items()):
            if gpu not in self._quarantined:
                self._bad(10, f"memory of GPU {gpu} is still occupied by {holder} at the end of the run")

    def _bad(self, invariant: int, message: str) -> None:
        self.found.append((invariant, message))

    def _opened(self, entry: Entry, event: ev.PoolOpened) -> None:
        self._size = event.nodes * event.gpus_per_node

    def _registered(self, entry: Entry, event: ev.Registered) -> None:
        self._clusters[event.pipeline] = {cluster.name: cluster for cluster in event.clusters}

    def _rejected(self, entry: Entry, event: ev.PlanRejected) -> None:
        self._bad(10, f"a plan broke the books: {'; '.join(event.problems)}")

    def _rank_gpus(self, pipeline: str, rank: int) -> tuple[int, ...]:
        infer = self._clusters[pipeline][ACTOR_INFER]
        return infer.gpus[rank * infer.tp_size : (rank + 1) * infer.tp_size]

    def _lease(self, gpus: Iterable[int], holder: str, epoch: int) -> None:
        if epoch <= self._newest_epoch:
            self._bad(1, f"{holder} got epoch {epoch}, which is not newer than {self._newest_epoch}")
        self._newest_epoch = max(self._newest_epoch, epoch)
        self._epochs[holder] = epoch
        for gpu in gpus:
            if gpu in self._leases:
                self._bad(1, f"GPU {gpu} is granted to {holder} while {self._leases[gpu]} holds it")
            if gpu in self._quarantined:
                self._bad(1, f"GPU {gpu} is granted to {holder} while it is in quarantine")
            if not 0 <= gpu < self._size:
                self._bad(10, f"GPU {gpu} granted to {holder} is outside the pool of {self._size}")
            self._leases[gpu] = holder

    def _unlease(self, gpus: Iterable[int], holder: str) -> None:
        for gpu in gpus:
            if self._leases.get(gpu) != holder:
                self._bad(10, f"{holder} gives back GPU {gpu}, which {self._leases.get(gpu, 'nobody')} holds")
            self._leases.pop(gpu, None)
            if gpu in self._memory and gpu not in self._quarantined:
                self._bad(10, f"GPU {gpu} is called free by {holder} while {self._memory[gpu]} occupies its memory")

    def _granted(self, entry: Entry, event: ev.Granted) -> None:
        mapping = self._clusters[event.pipeline][event.cluster].gpus
        if event.gpus != mapping:
            self._bad(10, f"{event.pipeline}/{event.cluster} is granted GPUs {event.gpus}, it is mapped to {mapping}")
        self._lease(event.gpus, f"{event.pipeline}/{event.cluster}", event.epoch)

    def _released(self, entry: Entry, event: ev.Released) -> None:
        holder = f"{event.pipeline}/{event.cluster}"
        if self._epochs.get(holder) != event.epoch:
            self._bad(10, f"{holder} gives back epoch {event.epoch}, it holds {self._epochs.get(holder)}")
        self._unlease(self._clusters[event.pipeline][event.cluster].gpus, holder)

    def _rank(self, entry: Entry, event: ev.RankMoved) -> None:
        holder = f"{event.pipeline}/rank {event.rank}"
        if event.phase is Phase.WAKING:
            self._lease(self._rank_gpus(event.pipeline, event.rank), holder, event.epoch)
        elif event.phase is Phase.ASLEEP:
            self._unlease(self._rank_gpus(event.pipeline, event.rank), holder)

    def _unregistered(self, entry: Entry, event: ev.Unregistered) -> None:
        name = event.pipeline
        for gpu, holder in list(self._leases.items()):
            if holder.startswith(f"{name}/"):
                self._unlease([gpu], holder)
        for gpu, holder in self._memory.items():
            if holder.startswith(f"{name}/") and gpu not in self._quarantined:
                self._bad(10, f"{name} is unregistered while {holder} occupies memory of GPU {gpu}")
        self._clusters.pop(name, None)

    def _quarantine(self, entry: Entry, event: ev.GpusQuarantined) -> None:
        self._quarantined.update(event.gpus)

    def _cleared(self, entry: Entry, event: ev.GpusCleared) -> None:
        for gpu in event.gpus:
            self._quarantined.discard(gpu)
            if gpu in self._memory:
                self._bad(10, f"GPU {gpu} leaves quarantine while {self._memory[gpu]} occupies its memory")

    def _taken(self, entry: Entry, event: ev.MemoryTaken) -> None:
        holder = f"{entry.source.partition('/')[0]}/{event.what}"
        for gpu in event.gpus:
            if gpu in self._memory:
                self._bad(1, f"{holder} takes memory of GPU {gpu} while {self._memory[gpu]} occupies it")
            if self._leases.get(gpu) != holder:
                self._bad(1, f"{holder} takes memory of GPU {gpu}, which is granted to {self._leases.get(gpu, 'nobody')}")
            self._memory[gpu] = holder

    def _freed(self, entry: Entry, event: ev.MemoryFreed) -> None:
        holder = f"{entry.source.partition('/')[0]}/{event.what}"
        for gpu in event.gpus:
            # A reaper makes sure of everything that the books give a dead pipeline, whether it had come to use it or not.
            if self._memory.get(gpu) != holder and not (entry.source.endswith("/reaper") and gpu not in self._memory):
                self._bad(10, f"{holder} frees memory of GPU {gpu}, which {self._memory.get(gpu, 'nobody')} occupies")
            self._memory.pop(gpu, None)
