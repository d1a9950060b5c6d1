"""Invariants 1 and 10: no GPU is granted twice, and none is lost or given on while its memory is occupied.

Keeps two ledgers: leases by the scheduler's events, and memory by events of pipelines and reapers. Each must be sound
by itself, and the lease ledger may call a GPU free only when its memory is. Across a lost end of the log (see `gaps`) a
lease may be one that the scheduler has forgotten, or holds on to although it is over; the memory ledger is checked
throughout, so a GPU used twice is found there too. The accounts, which rest on the scheduler's state, must agree with
`Ledger`, which does not.
"""

from __future__ import annotations

from collections.abc import Iterable

from nemo_rl.time_sharing.history.clocks import Clocks
from nemo_rl.time_sharing.history.ledger import Checks, Ledger
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.accounts import Accounts, UnaccountableLog, Use
from nemo_rl.time_sharing.log.state import ACCOUNTED
from nemo_rl.time_sharing.protocol.types import SCHEDULER, Phase
from nemo_rl.utils.record import Entry, Handler

_SLACK_S = 1.0
_Quarantine = tuple[tuple[int, ...], str, int, int]
"""GPUs, and the pipeline, incarnation and rank whose processes are to be ended."""


class GpuChecks(Checks):
    """Watches leases, memory and quarantine."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._unsure: set[int] = set()
        self._perhaps_held: set[int] = set()
        """GPUs that the scheduler may take for held though their lease ended in the part of the log that was lost."""
        self._perhaps: set[_Quarantine] = set()
        """Quarantines from before the log lost its end, which the scheduler may have forgotten."""
        self._leases: dict[int, str] = {}
        self._memory: dict[int, str] = {}
        self._quarantined: dict[int, set[_Quarantine]] = {}
        self._epochs: dict[str, int] = {}
        self._newest_epoch = 0

    def tail_lost(self, entry: Entry) -> None:
        self._unsure = self._leases.keys() | self._quarantined.keys()
        clusters = (cluster for known in self._ledger.clusters.values() for cluster in known.values())
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

    def _inventory_done(self, entry: Entry, event: ev.InventoryDone) -> None:
        if not self._ledger.gap:
            return
        for gpu, holder in sorted(self._memory.items()):
            known = holder.partition("/")[0] in self._ledger.live
            if known and self._leases.get(gpu) != holder and gpu not in self._quarantined:
                called = f"GPU {gpu} is called {self._leases.get(gpu, 'free')}"
                self._bad(10, f"after taking stock {called} while {holder} occupies its memory")

    def _rejected(self, entry: Entry, event: ev.PlanRejected) -> None:
        self._bad(10, f"a plan broke the ledger: {'; '.join(event.problems)}")

    def _lease(self, gpus: Iterable[int], holder: str, epoch: int) -> None:
        if epoch <= self._newest_epoch and not self._ledger.gap:
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
            mine, sure = self._leases.get(gpu) == holder, not (self._ledger.gap or gpu in self._unsure)
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
            if (
                occupied is not None
                and gpu not in self._quarantined
                and not self._ledger.gap
                and (sure or occupied == holder)
            ):
                self._bad(10, f"GPU {gpu} is called free by {holder} while {occupied} occupies its memory")

    def _granted(self, entry: Entry, event: ev.Granted) -> None:
        self._lease(event.gpus, f"{event.pipeline}/{event.cluster}", event.epoch)

    def _released(self, entry: Entry, event: ev.Released) -> None:
        holder = f"{event.pipeline}/{event.cluster}"
        gpus = self._ledger.clusters[event.pipeline][event.cluster].gpus
        if self._epochs.get(holder) != event.epoch and not self._ledger.gap and self._unsure.isdisjoint(gpus):
            self._bad(10, f"{holder} gives back epoch {event.epoch}, it holds {self._epochs.get(holder)}")
        self._unlease(gpus, holder)

    def _rank(self, entry: Entry, event: ev.RankMoved) -> None:
        holder = f"{event.pipeline}/rank {event.rank}"
        if event.phase in (Phase.RISING, Phase.BUILDING):
            self._lease(self._ledger.rank_gpus(event.pipeline, event.rank), holder, event.epoch)
        elif event.phase is Phase.ASLEEP:
            self._unlease(self._ledger.rank_gpus(event.pipeline, event.rank), holder)

    def _unregistered(self, entry: Entry, event: ev.Unregistered) -> None:
        name = event.pipeline
        for gpu, holder in list(self._leases.items()):
            if holder.startswith(f"{name}/"):
                self._unlease([gpu], holder)
        for gpu, holder in self._memory.items():
            # A later incarnation, whose registration was lost, may occupy this one's GPUs.
            if holder.startswith(f"{name}/") and gpu not in self._quarantined and not self._ledger.gap:
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
            elif gpu in self._memory and self._leases.get(gpu) != self._memory[gpu] and not self._ledger.gap:
                self._bad(10, f"GPU {gpu} leaves quarantine while {self._memory[gpu]} occupies its memory")

    def _node_away(self, entry: Entry, event: ev.NodeAway) -> None:
        gpus = self._ledger.pool.units_of([event.node]) if not self._ledger.gap else set()
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
            if self._leases.get(gpu) != holder and not self._ledger.gap and not lingers:
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


class AccountChecks(Checks):
    """Adds up the accounts: to the pool's time, and to the time of slots that nothing in the record speaks of."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._accounts: Accounts | None = Accounts()
        self._free_s = self._whole_s = 0.0
        self._latest: float | None = None

    def handlers(self) -> dict[type, Handler]:
        return dict.fromkeys(ACCOUNTED, self._take)

    def tail_lost(self, entry: Entry) -> None:
        # What was lost is on no account.
        self._accounts = None

    def finish(self, clocks: Clocks, ended: bool) -> None:
        if self._accounts is None or self._latest is None:
            return
        done = self._accounts.until(self._latest)
        accounted = sum(account.total_s for account in done.by_key.values())
        free = sum(account.seconds[Use.FREE] for account in done.by_key.values())
        slack = _SLACK_S + 1e-9 * self._whole_s
        if abs(accounted - self._whole_s) > slack:
            self._bad(10, f"the accounts add up to {accounted:.1f} GPU-seconds, the pool had {self._whole_s:.1f}")
        if abs(free - self._free_s) > slack:
            self._bad(10, f"the accounts leave {free:.1f} GPU-seconds free, in the record {self._free_s:.1f} were")

    def _take(self, entry: Entry, event: object) -> None:
        if self._accounts is None or entry.source != SCHEDULER:
            return
        pool = self._ledger.pool
        if self._latest is not None and entry.time > self._latest:
            passed = (entry.time - self._latest) / pool.slots_per_gpu
            self._free_s += self._ledger.free * passed
            self._whole_s += (pool.slots - self._ledger.away) * passed
        if self._latest is not None or isinstance(event, ev.PoolOpened):
            self._latest = max(entry.time, self._latest or entry.time)
        try:
            self._accounts.take(entry)
        except UnaccountableLog:
            # The ledger says what is wrong.
            self._accounts = None
