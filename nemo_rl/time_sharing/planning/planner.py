"""Decides which pipeline gets which GPU next: `plan(snapshot, now) -> Plan`, a pure function.

First the queue: requests for fixed clusters, and pipelines whose generation has no rank at all, in aged order. Each is
served completely, with all its victims known, or not at all; one that cannot be served reserves its GPUs against those
behind it. Then the rest is shared among generation (`apportionment`). Nothing here acts, waits or reads a clock.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import NamedTuple

from nemo_rl.time_sharing.log.state import PipelineState, QueuedWant
from nemo_rl.time_sharing.planning import apportionment
from nemo_rl.time_sharing.planning.plan import (
    BLOCKED,
    FREE,
    FREEING,
    RANK,
    Expand,
    Grant,
    Plan,
    PlanState,
    PriorityChange,
    Reason,
    Reservation,
    Room,
    Snapshot,
    Wait,
    candidates,
    guaranteed_seconds,
    has_claim,
    trained_on_within,
)
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, Phase, Priority

_BUILDING = (Phase.RISING, Phase.FALLING)
"""Phases in which a rank that never served may be building its engine, which cannot be cut short."""


class QueueItem(NamedTuple):
    """One place in the queue; `queued` is None for a pipeline that wants its first generation rank.

    The key is arrival + priority x aging: requests age at equal pace, so the order of two never changes, and a request
    is overtaken only by those that arrive within (its priority - theirs) x aging after it.
    """

    key: float
    name: str
    cluster: str
    queued: QueuedWant | None


@dataclass(slots=True)
class _Obstacles:
    """Obstacles of a fixed request, and the ranks that it would evict. `building`: ranks whose engines are being built,
    each with one of its GPUs.
    """

    victims: set[tuple[str, int]] = field(default_factory=set)
    because: Reason | None = None
    free_at: float = 0.0
    passed: dict[str, float] = field(default_factory=dict)
    building: dict[tuple[str, int], int] = field(default_factory=dict)

    def block(self, because: Reason, free_at: float) -> None:
        if self.because is None:
            self.because = because
        self.free_at = max(self.free_at, free_at)


def plan(snapshot: Snapshot, now: float) -> Plan:
    """The decisions for this moment.

    Arguments: snapshot, which is not changed; now, seconds on the scheduler's clock. Planned releases come first, then
    the queue, then generation.
    """
    with _no_garbage_collection():
        return _plan(snapshot, now)


@contextmanager
def _no_garbage_collection() -> Generator[None]:
    """Leaves cyclic garbage alone meanwhile: a plan makes tens of thousands of objects that are in no cycle, and for
    each few hundred of them the collector would look through the new ones, at times through all that the process has.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Expected(NamedTuple):
    """When a job that were registered now could begin: in so many seconds (infinity: unknown), and the reason why
    not at once.
    """

    seconds: float
    because: Reason | None


def expected_start(snapshot: Snapshot, now: float, name: str, gpus: tuple[int, ...]) -> Expected:
    """When all of these GPUs could be granted to job `name` for its start, by how long holds have lasted so far.

    Starts come before everything that was asked for in the last minutes (`aging_s`), so only what is held, claimed or
    was asked for earlier stands before it.
    """
    with _no_garbage_collection():
        plan_state, _ = _after_the_queue(
            snapshot, now, ahead_of=now + snapshot.limits.aging_s * Priority.INITIALIZATION
        )
        found = _obstacles(plan_state, name, gpus)
        ahead = {
            r.label: plan_state.usual(r.name, r.queued.want.priority)
            for gpu in gpus
            for r in plan_state.reserved.get(gpu, ())
            if r.name != name and r.queued is not None
        }
        if found.because is None and found.building:
            (holder, rank), gpu = min(found.building.items())
            found.block(("building", gpu, holder), plan_state.built_at(holder, rank))
    if found.because is None:
        return Expected(0.0, None)
    return Expected(max(found.free_at - now, 0.0) + sum(ahead.values()), found.because)


def _plan(snapshot: Snapshot, now: float) -> Plan:
    plan_state, result = _after_the_queue(snapshot, now)
    apportionment.share(plan_state, result)
    _build_ahead(plan_state, result)
    apportionment.fill_gaps(plan_state, result)
    return result


def _after_the_queue(snapshot: Snapshot, now: float, ahead_of: float = math.inf) -> tuple[PlanState, Plan]:
    """The plan as far as the requests in the queue, or those before this place in it, are served or wait."""
    plan_state = PlanState(snapshot, now)
    if snapshot.quotas.promised:
        apportionment.find_due(plan_state)
    if snapshot.limits.max_initialising:
        plan_state.initialising = {
            name for name, pipeline in snapshot.pipelines.items() if _initialises(snapshot, pipeline)
        }
    result = Plan()
    for name, pipeline in snapshot.pipelines.items():
        if pipeline.withdraws and not pipeline.fenced:
            for rank in pipeline.awake:
                plan_state.shrink(result, name, rank, ("leaving",) if pipeline.leaving else ("paused",))
        elif plan_state.withheld and not pipeline.fenced and name not in plan_state.finishing:
            _leave_nodes(plan_state, result, name, pipeline)
    for room in plan_state.rooms.values():
        _keep_limit(plan_state, result, room)
    for item in queue(snapshot):
        if item.key > ahead_of:
            break
        pipeline = snapshot.pipelines[item.name]
        if item.queued is None:
            apportionment.serve_unscheduled(plan_state, result, item.name, pipeline)
        elif item.cluster in pipeline.held:
            _change_priority(result, item, pipeline, item.queued)
        else:
            _serve(plan_state, result, item, pipeline, item.queued)
    return plan_state, result


def _leave_nodes(plan_state: PlanState, result: Plan, name: str, pipeline: PipelineState) -> None:
    """Puts the ranks on nodes that are to leave to sleep; an engine that is being built sleeps once it stands."""
    for rank, awake in pipeline.awake.items():
        if awake.phase is not Phase.BUILDING and not plan_state.withheld.isdisjoint(pipeline.topology.ranks[rank]):
            plan_state.shrink(result, name, rank, ("node",))


def _keep_limit(plan_state: PlanState, result: Plan, room: Room) -> None:
    """Has ranks go to sleep that are above a limit, which was lowered."""
    if len(room.slots) <= room.most:
        return
    above = plan_state.lack(room)
    ranks = [(name, rank) for name in room.pipelines for rank in plan_state.pipelines[name].awake]
    for name, rank in sorted(ranks, key=lambda one: -plan_state.spare_ranks(one[0])):
        if above <= 0:
            return
        if plan_state.kind[plan_state.ranks_of(name)[rank][0]] == RANK:
            plan_state.empty(result, name, rank, ("above", room.whose, room.most))
            above -= plan_state.tp[name]


def queue(snapshot: Snapshot) -> list[QueueItem]:
    """All waiting requests and pipelines in order of aged priority; those of pipelines of high priority come by
    `high_lead_s` before. Pipelines that run in gaps wait for nothing.
    """
    limits = snapshot.limits
    items = []
    for name, pipeline in snapshot.pipelines.items():
        if pipeline.fenced or (pipeline.withdraws and not pipeline.held):
            continue
        lead = limits.high_lead_s if pipeline.spec.is_high else 0.0
        for cluster, queued in pipeline.wants.items():
            if not has_claim(snapshot.claimed, pipeline, cluster):
                key = queued.since + limits.aging_s * queued.want.priority - lead
                items.append(QueueItem(key, name, cluster, queued))
        if pipeline.unscheduled_since is not None and not pipeline.spec.scavenges:
            key = pipeline.unscheduled_since + limits.aging_s * Priority.GENERATION - lead
            items.append(QueueItem(key, name, ACTOR_INFER, None))
    items.sort(key=itemgetter(0, 1, 2))
    return items


def _change_priority(result: Plan, item: QueueItem, pipeline: PipelineState, queued: QueuedWant) -> None:
    want = queued.want
    if want.priority is Priority.ACTOR_TRAINING and pipeline.waking():
        result.waits.append(Wait(item.name, item.cluster, want.request, ("expanding",)))
        return
    result.priority_changes.append(PriorityChange(item.name, item.cluster, want.request, want.priority, ("holds",)))


def _serve(plan_state: PlanState, result: Plan, item: QueueItem, pipeline: PipelineState, queued: QueuedWant) -> None:
    """Grants a fixed request with its whole donor set, or reserves its GPUs without evicting."""
    want, gpus = queued.want, pipeline.topology.clusters[item.cluster].gpus
    found = _obstacles(plan_state, item.name, gpus)
    if found.because is not None and found.because[0] == "withheld":
        # Keeps no GPUs from others, since it may wait for days.
        result.waits.append(Wait(item.name, item.cluster, want.request, found.because))
        return
    if (room := plan_state.too_small(item.name, gpus)) is not None:
        result.waits.append(Wait(item.name, item.cluster, want.request, ("limit", room.whose, room.most)))
        return
    if want.priority is Priority.INITIALIZATION and plan_state.limits.max_initialising:
        _check_places(plan_state, item.name, pipeline, found)
    if found.because is None and found.passed:
        _check_backfill(plan_state, pipeline, want.priority, found)
    turning: list[tuple[str, int]] = []
    if found.because is None and want.priority is Priority.ACTOR_TRAINING and pipeline.waking():
        plan_state.no_expand.add(item.name)
        # Ranks of its own that are waking on the training GPUs are victims like any other, and turn round as soon as
        # they can.
        turning = [v for v in found.victims if v[0] == item.name and pipeline.awake[v[1]].phase is Phase.RISING]
        found.block(("expanding",), plan_state.now)
    elif found.because is None and found.building:
        # Engines that are being built turn round when they stand; until then the other victims have no reason to stop.
        turning = [victim for victim in found.building if victim in found.victims]
        (name, _), gpu = min(found.building.items())
        found.block(("building", gpu, name), plan_state.now)
    if found.because is None and not plan_state.has_room(item.name, gpus):
        _wait_for_room(plan_state, result, item.name, gpus, found)
    for name, rank in sorted(turning):
        plan_state.shrink(result, name, rank, ("for_grant", gpus, item.cluster, item.name))
    if found.because is not None:
        result.waits.append(Wait(item.name, item.cluster, want.request, found.because))
        plan_state.reserve(gpus, Reservation(f"{item.name}#{want.request}", item.name, found.free_at, queued))
        plan_state.take_room(item.name, gpus)
        return
    for name, rank in sorted(found.victims):
        plan_state.shrink(result, name, rank, ("for_grant", plan_state.ranks_of(name)[rank], item.cluster, item.name))
    plan_state.claim_fixed(item.name, gpus)
    plan_state.passings.update(found.passed.keys())
    why: Reason = ("evicts", _names(found.victims)) if found.victims else ("free",)
    if found.passed:
        why = ("backfill", plan_state.now + (plan_state.estimate(pipeline, want.priority) or 0.0))
    result.grants.append(Grant(item.name, item.cluster, want.request, want.priority, gpus, tuple(found.passed), why))


def _obstacles(plan_state: PlanState, name: str, gpus: tuple[int, ...]) -> _Obstacles:
    found = _Obstacles(free_at=plan_state.now)
    if plan_state.withheld and name not in plan_state.finishing and (gone := plan_state.withheld & set(gpus)):
        found.block(("withheld", min(gone)), math.inf)
    for gpu in gpus:
        kind = plan_state.kind[gpu]
        if kind == FREE and gpu not in plan_state.reserved:
            continue
        if kind == BLOCKED:
            found.block(found.because or plan_state.why_blocked(gpu), plan_state.free_at(gpu))
            continue
        for reservation in plan_state.reserved.get(gpu, ()):
            if reservation.name == name:
                continue
            if plan_state.may_be_passed(reservation):
                found.passed[reservation.label] = reservation.free_at
            else:
                found.block(("reserved", gpu, reservation.label), reservation.free_at)
        lease = plan_state.owner[gpu]
        if lease is None:
            continue
        holder = plan_state.pipelines[lease.pipeline]
        awake = holder.awake[lease.rank]
        if lease.rank not in holder.warm and awake.phase in _BUILDING:
            found.building[lease.pipeline, lease.rank] = gpu
        if kind == FREEING:
            continue
        if lease.pipeline != name and _is_guaranteed(plan_state, (lease.pipeline, lease.rank)):
            slice_ends = awake.slice_began() + guaranteed_seconds(holder, plan_state.limits)
            found.block(("guaranteed", gpu, lease.pipeline), slice_ends)
        else:
            found.victims.add((lease.pipeline, lease.rank))
    return found


def _wait_for_room(plan_state: PlanState, result: Plan, name: str, gpus: tuple[int, ...], found: _Obstacles) -> None:
    """A request that would exceed a limit waits until ranks below that limit, or others' training, have made way."""
    apportionment.make_room(plan_state, result, name, gpus, partial(_is_guaranteed, plan_state))
    for room in plan_state.rooms_of(name):
        if not plan_state.has_room(name, gpus):
            trained_on = [gpu for gpu in room.slots.difference(gpus) if plan_state.kind[gpu] == BLOCKED]
            waits = plan_state.lack(room, gpus) > 0
            free_at = (
                min([plan_state.free_at(gpu) for gpu in trained_on], default=math.inf) if waits else plan_state.now
            )
            found.block(("limit", room.whose, room.most), free_at)


def _is_guaranteed(plan_state: PlanState, rank: tuple[str, int]) -> bool:
    """Whether a rank is in a slice that no request may cut short."""
    holder = plan_state.pipelines[rank[0]]
    awake = holder.awake[rank[1]]
    if not awake.guaranteed:
        return False
    slice_ends = awake.slice_began() + guaranteed_seconds(holder, plan_state.limits)
    return awake.phase is Phase.RISING or plan_state.now < slice_ends


def _initialises(snapshot: Snapshot, pipeline: PipelineState) -> bool:
    held = any(held.priority is Priority.INITIALIZATION for held in pipeline.held.values())
    return held or any(
        q.want.priority is Priority.INITIALIZATION and has_claim(snapshot.claimed, pipeline, cluster)
        for cluster, q in pipeline.wants.items()
    )


def _check_places(plan_state: PlanState, name: str, pipeline: PipelineState, found: _Obstacles) -> None:
    """Blocks a request beyond `max_initialising`. Waiting pipelines count for those behind them, or a later one could
    take every place that becomes free.
    """
    others = plan_state.initialising - {name}
    if len(others) >= plan_state.limits.max_initialising and not pipeline.held:
        found.block(("initialising", ", ".join(sorted(others))), float("inf"))
    plan_state.initialising.add(name)


def _check_backfill(plan_state: PlanState, pipeline: PipelineState, priority: Priority, found: _Obstacles) -> None:
    """A later request may use reserved GPUs only when its known duration ends before the reservation can begin."""
    seconds = plan_state.estimate(pipeline, priority)
    first = min(found.passed, key=lambda label: found.passed[label])
    if seconds is None or plan_state.now + seconds > found.passed[first]:
        found.block(("outlasts", first), found.passed[first])


def _names(victims: set[tuple[str, int]]) -> str:
    return ", ".join(f"{name}/{rank}" for name, rank in sorted(victims))


def _build_ahead(plan_state: PlanState, result: Plan) -> None:
    """Builds missing engines on unused GPUs, so that their first wakes are short.

    A build cannot be broken off. It begins where no pipeline trains, elsewhere only if past steps and builds show that
    it will have ended when the next training is asked for. Call it last.
    """
    for name, pipeline in plan_state.pipelines.items():
        if not pipeline.builds or pipeline.withdraws or pipeline.fenced:
            continue
        if len(pipeline.warm) == len(pipeline.topology.ranks):
            continue
        for rank in candidates(plan_state, pipeline):
            gpus = pipeline.topology.ranks[rank]
            if (
                rank not in pipeline.warm
                and all(plan_state.kind[gpu] == FREE and gpu not in plan_state.reserved for gpu in gpus)
                and not trained_on_within(plan_state, gpus, pipeline.build_s)
                and plan_state.has_room(name, gpus)
            ):
                plan_state.claim(gpus)
                plan_state.take_room(name, gpus)
                result.expands.append(Expand(name, rank, gpus, guaranteed=False, because=("ahead",), ahead=True))
