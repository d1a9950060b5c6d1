"""What the record says of each pipeline's generation, and of one plan: material for `fairness`, which judges it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, Phase, Priority

_UP = (Phase.WAKING, Phase.SYNCING, Phase.READY, Phase.ACTIVE)
_HANDOVERS = 4.0
"""A time slice lasts at least as long as so many hand-overs (rule 7)."""
_WEIGHTS = (0.1, 4.0)
"""Between these a pipeline's weight counts for its time slice (rule 7)."""


class Eviction(NamedTuple):
    """A rank that served is drained: of whom, its GPUs, for how long it served, how many of its pipeline were up or
    claimed before, and whether that may have a reason of its own (it broke, say).
    """

    pipeline: str
    gpus: tuple[int, ...]
    served_s: float
    up: int
    own: bool


@dataclass(slots=True)
class PlanSeen:
    """One plan as it is carried out; `places` says of each claim where in the queue it stood, `train` who begins to
    train by it, `contended` whether anybody held something and waited for more before it, `turns` whether a rank that
    was on its way up turns round.
    """

    number: int
    time: float
    evictions: list[Eviction] = field(default_factory=list)
    claims: list[ev.Claimed] = field(default_factory=list)
    places: list[tuple[ev.Claimed, float]] = field(default_factory=list)
    train: set[str] = field(default_factory=set)
    contended: bool = False
    turns: bool = False
    was_hungry: set[str] = field(default_factory=set)

    def moves(self) -> Iterator[tuple[ev.Claimed, Eviction]]:
        """Ranks that go from one pipeline to another, with the claim that takes their GPUs."""
        fixed = {gpu for claim in self.claims if claim.rank < 0 for gpu in claim.gpus}
        for eviction in self.evictions:
            gpus = set(eviction.gpus)
            takers = [c for c in self.claims if c.rank >= 0 and not gpus.isdisjoint(c.gpus)]
            if takers and gpus.isdisjoint(fixed) and not eviction.own:
                yield takers[0], eviction


class Served:
    """One registered pipeline.

    Attributes:
        hungry_since: Since when it has work and no rank that is up or claimed; None while it has.
        kept: Ranks that may be the one that is kept for it while it waits too long; None where that begins anew.
        cools_until: Until when one of its ranks may be left alone.
        has_asked: Whether it has ever asked for GPUs to train on.
    """

    def __init__(self, event: ev.Registered) -> None:
        infer = next(cluster for cluster in event.clusters if cluster.name == ACTOR_INFER)
        self.tp, self.mapping = infer.tp_size, tuple(infer.gpus)
        self.ranks = len(self.mapping) // self.tp
        self.weight, self.min_share, self.rank_batch = event.weight, event.min_share, event.rank_batch
        self.most = min(max(int(event.max_share * self.ranks + 1e-9), 1), self.ranks)
        self.trains_on = frozenset(g for c in event.clusters if c.name != ACTOR_INFER for g in c.gpus)
        self.demand = 0
        self.leaving = self.fenced = self.has_asked = False
        self.phases: dict[int, Phase] = {}
        self.serves_since: dict[int, float] = {}
        self.claims: set[int] = set()
        self.fixed_claims: dict[str, tuple[int, ...]] = {}
        self.held: dict[str, tuple[int, ...]] = {}
        self.requests: dict[str, tuple[float, Priority]] = {}
        self.hungry_since: float | None = None
        self.kept: set[int] | None = None
        self.cools_until = 0.0
        self._woken: dict[int, float] = {}
        self._fastest: float | None = None

    def gpus_of(self, rank: int) -> tuple[int, ...]:
        return self.mapping[rank * self.tp : (rank + 1) * self.tp]

    def lies_on(self, rank: int, gpus: Iterable[int]) -> bool:
        return not set(self.gpus_of(rank)).isdisjoint(gpus)

    @property
    def up(self) -> int:
        """Ranks that are up or will be."""
        return len(self.claims) + sum(phase in _UP for phase in self.phases.values())

    @property
    def all_asleep(self) -> bool:
        return all(phase is Phase.ASLEEP for phase in self.phases.values())

    @property
    def useful(self) -> int:
        """How many ranks it has a use for, within its maximum share."""
        if self.leaving or self.fenced:
            return 0
        return min(math.ceil(self.demand / self.rank_batch), self.most)

    @property
    def gpus(self) -> int:
        """GPUs that work for it, or will."""
        fixed = [*self.held.values(), *self.fixed_claims.values()]
        return sum(len(gpus) for gpus in fixed) + self.up * self.tp

    @property
    def part(self) -> float:
        """How well it is served, for its work and weight; comparable between pipelines."""
        return self.gpus / max(self.weight * self.demand * self.tp, 1e-9)

    def least_slice(self, min_hold_s: float, max_slice_s: float) -> float:
        """Seconds that its time slice lasts at least."""
        hold = min_hold_s if self._fastest is None else min(min_hold_s, max_slice_s, _HANDOVERS * self._fastest)
        return hold * min(max(self.weight, _WEIGHTS[0]), _WEIGHTS[1])

    def moved(self, event: ev.RankMoved, time: float) -> None:
        """One of its ranks changes phase."""
        self.phases[event.rank] = event.phase
        self.kept = None
        if event.phase in (Phase.WAKING, Phase.BUILDING):
            self.claims.discard(event.rank)
            self._woken[event.rank] = time
        elif event.phase is Phase.ACTIVE:
            self.serves_since[event.rank] = time
            rise = time - self._woken.get(event.rank, time)
            if rise > 0:
                self._fastest = rise if self._fastest is None else min(rise, self._fastest)

    def feed(self, time: float) -> None:
        """Begins or ends the wait for a first rank."""
        if self.demand <= 0 or self.leaving or self.fenced or self.up:
            self.hungry_since = None
        elif self.hungry_since is None:
            self.hungry_since = time
