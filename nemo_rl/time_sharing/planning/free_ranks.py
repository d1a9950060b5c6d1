"""Hands free GPUs out, rank by rank, each time to the pipeline that is served least for its work and weight: first what
each is entitled to, then to anybody who can use them. Takes nothing from anybody.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import compress
from operator import attrgetter

import numpy as np

from nemo_rl.time_sharing.planning.parties import Party
from nemo_rl.time_sharing.planning.plan import Expand, Plan
from nemo_rl.time_sharing.planning.plan_state import BLOCKED, FREEING, PlanState
from nemo_rl.time_sharing.planning.waking import candidates, expand, reserved_against

_TAKEN, _CLEAR, _KEPT = 0, 1, 2
"""What a GPU is while free ones are handed out: not to be had; to be had by anybody; to be had by some."""
_MARK_OF_KIND = bytes(_CLEAR if kind <= FREEING else _TAKEN for kind in range(256))
_Marks = list[int]
"""One of these for each GPU; a list, since that is what Python picks items from fastest."""


def hand_out_free(plan_state: PlanState, result: Plan, takers: list[Party]) -> None:
    """Gives free GPUs to the pipeline that is served least, again and again; beyond what it is entitled to only what
    nobody entitled wants.
    """
    marks = list(plan_state.kind.translate(_MARK_OF_KIND))
    if _CLEAR not in marks:
        return
    for gpu in plan_state.kept:
        if marks[gpu] == _CLEAR:
            marks[gpu] = _KEPT
    takers = [party for party in takers if _find_free(plan_state, party, marks)]
    kind, counts, expands = plan_state.kind, plan_state.counts, result.expands
    for party, has in _entitled_turns(takers):
        rank = next(party.free_ranks, None)
        if rank is None:
            continue
        gpus, name = party.ranks[rank], party.name
        for gpu in gpus:
            kind[gpu], marks[gpu] = BLOCKED, _TAKEN
        counts[name] += 1
        expands.append(Expand(name, rank, gpus, False, ("share", has, party.entitled)))
    for party in takers:
        party.update(counts[party.name])
    _hand_out_spare(plan_state, result, takers, marks)


def _entitled_turns(takers: list[Party]) -> Iterator[tuple[Party, int]]:
    """Whose turn it is to take a rank, and how many GPUs it will have before, until each could have what it is entitled
    to: always the one that is served least by then, the first by name among equals.

    How well a party is served with so many GPUs does not depend on the others, so all turns are sorted at once; one
    that finds no free rank has found none for good.
    """
    parties = sorted([party for party in takers if party.turns > 0], key=attrgetter("name"))
    if not parties:
        return iter(())
    turns = np.array([party.turns for party in parties])
    whose = np.repeat(np.arange(len(parties)), turns)
    earlier = np.arange(len(whose)) - np.repeat(np.cumsum(turns) - turns, turns)
    has, tp, minimum, pull = np.array([(party.gpus, party.tp, party.minimum, party.pull) for party in parties])[whose].T
    gpus = has + earlier * tp
    served = np.where(gpus < minimum, gpus / minimum - 1.0, gpus / pull)
    order = np.argsort(served, kind="stable")
    return zip(map(parties.__getitem__, whose[order].tolist()), gpus[order].astype(int).tolist(), strict=True)


def _hand_out_spare(plan_state: PlanState, result: Plan, takers: list[Party], marks: _Marks) -> None:
    """Gives what nobody entitled wants to whoever can use it, least served first."""
    counts = plan_state.counts
    heap = [(party.now, party.name, party) for party in takers if party.ranks_up < party.useful]
    heapq.heapify(heap)
    while heap:
        _, name, party = heap[0]
        rank = next(party.free_ranks, None)
        if rank is None:
            heapq.heappop(heap)
            continue
        for gpu in party.ranks[rank]:
            marks[gpu] = _TAKEN
        expand(plan_state, result, name, rank, ("spare",))
        party.update(counts[name])
        if counts[name] < party.useful:
            heapq.heapreplace(heap, (party.now, name, party))
        else:
            heapq.heappop(heap)


def _find_free(plan_state: PlanState, party: Party, marks: _Marks) -> bool:
    """Whether GPUs of a party are free; if so, begins the scan for its ranks on them."""
    pipeline = plan_state.pipelines[party.name]
    at_first_gpus = pipeline.topology.at_first_gpus(marks)
    if not any(at_first_gpus):
        return False
    could_wake = candidates(plan_state, pipeline)
    # Most ranks fall at their first GPU, so that is looked at without a step of Python for each.
    first_gpus = map(pipeline.topology.first_gpus.__getitem__, could_wake)
    found = compress(could_wake, map(marks.__getitem__, first_gpus))
    plain = party.tp == 1 and _KEPT not in at_first_gpus
    party.free_ranks = found if plain else _to_be_had(plan_state, party, marks, found)
    return True


def _to_be_had(plan_state: PlanState, party: Party, marks: _Marks, found: Iterator[int]) -> Iterator[int]:
    """Those of the ranks found whose GPUs are all free and not reserved against them."""
    for rank in found:
        gpus = party.ranks[rank]
        worst = [marks[gpu] for gpu in gpus]
        if _TAKEN not in worst and not (_KEPT in worst and reserved_against(plan_state, gpus, party.name, rank)):
            yield rank
