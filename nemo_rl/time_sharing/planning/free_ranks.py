"""Hands free GPUs out, rank by rank, each time to the pipeline that is served least for its work and weight: first what
each is entitled to, then to anybody who can use them. Takes nothing from anybody.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import compress
from operator import attrgetter

from nemo_rl.time_sharing.planning.parties import Party
from nemo_rl.time_sharing.planning.plan import Expand, Plan
from nemo_rl.time_sharing.planning.plan_state import BLOCKED, FREEING, PlanState
from nemo_rl.time_sharing.planning.waking import candidates, expand, reserved_against

_TAKEN, _CLEAR, _RESERVED = 0, 1, 2
"""What a GPU is while free ones are handed out: not to be had; to be had by anybody; to be had by some."""
_MARK_OF_KIND = bytes(_CLEAR if kind <= FREEING else _TAKEN for kind in range(256))


def hand_out_free(plan_state: PlanState, result: Plan, takers: list[Party]) -> None:
    """Gives free GPUs to the pipeline that is served least, again and again; beyond what it is entitled to only what
    nobody entitled wants.
    """
    marks = plan_state.kind.translate(_MARK_OF_KIND)
    if _CLEAR not in marks:
        return
    for gpu in plan_state.reserved:
        if marks[gpu] == _CLEAR:
            marks[gpu] = _RESERVED
    for party in takers:
        party.free_ranks = _free_ranks(plan_state, party, marks)
    kind, counts, expands = plan_state.kind, plan_state.counts, result.expands
    for party, has in _entitled_turns(plan_state, takers):
        for rank in party.free_ranks:
            gpus, name = party.ranks[rank], party.name
            for gpu in gpus:
                kind[gpu], marks[gpu] = BLOCKED, _TAKEN
            counts[name] += 1
            expands.append(Expand(name, rank, gpus, False, ("share", has, party.entitled)))
            break
    for party in takers:
        party.update(counts[party.name])
    _hand_out_spare(plan_state, result, takers, marks)


def _entitled_turns(plan_state: PlanState, takers: list[Party]) -> Iterator[tuple[Party, int]]:
    """Whose turn it is to take a rank, and how many GPUs it will have before, until each could have what it is entitled
    to: always the one that is served least by then, the first by name among equals.

    How well a party is served with so many GPUs does not depend on the others, so all turns are sorted at once; one
    that finds no free rank has found none for good.
    """
    whose: list[Party] = []
    gpus: list[int] = []
    served: list[float] = []
    for party in sorted(takers, key=attrgetter("name")):
        count, tp = plan_state.counts[party.name], party.tp
        has = party.fixed + count * tp
        turns = min(party.useful - count, (party.target - has) // tp)
        if turns > 0:
            before = range(has, has + turns * tp, tp)
            whose += [party] * turns
            gpus += before
            served += party.served_by(before)
    order = sorted(range(len(whose)), key=served.__getitem__)
    return zip(map(whose.__getitem__, order), map(gpus.__getitem__, order), strict=True)


def _hand_out_spare(plan_state: PlanState, result: Plan, takers: list[Party], marks: bytearray) -> None:
    """Gives what nobody entitled wants to whoever can use it, least served first."""
    counts = plan_state.counts
    heap = [(party.now, party.name, party) for party in takers if counts[party.name] < party.useful]
    heapq.heapify(heap)
    while heap:
        _, name, party = heap[0]
        rank = next(party.free_ranks, None)
        if rank is not None:
            for gpu in party.ranks[rank]:
                marks[gpu] = _TAKEN
            expand(plan_state, result, name, rank, ("spare",))
            party.update(counts[name])
        if rank is not None and counts[name] < party.useful:
            heapq.heapreplace(heap, (party.now, name, party))
        else:
            heapq.heappop(heap)


def _free_ranks(plan_state: PlanState, party: Party, marks: bytearray) -> Iterator[int]:
    """Ranks on GPUs that are still free when the scan comes to them; GPUs are only ever taken while it lasts."""
    ranks, topology, wide = party.ranks, plan_state.pipelines[party.name].topology, party.tp > 1
    if not any(topology.at_first_gpus(marks)):
        return
    could_wake = candidates(plan_state, plan_state.pipelines[party.name])
    # Most ranks fall at their first GPU, so that is looked at without a step of Python for each.
    at_first_gpu = map(marks.__getitem__, map(topology.first_gpus.__getitem__, could_wake))
    for rank in compress(could_wake, at_first_gpu):
        gpus = ranks[rank]
        if wide and not all(marks[gpu] for gpu in gpus):
            continue
        mark = max([marks[gpu] for gpu in gpus]) if wide else marks[gpus[0]]
        if mark == _CLEAR or (mark == _RESERVED and not reserved_against(plan_state, gpus, party.name, rank)):
            yield rank
