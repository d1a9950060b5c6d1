"""Invariants 1 and 10: no GPU is granted twice, and none is lost or given on while its memory is occupied.

Keeps two ledgers: leases by the scheduler's events, and memory by events of pipelines and reapers. Each must be sound
by itself, and the lease ledger may call a GPU free only when its memory is. Across a lost end of the log (see `gaps`) a
lease may be one that the scheduler has forgotten, or holds on to although it is over; the memory ledger is checked
throughout, so a GPU used twice is found there too.
"""

from __future__ import annotations

from collections.abc import Iterable

from nemo_rl.time_sharing.history.absences import NODE_EVENTS, Absences, NodeEvent
from nemo_rl.time_sharing.history.clocks import Clocks
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ClusterSpec, Phase
from nemo_rl.utils.record import Entry, Handler

_Quarantine = tuple[tuple[int, ...], str, int, int]
"""GPUs, and the pipeline, incarnation and rank whose processes are to be ended."""


class GpuChecks:
    """Watches leases, memory and quarantine."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self._gap = False
        self._live: set[str] = set()
        """Pipelines that are registered and not fenced, so that they say themselves what they hold."""
        self._unsure: set[int] = set()
        self._perhaps_held: set[int] = set()
        """GPUs that the scheduler may take for held though their lease ended in the part of the log that was lost."""
        self._perhaps: set[_Quarantine] = set()
        """Quarantines from before the log lost its end, which the scheduler may have forgotten."""
        self._clusters: dict[str, dict[str, ClusterSpec]] = {}
        self._leases: dict[int, str] = {}
        self._memory: dict[int, str] = {}
        self._quarantined: dict[int, set[_Quarantine]] = {}
        self._epochs: dict[str, int] = {}
        self._newest_epoch = 0
        self._absences = Absences()

    def handlers(self) -> dict[type, Handler]:
        return {
            ev.InventoryDone: self._inventory_done,
            ev.Registered: self._registered,
            ev.Fenced: self._fenced,
            ev.Granted: self._granted,
            ev.Released: self._released,
            ev.RankMoved: self._rank,
            ev.Unregistered: self._unregistered,
            ev.GpusQuarantined: self._quarantine,
            ev.GpusCleared: self._cleared,
            ev.MemoryTaken: self._taken,
            ev.MemoryFreed: self._freed,
            ev.PlanRejected: self._rejected,
            ev.PoolOpened: self._node,
            **dict.fromkeys(NODE_EVENTS, self._node),
        }

    def tail_lost(self, entry: Entry) -> None:
        self._gap = True
        self._unsure = self._leases.keys() | self._quarantined.keys()
        clusters = (cluster for known in self._clusters.values() for cluster in known.values())
        self._perhaps_held = {gpu for cluster in clusters for gpu in cluster.gpus} - self._leases.keys()
        self._perhaps = set().union(*self._quarantined.values())
        self._newest_epoch = 0

    def finish(self, clocks: Clocks, ended: bool) -> None:
        if not ended:
            return
        for gpu, holder in sorted(self._leases.items()):
            if gpu in self._unsure:
                continue
            self._bad(10, f"GPU {gpu} is still held by {holder} at the end of the run")
        for gpu, holder in sorted(self._memory.items()):
            if gpu not in self._quarantined:
                self._bad(10, f"memory of GPU {gpu} is still occupied by {holder} at the end of the run")

    def _bad(self, invariant: int, message: str) -> None:
        self.found.append((invariant, message))

    def _inventory_done(self, entry: Entry, event: ev.InventoryDone) -> None:
        if not self._gap:
            return
        self._gap = False
        for gpu, holder in sorted(self._memory.items()):
            known = holder.partition("/")[0] in self._live
            if known and self._leases.get(gpu) != holder and gpu not in self._quarantined:
                self._bad(
                    10,
                    f"after taking stock GPU {gpu} is called {self._leases.get(gpu, 'free')} while {holder} "
                    "occupies its memory",
                )

    def _registered(self, entry: Entry, event: ev.Registered) -> None:
        self._clusters[event.pipeline] = {cluster.name: cluster for cluster in event.clusters}

        self._live.add(event.pipeline)

    def _fenced(self, entry: Entry, event: ev.Fenced) -> None:
        self._live.discard(event.pipeline)

    def _rejected(self, entry: Entry, event: ev.PlanRejected) -> None:
        self._bad(10, f"a plan broke the ledger: {'; '.join(event.problems)}")

    def _rank_gpus(self, pipeline: str, rank: int) -> tuple[int, ...]:
        infer = self._clusters[pipeline][ACTOR_INFER]
        return infer.gpus[rank * infer.tp_size : (rank + 1) * infer.tp_size]

    def _lease(self, gpus: Iterable[int], holder: str, epoch: int) -> None:
        if epoch <= self._newest_epoch and not self._gap:
            self._bad(1, f"{holder} got epoch {epoch}, which is not newer than {self._newest_epoch}")
        self._newest_epoch = max(self._newest_epoch, epoch)
        self._epochs[holder] = epoch
        for gpu in gpus:
            if gpu in self._unsure:
                self._unsure.remove(gpu)
            elif gpu in self._leases:
                self._bad(1, f"GPU {gpu} is granted to {holder} while {self._leases[gpu]} holds it")
            if not self._quarantined.pop(gpu, set()) <= self._perhaps:
                self._bad(1, f"GPU {gpu} is granted to {holder} while it is in quarantine")
            self._leases[gpu] = holder
            self._perhaps_held.discard(gpu)

    def _unlease(self, gpus: Iterable[int], holder: str) -> None:
        for gpu in gpus:
            mine, sure = self._leases.get(gpu) == holder, not (self._gap or gpu in self._unsure)
            if mine:
                del self._leases[gpu]
                if gpu in self._unsure:
                    # The scheduler may still count it as held by its former holder.
                    self._unsure.remove(gpu)
                    self._perhaps_held.add(gpu)
            elif sure and gpu not in self._perhaps_held:
                self._bad(10, f"{holder} gives back GPU {gpu}, which {self._leases.get(gpu, 'none')} holds")
                self._leases.pop(gpu, None)
            occupied = self._memory.get(gpu)
            # What a new scheduler frees while it takes stock may be held again since, in the part that was lost; judged
            # when it has taken stock.
            if occupied is not None and gpu not in self._quarantined and not self._gap and (sure or occupied == holder):
                self._bad(10, f"GPU {gpu} is called free by {holder} while {occupied} occupies its memory")

    def _granted(self, entry: Entry, event: ev.Granted) -> None:
        self._lease(event.gpus, f"{event.pipeline}/{event.cluster}", event.epoch)

    def _released(self, entry: Entry, event: ev.Released) -> None:
        holder = f"{event.pipeline}/{event.cluster}"
        gpus = self._clusters[event.pipeline][event.cluster].gpus
        if self._epochs.get(holder) != event.epoch and not self._gap and self._unsure.isdisjoint(gpus):
            self._bad(10, f"{holder} gives back epoch {event.epoch}, it holds {self._epochs.get(holder)}")
        self._unlease(gpus, holder)

    def _rank(self, entry: Entry, event: ev.RankMoved) -> None:
        holder = f"{event.pipeline}/rank {event.rank}"
        if event.phase in (Phase.RISING, Phase.BUILDING):
            self._lease(self._rank_gpus(event.pipeline, event.rank), holder, event.epoch)
        elif event.phase is Phase.ASLEEP:
            self._unlease(self._rank_gpus(event.pipeline, event.rank), holder)

    def _unregistered(self, entry: Entry, event: ev.Unregistered) -> None:
        name = event.pipeline
        self._live.discard(name)
        for gpu, holder in list(self._leases.items()):
            if holder.startswith(f"{name}/"):
                self._unlease([gpu], holder)
        for gpu, holder in self._memory.items():
            # A later incarnation, whose registration was lost, may occupy this one's GPUs.
            if holder.startswith(f"{name}/") and gpu not in self._quarantined and not self._gap:
                self._bad(10, f"{name} is unregistered while {holder} occupies memory of GPU {gpu}")

    def _quarantine(self, entry: Entry, event: ev.GpusQuarantined) -> None:
        made = (event.gpus, event.pipeline, event.incarnation, event.rank)
        self._perhaps.discard(made)
        for gpu in event.gpus:
            self._quarantined.setdefault(gpu, set()).add(made)

    def _cleared(self, entry: Entry, event: ev.GpusCleared) -> None:
        over = (event.gpus, event.pipeline, event.incarnation, event.rank)
        for gpu in event.gpus:
            left = {q for q in self._quarantined.pop(gpu, ()) if q != over}
            if left:
                self._quarantined[gpu] = left
            elif gpu in self._memory and self._leases.get(gpu) != self._memory[gpu] and not self._gap:
                self._bad(10, f"GPU {gpu} leaves quarantine while {self._memory[gpu]} occupies its memory")

    def _node(self, entry: Entry, event: NodeEvent) -> None:
        gpus = self._absences.take(event, entry.time)
        if isinstance(event, ev.NodeAway) and not self._gap:
            for gpu in sorted(gpus & ((self._leases.keys() - self._unsure) | self._memory.keys())):
                holder = self._memory.get(gpu) or self._leases[gpu]
                self._bad(10, f"node {event.node} is away while {holder} is on its GPU {gpu}")

    def _taken(self, entry: Entry, event: ev.MemoryTaken) -> None:
        name = entry.source.partition("/")[0]
        holder = f"{name}/{event.what}"
        for gpu in event.gpus:
            if gpu in self._memory:
                self._bad(1, f"{holder} takes memory of GPU {gpu} while {self._memory[gpu]} occupies it")
            # A process that could not be ended may go on using GPUs that are withheld for its sake.
            lingers = gpu not in self._leases and any(q[1] == name for q in self._quarantined.get(gpu, ()))
            if self._leases.get(gpu) != holder and not self._gap and not lingers:
                self._bad(1, f"{holder} takes memory of GPU {gpu}, which is granted to {self._leases.get(gpu, 'none')}")
            self._memory[gpu] = holder

    def _freed(self, entry: Entry, event: ev.MemoryFreed) -> None:
        name = entry.source.partition("/")[0]
        holder = f"{name}/{event.what}"
        for gpu in event.gpus:
            if event.what == ev.EVERYTHING and entry.source.endswith("/reaper"):
                if self._memory.get(gpu, "").startswith(f"{name}/"):
                    del self._memory[gpu]
                continue
            # A reaper makes sure of everything that the ledger gives a dead pipeline, whether it had come to use it or
            # not.
            if self._memory.get(gpu) != holder and not (entry.source.endswith("/reaper") and gpu not in self._memory):
                self._bad(10, f"{holder} frees memory of GPU {gpu}, which {self._memory.get(gpu, 'none')} occupies")
            self._memory.pop(gpu, None)
