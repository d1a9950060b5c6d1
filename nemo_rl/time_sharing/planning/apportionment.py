"""Shares what is left among generation: a first rank for each without one, then ranks by remaining work times weight.

Free GPUs go to the pipeline that is served least (`free_ranks`), then busy ones move from those that are served better
to those that are served worse (`busy_ranks`).
"""

from __future__ import annotations

from nemo_rl.time_sharing.log.ledger import PipelineState
from nemo_rl.time_sharing.planning.busy_ranks import given_by, move_busy, ranks_to_evict
from nemo_rl.time_sharing.planning.entitlement import divide
from nemo_rl.time_sharing.planning.free_ranks import hand_out_free
from nemo_rl.time_sharing.planning.plan import Plan
from nemo_rl.time_sharing.planning.plan_state import BLOCKED, FREEING, RANK, PlanState, Reservation
from nemo_rl.time_sharing.planning.waking import candidates, expand, guaranteed_from, rank_state, slice_seconds
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
