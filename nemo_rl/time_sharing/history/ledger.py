"""What the scheduler's entries say of pipelines, claims, leases and nodes, derived once for all groups of checks.

A group sees an entry before the ledger takes it, so the ledger is the last of them. Slots are spoken for while they are
leased, claimed or in quarantine, or their node is away.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TypeVar, get_args, get_type_hints

from nemo_rl.time_sharing.history.absences import Absences
from nemo_rl.time_sharing.history.clocks import Clocks
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ClusterSpec, Phase
from nemo_rl.utils.record import Entry, Handler

_K = TypeVar("_K", bound=tuple[object, ...])
Key = tuple[str, str, int]
"""Pipeline, cluster and rank; rank -1 is a fixed cluster."""


class Checks:
    """A group of invariants. `found`: violations of the entry that was read last, each with its invariant.

    A method of an entry and an event alone is called with each event of the kinds that it is annotated with.
    """

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []

    def handlers(self) -> dict[type, Handler]:
        return {kind: getattr(self, name) for kind, name in _read_by(type(self)).items()}

    def tail_lost(self, entry: Entry) -> None:
        """From this entry to the next `InventoryDone` the ledger may contradict the record; see `checker.Survey`."""

    def finish(self, clocks: Clocks, ended: bool) -> None:
        """Checks open items at the end of the record; if `ended`, open items are violations."""

    def _bad(self, invariant: int, message: str) -> None:
        self.found.append((invariant, message))


@cache
def _read_by(group: type) -> dict[type, str]:
    """By kind of event, the name of the method that takes it."""
    found: dict[type, str] = {}
    for name, method in inspect.getmembers(group, inspect.isfunction):
        if [*inspect.signature(method).parameters] == ["self", "entry", "event"]:
            kinds = get_type_hints(method)["event"]
            found |= dict.fromkeys(get_args(kinds) or (kinds,), name)
    return found


class Ledger(Checks):
    """Follows the scheduler.

    Attributes:
        gap: Whether the log has lost its end, and no scheduler has taken stock since.
        recovering: Whether a restarted scheduler has not taken stock yet.
        live: Pipelines that are registered and not fenced, so that they say themselves what they hold.
        registered, clusters: Of each pipeline, as it was registered last.
        commands: Those that are open; forgotten where the log loses its end, as claims and leases are.
        claims, leases: GPUs of each.
        free: How many slots nothing speaks of, until the log loses its end.
        away: How many slots are on nodes that are away.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gap = self.recovering = False
        self.limits: Mapping[str, float] = {}
        self.absences = Absences()
        self.live: set[str] = set()
        self.registered: dict[str, ev.Registered] = {}
        self.clusters: dict[str, dict[str, ClusterSpec]] = {}
        self.commands: dict[str, ev.CommandSent] = {}
        self.claims: dict[Key, tuple[int, ...]] = {}
        self.leases: dict[Key, tuple[int, ...]] = {}
        self.free = self.away = 0
        self._quarantines: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._nodes: dict[tuple[int], tuple[int, ...]] = {}
        self._spoken: Counter[int] = Counter()

    @property
    def pool(self) -> Pool:
        """The pool as it was opened."""
        return self.absences.pool

    @property
    def settled(self) -> bool:
        """Whether the scheduler knows everything."""
        return not self.gap and not self.recovering

    def rank_gpus(self, pipeline: str, rank: int) -> tuple[int, ...]:
        """The GPUs of a generation rank."""
        infer = self.clusters[pipeline][ACTOR_INFER]
        return infer.gpus[rank * infer.tp_size : (rank + 1) * infer.tp_size]

    def tail_lost(self, entry: Entry) -> None:
        self.gap = True
        self.commands.clear()
        self.claims.clear()
        self.leases.clear()

    def _opened(self, entry: Entry, event: ev.PoolOpened) -> None:
        self.limits, self.free, self.away = event.limits, event.pool.slots, 0
        self.absences.take(event, entry.time)
        for held in (self.claims, self.leases, self._quarantines, self._nodes, self._spoken):
            held.clear()

    def _started(self, entry: Entry, event: ev.SchedulerStarted) -> None:
        self.recovering = event.term > 1

    def _inventory_done(self, entry: Entry, event: ev.InventoryDone) -> None:
        self.gap = self.recovering = False

    def _registered(self, entry: Entry, event: ev.Registered) -> None:
        self.live.add(event.pipeline)
        self.registered[event.pipeline] = event
        self.clusters[event.pipeline] = {cluster.name: cluster for cluster in event.clusters}

    def _fenced(self, entry: Entry, event: ev.Fenced) -> None:
        self.live.discard(event.pipeline)

    def _unregistered(self, entry: Entry, event: ev.Unregistered) -> None:
        self.live.discard(event.pipeline)
        for held in (self.claims, self.leases):
            for key in [key for key in held if key[0] == event.pipeline]:
                self._let_go(held, key)

    def _sent(self, entry: Entry, event: ev.CommandSent) -> None:
        self.commands[event.command] = event

    def _ended(self, entry: Entry, event: ev.CommandEnded) -> None:
        self.commands.pop(event.command, None)

    def _claimed(self, entry: Entry, event: ev.Claimed) -> None:
        self._hold(self.claims, event.key, event.gpus)

    def _claim_dropped(self, entry: Entry, event: ev.ClaimDropped) -> None:
        self._let_go(self.claims, (event.pipeline, event.cluster, event.rank))

    def _granted(self, entry: Entry, event: ev.Granted) -> None:
        self._lease((event.pipeline, event.cluster, -1), event.gpus)

    def _released(self, entry: Entry, event: ev.Released) -> None:
        self._let_go(self.leases, (event.pipeline, event.cluster, -1))

    def _rank(self, entry: Entry, event: ev.RankMoved) -> None:
        key = (event.pipeline, ACTOR_INFER, event.rank)
        if event.phase in (Phase.RISING, Phase.BUILDING):
            self._lease(key, self.rank_gpus(event.pipeline, event.rank))
        elif event.phase is Phase.ASLEEP:
            self._let_go(self.leases, key)

    def _quarantined(self, entry: Entry, event: ev.GpusQuarantined) -> None:
        self._hold(self._quarantines, (event.gpus, *event.whose), event.gpus)

    def _cleared(self, entry: Entry, event: ev.GpusCleared) -> None:
        self._let_go(self._quarantines, (event.gpus, event.pipeline, event.incarnation, event.rank))

    def _node(self, entry: Entry, event: ev.NodeDraining | ev.NodeAway | ev.NodeHere) -> None:
        gpus = self.absences.take(event, entry.time)
        self._let_go(self._nodes, (event.node,))
        if isinstance(event, ev.NodeAway):
            self._hold(self._nodes, (event.node,), gpus)
        self.away = sum(gpu < self.pool.slots for gpus in self._nodes.values() for gpu in gpus)

    def _lease(self, key: Key, gpus: Iterable[int]) -> None:
        self._let_go(self.claims, key)
        self._hold(self.leases, key, gpus)

    def _hold(self, held: dict[_K, tuple[int, ...]], key: _K, gpus: Iterable[int]) -> None:
        self._let_go(held, key)
        held[key] = tuple(gpus)
        for gpu in held[key]:
            self.free -= gpu < self.pool.slots and not self._spoken[gpu]
            self._spoken[gpu] += 1

    def _let_go(self, held: dict[_K, tuple[int, ...]], key: _K) -> None:
        for gpu in held.pop(key, ()):
            self._spoken[gpu] -= 1
            self.free += gpu < self.pool.slots and not self._spoken[gpu]
