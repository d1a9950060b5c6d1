"""Hands free GPUs out, rank by rank, each time to the pipeline that is served least for its work and weight: first what
each is entitled to, then to anybody who can use them. Takes nothing from anybody.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import compress
from operator import attrgetter

import numpy as np

from nemo_rl.time_sharing.planning.entitlement import PipelineShare
from nemo_rl.time_sharing.planning.plan import Expand, Plan
from nemo_rl.time_sharing.planning.plan_state import BLOCKED, FREEING, PlanState
from nemo_rl.time_sharing.planning.waking import candidates, expand, reserved_against

_TAKEN, _CLEAR, _KEPT = 0, 1, 2
"""What a GPU is while free ones are handed out: not to be had; to be had by anybody; to be had by some."""
_MARK_OF_KIND = bytes(_CLEAR if kind <= FREEING else _TAKEN for kind in range(256))
_Marks = list[int]
"""One of these for each GPU; a list, since that is what Python picks items from fastest."""


def hand_out_free(plan_state: PlanState, result: Plan, takers: list[PipelineShare]) -> None:
    """Gives free GPUs to the pipeline that is served least, again and again; beyond what it is entitled to only what
    no entitled pipeline wants.
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
    """Whose turn it is to take a rank, and how many GPUs it will have before, until each could have what it is entitled
    to: always the one that is served least by then, the first by name among equals.

    How well a pipeline is served with so many GPUs does not depend on the others, so all turns are sorted at once; one
    that finds no free rank has found none for good.
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
    """Gives what no entitled pipeline wants to those that can use it, least served first."""
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
    """Those of the ranks found whose GPUs are all free and not reserved against them."""
    for rank in found:
        gpus = share.ranks[rank]
        worst = [marks[gpu] for gpu in gpus]
        if _TAKEN not in worst and not (_KEPT in worst and reserved_against(plan_state, gpus, share.name, rank)):
            yield rank
