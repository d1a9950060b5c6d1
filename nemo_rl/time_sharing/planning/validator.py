"""Checks a plan against the snapshot it was made from, by carrying it out on a copy: shrinks, then grants, then
expands.

Pure, and written without the planner's data structures: it shares only the snapshot and the plan. Each failure names
rule, pipeline and GPU. An empty answer means that the executor can do everything the plan says without breaking the
ledger. Simulations and tests validate every plan; a live scheduler trusts its planner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from nemo_rl.time_sharing.log.state import Lease
from nemo_rl.time_sharing.planning.plan import Expand, Grant, Plan, Shrink, Snapshot
from nemo_rl.time_sharing.protocol.types import (
    ACTOR_INFER,
    SLEEP_PHASES,
    Phase,
    Priority,
)

Validator = Callable[[Snapshot, Plan], list[str]]


def validate(snapshot: Snapshot, plan: Plan) -> list[str]:
    """Every rule that the plan breaks; [] when it is sound."""
    if plan.empty:
        return []
    problems = list(_named_once(plan))
    problems += _known(snapshot, plan)
    if problems:
        return problems
    problems += _idle_and_owned(snapshot)
    freed, shrink_problems = _shrinks(snapshot, plan)
    problems += shrink_problems
    taken: set[int] = set()
    for grant in plan.grants:
        problems += _grant(snapshot, grant, freed, taken)
    for expand in plan.expands:
        problems += _expand(snapshot, expand, freed, taken)
    problems += _priority_changes(snapshot, plan)
    limits = list(_limits(snapshot))
    problems += _above_limits(plan, limits, snapshot.slots)
    if (promised := sum(plan.in_ranks.values())) > (there := snapshot.budget):
        problems.append(f"rule 16: pipelines are entitled to {promised} of {there} GPUs, in whole ranks")
    unused = (
        freed
        - taken
        - {
            g
            for s in plan.shrinks
            if snapshot.pipelines[s.pipeline].withdraws
            for g in _bundle(snapshot, s.pipeline, s.rank)
        }
    )
    problems += _pointless(snapshot, plan, unused, taken, limits)
    return problems


def _named_once(plan: Plan) -> Iterator[str]:
    """Rule 1: nothing is ordered twice. Rule 5: no rank both sleeps and wakes. Rule 14: no pipeline both begins to
    train and wakes a rank.
    """
    orders = Counter(("shrink", s.pipeline, str(s.rank)) for s in plan.shrinks)
    orders.update(("grant", g.pipeline, g.cluster) for g in [*plan.grants, *plan.priority_changes])
    orders.update(("expand", e.pipeline, str(e.rank)) for e in plan.expands)
    for (what, name, which), count in orders.items():
        if count > 1:
            yield f"rule 1: {what} of {name}/{which} is ordered {count} times"
    training = {g.pipeline for g in [*plan.grants, *plan.priority_changes] if g.priority is Priority.ACTOR_TRAINING}
    for expand in plan.expands:
        if expand.pipeline in training and not expand.ahead:
            yield f"rule 14: {expand.pipeline} would begin to train while rank {expand.rank} of its own is woken"
    both = {(s.pipeline, s.rank) for s in plan.shrinks} & {(e.pipeline, e.rank) for e in plan.expands}
    for name, rank in sorted(both):
        yield f"rule 5: rank {rank} of {name} is both shrunk and expanded"


def _known(snapshot: Snapshot, plan: Plan) -> Iterator[str]:
    """Rules 2, 7, 11: pipelines, clusters and ranks exist; only generation is shrunk or expanded."""
    for grant in [*plan.grants, *plan.priority_changes]:
        pipeline = snapshot.pipelines.get(grant.pipeline)
        if pipeline is None:
            yield f"rule 11: {grant.pipeline} is not registered"
        elif grant.cluster == ACTOR_INFER or grant.priority is Priority.GENERATION:
            yield f"rule 2: {grant.pipeline}/{grant.cluster} is elastic and cannot be granted as a whole"
        elif grant.cluster not in pipeline.topology.clusters:
            yield f"rule 11: {grant.pipeline} has no cluster {grant.cluster}"
    for order in [*plan.shrinks, *plan.expands]:
        pipeline = snapshot.pipelines.get(order.pipeline)
        if pipeline is None:
            yield f"rule 11: {order.pipeline} is not registered"
        elif (
            isinstance(order.rank, bool)
            or not isinstance(order.rank, int)
            or not 0 <= order.rank < len(pipeline.topology.ranks)
        ):
            yield f"rule 7: {order.pipeline} has no rank {order.rank}"


def _idle_and_owned(snapshot: Snapshot) -> Iterator[str]:
    """Rules 4, 8, 10: the GPUs' leases and the pipelines' holds agree, once for each GPU."""
    owner, agreed = snapshot.owner, 0
    holders: dict[int, tuple[str, str, int, int]] = {}
    for name, pipeline in snapshot.pipelines.items():
        ranks = pipeline.topology.ranks
        leases = [((name, cluster, -1, held.epoch), held.gpus) for cluster, held in pipeline.held.items()]
        leases += [((name, ACTOR_INFER, rank, awake.epoch), ranks[rank]) for rank, awake in pipeline.awake.items()]
        for lease, gpus in leases:
            for gpu in gpus:
                if gpu in holders:
                    yield f"rule 10: GPU {gpu} is held by {Lease(*holders[gpu])} and by {Lease(*lease)}"
                holders[gpu] = lease
                agreed += owner[gpu] == lease
    if agreed == len(holders) == len(owner) - owner.count(None):
        return
    for gpu, on_gpu in enumerate(owner):
        if on_gpu != holders.get(gpu):
            yield (
                f"rule 8: GPU {gpu} is on the ledger of {on_gpu}, but "
                f"{Lease(*holders[gpu]) if gpu in holders else None} has it"
            )


def _bundle(snapshot: Snapshot, name: str, rank: int) -> tuple[int, ...]:
    return snapshot.pipelines[name].topology.ranks[rank]


def _shrinks(snapshot: Snapshot, plan: Plan) -> tuple[set[int], list[str]]:
    """Rules 5, 9: only ranks that are up are shrunk, and no GPU is freed twice. Returns every GPU that is or will be
    free.
    """
    problems = []
    freed: set[int] = set()
    for shrink in plan.shrinks:
        awake = snapshot.pipelines[shrink.pipeline].awake.get(shrink.rank)
        if awake is None or awake.phase in SLEEP_PHASES:
            problems.append(f"rule 5: rank {shrink.rank} of {shrink.pipeline} is not up and cannot be shrunk")
            continue
        for gpu in _bundle(snapshot, shrink.pipeline, shrink.rank):
            if gpu in freed:
                problems.append(f"rule 9: GPU {gpu} is freed twice")
            freed.add(gpu)
    freed.update(gpu for gpu, owner in enumerate(snapshot.owner) if owner is None)
    for pipeline in snapshot.pipelines.values():
        for rank, awake in pipeline.awake.items():
            if awake.phase is Phase.FALLING:
                freed.update(pipeline.topology.ranks[rank])
    return freed - snapshot.quarantined - snapshot.claimed.keys(), problems


def _take(gpus: tuple[int, ...], who: str, freed: set[int], taken: set[int]) -> Iterator[str]:
    """Rules 4, 6: only GPUs that are or will be free are given, each once."""
    for gpu in gpus:
        if gpu in taken:
            yield f"rule 6: GPU {gpu} is given twice, last to {who}"
        elif gpu not in freed:
            yield f"rule 4: GPU {gpu} is not free and nothing frees it for {who}"
        taken.add(gpu)


def _grant(snapshot: Snapshot, grant: Grant, freed: set[int], taken: set[int]) -> Iterator[str]:
    """Rules 3, 6, 11 for one grant, and 14: training does not begin while an expand of its own pipeline is
    under way.
    """
    pipeline = snapshot.pipelines[grant.pipeline]
    if pipeline.fenced or pipeline.withdraws:
        yield f"rule 11: {grant.pipeline} is leaving or paused and gets nothing more"
    if grant.priority is Priority.ACTOR_TRAINING and pipeline.waking():
        yield f"rule 14: {grant.pipeline} would train while an expand of its own is under way"
    if grant.cluster in pipeline.held:
        yield f"rule 3: {grant.pipeline}/{grant.cluster} is already held"
    if grant.gpus != pipeline.topology.clusters[grant.cluster].gpus:
        mapped = pipeline.topology.clusters[grant.cluster].gpus
        yield f"rule 6: {grant.pipeline}/{grant.cluster} is granted {grant.gpus}, its mapping is {mapped}"
    queued = pipeline.wants.get(grant.cluster)
    if queued is None or queued.want.request != grant.request or queued.want.priority is not grant.priority:
        yield (
            f"rule 3: {grant.pipeline}/{grant.cluster} did not ask for request {grant.request} at {grant.priority.name}"
        )
    if grant.pipeline not in snapshot.finishing:
        yield from _leaves(snapshot, grant.gpus, f"{grant.pipeline}/{grant.cluster}")
    yield from _take(grant.gpus, f"{grant.pipeline}/{grant.cluster}", freed, taken)


def _expand(snapshot: Snapshot, expand: Expand, freed: set[int], taken: set[int]) -> Iterator[str]:
    """Rules 5, 6, 7 for one expand, and that its bundle is the one that the mapping says."""
    pipeline = snapshot.pipelines[expand.pipeline]
    who = f"{expand.pipeline}/{expand.rank}"
    if expand.rank in pipeline.awake or expand.rank in pipeline.claimed_ranks:
        yield f"rule 5: rank {expand.rank} of {expand.pipeline} is already up or about to be"
    if len(set(expand.gpus)) != pipeline.topology.tp:
        yield f"rule 6: {who} needs {pipeline.topology.tp} different GPUs, the plan gives {expand.gpus}"
    if expand.gpus != pipeline.topology.ranks[expand.rank]:
        yield f"rule 12: {who} is mapped to {pipeline.topology.ranks[expand.rank]}, the plan gives {expand.gpus}"
    if pipeline.withdraws or pipeline.fenced:
        yield f"rule 11: {expand.pipeline} is leaving or paused and gets nothing more"
    yield from _leaves(snapshot, expand.gpus, who)
    yield from _take(expand.gpus, who, freed, taken)


def _leaves(snapshot: Snapshot, gpus: tuple[int, ...], who: str) -> Iterator[str]:
    """Rule 17: nothing is given on a node that is to leave, but to what trains there until it has left."""
    if gone := sorted(snapshot.withheld & set(gpus)):
        yield f"rule 17: {who} gets GPU {gone[0]}, whose node is leaving or away"


def _priority_changes(snapshot: Snapshot, plan: Plan) -> Iterator[str]:
    for change in plan.priority_changes:
        pipeline = snapshot.pipelines[change.pipeline]
        if change.priority is Priority.ACTOR_TRAINING and pipeline.waking():
            yield f"rule 14: {change.pipeline} would train while an expand of its own is under way"
        queued = pipeline.wants.get(change.cluster)
        if change.cluster not in pipeline.held:
            yield f"rule 3: {change.pipeline}/{change.cluster} is not held and cannot change its priority"
        if queued is None or queued.want.request != change.request:
            yield f"rule 3: {change.pipeline}/{change.cluster} did not ask for request {change.request}"


def _pointless(
    snapshot: Snapshot, plan: Plan, unused: set[int], taken: set[int], limits: Sequence[_Limit]
) -> Iterator[str]:
    """Rule 13: a rank is only put to sleep when somebody gets one of its GPUs, its pipeline or its node leaves, a limit
    asks for it, or it has not risen yet and training waits for it to land.
    """
    for shrink in plan.shrinks:
        pipeline = snapshot.pipelines[shrink.pipeline]
        gpus = _bundle(snapshot, shrink.pipeline, shrink.rank)
        if pipeline.withdraws or not (taken.isdisjoint(gpus) and snapshot.withheld.isdisjoint(gpus)):
            continue
        if any(limit.makes_room and shrink.pipeline in limit.below for limit in limits):
            continue
        awake = pipeline.awake.get(shrink.rank)
        if awake is None or (awake.phase is not Phase.SERVING and (pipeline.wants or _wanted(snapshot, shrink))):
            continue
        idle = sorted(unused & set(_bundle(snapshot, shrink.pipeline, shrink.rank)))
        yield f"rule 13: rank {shrink.rank} of {shrink.pipeline} is evicted without a taker (GPUs {idle})"


def _wanted(snapshot: Snapshot, shrink: Shrink) -> bool:
    """Whether somebody asks for a fixed cluster on the GPUs of this rank."""
    gpus = set(_bundle(snapshot, shrink.pipeline, shrink.rank))
    return any(
        not gpus.isdisjoint(pipeline.topology.clusters[cluster].gpus)
        for pipeline in snapshot.pipelines.values()
        for cluster in pipeline.wants
    )


class _Limit(NamedTuple):
    """A limit: whose it is, slots, the pipelines below it, the slots that they hold or were promised, and whether ranks
    below it may go to sleep for others, or because it is exceeded.
    """

    whose: str
    most: int
    below: set[str]
    held: set[int]
    makes_room: bool


def _limits(snapshot: Snapshot) -> Iterator[_Limit]:
    quotas, slots = snapshot.quotas, snapshot.slots
    for whose, most in quotas.most.items():
        below = {name for name, pipeline in snapshot.pipelines.items() if whose in quotas.above(pipeline.spec)}
        held = {gpu for gpu, lease in enumerate(snapshot.owner) if lease is not None and lease.pipeline in below}
        held |= {gpu for gpu, claim in snapshot.claimed.items() if claim.pipeline in below}
        held = {gpu for gpu in held if gpu < slots}
        pipelines = (snapshot.pipelines[name] for name in below)
        asks = any(
            pipeline.wants
            or pipeline.unscheduled_since is not None
            or pipeline.demand.remaining > len(pipeline.awake) * pipeline.rank_batch
            for pipeline in pipelines
        )
        yield _Limit(whose, most, below, held, asks or len(held) > most)


def _above_limits(plan: Plan, limits: Iterable[_Limit], slots: int) -> Iterator[str]:
    """Rule 18: what is given keeps all limits, before anybody has made way."""
    given = [(order.pipeline, gpu) for order in (*plan.grants, *plan.expands) for gpu in order.gpus]
    for limit in limits:
        gets = {gpu for name, gpu in given if name in limit.below and gpu < slots}
        if gets and len(limit.held | gets) > limit.most:
            yield f"rule 18: {limit.whose} would have {len(limit.held | gets)} slots, its limit is {limit.most}"
