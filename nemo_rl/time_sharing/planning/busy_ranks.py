"""Moves ranks from pipelines that are served better to those that are served worse.

A rank moves only when the giver stays better served than the taker becomes, so no move can be undone by the next plan,
and only after it has served its minimum hold. Nothing shrinks without somebody to take the GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import compress

from nemo_rl.time_sharing.planning.entitlement import PipelineShare, WithoutDemand
from nemo_rl.time_sharing.planning.plan import Plan, Reason
from nemo_rl.time_sharing.planning.plan_state import RANK, PlanState
from nemo_rl.time_sharing.planning.waking import candidates, expand, rank_state, reserved_against, slice_seconds

_Bar = tuple[float, float]
"""How well a giver must be served at least: now, and after it has given."""
_Option = tuple[float, int, list[tuple[str, int]]]
"""Minus how well the worst served of those who would give is served; the taker's rank; the ranks on its GPUs."""


def move_busy(
    plan_state: PlanState, result: Plan, takers: list[PipelineShare], shares: dict[str, PipelineShare]
) -> None:
    """Moves ranks from pipelines that are served better to pipelines that are served worse, where the mapping
    allows.
    """
    if RANK in plan_state.kind:
        moves = _Moves(plan_state, result, shares)
        for taker in sorted([p for p in takers if p.ranks_up < p.useful], key=lambda p: (p.now, p.name)):
            moves.serve(taker)


class _Moves:
    """Busy ranks that change hands in one plan."""

    def __init__(self, plan_state: PlanState, result: Plan, shares: dict[str, PipelineShare]) -> None:
        self._plan_state, self._result, self._shares = plan_state, result, shares
        self._lead = 1 + plan_state.limits.hysteresis
        # Whose rank, which could be put to sleep, is on each GPU.
        self._givers: list[PipelineShare | None] = _givers(plan_state, shares)

    def serve(self, taker: PipelineShare) -> None:
        """Moves ranks to this pipeline until it can use no more or no holder gives one up."""
        holders = self._plan_state.pipelines[taker.name].topology.at_first_gpus(self._givers)
        willing = _willing(holders, self._bar(taker))
        if taker.tp > 1:
            self._take_wide(taker, _wide_options(self._plan_state, taker, holders, willing, self._shares))
        elif willing:
            self._take_narrow(taker, _options(self._plan_state, taker, holders, willing))

    def _bar(self, taker: PipelineShare) -> _Bar:
        """Service that a donor must have, now and with a rank less, to give this taker a rank."""
        return self._lead * taker.now, taker.served(taker.gpus + taker.tp)

    def _take_narrow(self, taker: PipelineShare, ranks: list[int]) -> None:
        """Takes ranks of one GPU each, in this order, from holders that may give them."""
        plan_state, givers, owner = self._plan_state, self._givers, self._plan_state.owner
        bar, after = self._bar(taker)
        for rank in ranks:
            if taker.ranks_up >= taker.useful:
                return
            gpus = taker.ranks[rank]
            giver, lease = givers[gpus[0]], owner[gpus[0]]
            if giver is None or lease is None:
                continue
            if not giver.surplus and (
                giver.now < bar
                or giver.less_one < after
                or plan_state.now < _slice_end(plan_state, lease.pipeline, lease.rank)
            ):
                continue
            if not reserved_against(plan_state, gpus, taker.name, rank):
                self._take_over(taker, rank, [(lease.pipeline, lease.rank)])
                bar, after = self._bar(taker)

    def _take_wide(self, taker: PipelineShare, options: list[_Option]) -> None:
        """Takes ranks of several GPUs each, in this order, from holders that all may give them."""
        for _, rank, donors in options:
            if taker.ranks_up >= taker.useful:
                return
            if _may_give(self._plan_state, self._shares, donors, self._bar(taker)):
                self._take_over(taker, rank, donors)

    def _take_over(self, taker: PipelineShare, rank: int, donors: list[tuple[str, int]]) -> None:
        """Puts these ranks to sleep for one of the taker."""
        plan_state, result, name = self._plan_state, self._result, taker.name
        for donor, given in donors:
            giver = self._shares.get(donor)
            why: Reason = ("surplus", donor, name) if giver is None else ("gives", donor, giver.now, name, taker.now)
            plan_state.shrink(result, donor, given, why)
            if giver is not None:
                giver.update(giver.ranks_up - 1)
            for gpu in plan_state.pipelines[donor].topology.ranks[given]:
                self._givers[gpu] = None
        expand(plan_state, result, name, rank, ("share", taker.gpus, taker.entitled))
        taker.update(taker.ranks_up + 1)


def _givers(plan_state: PlanState, shares: dict[str, PipelineShare]) -> list[PipelineShare | None]:
    without_demand = WithoutDemand()
    givers: list[PipelineShare | None] = [
        shares.get(lease.pipeline, without_demand) if kind == RANK and lease is not None else None
        for kind, lease in zip(plan_state.kind, plan_state.owner, strict=True)
    ]
    for gpu in plan_state.waking_gpus:
        givers[gpu] = None
    return givers


def _willing(holders: Iterable[PipelineShare | None], bar: _Bar) -> set[PipelineShare]:
    """The holders that may give a rank away under the shares."""
    now, after = bar
    return {
        giver
        for giver in set(holders)
        if giver is not None and (giver.surplus or (giver.now >= now and giver.less_one >= after))
    }


def _options(
    plan_state: PlanState, taker: PipelineShare, holders: Sequence[PipelineShare | None], willing: set[PipelineShare]
) -> list[int]:
    """Ranks of one GPU each whose holder might give way, those of the best served first; `holders` by rank."""
    name, pipeline = taker.name, plan_state.pipelines[taker.name]
    found = list(compress(range(len(holders)), map(willing.__contains__, holders)))
    # A rank on whose GPU another is up is neither up nor claimed itself, so all of them could wake but for these.
    if pipeline.cooling or plan_state.building.get(name) or pipeline.spec.slice_s:
        could_wake = set(candidates(plan_state, pipeline))
        found = [rank for rank in found if rank in could_wake]
    if len(willing) > 1:
        served: dict[PipelineShare | None, float] = {giver: -giver.now for giver in willing}
        found.sort(key=lambda rank: served[holders[rank]])
    return found


def _wide_options(
    plan_state: PlanState,
    taker: PipelineShare,
    holders: Sequence[PipelineShare | None],
    willing: set[PipelineShare],
    shares: dict[str, PipelineShare],
) -> list[_Option]:
    """Ranks of several GPUs each whose holders might give way, those of the best served first; `holders` by rank, of
    its first GPU.
    """
    found = []
    for rank in candidates(plan_state, plan_state.pipelines[taker.name]):
        giver, gpus = holders[rank], taker.ranks[rank]
        if (giver is None or giver in willing) and rank_state(plan_state, gpus, taker.name, rank) == RANK:
            donors = _holders(plan_state, gpus)
            if donors is not None:
                worst = min([shares[donor].now if donor in shares else math.inf for donor, _ in donors])
                found.append((-worst, rank, donors))
    found.sort()
    return found


def ranks_to_evict(plan_state: PlanState, gpus: tuple[int, ...]) -> list[tuple[str, int]] | None:
    """The awake ranks on these GPUs, or None when one of them must not be disturbed now."""
    donors = _holders(plan_state, gpus)
    return None if donors is None or in_slice(plan_state, donors) else donors


def _holders(plan_state: PlanState, gpus: tuple[int, ...]) -> list[tuple[str, int]] | None:
    """The awake ranks on these GPUs, or None when one of them is on its way up or down."""
    donors: list[tuple[str, int]] = []
    for gpu in gpus:
        if plan_state.kind[gpu] != RANK:
            continue
        lease = plan_state.owner[gpu]
        if lease is None:
            continue
        pair = (lease.pipeline, lease.rank)
        if gpu in plan_state.waking_gpus:
            return None
        if pair not in donors:
            donors.append(pair)
    return donors


def in_slice(plan_state: PlanState, donors: list[tuple[str, int]]) -> bool:
    """Whether one of these ranks is in its time slice and of use to its pipeline, had that given all of them."""
    for name, rank in donors:
        needed = plan_state.counts[name] - given_by(name, donors) < plan_state.useful[name]
        if needed and plan_state.now < _slice_end(plan_state, name, rank):
            return True
    return False


def _slice_end(plan_state: PlanState, name: str, rank: int) -> float:
    return plan_state.pipelines[name].awake[rank].slice_began() + slice_seconds(plan_state, name)


def given_by(name: str, donors: list[tuple[str, int]]) -> int:
    """How many of these ranks are of one pipeline: a wide rank may lie on several."""
    return 1 if len(donors) == 1 else sum(giver == name for giver, _ in donors)


def _may_give(
    plan_state: PlanState, shares: dict[str, PipelineShare], donors: list[tuple[str, int]], bar: _Bar
) -> bool:
    """Whether each donor stays at least as well served as the taker becomes, by a margin; ranks that a donor cannot use
    are given without this condition.

    Time slices are checked last, after earlier moves of the same plan: these may have taken the donor's surplus.
    """
    for pair in donors:
        if pair in plan_state.shrunk:
            return False
        donor = pair[0]
        ranks = plan_state.counts[donor] - given_by(donor, donors)
        if ranks >= plan_state.useful[donor]:
            continue
        giver = shares[donor]
        if giver.now < bar[0] or giver.served(giver.fixed + ranks * giver.tp) < bar[1]:
            return False
    return not in_slice(plan_state, donors)
