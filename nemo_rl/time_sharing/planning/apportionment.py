"""Shares the remaining GPUs among generation: a first rank for each pipeline without one, then ranks in proportion to
remaining work times weight.

*Entitlements* come from `division`. *Free GPUs* are handed out rank by rank, each time to the pipeline with the lowest
service: first up to its entitlement, then to any pipeline that can use more. *Busy ranks* then move from pipelines with
higher service to those with lower: only while the giver stays better served than the taker becomes, so that no move
can be undone by the next plan, and only after a minimum hold. With a team's shares they move from those who have more
than they are due to those who have fewer. Nothing shrinks without somebody to take the GPUs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import attrgetter

import numpy as np

from nemo_rl.time_sharing.log.state import PipelineState
from nemo_rl.time_sharing.planning.division import Claimant, Division, Leaf, divide_by_quotas, fill, whole_ranks
from nemo_rl.time_sharing.planning.plan import (
    BLOCKED,
    FREE,
    FREEING,
    RANK,
    Expand,
    Plan,
    PlanState,
    Reason,
    Reservation,
    Room,
    candidates,
    expand,
    guaranteed_from,
    guaranteed_seconds,
    rank_state,
    reserved_against,
    slice_seconds,
)
from nemo_rl.time_sharing.protocol.types import Priority


class PipelineShare:
    """A pipeline with demand, and its service while ranks are given and moved: GPUs / pull; below 0 as long as it lacks
    guaranteed GPUs.

    entitled: GPUs of the whole pool, within bounds. target: entitlement in whole ranks. pull: GPUs in proportion to
    work and weight alone; pipelines that want the same GPUs are compared by these, since the bounds of a share
    elsewhere in the pool do not concern these GPUs. minimum: guaranteed GPUs. `ranks_up` and `gpus`: its present ranks
    and GPUs; `now`: its present service, `less_one` that with one rank less; `surplus`: it has more ranks than it can
    use. By the shares of a team, `due`: its whole ranks, None without shares; `lacks`, `spares`: it has fewer, or more.
    `free_ranks`: ranks on GPUs that are still free when the scan comes to them.
    """

    __slots__ = (
        "due",
        "entitled",
        "fixed",
        "free_ranks",
        "gpus",
        "less_one",
        "minimum",
        "name",
        "now",
        "pull",
        "ranks",
        "ranks_up",
        "spares",
        "surplus",
        "target",
        "tp",
        "useful",
    )

    def __init__(
        self, plan_state: PlanState, name: str, entitled: float, target: int, pull: float, minimum: float
    ) -> None:
        self.name, self.entitled, self.target = name, entitled, target
        self.pull, self.minimum = max(pull, 1e-9), minimum or -math.inf
        self.ranks, self.tp = plan_state.ranks_of(name), plan_state.tp[name]
        self.useful, self.fixed = plan_state.useful[name], plan_state.fixed_gpus[name]
        self.free_ranks: Iterator[int] = iter(())
        self.due = plan_state.due.get(name)
        self.update(plan_state.counts[name])

    def served(self, gpus: int) -> float:
        """How well it would be served with so many GPUs."""
        return gpus / self.minimum - 1.0 if gpus < self.minimum else gpus / self.pull

    @property
    def turns(self) -> int:
        """Number of ranks to add until its entitlement is met or it can use no more."""
        return min(self.useful - self.ranks_up, (self.target - self.gpus) // self.tp)

    @property
    def lacks(self) -> bool:
        """Whether it has fewer ranks than it is due."""
        return self.due is not None and self.ranks_up < self.due

    def update(self, ranks: int) -> None:
        """Takes in how many ranks it has, or will have."""
        tp, minimum = self.tp, self.minimum
        self.ranks_up = ranks
        self.gpus = gpus = self.fixed + ranks * tp
        less = gpus - tp
        self.surplus = ranks > self.useful
        self.spares = self.due is not None and ranks > self.due
        self.now = gpus / minimum - 1.0 if gpus < minimum else gpus / self.pull
        self.less_one = less / minimum - 1.0 if less < minimum else less / self.pull


class WithoutDemand(PipelineShare):
    """A pipeline with ranks and no demand: the first to give."""

    __slots__ = ()

    def __init__(self) -> None:
        self.now = self.less_one = math.inf
        self.surplus, self.spares = True, False


def divide(plan_state: PlanState, result: Plan) -> dict[str, PipelineShare]:
    """Shares of all pipelines with demand, by name; writes their entitlements into the plan."""
    claimants = claimants_of(plan_state)
    if not claimants:
        return {}
    budget = plan_state.budget
    if not plan_state.quotas.nodes:
        entitled = fill(budget, claimants)
        level = budget / sum([c.claim for c in claimants])
        pulls = {c.name: c.claim * level for c in claimants}
    else:
        entitled, pulls = _by_quotas(plan_state, claimants)
        _round(plan_state, entitled)
        # The minimum of a job is one within what its user has.
        within = {c.name: int(pulls[c.name] / c.rank_gpus + 1e-9) * c.rank_gpus for c in claimants}
        claimants = [c._replace(minimum=min(c.minimum, within[c.name])) for c in claimants]
    result.entitled = entitled
    ranks = whole_ranks(budget, claimants, entitled)
    result.in_ranks = in_ranks = {c.name: ranks[c.name] * c.rank_gpus for c in claimants}
    return {
        c.name: PipelineShare(plan_state, c.name, entitled[c.name], in_ranks[c.name], pulls[c.name], c.minimum)
        for c in claimants
    }


def _by_quotas(plan_state: PlanState, claimants: Sequence[Claimant]) -> Division:
    if plan_state.quotas.promised:
        # What one whose training waits will not take is for others of its user.
        held = {c.name: plan_state.gpus_of(c.name) for c in claimants if plan_state.waits_to_train(c.name)}
        claimants = [c._replace(maximum=min(c.maximum, held.get(c.name, c.maximum))) for c in claimants]
    leaves = leaves_of(plan_state, claimants)
    return divide_by_quotas(plan_state.budget, leaves, plan_state.quotas, plan_state.use)


def find_due(plan_state: PlanState) -> None:
    """Works out how many ranks each pipeline is due by the shares of a team, for the queue; `divide` does so again for
    what is left. Where jobs outnumber GPUs each would have one of its own otherwise, and who has more jobs more of the
    pool.

    What the groups, and the users in each, are due is rounded to whole GPUs; of a user's jobs that are due less than
    a rank as many have one as that allows: those of high priority, then those whose slices began last, then those that
    wait the longest. What is left then rounds up what others are due.
    """
    claimants = claimants_of(plan_state)
    if claimants:
        _round(plan_state, _by_quotas(plan_state, claimants).entitled)


def _round(plan_state: PlanState, entitled: Mapping[str, float]) -> None:
    if plan_state.quotas.promised:
        due = {name: gpus - plan_state.fixed_gpus[name] for name, gpus in entitled.items()}
        _round_down_the_tree(plan_state, due, list(due), 0, round(sum(due.values())))


_STAYS = 0.1
"""How much less than another part of a GPU that of a node or a job may be which has a GPU for it already."""


def _round_down_the_tree(
    plan_state: PlanState, due: dict[str, float], names: Sequence[str], depth: int, budget: int
) -> None:
    """Divides a budget of whole GPUs among the pipelines below a node at this depth, who are due these GPUs."""
    parts: dict[str, list[str]] = {}
    for name in names:
        above = plan_state.above[name]
        parts.setdefault(above[-1 - depth] if depth < len(above) else "", []).append(name)
    if not parts.keys() - {""}:
        _round_to_ranks(plan_state, due, names, budget)
        return
    gpus = {node: max(sum([due[name] for name in below]), 0.0) for node, below in parts.items()}
    whole = {node: int(part + 1e-9) for node, part in gpus.items()}
    left = budget - sum(whole.values())

    def order(node: str) -> tuple[float, str]:
        has = sum([plan_state.counts[name] * plan_state.tp[name] for name in parts[node]])
        return whole[node] - gpus[node] - (_STAYS if has > whole[node] else 0.0), node

    for node in sorted(parts, key=order):
        more = left > 0 and gpus[node] > whole[node]
        left -= more
        _round_down_the_tree(plan_state, due, parts[node], depth + 1, whole[node] + more)


def _round_to_ranks(plan_state: PlanState, due: dict[str, float], names: Sequence[str], budget: float) -> None:
    turns: list[tuple[bool, bool, float, str]] = []
    for name in sorted(names, key=lambda name: not plan_state.pipelines[name].spec.is_high):
        pipeline, tp, has = plan_state.pipelines[name], plan_state.tp[name], plan_state.counts[name]
        # One of high priority is due a first rank, out of what the others of its user are due.
        ranks = max(int(due[name] / tp + 1e-9), pipeline.spec.is_high)
        ranks = plan_state.due[name] = min(ranks, max(int(budget / tp + 0.5), 0))
        budget -= ranks * tp
        if ranks:
            turns.append((True, False, ranks - due[name] / tp - (_STAYS if has > ranks else 0.0), name))
        else:
            began = max([awake.slice_began() for awake in pipeline.awake.values()], default=plan_state.now)
            turns.append((False, not has, -began if has else pipeline.unscheduled_since or math.inf, name))
    for *_, name in sorted(turns):
        if budget >= plan_state.tp[name] / 2:
            plan_state.due[name] += 1
            budget -= plan_state.tp[name]


def leaves_of(plan_state: PlanState, claimants: Sequence[Claimant]) -> list[Leaf]:
    """The jobs in the tree of quotas: those that claim GPUs, and others that train on some."""
    claiming = {claimant.name for claimant in claimants}
    others = [
        Claimant(name, 0.0, gpus, gpus, 1)
        for name, gpus in plan_state.fixed_gpus.items()
        if gpus and name not in claiming
    ]
    return [Leaf(c, plan_state.fixed_gpus[c.name], plan_state.above[c.name]) for c in (*claimants, *others)]


def claimants_of(plan_state: PlanState) -> list[Claimant]:
    """The pipelines that can use GPUs for generation and have a claim on them."""
    return [
        _claimant(plan_state, name, pipeline)
        for name, pipeline in plan_state.pipelines.items()
        if plan_state.useful[name] > 0 and name not in plan_state.scavengers
    ]


def _claimant(plan_state: PlanState, name: str, pipeline: PipelineState) -> Claimant:
    spec, tp, ranks = pipeline.spec, pipeline.topology.tp, len(pipeline.topology.ranks)
    useful = plan_state.useful[name]
    guaranteed = min(math.ceil(spec.min_share * ranks - 1e-9), useful)
    # A sample costs a rank of tp GPUs the time that it costs a rank of one.
    work = pipeline.demand.remaining * tp
    return Claimant(name, spec.weight * work, guaranteed * tp, useful * tp + plan_state.fixed_gpus[name], tp)


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
        for taker in sorted(
            [p for p in takers if p.ranks_up < p.useful],
            key=lambda p: (p.due is not None and not p.lacks, p.now, p.name),
        ):
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
        willing = _willing(holders, taker, self._bar(taker))
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
        near_limit = plan_state.is_near_limit(taker.name)
        for rank in ranks:
            if taker.ranks_up >= taker.useful:
                return
            gpus = taker.ranks[rank]
            giver, lease = givers[gpus[0]], owner[gpus[0]]
            if giver is None or lease is None:
                continue
            if not giver.surplus and (
                not (
                    giver.now >= bar and giver.less_one >= after if taker.due is None else taker.lacks and giver.spares
                )
                or plan_state.now < _slice_end(plan_state, lease.pipeline, lease.rank)
            ):
                continue
            if reserved_against(plan_state, gpus, taker.name, rank):
                continue
            if not near_limit or plan_state.has_room(taker.name, gpus):
                self._take_over(taker, rank, [(lease.pipeline, lease.rank)])
                bar, after = self._bar(taker)
                near_limit = plan_state.is_near_limit(taker.name)

    def _take_wide(self, taker: PipelineShare, options: list[_Option]) -> None:
        """Takes ranks of several GPUs each, in this order, from holders that all may give them."""
        for _, rank, donors in options:
            if taker.ranks_up >= taker.useful:
                return
            has_room = self._plan_state.has_room(taker.name, taker.ranks[rank])
            if has_room and _may_give(self._plan_state, self._shares, donors, taker, self._bar(taker)):
                self._take_over(taker, rank, donors)

    def _take_over(self, taker: PipelineShare, rank: int, donors: list[tuple[str, int]]) -> None:
        """Puts these ranks to sleep for one of the taker."""
        plan_state, result, name = self._plan_state, self._result, taker.name
        for donor, given in donors:
            giver = self._shares.get(donor)
            if giver is not None:
                why: Reason = ("gives", donor, giver.now, name, taker.now)
            else:
                why = ("gap_ends" if donor in plan_state.scavengers else "surplus", donor, name)
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


def _willing(holders: Iterable[PipelineShare | None], taker: PipelineShare, bar: _Bar) -> set[PipelineShare]:
    """The holders that may give a rank away under the shares."""
    now, after = bar
    if taker.due is not None:
        return {giver for giver in set(holders) if giver and (giver.surplus or (taker.lacks and giver.spares))}
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
    if pipeline.cooling or plan_state.building.get(name) or pipeline.spec.slice_s or plan_state.withheld:
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
        if not _is_spare(plan_state, name, donors) and plan_state.now < _slice_end(plan_state, name, rank):
            return True
    return False


def _is_spare(plan_state: PlanState, name: str, donors: list[tuple[str, int]]) -> bool:
    """Whether what this one of the donors would give is of no use to it, or was a gap's."""
    return name in plan_state.scavengers or plan_state.counts[name] - given_by(name, donors) >= plan_state.useful[name]


def _slice_end(plan_state: PlanState, name: str, rank: int) -> float:
    pipeline = plan_state.pipelines[name]
    awake, seconds = pipeline.awake[rank], slice_seconds(plan_state, name)
    if awake.guaranteed:
        seconds = max(seconds, guaranteed_seconds(pipeline, plan_state.limits))
    return awake.slice_began() + seconds


def given_by(name: str, donors: list[tuple[str, int]]) -> int:
    """How many of these ranks are of one pipeline: a wide rank may lie on several."""
    return 1 if len(donors) == 1 else sum(giver == name for giver, _ in donors)


def _may_give(
    plan_state: PlanState,
    shares: dict[str, PipelineShare],
    donors: list[tuple[str, int]],
    taker: PipelineShare,
    bar: _Bar,
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
        if ranks >= plan_state.useful[donor] or donor not in shares:
            continue
        giver = shares[donor]
        if taker.due is not None and giver.due is not None:
            if not taker.lacks or ranks < giver.due:
                return False
        elif giver.now < bar[0] or giver.served(giver.fixed + ranks * giver.tp) < bar[1]:
            return False
    return not in_slice(plan_state, donors)


def share(plan_state: PlanState, result: Plan) -> None:
    """Adds the expands and shrinks of elastic generation to the plan."""
    shares = divide(plan_state, result)
    if not shares:
        return
    takers = [
        share
        for name, share in shares.items()
        if name not in plan_state.no_expand and not _trains_next(plan_state.pipelines[name])
    ]
    hand_out_free(plan_state, result, takers)
    if plan_state.rooms:
        _move_below_limits(plan_state, result, takers, shares)
    move_busy(plan_state, result, takers, shares)


def _trains_next(pipeline: PipelineState) -> bool:
    """Whether training waits: an expand now would only make it wait longer."""
    wants = pipeline.wants
    return bool(wants) and any(queued.want.priority is Priority.ACTOR_TRAINING for queued in wants.values())


def serve_unscheduled(plan_state: PlanState, result: Plan, name: str, pipeline: PipelineState) -> None:
    """A pipeline with work and no rank gets one: a free one, else one whose holder has had its time slice; else it
    reserves the likeliest.
    """
    since = pipeline.unscheduled_since
    if since is None or plan_state.useful[name] == 0 or name in plan_state.no_expand or _trains_next(pipeline):
        return
    due = guaranteed_from(pipeline, plan_state.limits)
    starved = plan_state.now >= due
    if pipeline.spec.slice_s and not starved:
        result.replan_by(due)
    options: list[tuple[bool, bool, float, float, int, list[tuple[str, int]]]] = []
    for until in pipeline.cooling.values():
        if until > plan_state.now:
            result.replan_by(until)
    could_wake, ranks, short = candidates(plan_state, pipeline), pipeline.topology.ranks, None
    near_limit = plan_state.is_near_limit(name)
    waits = plan_state.due.get(name) == 0 and not starved
    if waits:
        result.replan_by(due)
    for rank in could_wake:
        gpus = ranks[rank]
        if plan_state.kind[gpus[0]] == BLOCKED:
            continue
        state = rank_state(plan_state, gpus, name, rank)
        if near_limit and state <= RANK and not plan_state.has_room(name, gpus):
            short = short or (gpus if plan_state.too_small(name, gpus) is None else None)
            continue
        if state <= FREEING:
            expand(plan_state, result, name, rank, ("unscheduled", since), guaranteed=starved)
            return
        if state == RANK and not pipeline.held:
            donors = ranks_to_evict(plan_state, gpus)
            if donors is not None and all((d, r) not in plan_state.shrunk for d, r in donors):
                if waits and not all(_is_spare(plan_state, donor, donors) for donor, _ in donors):
                    continue
                held = min(plan_state.pipelines[d].awake[r].slice_began() for d, r in donors)
                spare = min(plan_state.spare_ranks(d) - given_by(d, donors) for d, _ in donors)
                kept = any(plan_state.due.get(d) != 0 for d, _ in donors)
                options.append((rank not in pipeline.warm, kept, -spare, held, rank, donors))
            elif donors is None and (slice_end := _slice_end_on(plan_state, gpus)) > plan_state.now:
                # Otherwise a rank is on its way up, and its arrival brings the next plan.
                result.replan_by(slice_end)
    if options:
        *_, chosen, donors = min(options)
        for donor, rank in donors:
            plan_state.shrink(result, donor, rank, ("time_slice", donor, name, since))
        expand(plan_state, result, name, chosen, ("unscheduled", since), guaranteed=starved)
    elif short is not None:
        make_room(plan_state, result, name, short, lambda donor: in_slice(plan_state, [donor]))
        plan_state.take_room(name, short)
    elif starved:
        for rank in could_wake:
            if plan_state.quarantined.isdisjoint(ranks[rank]) and plan_state.too_small(name, ranks[rank]) is None:
                plan_state.reserve(ranks[rank], Reservation(f"{name} (first rank)", name, plan_state.now, None))
                return


def make_room(
    plan_state: PlanState, result: Plan, name: str, gpus: tuple[int, ...], spares: Callable[[tuple[str, int]], bool]
) -> None:
    """Has ranks under the limits that this pipeline's next GPUs would exceed go to sleep, where so many can under each
    of them; nothing else makes way for it there. `spares`: ranks that may not be disturbed.
    """
    chosen: dict[tuple[str, int], Room] = {}

    def frees(other: str, rank: int) -> int:
        return sum([gpu not in gpus for gpu in plan_state.ranks_of(other)[rank]])

    for room in plan_state.rooms_of(name):
        lacks = plan_state.lack(room, gpus) - sum([frees(*pair) for pair in chosen if pair[0] in room.pipelines])
        ranks = sorted(
            (plan_state.spare_ranks(other) * -1.0, other, rank)
            for other in room.pipelines
            for rank in plan_state.pipelines[other].awake
            if (other, rank) not in plan_state.shrunk
            and plan_state.kind[plan_state.ranks_of(other)[rank][0]] == RANK
            and frees(other, rank)
            and (other, rank) not in chosen
            and not spares((other, rank))
        )
        for _, other, rank in ranks:
            if lacks <= 0:
                break
            chosen[other, rank] = room
            lacks -= frees(other, rank)
        if lacks > 0:
            return
    for (other, rank), room in chosen.items():
        plan_state.empty(result, other, rank, ("room", room.whose, room.most, name))


def _move_below_limits(
    plan_state: PlanState, result: Plan, takers: list[PipelineShare], shares: dict[str, PipelineShare]
) -> None:
    """Has ranks go to sleep for those of pipelines under the same limit that are served worse and have free GPUs."""
    lead = 1 + plan_state.limits.hysteresis
    for taker in sorted([one for one in takers if one.turns > 0], key=attrgetter("now", "name")):
        name = taker.name
        if not plan_state.is_near_limit(name):
            continue
        bar = lead * taker.now, taker.served(taker.gpus + taker.tp)
        for rank in candidates(plan_state, plan_state.pipelines[name]):
            gpus = taker.ranks[rank]
            if rank_state(plan_state, gpus, name, rank) == FREE and plan_state.too_small(name, gpus) is None:
                gives = partial(_may_give, plan_state, shares, taker=taker, bar=bar)
                make_room(plan_state, result, name, gpus, lambda donor, gives=gives: not gives([donor]))
                for share in shares.values():
                    share.update(plan_state.counts[share.name])
                break


def _slice_end_on(plan_state: PlanState, gpus: tuple[int, ...]) -> float:
    ends = [plan_state.now]
    for gpu in gpus:
        lease = plan_state.owner[gpu]
        if lease is not None and lease.rank >= 0:
            ends.append(_slice_end(plan_state, lease.pipeline, lease.rank))
    return max(ends)


_TAKEN, _CLEAR, _KEPT = 0, 1, 2
"""What a GPU is while free ones are handed out: not to be had; to be had by anybody; to be had by some."""
_MARK_OF_KIND = bytes(_CLEAR if kind <= FREEING else _TAKEN for kind in range(256))
_Marks = list[int]
"""One of these for each GPU; a list, since that is what Python picks items from fastest."""


def hand_out_free(plan_state: PlanState, result: Plan, takers: list[PipelineShare]) -> None:
    """Gives free GPUs rank by rank to the pipeline with the lowest service, up to its entitlement; beyond that only
    GPUs that no entitled pipeline wants.
    """
    marks = list(plan_state.kind.translate(_MARK_OF_KIND))
    if _CLEAR not in marks:
        return
    for gpu in plan_state.kept:
        if marks[gpu] == _CLEAR:
            marks[gpu] = _KEPT
    takers = [share for share in takers if _find_free(plan_state, share, marks)]
    kind, counts, expands = plan_state.kind, plan_state.counts, result.expands
    for share, has in _entitled_turns(takers):
        rank = next(share.free_ranks, None)
        if rank is None:
            continue
        gpus, name = share.ranks[rank], share.name
        if plan_state.rooms:
            plan_state.take_room(name, gpus)
        for gpu in gpus:
            kind[gpu], marks[gpu] = BLOCKED, _TAKEN
        counts[name] += 1
        expands.append(Expand(name, rank, gpus, False, ("share", has, share.entitled)))
    for share in takers:
        share.update(counts[share.name])
    _hand_out_spare(plan_state, result, takers, marks)


def _entitled_turns(takers: list[PipelineShare]) -> Iterator[tuple[PipelineShare, int]]:
    """Turns to take a rank, each with the taker's GPUs before it, until every entitlement is met: always the lowest
    service first, then by name.

    Service at a number of GPUs does not depend on the other pipelines, so all turns are sorted at once; a pipeline that
    finds no free rank will find none later in the plan.
    """
    shares = sorted([share for share in takers if share.turns > 0], key=attrgetter("name"))
    if not shares:
        return iter(())
    turns = np.array([share.turns for share in shares])
    whose = np.repeat(np.arange(len(shares)), turns)
    earlier = np.arange(len(whose)) - np.repeat(np.cumsum(turns) - turns, turns)
    has, tp, minimum, pull = np.array([(share.gpus, share.tp, share.minimum, share.pull) for share in shares])[whose].T
    gpus = has + earlier * tp
    served = np.where(gpus < minimum, gpus / minimum - 1.0, gpus / pull)
    order = np.argsort(served, kind="stable")
    return zip(map(shares.__getitem__, whose[order].tolist()), gpus[order].astype(int).tolist(), strict=True)


def _hand_out_spare(plan_state: PlanState, result: Plan, takers: list[PipelineShare], marks: _Marks) -> None:
    """Gives GPUs that no entitled pipeline wants to pipelines that can use them, lowest service first."""
    counts = plan_state.counts
    heap = [(share.now, share.name, share) for share in takers if share.ranks_up < share.useful]
    heapq.heapify(heap)
    while heap:
        _, name, share = heap[0]
        rank = next(share.free_ranks, None)
        if rank is None:
            heapq.heappop(heap)
            continue
        for gpu in share.ranks[rank]:
            marks[gpu] = _TAKEN
        expand(plan_state, result, name, rank, ("spare",))
        share.update(counts[name])
        if counts[name] < share.useful:
            heapq.heapreplace(heap, (share.now, name, share))
        else:
            heapq.heappop(heap)


def _find_free(plan_state: PlanState, share: PipelineShare, marks: _Marks) -> bool:
    """Whether GPUs of a pipeline are free; if so, begins the scan for its ranks on them."""
    pipeline = plan_state.pipelines[share.name]
    at_first_gpus = pipeline.topology.at_first_gpus(marks)
    if not any(at_first_gpus):
        return False
    could_wake = candidates(plan_state, pipeline)
    # Most ranks fall at their first GPU, so that is looked at without a step of Python for each.
    first_gpus = map(pipeline.topology.first_gpus.__getitem__, could_wake)
    found = compress(could_wake, map(marks.__getitem__, first_gpus))
    plain = share.tp == 1 and _KEPT not in at_first_gpus and not plan_state.rooms
    share.free_ranks = found if plain else _to_be_had(plan_state, share, marks, found)
    return True


def _to_be_had(plan_state: PlanState, share: PipelineShare, marks: _Marks, found: Iterator[int]) -> Iterator[int]:
    """The found ranks whose GPUs are all free and not reserved against them."""
    for rank in found:
        gpus = share.ranks[rank]
        worst = [marks[gpu] for gpu in gpus]
        if (
            _TAKEN not in worst
            and not (_KEPT in worst and reserved_against(plan_state, gpus, share.name, rank))
            and plan_state.has_room(share.name, gpus)
        ):
            yield rank


def fill_gaps(plan_state: PlanState, result: Plan) -> None:
    """Gives GPUs that no request waits for to pipelines that run in gaps, the least served first: those that are left,
    then those of ranks that have had nothing to do for a while.
    """
    pipelines, useful, scavengers = plan_state.pipelines, plan_state.useful, plan_state.scavengers
    hungry = [name for name in pipelines if name in scavengers and plan_state.counts[name] < useful[name]]
    if not hungry:
        return
    idle = {name for name, one in pipelines.items() if one.awake and not useful[name] and name not in scavengers}
    gaps = {name: _in_gaps(plan_state, result, name, idle) for name in hungry}
    heap = [(plan_state.gpus_of(name) / pipelines[name].spec.weight, name) for name in hungry]
    heapq.heapify(heap)
    while heap:
        _, name = heapq.heappop(heap)
        rank, holders = next(gaps[name], (None, ()))
        if rank is None:
            continue
        for donor, given in holders:
            plan_state.shrink(result, donor, given, ("idle", donor, name, pipelines[donor].idle_since))
        expand(plan_state, result, name, rank, ("gap",))
        if plan_state.counts[name] < useful[name]:
            heapq.heappush(heap, (plan_state.gpus_of(name) / pipelines[name].spec.weight, name))


def _in_gaps(
    plan_state: PlanState, result: Plan, name: str, idle: set[str]
) -> Iterator[tuple[int, list[tuple[str, int]]]]:
    """Ranks of a pipeline on free GPUs, then those on GPUs of these idle pipelines, with the ranks that make way. Free
    GPUs of a wide rank stay so until it has them.
    """
    pipeline, kind = plan_state.pipelines[name], plan_state.kind
    on_idle: list[int] = []
    for rank in candidates(plan_state, pipeline):
        gpus = pipeline.topology.ranks[rank]
        if not plan_state.reserved.keys().isdisjoint(gpus) or not plan_state.has_room(name, gpus):
            continue
        if all(kind[gpu] == FREE for gpu in gpus):
            yield rank, []
        elif idle and all(kind[gpu] in (FREE, RANK) for gpu in gpus):
            on_idle.append(rank)
    for rank in on_idle:
        gpus = pipeline.topology.ranks[rank]
        # Others, or the ranks before this one, may have taken its GPUs and its room.
        still_so = all(kind[gpu] in (FREE, RANK) for gpu in gpus) and plan_state.has_room(name, gpus)
        holders = _holders(plan_state, gpus) if still_so else None
        if holders and idle.issuperset(givers := [donor for donor, _ in holders]):
            if plan_state.now >= (idle_from := _idle_from(plan_state, name, rank, givers)):
                yield rank, holders
            else:
                result.replan_by(idle_from)


def _idle_from(plan_state: PlanState, name: str, rank: int, givers: Sequence[str]) -> float:
    """Time from which idle pipelines give their ranks to one that runs in gaps: they have had nothing to do for as long
    as it needs to rise (by their own starts before it has had any), so that what is lost if they want them back at once
    is no more than what was idle.
    """
    pipelines = [plan_state.pipelines[giver] for giver in givers]
    rise_s = plan_state.rise_s(name, rank) or max([pipeline.start_s or 0.0 for pipeline in pipelines])
    return max([pipeline.idle_since for pipeline in pipelines]) + max(rise_s, plan_state.limits.min_hold_s)
