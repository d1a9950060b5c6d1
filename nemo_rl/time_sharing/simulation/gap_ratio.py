"""The gap-ratio rule, to compare with: the allocation rule of earlier time-sharing schedulers, defects included.

Fixed requests evict whatever generation stands on their GPUs even when they stay infeasible, no request reserves, and
generation is moved towards shares of remaining work with zero tolerance. A cycle waits for every hand-over of the one
before it. The executor is ours, so it is spared the rest. Never used outside simulation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nemo_rl.time_sharing.log.state import PipelineState
from nemo_rl.time_sharing.planning.plan import (
    BLOCKED,
    FREEING,
    RANK,
    Expand,
    Grant,
    Plan,
    PlanState,
    PriorityChange,
    Snapshot,
)
from nemo_rl.time_sharing.protocol.types import Phase, Priority

_ACTIVATIONS = 1000
_POLL_S = 0.02


@dataclass(slots=True)
class _Row:
    """One pipeline with demand, as the rule sees it."""

    name: str
    pipeline: PipelineState
    tp: int
    remaining: float
    target: float
    active: int
    tau: float = 0.0
    wanted_gpus: int = 0


def plan(snapshot: Snapshot, now: float) -> Plan:
    """One cycle of the rule. Cycles are strictly serial: none begins while hand-overs of the last one are under way,
    of any pipeline.
    """
    if _cycle_runs(snapshot):
        waiting = Plan()
        waiting.replan_by(now + _POLL_S)
        return waiting
    return decide(snapshot, now)


def decide(snapshot: Snapshot, now: float) -> Plan:
    """The decisions of one cycle, whatever is under way: the rule on an executor that lets unrelated pipelines
    go on.
    """
    plan_state, result = PlanState(snapshot, now), Plan()
    for name, pipeline in snapshot.pipelines.items():
        if pipeline.withdraws and not pipeline.fenced:
            for rank in pipeline.awake:
                plan_state.shrink(result, name, rank, ("leaving",))
    _fixed(plan_state, result, snapshot)
    _generation(plan_state, result)
    return result


def _cycle_runs(snapshot: Snapshot) -> bool:
    if snapshot.claimed:
        return True
    return any(
        rank.phase is not Phase.SERVING and rank.phase is not Phase.FAILED
        for p in snapshot.pipelines.values()
        for rank in p.awake.values()
    )


def _fixed(plan_state: PlanState, result: Plan, snapshot: Snapshot) -> None:
    waiting = [
        (q.want.priority, q.since, name, cluster, q.want)
        for name, p in snapshot.pipelines.items()
        if not p.fenced
        for cluster, q in p.wants.items()
    ]
    for priority, _, name, cluster, want in sorted(waiting, key=lambda item: item[:4]):
        pipeline = snapshot.pipelines[name]
        gpus = pipeline.topology.clusters[cluster].gpus
        claim = snapshot.claimed.get(gpus[0])
        if claim is not None and claim.key == (name, cluster, -1):
            continue
        if want.priority is Priority.ACTOR_TRAINING and pipeline.waking():
            continue
        if cluster in pipeline.held:
            result.priority_changes.append(PriorityChange(name, cluster, want.request, priority, ("holds",)))
            continue
        for gpu in gpus:
            lease = plan_state.owner[gpu]
            if plan_state.kind[gpu] == RANK and lease is not None:
                # Kept even if another GPU of the request stays out of reach: this is the rule's wasted preemption.
                plan_state.shrink(result, lease.pipeline, lease.rank, ("for_grant", gpus, cluster, name))
        if all(plan_state.kind[gpu] in (0, FREEING) for gpu in gpus):
            plan_state.claim(gpus)
            result.grants.append(Grant(name, cluster, want.request, priority, gpus, (), ("free",)))


def _rows(plan_state: PlanState) -> list[_Row]:
    rows = []
    for name, pipeline in plan_state.pipelines.items():
        demand = pipeline.demand
        if pipeline.fenced or pipeline.withdraws or demand.target == 0:
            continue
        waits = pipeline.unscheduled_since is not None
        target = float(demand.target * demand.unit)
        remaining = float(demand.remaining) + (target if waits else 0.0)
        rows.append(_Row(name, pipeline, pipeline.topology.tp, remaining, target, plan_state.counts[name]))
    return rows


def _generation(plan_state: PlanState, result: Plan) -> None:
    rows = _rows(plan_state)
    work = sum(row.remaining * row.tp for row in rows)
    budget = sum(1 for kind in plan_state.kind if kind != BLOCKED) + sum(
        len(c.gpus) for c in {id(c): c for c in plan_state.claimed.values() if c.rank >= 0}.values()
    )
    if budget and work:
        _Cycle(plan_state, result, rows, work, budget).run()


class _Cycle:
    """One division of the generation GPUs: ranks are activated one by one until none can be."""

    def __init__(self, plan_state: PlanState, result: Plan, rows: list[_Row], work: float, budget: int) -> None:
        self._plan_state, self._result, self._budget = plan_state, result, budget
        self._rows = {row.name: row for row in rows}
        self._todo = {row.name: row.remaining / row.target if row.target else 0.0 for row in rows}
        self._touched: set[tuple[str, int]] = set()
        for row in rows:
            row.tau = row.remaining * row.tp / work
            row.wanted_gpus = max(math.floor(row.tau * budget / row.tp + 0.5) * row.tp, row.tp)

    def run(self) -> None:
        # Who found no rank finds none later either, unless a donor has given more GPUs than its taker needed.
        without: set[str] = set()
        for _ in range(_ACTIVATIONS):
            open_rows = [r for r in self._rows.values() if r.name not in without]
            acceptors = [r for r in open_rows if self._gap(r) > 0 and r.active * r.tp < r.wanted_gpus and r.tau > 0]
            acceptors.sort(key=lambda r: (-self._gap(r) / r.tau, -self._gap(r), r.name))
            shrunk = len(self._result.shrinks)
            for row in acceptors:
                if self._activate(row):
                    break
                without.add(row.name)
            else:
                return
            if len(self._result.shrinks) > shrunk:
                without.clear()

    def _gap(self, row: _Row) -> float:
        return row.tau - row.active * row.tp / self._budget

    def _activate(self, row: _Row) -> bool:
        best: tuple[tuple[object, ...], int, list[tuple[str, int]]] | None = None
        plan_state, pipeline = self._plan_state, row.pipeline
        if any(q.want.priority is Priority.ACTOR_TRAINING for q in pipeline.wants.values()):
            return False
        for rank, gpus in enumerate(pipeline.topology.ranks):
            asleep = (
                rank not in pipeline.awake
                and rank not in pipeline.claimed_ranks
                and pipeline.cooling.get(rank, 0.0) <= plan_state.now
            )
            if not asleep or (row.name, rank) in self._touched or any(plan_state.kind[g] == BLOCKED for g in gpus):
                continue
            donors = self._donors(gpus, row)
            if donors is None:
                continue
            score = (1 if donors else 0, sorted(-self._todo.get(name, 0.0) for name, _ in donors), rank)
            if best is None or score < best[0]:
                best = (score, rank, donors)
            if not donors:
                break
        if best is None:
            return False
        _, rank, donors = best
        for name, donor in donors:
            self._touched.add((name, donor))
            plan_state.shrink(self._result, name, donor, ("gives", name, 0.0, row.name, 0.0))
            self._rows[name].active = plan_state.counts[name]
        gpus = pipeline.topology.ranks[rank]
        self._touched.add((row.name, rank))
        plan_state.claim(gpus)
        plan_state.counts[row.name] += 1
        self._result.expands.append(
            Expand(row.name, rank, gpus, False, ("share", row.active * row.tp, row.tau * self._budget))
        )
        row.active = plan_state.counts[row.name]
        return True

    def _donors(self, gpus: tuple[int, ...], row: _Row) -> list[tuple[str, int]] | None:
        spent: dict[str, int] = {}
        donors: list[tuple[str, int]] = []
        plan_state = self._plan_state
        for gpu in gpus:
            lease = plan_state.owner[gpu]
            if plan_state.kind[gpu] != RANK or lease is None or (lease.pipeline, lease.rank) in donors:
                continue
            donor = self._rows.get(lease.pipeline)
            if donor is None or donor is row or self._gap(donor) >= 0:
                return None
            spare = max(0, donor.active - max(1, donor.wanted_gpus // donor.tp))
            if spare <= spent.get(donor.name, 0):
                return None
            if (
                plan_state.pipelines[lease.pipeline].awake[lease.rank].phase is not Phase.SERVING
                or (lease.pipeline, lease.rank) in self._touched
            ):
                return None
            spent[donor.name] = spent.get(donor.name, 0) + 1
            donors.append((lease.pipeline, lease.rank))
        return donors
