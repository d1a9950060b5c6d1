"""The accounts of a record: they add up to the pool's time, and leave free what nothing in the record speaks of.

Invariant 10, like the ledger of `gpus`. A slot is spoken for while it is leased, claimed or in quarantine, or its node
is away, which is no time of the pool's; that is derived here from the events again, without the scheduler's state on
which the accounts rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from nemo_rl.time_sharing.history.clocks import Clocks
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.accounts import Accounts, UnaccountableLog, Use
from nemo_rl.time_sharing.log.state import ACCOUNTED
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, SCHEDULER, ClusterSpec, Phase
from nemo_rl.utils.record import Entry, Handler

_SLACK_S = 1.0
_Held = dict[tuple[object, ...], tuple[int, ...]]


class AccountChecks:
    """Folds the accounts beside a count of what is spoken for."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self._accounts: Accounts | None = Accounts()
        self._pool = Pool(1, 1)
        self._clusters: dict[tuple[str, str], ClusterSpec] = {}
        self._spoken: Counter[int] = Counter()
        self._claims: _Held = {}
        self._leases: _Held = {}
        self._quarantines: _Held = {}
        self._away: _Held = {}
        self._free, self._free_s, self._whole_s = 0, 0.0, 0.0
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
            self._bad(f"the accounts add up to {accounted:.1f} GPU-seconds, the pool had {self._whole_s:.1f}")
        if abs(free - self._free_s) > slack:
            self._bad(f"the accounts leave {free:.1f} GPU-seconds free, in the record {self._free_s:.1f} were")

    def _bad(self, message: str) -> None:
        self.found.append((10, message))

    def _take(self, entry: Entry, event: object) -> None:
        if self._accounts is None or entry.source != SCHEDULER:
            return
        if self._latest is not None and entry.time > self._latest:
            passed = (entry.time - self._latest) / self._pool.slots_per_gpu
            self._free_s += self._free * passed
            self._whole_s += (self._pool.slots - sum(map(len, self._away.values()))) * passed
        if self._latest is not None or isinstance(event, ev.PoolOpened):
            self._latest = max(entry.time, self._latest or entry.time)
        try:
            self._accounts.take(entry)
        except UnaccountableLog:
            # The ledger says what is wrong.
            self._accounts = None
            return
        self._count(event)

    def _count(self, event: object) -> None:
        match event:
            case ev.PoolOpened():
                self._pool, self._free = event.pool, event.pool.slots
                for held in (self._spoken, self._claims, self._leases, self._quarantines, self._away):
                    held.clear()
            case ev.Registered():
                self._clusters |= {(event.pipeline, cluster.name): cluster for cluster in event.clusters}
            case ev.Claimed():
                self._hold(self._claims, (event.pipeline, event.cluster, event.rank), event.gpus)
            case ev.ClaimDropped():
                self._let_go(self._claims, (event.pipeline, event.cluster, event.rank))
            case ev.Granted():
                self._let_go(self._claims, (event.pipeline, event.cluster, -1))
                self._hold(self._leases, (event.pipeline, event.cluster, -1), event.gpus)
            case ev.Released():
                self._let_go(self._leases, (event.pipeline, event.cluster, -1))
            case ev.RankMoved(phase=Phase.ASLEEP):
                self._let_go(self._leases, (event.pipeline, ACTOR_INFER, event.rank))
            case ev.RankMoved(phase=Phase.RISING | Phase.BUILDING):
                key = (event.pipeline, ACTOR_INFER, event.rank)
                spec = self._clusters[event.pipeline, ACTOR_INFER]
                self._let_go(self._claims, key)
                self._hold(self._leases, key, spec.gpus[event.rank * spec.tp_size : (event.rank + 1) * spec.tp_size])
            case ev.Unregistered():
                for held in (self._claims, self._leases):
                    for key in [key for key in held if key[0] == event.pipeline]:
                        self._let_go(held, key)
            case ev.GpusQuarantined():
                self._hold(self._quarantines, (event.gpus, event.pipeline, event.incarnation, event.rank), event.gpus)
            case ev.GpusCleared():
                self._let_go(self._quarantines, (event.gpus, event.pipeline, event.incarnation, event.rank))
            case ev.NodeAway():
                self._hold(self._away, (event.node,), self._pool.units_of([event.node]))
            case ev.NodeHere() | ev.NodeDraining():
                self._let_go(self._away, (event.node,))
            case _:
                pass

    def _hold(self, held: _Held, key: tuple[object, ...], gpus: Iterable[int]) -> None:
        self._let_go(held, key)
        held[key] = tuple(gpu for gpu in gpus if gpu < self._pool.slots)
        for slot in held[key]:
            self._free -= not self._spoken[slot]
            self._spoken[slot] += 1

    def _let_go(self, held: _Held, key: tuple[object, ...]) -> None:
        for slot in held.pop(key, ()):
            self._spoken[slot] -= 1
            self._free += not self._spoken[slot]
