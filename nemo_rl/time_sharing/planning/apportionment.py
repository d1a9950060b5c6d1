"""Shares the remaining GPUs among generation: a first rank for each pipeline without one, then ranks in proportion to
remaining work times weight.

Free GPUs are handed out rank by rank, each time to the pipeline with the lowest service: first up to its entitlement,
then to any pipeline that can use more. Then busy ranks move from pipelines with higher service to those with lower
(`busy_ranks`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import compress
from operator import attrgetter

import numpy as np

from nemo_rl.time_sharing.log.ledger import PipelineState
from nemo_rl.time_sharing.planning.busy_ranks import given_by, move_busy, ranks_to_evict
from nemo_rl.time_sharing.planning.entitlement import PipelineShare, divide
from nemo_rl.time_sharing.planning.plan import Expand, Plan
from nemo_rl.time_sharing.planning.plan_state import BLOCKED, FREEING, RANK, PlanState, Reservation
from nemo_rl.time_sharing.planning.waking import (
    candidates,
    expand,
    guaranteed_from,
    rank_state,
    reserved_against,
    slice_seconds,
)
from nemo_rl.time_sharing.protocol.types import Priority


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
    options: list[tuple[bool, int, float, int, list[tuple[str, int]]]] = []
    for until in pipeline.cooling.values():
        if until > plan_state.now:
            result.replan_by(until)
    could_wake, ranks = candidates(plan_state, pipeline), pipeline.topology.ranks
    for rank in could_wake:
        gpus = ranks[rank]
        if plan_state.kind[gpus[0]] == BLOCKED:
            continue
        state = rank_state(plan_state, gpus, name, rank)
        if state <= FREEING:
            expand(plan_state, result, name, rank, ("unscheduled", since), guaranteed=starved)
            return
        if state == RANK and not pipeline.held:
            donors = ranks_to_evict(plan_state, gpus)
            if donors is not None and all((d, r) not in plan_state.shrunk for d, r in donors):
                held = min(plan_state.pipelines[d].awake[r].slice_began() for d, r in donors)
                spare = min(plan_state.counts[d] - given_by(d, donors) for d, _ in donors)
                options.append((rank not in pipeline.warm, -spare, held, rank, donors))
            elif donors is None and (slice_end := _slice_end_on(plan_state, gpus)) > plan_state.now:
                # Otherwise a rank is on its way up, and its arrival brings the next plan.
                result.replan_by(slice_end)
    if options:
        *_, chosen, donors = min(options)
        for donor, rank in donors:
            plan_state.shrink(result, donor, rank, ("time_slice", donor, name, since))
        expand(plan_state, result, name, chosen, ("unscheduled", since), guaranteed=starved)
    elif starved:
        for rank in could_wake:
            if plan_state.quarantined.isdisjoint(ranks[rank]):
                plan_state.reserve(ranks[rank], Reservation(f"{name} (first rank)", name, plan_state.now, None))
                return


def _slice_end_on(plan_state: PlanState, gpus: tuple[int, ...]) -> float:
    ends = [plan_state.now]
    for gpu in gpus:
        lease = plan_state.owner[gpu]
        if lease is not None and lease.rank >= 0:
            pipeline = plan_state.pipelines[lease.pipeline]
            ends.append(pipeline.awake[lease.rank].slice_began() + slice_seconds(plan_state, lease.pipeline))
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
    plain = share.tp == 1 and _KEPT not in at_first_gpus
    share.free_ranks = found if plain else _to_be_had(plan_state, share, marks, found)
    return True


def _to_be_had(plan_state: PlanState, share: PipelineShare, marks: _Marks, found: Iterator[int]) -> Iterator[int]:
    """The found ranks whose GPUs are all free and not reserved against them."""
    for rank in found:
        gpus = share.ranks[rank]
        worst = [marks[gpu] for gpu in gpus]
        if _TAKEN not in worst and not (_KEPT in worst and reserved_against(plan_state, gpus, share.name, rank)):
            yield rank
