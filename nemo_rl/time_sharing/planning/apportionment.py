"""Shares what is left among generation: a first rank for whoever has none, then ranks by remaining work times weight.

Free GPUs go to the pipeline that is served least for its work and weight. A busy GPU moves only when the giver stays
better served than the taker becomes, so no move can be undone by the next plan, and only after it has served its
minimum hold. Nothing shrinks without somebody to take the GPUs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import NamedTuple

from nemo_rl.time_sharing.log.ledger import PipelineState
from nemo_rl.time_sharing.planning.hold_graph import unscheduled
from nemo_rl.time_sharing.planning.plan import Expand, Plan, Reason
from nemo_rl.time_sharing.planning.plan_state import BLOCKED, FREEING, RANK, PlanState, Reservation
from nemo_rl.time_sharing.planning.shares import Claimant, fill, whole_ranks
from nemo_rl.time_sharing.protocol.types import Phase, Priority

_WORTH_HANDOVERS = 4.0
"""How many times the hand-over a turn lasts, so that at most a fifth of a GPU's time goes into moving it."""
_LONGEST_TURN = 4.0
"""How many times the turn of a pipeline of weight 1 the turn of a heavy one lasts at most, whatever its weight, since
others wait for its end."""


class _Division(NamedTuple):
    """How the GPUs are to be divided among pipelines with demand, by name.

    entitled: GPUs of the whole pool, within bounds. targets: those in whole ranks. pulls: GPUs in proportion to work
    and weight alone; pipelines that want the same GPUs are compared by these, since what bounds a share elsewhere in
    the pool says nothing about these GPUs. floors: guaranteed GPUs.
    """

    entitled: dict[str, float]
    targets: dict[str, int]
    pulls: dict[str, float]
    floors: dict[str, float]


def turn_seconds(plan_state: PlanState, name: str) -> float:
    """How long a pipeline keeps a rank before another may have it: worth its hand-over, the minimum hold at most;
    longer for heavier pipelines.

    The longest, `min_hold_s` x `_LONGEST_TURN`, is what others may have to wait for it.
    """
    known = plan_state.turns.get(name)
    if known is None:
        pipeline, hold = plan_state.pipelines[name], plan_state.limits.min_hold_s
        if pipeline.handover_s is not None:
            hold = min(hold, _WORTH_HANDOVERS * pipeline.handover_s)
        known = plan_state.turns[name] = hold * min(max(pipeline.spec.weight, 0.1), _LONGEST_TURN)
    return known


def share(plan_state: PlanState, result: Plan) -> None:
    """Adds the expands and shrinks of elastic generation to the plan."""
    claimants = [
        _claimant(plan_state, name, pipeline)
        for name, pipeline in plan_state.pipelines.items()
        if plan_state.useful[name] > 0
    ]
    if not claimants:
        return
    division = _divide(plan_state, claimants)
    result.entitled = division.entitled
    open_names = [
        c.name
        for c in claimants
        if c.name not in plan_state.no_expand and not _trains_next(plan_state.pipelines[c.name])
    ]
    _hand_out_free(plan_state, result, open_names, division)
    _move_busy(plan_state, result, open_names, division)


def _divide(plan_state: PlanState, claimants: list[Claimant]) -> _Division:
    budget = len(plan_state.kind) - len(plan_state.quarantined)
    entitled = fill(budget, claimants)
    targets = {
        name: ranks * plan_state.pipelines[name].topology.tp
        for name, ranks in whole_ranks(budget, claimants, entitled).items()
    }
    level = budget / sum(c.claim for c in claimants)
    return _Division(
        entitled, targets, {c.name: c.claim * level for c in claimants}, {c.name: c.floor for c in claimants if c.floor}
    )


def _claimant(plan_state: PlanState, name: str, pipeline: PipelineState) -> Claimant:
    tp, ranks = pipeline.topology.tp, len(pipeline.topology.ranks)
    useful = plan_state.useful[name]
    floor = min(math.ceil(pipeline.spec.min_share * ranks - 1e-9), useful)
    # A sample costs a rank of tp GPUs the time that it costs a rank of one.
    work = pipeline.demand.remaining * tp
    return Claimant(name, pipeline.spec.weight * work, floor * tp, useful * tp + plan_state.fixed_gpus[name], tp)


def _served(plan_state: PlanState, name: str, division: _Division, more: int = 0) -> float:
    """How well a pipeline is served, with `more` GPUs added: GPUs for its work and weight; below 0 as long as it lacks
    GPUs that it is guaranteed.
    """
    gpus = plan_state.gpus_of(name) + more
    floor = division.floors.get(name, 0.0)
    return gpus / floor - 1.0 if floor and gpus < floor else gpus / max(division.pulls[name], 1e-9)


def _trains_next(pipeline: PipelineState) -> bool:
    """Whether training waits: an expand now would only make it wait longer."""
    return any(queued.want.priority is Priority.ACTOR_TRAINING for queued in pipeline.wants.values())


def _rank_state(plan_state: PlanState, gpus: tuple[int, ...], name: str) -> int:
    """The worst of a rank's GPUs; a GPU reserved for a request that will start soon counts as blocked."""
    kind = plan_state.kind
    worst = kind[gpus[0]] if len(gpus) == 1 else max(kind[gpu] for gpu in gpus)
    if worst != BLOCKED and plan_state.reserved:
        for gpu in gpus:
            for reservation in plan_state.reserved.get(gpu, ()):
                unscheduled = reservation.queued is None
                if (unscheduled and reservation.name != name) or (
                    not unscheduled and reservation.free_at < plan_state.now + turn_seconds(plan_state, name)
                ):
                    return BLOCKED
    return worst


def _candidates(plan_state: PlanState, pipeline: PipelineState) -> list[int]:
    """Ranks that could wake: asleep, not claimed, not cooling off after a failure; those first whose engine has been
    built before.
    """
    up, claimed, warm = pipeline.awake, pipeline.claimed_ranks, pipeline.warm
    asleep = [rank for rank in pipeline.wake_order if rank not in up and rank not in claimed]
    if warm and len(warm) < len(pipeline.topology.ranks):
        asleep = [rank for rank in asleep if rank in warm] + [rank for rank in asleep if rank not in warm]
    return (
        [rank for rank in asleep if pipeline.cooling.get(rank, 0.0) <= plan_state.now] if pipeline.cooling else asleep
    )


def _expand(plan_state: PlanState, result: Plan, name: str, rank: int, because: Reason, *, floor: bool = False) -> None:
    gpus = plan_state.ranks_of(name)[rank]
    plan_state.claim(gpus)
    plan_state.counts[name] += 1
    result.expands.append(Expand(name, rank, gpus, floor, because))


def _hand_out_free(plan_state: PlanState, result: Plan, names: list[str], division: _Division) -> None:
    """Gives free GPUs to the pipeline that is served least, again and again; beyond what it is entitled to only what
    nobody entitled wants.
    """
    if all(kind >= RANK for kind in plan_state.kind):
        return
    scans = {name: _free_ranks(plan_state, name) for name in names}
    for spare in (False, True):
        heap = [
            (_served(plan_state, name, division), name)
            for name in names
            if _wants_more(plan_state, name, division, spare)
        ]
        heapq.heapify(heap)
        while heap:
            _, name = heapq.heappop(heap)
            rank = next(scans[name], None)
            if rank is None:
                continue
            _expand(
                plan_state,
                result,
                name,
                rank,
                ("spare",) if spare else ("share", plan_state.gpus_of(name), division.entitled[name]),
            )
            if _wants_more(plan_state, name, division, spare):
                heapq.heappush(heap, (_served(plan_state, name, division), name))


def _free_ranks(plan_state: PlanState, name: str) -> Iterator[int]:
    """Ranks on GPUs that are still free when the scan comes to them; GPUs are only ever taken while it lasts."""
    kind, ranks = plan_state.kind, plan_state.ranks_of(name)
    for rank in _candidates(plan_state, plan_state.pipelines[name]):
        gpus = ranks[rank]
        # Most ranks fall at their first GPU.
        if kind[gpus[0]] <= FREEING and _rank_state(plan_state, gpus, name) <= FREEING:
            yield rank


def _wants_more(plan_state: PlanState, name: str, division: _Division, spare: bool) -> bool:
    below_share = plan_state.gpus_of(name) + plan_state.tp[name] <= division.targets[name]
    return _can_use_more(plan_state, name) and (spare or below_share)


def _can_use_more(plan_state: PlanState, name: str) -> bool:
    return plan_state.counts[name] < plan_state.useful[name]


class _Bar(NamedTuple):
    """How well a giver must be served at least, `now` and `after` it has given."""

    now: float
    after: float


class _Standing:
    """How well pipelines are served while ranks move: `now`, and as it would be had one given a rank."""

    def __init__(self, plan_state: PlanState, division: _Division) -> None:
        self._plan_state, self._division = plan_state, division
        self.now: dict[str, float] = {}
        self.less_one: dict[str, float] = {}
        for name in division.pulls:
            self.update(name)

    def update(self, name: str) -> None:
        """Takes in what a pipeline of the division has got or given."""
        if name in self._division.pulls:
            self.now[name] = _served(self._plan_state, name, self._division)
            self.less_one[name] = self.having(name, -1)

    def having(self, name: str, ranks: int) -> float:
        """With so many more ranks."""
        return _served(self._plan_state, name, self._division, ranks * self._plan_state.tp[name])

    def bar(self, taker: str) -> _Bar:
        """What somebody must reach to give this one a rank."""
        return _Bar((1 + self._plan_state.limits.hysteresis) * self.now[taker], self.having(taker, 1))


def _move_busy(plan_state: PlanState, result: Plan, names: list[str], division: _Division) -> None:
    """Moves ranks from pipelines that are served better to pipelines that are served worse, where the mapping
    allows.
    """
    standing = _Standing(plan_state, division)
    served = standing.now
    for name in sorted((n for n in names if _can_use_more(plan_state, n)), key=lambda n: (served[n], n)):
        bar = standing.bar(name)
        for _, rank, donors in sorted(_options(plan_state, name, standing, bar)):
            if not _can_use_more(plan_state, name):
                break
            if _may_give(plan_state, standing, donors, name, bar):
                for donor, drank in donors:
                    why: Reason = (
                        ("gives", donor, served[donor], name, served[name])
                        if donor in served
                        else ("surplus", donor, name)
                    )
                    plan_state.shrink(result, donor, drank, why)
                    standing.update(donor)
                _expand(plan_state, result, name, rank, ("share", plan_state.gpus_of(name), division.entitled[name]))
                standing.update(name)
                bar = standing.bar(name)


def _options(
    plan_state: PlanState, name: str, standing: _Standing, bar: _Bar
) -> list[tuple[float, int, list[tuple[str, int]]]]:
    """Ranks of a pipeline whose holders might give way: (minus how well the worst served of them is served, rank,
    holders).
    """
    kind, owner, ranks, counts, useful = (
        plan_state.kind,
        plan_state.owner,
        plan_state.ranks_of(name),
        plan_state.counts,
        plan_state.useful,
    )
    served, less_one = standing.now, standing.less_one
    found = []
    for rank in _candidates(plan_state, plan_state.pipelines[name]):
        gpus = ranks[rank]
        first = kind[gpus[0]]
        # Most ranks fall at their first GPU: out of reach, or held by somebody who is no better served than the taker.
        if first == BLOCKED or (first != RANK and len(gpus) == 1):
            continue
        lease = owner[gpus[0]]
        if first == RANK and lease is not None:
            holder = lease.pipeline
            if counts[holder] <= useful[holder] and (served[holder] < bar.now or less_one[holder] < bar.after):
                continue
        if _rank_state(plan_state, gpus, name) == RANK:
            donors = _holders(plan_state, gpus)
            if donors is not None:
                found.append((max(-served.get(donor, math.inf) for donor, _ in donors), rank, donors))
    return found


def _donors(plan_state: PlanState, gpus: tuple[int, ...]) -> list[tuple[str, int]] | None:
    """The awake ranks on these GPUs, or None when one of them must not be disturbed now."""
    donors = _holders(plan_state, gpus)
    return None if donors is None or _in_turn(plan_state, donors) else donors


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
        if pair in donors:
            continue
        if plan_state.pipelines[lease.pipeline].awake[lease.rank].phase is not Phase.ACTIVE:
            return None
        donors.append(pair)
    return donors


def _in_turn(plan_state: PlanState, donors: list[tuple[str, int]]) -> bool:
    """Whether one of these ranks is in its turn and of use to its pipeline, had that given all of them."""
    for name, rank in donors:
        pipeline = plan_state.pipelines[name]
        needed = plan_state.counts[name] - _given_by(name, donors) < plan_state.useful[name]
        if needed and plan_state.now < pipeline.awake[rank].since + turn_seconds(plan_state, name):
            return True
    return False


def _given_by(name: str, donors: list[tuple[str, int]]) -> int:
    """How many of these ranks are of one pipeline: a wide rank may lie on several."""
    return 1 if len(donors) == 1 else sum(giver == name for giver, _ in donors)


def _may_give(plan_state: PlanState, standing: _Standing, donors: list[tuple[str, int]], taker: str, bar: _Bar) -> bool:
    """Giving must leave each giver at least as well served as the taker becomes, by a margin; what a pipeline has no
    use for it just gives.

    Turns are looked at last, when earlier moves of the same plan count: what a giver had too many it may have given by
    now.
    """
    for donor, rank in donors:
        if donor == taker or (donor, rank) in plan_state.shrunk:
            return False
        given = _given_by(donor, donors)
        if plan_state.counts[donor] - given >= plan_state.useful[donor]:
            continue
        if standing.now[donor] < bar.now or standing.having(donor, -given) < bar.after:
            return False
    return not _in_turn(plan_state, donors)


def serve_unscheduled(plan_state: PlanState, result: Plan, name: str, pipeline: PipelineState) -> None:
    """A pipeline with work and no rank gets one: a free one, else one whose holder has had its turn; else it reserves
    the likeliest.
    """
    since = pipeline.unscheduled_since
    if since is None or plan_state.useful[name] == 0 or name in plan_state.no_expand or _trains_next(pipeline):
        return
    starved = plan_state.now >= since + plan_state.limits.aging_s * Priority.GENERATION
    options: list[tuple[bool, int, float, int, list[tuple[str, int]]]] = []
    fallback: int | None = None
    for until in pipeline.cooling.values():
        if until > plan_state.now:
            result.look_again(until)
    for rank in _candidates(plan_state, pipeline):
        gpus = pipeline.topology.ranks[rank]
        state = _rank_state(plan_state, gpus, name)
        if state <= FREEING:
            _expand(plan_state, result, name, rank, ("unscheduled", since), floor=starved)
            return
        if not any(gpu in plan_state.quarantined for gpu in gpus):
            fallback = rank if fallback is None else fallback
        if state == RANK and not pipeline.held:
            donors = _donors(plan_state, gpus)
            if donors is not None and all((d, r) not in plan_state.shrunk for d, r in donors):
                held = min(plan_state.pipelines[d].awake[r].since for d, r in donors)
                spare = min(plan_state.counts[d] - _given_by(d, donors) for d, _ in donors)
                options.append((rank not in pipeline.warm, -spare, held, rank, donors))
            elif donors is None and (turn_end := _turn_end(plan_state, gpus)) > plan_state.now:
                # Otherwise a rank is on its way up, and its arrival brings the next plan.
                result.look_again(turn_end)
    if options:
        *_, chosen, donors = min(options)
        for donor, rank in donors:
            plan_state.shrink(result, donor, rank, ("turn", donor, name, since))
        _expand(plan_state, result, name, chosen, ("unscheduled", since), floor=starved)
    elif fallback is not None and starved:
        plan_state.holds.wait(unscheduled(name), pipeline.topology.ranks[fallback], name)
        plan_state.reserve(
            pipeline.topology.ranks[fallback], Reservation(f"{name} (first rank)", name, plan_state.now, None)
        )


def _turn_end(plan_state: PlanState, gpus: tuple[int, ...]) -> float:
    ends = [plan_state.now]
    for gpu in gpus:
        lease = plan_state.owner[gpu]
        if lease is not None and lease.rank >= 0:
            pipeline = plan_state.pipelines[lease.pipeline]
            ends.append(pipeline.awake[lease.rank].since + turn_seconds(plan_state, lease.pipeline))
    return max(ends)
