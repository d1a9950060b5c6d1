"""The scheduler's whole state: a fold over its events, so that a log read again gives the same state.

`SchedulerState.apply` is the only way to change anything. It decides nothing and refuses what would break the ledger (a
GPU leased twice, an unknown rank), because a log that says so is wrong and must not be believed. `StateSaved` is the
whole state as one event, with which a segment of the log begins, so that nothing before it is needed to go on: it
carries what cannot be derived, and folds into exactly the state that was saved.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple, Self

from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.quota_use import QuotaUse
from nemo_rl.time_sharing.protocol.topology import Pool, Topology
from nemo_rl.time_sharing.protocol.types import (
    ACTOR_INFER,
    SLEEP_PHASES,
    Demand,
    Limits,
    Phase,
    PipelineSpec,
    Priority,
    Want,
    limits_from,
)
from nemo_rl.utils.record import Entry
from nemo_rl.utils.record_events import event_kind


class Lease(NamedTuple):
    """Holder of a GPU: a fixed cluster (`rank` -1) or a generation rank, under the epoch of its grant."""

    pipeline: str
    cluster: str
    rank: int
    epoch: int


Claim = ev.Claimed
"""Next holder of some GPUs, once all of them are free."""


@dataclass(slots=True)
class QueuedWant:
    """A request in the queue: since when, and how often a later one was let past it."""

    want: Want
    since: float
    passed: int = 0


@dataclass(slots=True)
class HeldCluster:
    """A fixed cluster with its GPUs."""

    epoch: int
    gpus: tuple[int, ...]
    priority: Priority
    step: int
    since: float
    hold_until: float
    request: int


@dataclass(slots=True)
class AwakeRank:
    """A generation rank that holds its GPUs; `since` is when it got them, `serves_since` when it first took
    requests.
    """

    phase: Phase
    epoch: int
    since: float
    version: int = -1
    guaranteed: bool = False
    serves_since: float | None = None

    def slice_began(self) -> float:
        """Begin of its time slice: time of use, without waking."""
        return self.since if self.serves_since is None else self.serves_since


@dataclass(slots=True)
class SavedPipeline:
    """What is saved of a registered pipeline. `unscheduled_since`: since when it has demand but no rank awake or about
    to be. `service`: GPU-seconds of generation had. `builds`: whether its engines can be built; `build_s`: how long
    that took. `batch_since`: since when the samples that are waited for are, `idle_since`: since when none are, where
    that is so; `generation_s`: how long it takes until training is asked for. `warm`: ranks whose engine stands, so
    that their next wake builds none; `handover_s`: how long such a wake takes until the rank serves; `start_s`: the
    same for one that builds its engine. `expired`: by cluster, the newest request that waited too long.
    """

    spec: PipelineSpec
    incarnation: int
    registered_at: float
    demand: Demand = Demand()
    wants: dict[str, QueuedWant] = field(default_factory=dict)
    held: dict[str, HeldCluster] = field(default_factory=dict)
    awake: dict[int, AwakeRank] = field(default_factory=dict)
    warm: set[int] = field(default_factory=set)
    handover_s: float | None = None
    start_s: float | None = None
    cooling: dict[int, float] = field(default_factory=dict)
    releases: dict[str, int] = field(default_factory=dict)
    hold_estimates: dict[Priority, float] = field(default_factory=dict)
    unscheduled_since: float | None = None
    service: float = 0.0
    last_request: int = -1
    expired: dict[str, int] = field(default_factory=dict)
    leaving: bool = False
    paused: bool = False
    fenced: bool = False
    builds: bool = False
    build_s: float | None = None
    batch_since: float = 0.0
    idle_since: float = 0.0
    generation_s: float | None = None

    @classmethod
    def of(cls, pipeline: SavedPipeline) -> Self:
        """The pipeline, but for what follows from the others and from the claims."""
        return cls(pipeline.spec, **{name: copy.deepcopy(getattr(pipeline, name)) for name in _KEPT})


_KEPT = tuple(member.name for member in fields(SavedPipeline) if member.name != "spec")


@dataclass(slots=True)
class PipelineState(SavedPipeline):
    """One registered pipeline. `wake_order`: its ranks, those first whose GPUs the fewest others train on, and among
    them those that its own training spares.
    """

    claimed_ranks: set[int] = field(default_factory=set)
    wake_order: tuple[int, ...] = ()
    topology: Topology = field(init=False)

    def __post_init__(self) -> None:
        self.topology = Topology(self.spec)

    @property
    def rank_batch(self) -> int:
        """How many samples one rank runs at once at good speed."""
        return self.demand.rank_batch or self.spec.rank_batch

    @property
    def withdraws(self) -> bool:
        """Whether its ranks go to sleep and nothing more is given to it: for good, or until it is resumed."""
        return self.leaving or self.paused

    def waking(self) -> bool:
        """Whether an expand is planned or under way."""
        return bool(self.claimed_ranks) or any(rank.phase is Phase.RISING for rank in self.awake.values())


@event_kind("ts_state_saved")
class StateSaved:
    """The state after all events before this one; says nothing new."""

    nodes: int
    gpus_per_node: int
    limits: Mapping[str, float]
    term: int
    epoch: int
    plan: int
    recovering: bool
    pipelines: tuple[SavedPipeline, ...]
    incarnations: Mapping[str, int]
    claims: tuple[Claim, ...]
    quarantines: tuple[ev.GpusQuarantined, ...]
    commands: tuple[ev.CommandSent, ...]
    unsure: bool = False
    slots_per_gpu: int = 1
    draining: Mapping[int, float | None] = field(default_factory=dict)
    away: tuple[int, ...] = ()
    quota_use: QuotaUse | None = None


_EWMA = 0.3
EXPIRED = "expired"
"""Why a request was dropped that its pipeline still waits for."""


class InconsistentLog(RuntimeError):
    """An event contradicts the state that the events before it made."""


class SchedulerState:
    """The scheduler's complete state. Read it freely; change it through `apply` only."""

    def __init__(self) -> None:
        self.pool = Pool(1, 1)
        self.limits = Limits()
        self.term = 0
        self.epoch = 0
        self.plan = 0
        self.recovering = False
        # A scheduler went on without the end of its log and has not taken stock since; the next one is no wiser.
        self.unsure = False
        self.time = 0.0
        self.pipelines: dict[str, PipelineState] = {}
        # Kept for names that are gone, too: what a late reaper or message says of an incarnation must never be taken
        # for another's.
        self.incarnations: dict[str, int] = {}
        self.owner: list[Lease | None] = [None]
        self.trainers: list[int] = [0]
        self.claims: dict[tuple[str, str, int], Claim] = {}
        self.claimed: dict[int, Claim] = {}
        self.quarantines: list[ev.GpusQuarantined] = []
        self.quarantined: set[int] = set()
        self.commands: dict[str, ev.CommandSent] = {}
        # Nodes that are to leave, with the time by which; those that are not there; and the GPUs of both.
        self.draining: dict[int, float | None] = {}
        self.away: set[int] = set()
        self.withheld: set[int] = set()
        # None without a team: nothing is counted then.
        self.quota_use: QuotaUse | None = None

    def apply(self, event: object, at: float) -> None:
        """Takes one event into the state; events of other parts of the run are not the scheduler's and change
        nothing.
        """
        fold = _FOLDS.get(type(event))
        if fold is not None:
            self.time = at
            fold(self, event, at)

    def free(self, gpu: int) -> bool:
        """Whether the GPU is not held (it may still be claimed)."""
        return self.owner[gpu] is None and gpu not in self.quarantined

    def pipeline(self, name: str) -> PipelineState:
        found = self.pipelines.get(name)
        if found is None:
            raise InconsistentLog(f"pipeline {name!r} is not registered")
        return found

    def take(self, gpus: Sequence[int], lease: Lease) -> None:
        for gpu in gpus:
            if self.owner[gpu] is not None:
                raise InconsistentLog(f"GPU {gpu} is held by {self.owner[gpu]} and cannot go to {lease}")
            self.owner[gpu] = lease
        self._count(lease.pipeline, gpus, 1)

    def give_back(self, pipeline: str, gpus: Sequence[int]) -> None:
        for gpu in gpus:
            self.owner[gpu] = None
        self._count(pipeline, gpus, -1)

    def _count(self, pipeline: str, gpus: Sequence[int], sign: int) -> None:
        if self.quota_use is not None:
            slots = sum(gpu < self.pool.slots for gpu in gpus)
            self.quota_use.add(self.pipelines[pipeline].spec, sign * slots, self.time)

    def count_use(self, use: QuotaUse) -> None:
        """Counts for these quotas from here on, what is held already included."""
        self.quota_use = use
        for lease in self.owner[: self.pool.slots]:
            if lease is not None:
                use.add(self.pipelines[lease.pipeline].spec, 1, use.counted_at)

    def add_claim(self, claim: Claim) -> None:
        for gpu in claim.gpus:
            if gpu in self.claimed:
                raise InconsistentLog(
                    f"GPU {gpu} is claimed by {self.claimed[gpu].key} and cannot be claimed by {claim.key}"
                )
            self.claimed[gpu] = claim
        self.claims[claim.key] = claim
        if claim.rank >= 0:
            self.pipeline(claim.pipeline).claimed_ranks.add(claim.rank)

    def on(self, node: int) -> set[str]:
        """The pipelines that hold GPUs of a node."""
        units = self.pool.units_of([node])
        return {lease.pipeline for lease in (self.owner[unit] for unit in units) if lease is not None}

    def finishing(self) -> set[str]:
        """The pipelines that train on nodes that are to leave: they have these until they have left."""
        if not self.draining:
            return set()
        units = self.pool.units_of(self.draining)
        return {name for name, p in self.pipelines.items() if not p.topology.training_gpus.isdisjoint(units)}

    def drop_claim(self, key: tuple[str, str, int]) -> None:
        claim = self.claims.pop(key, None)
        if claim is None:
            return
        for gpu in claim.gpus:
            del self.claimed[gpu]
        pipeline = self.pipelines.get(claim.pipeline)
        if pipeline is not None:
            pipeline.claimed_ranks.discard(claim.rank)

    def update_unscheduled_since(self, pipeline: PipelineState, at: float) -> None:
        up = (rank.phase not in SLEEP_PHASES for rank in pipeline.awake.values())
        has_rank = bool(pipeline.claimed_ranks) or any(up)
        unscheduled = pipeline.demand.remaining > 0 and not has_rank and not pipeline.withdraws and not pipeline.fenced
        if not unscheduled:
            pipeline.unscheduled_since = None
        elif pipeline.unscheduled_since is None:
            pipeline.unscheduled_since = at


def replay(entries: Iterable[Entry]) -> SchedulerState:
    """The state that a log leads to. Raises InconsistentLog where an event contradicts the ones before it."""
    state = SchedulerState()
    for entry in entries:
        try:
            state.apply(entry.event, entry.time)
        except InconsistentLog as error:
            what = type(entry.event).__name__
            raise InconsistentLog(f"entry {entry.seq} ({what}) at {entry.time:.3f} s: {error}") from error
    return state


def _pool_opened(state: SchedulerState, event: ev.PoolOpened, at: float) -> None:
    state.pool = event.pool
    state.limits = limits_from(event.limits)
    state.owner = [None] * state.pool.size
    state.trainers = [0] * state.pool.size
    state.draining.clear()
    state.away.clear()
    state.withheld.clear()


def _state_saved(state: SchedulerState, event: StateSaved, at: float) -> None:
    state.__dict__.update(SchedulerState().__dict__)
    _pool_opened(state, ev.PoolOpened(event.nodes, event.gpus_per_node, event.limits, event.slots_per_gpu), at)
    state.time, state.term, state.epoch, state.plan = at, event.term, event.epoch, event.plan
    state.recovering, state.unsure = event.recovering, event.unsure
    state.incarnations = dict(event.incarnations)
    for kept in event.pipelines:
        name, pipeline = kept.spec.pipeline, PipelineState.of(kept)
        state.pipelines[name] = pipeline
        for cluster, held in pipeline.held.items():
            state.take(held.gpus, Lease(name, cluster, -1, held.epoch))
        for rank, awake in pipeline.awake.items():
            state.take(pipeline.topology.ranks[rank], Lease(name, ACTOR_INFER, rank, awake.epoch))
        for gpu in pipeline.topology.training_gpus:
            state.trainers[gpu] += 1
    for pipeline in state.pipelines.values():
        _order_wakes(state, pipeline)
    if event.quota_use is not None:
        state.count_use(replace(event.quota_use, slots_per_gpu=event.slots_per_gpu))
    for claim in event.claims:
        state.add_claim(claim)
    state.quarantines = list(event.quarantines)
    state.quarantined = {gpu for quarantine in state.quarantines for gpu in quarantine.gpus}
    state.commands = {command.command: command for command in event.commands}
    state.draining, state.away = dict(event.draining), set(event.away)
    state.withheld = state.pool.units_of(state.draining.keys() | state.away)


def _started(state: SchedulerState, event: ev.SchedulerStarted, at: float) -> None:
    state.term = event.term
    state.recovering = event.term > 1
    state.unsure = state.unsure or not event.complete


def _inventory_done(state: SchedulerState, event: ev.InventoryDone, at: float) -> None:
    state.recovering = state.unsure = False


def _registered(state: SchedulerState, event: ev.Registered, at: float) -> None:
    if event.pipeline in state.pipelines:
        raise InconsistentLog(f"pipeline {event.pipeline!r} is already registered")
    spec = PipelineSpec(event.pipeline, event.namespace, event.clusters, **event.options())
    state.pipelines[event.pipeline] = PipelineState(spec, event.incarnation, at)
    state.incarnations[event.pipeline] = max(
        event.incarnation, state.incarnations.get(event.pipeline, event.incarnation)
    )
    _count_trainer(state, state.pipelines[event.pipeline].topology, 1)
    _order_wakes(state, state.pipelines[event.pipeline])


def _count_trainer(state: SchedulerState, topology: Topology, change: int) -> None:
    for gpu in topology.training_gpus:
        state.trainers[gpu] += change
    for other in state.pipelines.values():
        if not other.topology.mapped_gpus.isdisjoint(topology.training_gpus):
            _order_wakes(state, other)


def _order_wakes(state: SchedulerState, pipeline: PipelineState) -> None:
    topology = pipeline.topology

    def dislike(rank: int) -> tuple[int, bool, int]:
        own = sum(1 for gpu in topology.ranks[rank] if gpu in topology.training_gpus)
        return sum(state.trainers[gpu] for gpu in topology.ranks[rank]) - own, own > 0, rank

    pipeline.wake_order = tuple(sorted(range(len(topology.ranks)), key=dislike))


def _quotas_set(state: SchedulerState, event: ev.QuotasSet, at: float) -> None:
    use = {} if state.quota_use is None else state.quota_use.weighed(at)
    state.count_use(QuotaUse(event.nodes, event.half_life_s, at, use, {}, at, state.pool.slots_per_gpu))


def _use_weighed(state: SchedulerState, event: ev.UseWeighed, at: float) -> None:
    if state.quota_use is not None:
        state.quota_use.weigh(event.use, at)


def _demand(state: SchedulerState, event: ev.DemandReported, at: float) -> None:
    pipeline = state.pipeline(event.pipeline)
    demand = Demand(event.target, event.done, event.unit, event.seq, event.rank_batch)
    if pipeline.demand.remaining == 0 or demand.done < pipeline.demand.done:
        pipeline.batch_since = at
    if demand.remaining == 0 < pipeline.demand.remaining:
        pipeline.idle_since = at
    pipeline.demand = demand
    state.update_unscheduled_since(pipeline, at)


def _builds_ahead(state: SchedulerState, event: ev.BuildsAhead, at: float) -> None:
    state.pipeline(event.pipeline).builds = True


def _requested(state: SchedulerState, event: ev.Requested, at: float) -> None:
    pipeline = state.pipeline(event.pipeline)
    pipeline.last_request = max(pipeline.last_request, event.request)
    if event.cluster not in pipeline.held and event.priority is not Priority.INITIALIZATION:
        pipeline.generation_s = _smoothed(pipeline.generation_s, at - pipeline.batch_since)
    pipeline.wants[event.cluster] = QueuedWant(Want(event.cluster, event.priority, event.request, event.step), at)


def _request_dropped(state: SchedulerState, event: ev.RequestDropped, at: float) -> None:
    pipeline = state.pipeline(event.pipeline)
    pipeline.wants.pop(event.cluster, None)
    if event.reason == EXPIRED:
        pipeline.expired[event.cluster] = event.request


def _claimed(state: SchedulerState, event: ev.Claimed, at: float) -> None:
    state.plan = max(state.plan, event.plan)
    state.add_claim(event)
    if event.rank >= 0:
        state.update_unscheduled_since(state.pipeline(event.pipeline), at)
    for passed in event.passed:
        name, _, request = passed.rpartition("#")
        for queued in state.pipeline(name).wants.values():
            if queued.want.request == int(request):
                queued.passed += 1


def _claim_dropped(state: SchedulerState, event: ev.ClaimDropped, at: float) -> None:
    state.drop_claim((event.pipeline, event.cluster, event.rank))
    state.update_unscheduled_since(state.pipeline(event.pipeline), at)


def _granted(state: SchedulerState, event: ev.Granted, at: float) -> None:
    pipeline = state.pipeline(event.pipeline)
    state.drop_claim((event.pipeline, event.cluster, -1))
    state.take(event.gpus, Lease(event.pipeline, event.cluster, -1, event.epoch))
    state.epoch = max(state.epoch, event.epoch)
    pipeline.held[event.cluster] = HeldCluster(
        event.epoch, event.gpus, event.priority, event.step, at, event.hold_until, event.request
    )
    pipeline.wants.pop(event.cluster, None)
    pipeline.last_request = max(pipeline.last_request, event.request)


def _priority_changed(state: SchedulerState, event: ev.PriorityChanged, at: float) -> None:
    pipeline = state.pipeline(event.pipeline)
    held = pipeline.held[event.cluster]
    _note_hold(pipeline, held, at)
    held.priority, held.step, held.since, held.request = event.priority, event.step, at, event.request
    pipeline.wants.pop(event.cluster, None)


def _released(state: SchedulerState, event: ev.Released, at: float) -> None:
    pipeline = state.pipeline(event.pipeline)
    held = pipeline.held.pop(event.cluster)
    pipeline.releases[event.cluster] = held.epoch
    _note_hold(pipeline, held, at)
    state.give_back(event.pipeline, held.gpus)


def _note_hold(pipeline: PipelineState, held: HeldCluster, at: float) -> None:
    known = pipeline.hold_estimates.get(held.priority)
    pipeline.hold_estimates[held.priority] = _smoothed(known, at - held.since)


def _smoothed(known: float | None, seconds: float) -> float:
    return seconds if known is None else (1 - _EWMA) * known + _EWMA * seconds


def _rank_moved(state: SchedulerState, event: ev.RankMoved, at: float) -> None:
    pipeline = state.pipeline(event.pipeline)
    gpus = pipeline.topology.ranks[event.rank]
    if event.phase in (Phase.RISING, Phase.BUILDING):
        state.drop_claim((event.pipeline, ACTOR_INFER, event.rank))
        state.take(gpus, Lease(event.pipeline, ACTOR_INFER, event.rank, event.epoch))
        state.epoch = max(state.epoch, event.epoch)
        pipeline.awake[event.rank] = AwakeRank(event.phase, event.epoch, at, guaranteed=event.guaranteed)
    elif event.phase is Phase.ASLEEP:
        rank = pipeline.awake.pop(event.rank)
        pipeline.service += len(gpus) * (at - rank.since)
        state.give_back(event.pipeline, gpus)
        if rank.phase is Phase.FAILED:
            pipeline.cooling[event.rank] = at + state.limits.quarantine_s
            pipeline.warm.discard(event.rank)
        elif rank.phase is Phase.BUILDING:
            pipeline.warm.add(event.rank)
            pipeline.build_s = _smoothed(pipeline.build_s, at - rank.since)
    else:
        rank = pipeline.awake[event.rank]
        rank.phase, rank.version = event.phase, max(rank.version, event.version)
        if event.phase is Phase.SERVING:
            rank.serves_since = at
            _note_handover(pipeline, event.rank, at - rank.since)
    state.update_unscheduled_since(pipeline, at)


def _note_handover(pipeline: PipelineState, rank: int, seconds: float) -> None:
    if seconds > 0 and rank in pipeline.warm:
        pipeline.handover_s = _smoothed(pipeline.handover_s, seconds)
    elif seconds > 0:
        pipeline.start_s = _smoothed(pipeline.start_s, seconds)
        pipeline.build_s = _smoothed(pipeline.build_s, seconds)
    pipeline.warm.add(rank)


def _rank_cooling(state: SchedulerState, event: ev.RankCooling, at: float) -> None:
    state.pipeline(event.pipeline).cooling[event.rank] = event.until


def _command_sent(state: SchedulerState, event: ev.CommandSent, at: float) -> None:
    state.commands[event.command] = event


def _command_ended(state: SchedulerState, event: ev.CommandEnded, at: float) -> None:
    state.commands.pop(event.command, None)


def _withdraws(state: SchedulerState, event: ev.Leaving | ev.Paused | ev.Resumed, at: float) -> None:
    pipeline = state.pipeline(event.pipeline)
    pipeline.leaving = pipeline.leaving or isinstance(event, ev.Leaving)
    pipeline.paused = isinstance(event, ev.Paused)
    state.update_unscheduled_since(pipeline, at)


def _fenced(state: SchedulerState, event: ev.Fenced, at: float) -> None:
    pipeline = state.pipeline(event.pipeline)
    pipeline.fenced = True
    pipeline.wants.clear()
    state.update_unscheduled_since(pipeline, at)


def _unregistered(state: SchedulerState, event: ev.Unregistered, at: float) -> None:
    gone = state.pipeline(event.pipeline)
    for held in gone.held.values():
        state.give_back(event.pipeline, held.gpus)
    for rank in gone.awake:
        state.give_back(event.pipeline, gone.topology.ranks[rank])
    del state.pipelines[event.pipeline]
    _count_trainer(state, gone.topology, -1)
    for key in [key for key in state.claims if key[0] == event.pipeline]:
        state.drop_claim(key)


def _quarantined(state: SchedulerState, event: ev.GpusQuarantined, at: float) -> None:
    state.quarantines = [q for q in state.quarantines if (q.gpus, q.whose) != (event.gpus, event.whose)]
    state.quarantines.append(event)
    state.quarantined.update(event.gpus)


def _cleared(state: SchedulerState, event: ev.GpusCleared, at: float) -> None:
    whose = (event.pipeline, event.incarnation, event.rank)
    state.quarantines = [q for q in state.quarantines if (q.gpus, q.whose) != (event.gpus, whose)]
    state.quarantined.intersection_update(gpu for q in state.quarantines for gpu in q.gpus)


def _reconnected(state: SchedulerState, event: ev.Reconnected, at: float) -> None:
    for name, command in state.commands.items():
        state.commands[name] = replace(command, deadline=command.deadline + event.seconds)
    for pipeline in state.pipelines.values():
        for held in pipeline.held.values():
            held.hold_until += event.seconds


def _node_moved(state: SchedulerState, event: ev.NodeDraining | ev.NodeAway | ev.NodeHere, at: float) -> None:
    state.draining.pop(event.node, None)
    state.away.discard(event.node)
    if isinstance(event, ev.NodeDraining):
        state.draining[event.node] = event.by
    elif isinstance(event, ev.NodeAway):
        if holders := state.on(event.node):
            raise InconsistentLog(f"node {event.node} is away while {', '.join(sorted(holders))} holds GPUs of it")
        state.away.add(event.node)
        units = state.pool.units_of([event.node])
        for pipeline in state.pipelines.values():
            # Its engines end with the node.
            pipeline.warm = {rank for rank in pipeline.warm if units.isdisjoint(pipeline.topology.ranks[rank])}
    state.withheld = state.pool.units_of(state.draining.keys() | state.away)


_FOLDS: dict[type, Callable[..., None]] = {
    StateSaved: _state_saved,
    ev.PoolOpened: _pool_opened,
    ev.SchedulerStarted: _started,
    ev.InventoryDone: _inventory_done,
    ev.Registered: _registered,
    ev.QuotasSet: _quotas_set,
    ev.UseWeighed: _use_weighed,
    ev.DemandReported: _demand,
    ev.BuildsAhead: _builds_ahead,
    ev.Requested: _requested,
    ev.RequestDropped: _request_dropped,
    ev.Claimed: _claimed,
    ev.ClaimDropped: _claim_dropped,
    ev.Granted: _granted,
    ev.PriorityChanged: _priority_changed,
    ev.Released: _released,
    ev.RankMoved: _rank_moved,
    ev.RankCooling: _rank_cooling,
    ev.CommandSent: _command_sent,
    ev.CommandEnded: _command_ended,
    ev.Leaving: _withdraws,
    ev.Paused: _withdraws,
    ev.Resumed: _withdraws,
    ev.Fenced: _fenced,
    ev.Unregistered: _unregistered,
    ev.GpusQuarantined: _quarantined,
    ev.GpusCleared: _cleared,
    ev.Reconnected: _reconnected,
    ev.NodeDraining: _node_moved,
    ev.NodeAway: _node_moved,
    ev.NodeHere: _node_moved,
}
ACCOUNTED = frozenset(_FOLDS)
"""The events that the state is a fold of."""
