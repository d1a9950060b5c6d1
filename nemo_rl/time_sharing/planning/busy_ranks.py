"""Moves ranks from pipelines that are served better to those that are served worse.

A rank moves only when the giver stays better served than the taker becomes, so no move can be undone by the next plan,
and only after it has served its minimum hold. Nothing shrinks without somebody to take the GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import NamedTuple

from nemo_rl.time_sharing.planning.parties import Idle, Party
from nemo_rl.time_sharing.planning.plan import Plan, Reason
from nemo_rl.time_sharing.planning.plan_state import RANK, PlanState
from nemo_rl.time_sharing.planning.waking import candidates, expand, rank_state, reserved_against, slice_seconds


class _Bar(NamedTuple):
    """How well a giver must be served at least, `now` and `after` it has given."""

    now: float
    after: float


_Option = tuple[float, int, list[tuple[str, int]]]
"""Minus how well the worst served of those who would give is served; the taker's rank; the ranks on its GPUs."""


def _bar(plan_state: PlanState, taker: Party) -> _Bar:
    """What somebody must reach to give this one a rank."""
    gpus = taker.fixed + (plan_state.counts[taker.name] + 1) * taker.tp
    return _Bar((1 + plan_state.limits.hysteresis) * taker.now, taker.served(gpus))


def move_busy(plan_state: PlanState, result: Plan, takers: list[Party], parties: dict[str, Party]) -> None:
    """Moves ranks from pipelines that are served better to pipelines that are served worse, where the mapping
    allows.
    """
    if RANK not in plan_state.kind:
        return
    counts = plan_state.counts
    givers = _givers(plan_state, parties)
    for taker in sorted((p for p in takers if counts[p.name] < p.useful), key=lambda p: (p.now, p.name)):
        bar, name = _bar(plan_state, taker), taker.name
        holders = plan_state.pipelines[name].topology.at_first_gpus(givers)
        willing = _willing(holders, bar)
        if taker.tp > 1:
            options, in_order = _wide_options(plan_state, taker, holders, willing, parties), False
        else:
            options = _options(plan_state, taker, holders, willing)
            in_order = not any(giver.surplus for giver in willing)
        for minus_worst, rank, donors in sorted(options):
            # Those that follow are served no better, and give nothing more either.
            if counts[name] >= taker.useful or (in_order and -minus_worst < bar.now):
                break
            if _may_give(plan_state, parties, donors, bar):
                _take_over(plan_state, result, taker, rank, donors, parties)
                for donor, given in donors:
                    for gpu in plan_state.ranks_of(donor)[given]:
                        givers[gpu] = None
                bar = _bar(plan_state, taker)


def _givers(plan_state: PlanState, parties: dict[str, Party]) -> list[Party | None]:
    """Whose rank, which could be put to sleep, is on each GPU."""
    idle = Idle()
    givers: list[Party | None] = [
        parties.get(lease.pipeline, idle) if kind == RANK and lease is not None else None
        for kind, lease in zip(plan_state.kind, plan_state.owner, strict=True)
    ]
    for gpu in plan_state.rising:
        givers[gpu] = None
    return givers


def _take_over(
    plan_state: PlanState,
    result: Plan,
    taker: Party,
    rank: int,
    donors: list[tuple[str, int]],
    parties: dict[str, Party],
) -> None:
    """Puts these ranks to sleep for one of the taker."""
    counts, name = plan_state.counts, taker.name
    for donor, drank in donors:
        giver = parties.get(donor)
        why: Reason = ("surplus", donor, name) if giver is None else ("gives", donor, giver.now, name, taker.now)
        plan_state.shrink(result, donor, drank, why)
        if giver is not None:
            giver.update(counts[donor])
    expand(plan_state, result, name, rank, ("share", plan_state.gpus_of(name), taker.entitled))
    taker.update(counts[name])


def _willing(holders: Iterable[Party | None], bar: _Bar) -> set[Party]:
    """Whoever of these would give a rank away as far as shares are concerned."""
    now, after = bar
    return {
        giver
        for giver in set(holders)
        if giver is not None and (giver.surplus or (giver.now >= now and giver.less_one >= after))
    }


def _options(
    plan_state: PlanState, taker: Party, holders: Sequence[Party | None], willing: set[Party]
) -> list[_Option]:
    """Ranks of one GPU each whose holder might give way; `holders` by rank."""
    name, ranks, pipeline = taker.name, taker.ranks, plan_state.pipelines[taker.name]
    # A rank on whose GPU another is up is neither up nor claimed itself, so all of them could wake but for these.
    could_wake: Sequence[int] = range(len(ranks))
    if pipeline.cooling or plan_state.building.get(name):
        could_wake = candidates(plan_state, pipeline)
        holders = [holders[rank] for rank in could_wake]
    found = []
    for rank, giver in compress(zip(could_wake, holders, strict=True), map(willing.__contains__, holders)):
        gpu = ranks[rank][0]
        lease = plan_state.owner[gpu]
        kept = gpu in plan_state.reserved and reserved_against(plan_state, ranks[rank], name, rank)
        if lease is not None and giver is not None and not kept:
            found.append((-giver.now, rank, [(lease.pipeline, lease.rank)]))
    return found


def _wide_options(
    plan_state: PlanState,
    taker: Party,
    holders: Sequence[Party | None],
    willing: set[Party],
    parties: dict[str, Party],
) -> list[_Option]:
    """Ranks of several GPUs each whose holders might give way; `holders` by rank, of its first GPU."""
    found = []
    for rank in candidates(plan_state, plan_state.pipelines[taker.name]):
        giver, gpus = holders[rank], taker.ranks[rank]
        if (giver is None or giver in willing) and rank_state(plan_state, gpus, taker.name, rank) == RANK:
            donors = _holders(plan_state, gpus)
            if donors is not None:
                worst = min([parties[donor].now if donor in parties else math.inf for donor, _ in donors])
                found.append((-worst, rank, donors))
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
        if gpu in plan_state.rising:
            return None
        if pair not in donors:
            donors.append(pair)
    return donors


def in_slice(plan_state: PlanState, donors: list[tuple[str, int]]) -> bool:
    """Whether one of these ranks is in its time slice and of use to its pipeline, had that given all of them."""
    for name, rank in donors:
        pipeline = plan_state.pipelines[name]
        needed = plan_state.counts[name] - given_by(name, donors) < plan_state.useful[name]
        if needed and plan_state.now < pipeline.awake[rank].slice_began() + slice_seconds(plan_state, name):
            return True
    return False


def given_by(name: str, donors: list[tuple[str, int]]) -> int:
    """How many of these ranks are of one pipeline: a wide rank may lie on several."""
    return 1 if len(donors) == 1 else sum(giver == name for giver, _ in donors)


def _may_give(plan_state: PlanState, parties: dict[str, Party], donors: list[tuple[str, int]], bar: _Bar) -> bool:
    """Giving must leave each giver at least as well served as the taker becomes, by a margin; what a pipeline has no
    use for it just gives.

    Time slices are looked at last, when earlier moves of the same plan count: what a giver had too many it may have
    given by now.
    """
    alone = len(donors) == 1
    for pair in donors:
        if pair in plan_state.shrunk:
            return False
        donor = pair[0]
        ranks = plan_state.counts[donor] - (1 if alone else given_by(donor, donors))
        if ranks >= plan_state.useful[donor]:
            continue
        giver = parties[donor]
        after = giver.less_one if alone else giver.served(giver.fixed + ranks * giver.tp)
        if giver.now < bar.now or after < bar.after:
            return False
    return not in_slice(plan_state, donors)
