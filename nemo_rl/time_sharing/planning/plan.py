"""The plan: what the planner says, the state that it plans on, and which ranks may wake in it.

A `Snapshot` is what the scheduler knows at one moment, a `Plan` what it does next. `PlanState` is a snapshot with what
the plan has given away so far.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from nemo_rl.time_sharing.log.quota_use import QuotaUse
from nemo_rl.time_sharing.log.state import Claim, Lease, PipelineState, QueuedWant, SchedulerState
from nemo_rl.time_sharing.protocol.quotas import NO_QUOTAS, Quotas
from nemo_rl.time_sharing.protocol.types import SLEEP_PHASES, Limits, Phase, Priority

Reason = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Read-only input of a planner. `slots`: number of slots for engines; training turns are numbered from there on."""

    limits: Limits
    pipelines: Mapping[str, PipelineState]
    owner: Sequence[Lease | None]
    claimed: Mapping[int, Claim]
    quarantined: Set[int]
    slots: int
    withheld: Set[int] = frozenset()  # GPUs of nodes that are to leave, or away
    finishing: Set[str] = frozenset()  # pipelines that train on those that are to leave, and have them until they left
    quota_use: QuotaUse | None = None

    @classmethod
    def of(cls, state: SchedulerState) -> Snapshot:
        ledger, leaving = (state.owner, state.claimed, state.quarantined), (state.withheld, state.finishing())
        return cls(state.limits, state.pipelines, *ledger, state.pool.slots, *leaving, state.quota_use)

    @property
    def out_of_use(self) -> Set[int]:
        """GPUs that no one gets now."""
        return self.quarantined | self.withheld if self.withheld else self.quarantined

    @property
    def budget(self) -> int:
        """Slots that engines may be on."""
        return self.slots - sum(gpu < self.slots for gpu in self.out_of_use)

    @property
    def quotas(self) -> Quotas:
        """The quotas; none where the pool is no team's."""
        return NO_QUOTAS if self.quota_use is None else self.quota_use.quotas


class Grant(NamedTuple):
    """All GPUs of a fixed cluster go to it once free; `passed` are the requests ahead of it that it overtakes
    safely.
    """

    pipeline: str
    cluster: str
    request: int
    priority: Priority
    gpus: tuple[int, ...]
    passed: tuple[str, ...]
    because: Reason


class PriorityChange(NamedTuple):
    """A held cluster goes on under another priority."""

    pipeline: str
    cluster: str
    request: int
    priority: Priority
    because: Reason


class Shrink(NamedTuple):
    """A generation rank drains and sleeps."""

    pipeline: str
    rank: int
    because: Reason


class Expand(NamedTuple):
    """A generation rank takes its GPUs once free and wakes; `ahead`: its engine is built there, and sleeps then. A
    `guaranteed` rank is safe from every request for the minimum hold time.
    """

    pipeline: str
    rank: int
    gpus: tuple[int, ...]
    guaranteed: bool
    because: Reason
    ahead: bool = False


class Wait(NamedTuple):
    """A request that cannot be served now, and why."""

    pipeline: str
    cluster: str
    request: int
    because: Reason


@dataclass(slots=True)
class Plan:
    """Operations to begin now. `entitled`: GPUs of the elastic budget each pipeline with demand is entitled to, before
    rounding; `in_ranks`: the GPUs of as many whole ranks.
    """

    grants: list[Grant] = field(default_factory=list)
    priority_changes: list[PriorityChange] = field(default_factory=list)
    shrinks: list[Shrink] = field(default_factory=list)
    expands: list[Expand] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    entitled: dict[str, float] = field(default_factory=dict)
    wake_at: float | None = None
    in_ranks: dict[str, int] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not (self.grants or self.priority_changes or self.shrinks or self.expands)

    def replan_by(self, at: float) -> None:
        """Asks for another plan no later than `at`, when a hold or a slice ends."""
        if self.wake_at is None or at < self.wake_at:
            self.wake_at = at


_REASONS = {
    "free": "its GPUs are free and no earlier request in the queue wants them",
    "evicts": "generation ranks {0} on its GPUs can make way",
    "backfill": "it will be done in {0:.1f} s, before the requests ahead of it can start",
    "holds": "it already holds these GPUs",
    "for_grant": "GPUs {0} go to {1} of {2}",
    "leaving": "its pipeline is leaving",
    "paused": "its pipeline is paused",
    "node": "its node is leaving",
    "share": "its pipeline has {0} of {1:.1f} GPUs that its remaining work entitles it to",
    "ahead": "the GPUs are idle now, and it will wake at once when it is wanted",
    "gap_ends": "{0} runs in gaps, and {1} can use the GPUs",
    "idle": "{0} has had nothing to generate for {2:.1f} s, and {1} runs in gaps",
    "gap": "the GPUs would be idle otherwise, and as a scavenger it gives them to any job that wants them",
    "room": "{2} is to get GPUs, and the {1} slots of the limit of {0} are taken",
    "above": "{0} has more than the {1} slots of its limit",
    "limit": "the {1} slots of the limit of {0} are taken",
    "spare": "the GPUs would be idle otherwise",
    "gives": "{0} is served more for its work and weight ({1:.2f}) than {2} ({3:.2f}) and gives way",
    "surplus": "{0} has more ranks than work left, {1} has not",
    "unscheduled": "its pipeline has work and has had no rank for {0:.1f} s",
    "time_slice": "{0} has had its time slice on these GPUs, {1} has waited for {2:.1f} s",
    "held": "GPU {0} is held by {1} until it releases",
    "claimed": "GPU {0} goes to {1} next",
    "reserved": "GPU {0} is reserved for {1}, which is ahead in the queue",
    "outlasts": "GPUs of it are reserved for {0}, which is ahead in the queue and may start before this would end",
    "quarantined": "GPU {0} is in quarantine",
    "withheld": "the node of GPU {0} is leaving or away",
    "guaranteed": "GPU {0} is in its guaranteed time slice of {1}",
    "building": "an engine of {1} is being built on GPU {0} and cannot be stopped before it stands",
    "initialising": "{0} initialise now, as many as may at the same time",
    "expanding": "an expand of its own pipeline is under way, and the next training may not begin before it has ended",
}
_OF_A_GPU = ("held", "claimed", "reserved", "quarantined", "withheld", "guaranteed", "building")
"""Those whose first value is a GPU."""
_ABOUT_TIME = ("backfill", "unscheduled", "time_slice", "idle")


def reason_text(because: Reason, now: float = 0.0, name_of: Callable[[int], str] = str) -> str:
    """A reason as an English clause; points in time are given as seconds from `now`. `name_of`: what people call a
    slot.
    """
    name, *values = because
    if name in _ABOUT_TIME:
        values[-1] = abs(now - float(str(values[-1])))
    if name in _OF_A_GPU:
        values[0] = name_of(int(str(values[0])))
    ranks = name == "evicts"
    shown = (_listed(value, str if ranks else name_of) if isinstance(value, tuple) else value for value in values)
    return _REASONS[str(name)].format(*shown)


def explain(plan: Plan, now: float = 0.0, name_of: Callable[[int], str] = str) -> Iterator[str]:
    """Why each GPU goes where it goes, one sentence per decision; `now` is when the plan was made. `name_of`: what
    people call a slot.
    """
    reason = partial(reason_text, now=now, name_of=name_of)
    for g in plan.grants:
        what = f"{g.cluster} (GPUs {_listed(g.gpus, name_of)}) for {g.priority.name}"
        yield f"{g.pipeline} gets {what}: {reason(g.because)}."
    for r in plan.priority_changes:
        yield f"{r.pipeline} goes on with {r.cluster} for {r.priority.name}: {reason(r.because)}."
    for s in plan.shrinks:
        yield f"rank {s.rank} of {s.pipeline} goes to sleep: {reason(s.because)}."
    for e in plan.expands:
        rank = f"rank {e.rank} of {e.pipeline}"
        what = f"the engine of {rank} is built" if e.ahead else f"{rank} wakes"
        yield f"{what} on GPUs {_listed(e.gpus, name_of)}: {reason(e.because)}."
    for w in plan.waits:
        yield f"{w.pipeline} waits for {w.cluster}: {reason(w.because)}."


def _listed(numbers: tuple[int, ...], name_of: Callable[[int], str]) -> str:
    if len(numbers) > 4 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{name_of(numbers[0])}-{name_of(numbers[-1])}"
    return ", ".join(map(name_of, numbers))


FREE, FREEING, RANK, BLOCKED = 0, 1, 2, 3
"""What a GPU is to the plan: idle; being freed by a rank that is falling asleep; under a waking or awake rank; out of
reach (fixed, claimed, failed, with an engine that is being built)."""
_KIND_OF_PHASE = {phase: FREEING if phase in SLEEP_PHASES else RANK for phase in Phase} | {
    Phase.FAILED: BLOCKED,
    Phase.BUILDING: BLOCKED,
}


class Reservation(NamedTuple):
    """A request that waits for a GPU: its label, its pipeline, when the GPUs are expected free, and the request (None:
    an unscheduled pipeline).
    """

    label: str
    name: str
    free_at: float
    queued: QueuedWant | None


def has_claim(claimed: Mapping[int, Claim], pipeline: PipelineState, cluster: str) -> bool:
    """Whether the GPUs of a cluster are promised to its pipeline."""
    claim = claimed.get(pipeline.topology.clusters[cluster].gpus[0])
    return claim is not None and claim.key == (pipeline.topology.pipeline, cluster, -1)


def useful_ranks(pipeline: PipelineState) -> int:
    """How many ranks a pipeline can use: enough for its remaining samples, within its maximum share, at least one while
    it has demand.
    """
    remaining = pipeline.demand.remaining
    if remaining <= 0 or pipeline.withdraws or pipeline.fenced:
        return 0
    ranks = len(pipeline.topology.ranks)
    most = max(int(pipeline.spec.max_share * ranks + 1e-9), 1)
    return min(math.ceil(remaining / pipeline.rank_batch), most, ranks)


class Room:
    """What a limit leaves: `slots` that the jobs of a node hold, or are about to, of at most `most`."""

    __slots__ = ("most", "pipelines", "slots", "whose")

    def __init__(self, whose: str, most: int) -> None:
        self.whose, self.most = whose, most
        self.slots: set[int] = set()
        self.pipelines: list[str] = []

    def has(self, gpus: Sequence[int]) -> bool:
        """Whether so many fit beside those."""
        return (
            len(self.slots) + len(gpus) <= self.most
            or len(self.slots) + sum([gpu not in self.slots for gpu in gpus]) <= self.most
        )


class PlanState:
    """GPUs and ranks as they will be once the decisions so far are carried out."""

    def __init__(self, snapshot: Snapshot, now: float) -> None:
        self.now = now
        self.limits = snapshot.limits
        self.pipelines = snapshot.pipelines
        self.owner = snapshot.owner
        self.claimed = snapshot.claimed
        self.quarantined, self.budget = snapshot.quarantined, snapshot.budget
        self.withheld, self.finishing = snapshot.withheld, snapshot.finishing
        self.slots = snapshot.slots
        self.quotas = snapshot.quotas
        self.use: Mapping[str, float] = {} if snapshot.quota_use is None else snapshot.quota_use.use
        # The nodes of the quotas that each pipeline counts for, and what their limits leave.
        self.above: dict[str, tuple[str, ...]] = {}
        self.emptied: set[int] = set()
        self._rooms_of: dict[str, list[Room]] = {}
        self.rooms = {node: Room(node, most) for node, most in self.quotas.most.items()}
        if self.quotas.nodes:
            self.above = {name: self.quotas.above(p.spec) for name, p in snapshot.pipelines.items()}
            self._fill_rooms()
        self.reserved: dict[int, list[Reservation]] = {}
        # What generation has to know of them: when the first request is expected to start on a GPU, and which
        # unscheduled pipeline keeps it ("" where several do).
        self.first_start: dict[int, float] = {}
        self.kept_for: dict[int, str] = {}
        self.passings: Counter[str] = Counter()
        self.shrunk: set[tuple[str, int]] = set()
        self.no_expand: set[str] = set()
        self.initialising: set[str] = set()
        self.tp: dict[str, int] = {name: p.topology.tp for name, p in snapshot.pipelines.items()}
        self.time_slices: dict[str, float] = {}
        # The pipelines whose requests this plan has served.
        self.promised: set[str] = set()
        # By the shares of a team, in whole ranks.
        self.due: dict[str, int] = {}
        self._usual_holds: dict[Priority, float] = {}
        self.scavengers = {name for name, p in snapshot.pipelines.items() if p.spec.scavenges}
        self.useful: dict[str, int] = {name: useful_ranks(p) for name, p in snapshot.pipelines.items()}
        if self.withheld:
            for name, p in snapshot.pipelines.items():
                if name in self.finishing:
                    continue
                there = sum(self.withheld.isdisjoint(rank) for rank in p.topology.ranks)
                self.useful[name] = min(self.useful[name], there)
        self.counts: dict[str, int] = {}
        self.building: dict[str, int] = {}
        # GPUs of ranks that are up and do not serve yet.
        self.waking_gpus: set[int] = set()
        self.asleep: dict[str, Sequence[int]] = {}
        self.kind = self._kinds()
        # GPUs on which a pipeline trains count as its share: it is being served, though not with generation.
        self.fixed_gpus: dict[str, int] = {
            name: sum([self._count(held.gpus) for held in p.held.values()]) for name, p in snapshot.pipelines.items()
        }
        fixed_claims = {id(c): c for c in snapshot.claimed.values() if c.rank < 0}.values()
        for claim in fixed_claims:
            self.fixed_gpus[claim.pipeline] += self._count(claim.gpus)

    def _count(self, gpus: tuple[int, ...]) -> int:
        """How many of them count towards a share: training turns do not."""
        # Ascending, so that all of them are slots where the last one is.
        return len(gpus) if gpus[-1] < self.slots else sum(gpu < self.slots for gpu in gpus)

    def _fill_rooms(self) -> None:
        for name, above in self.above.items():
            self._rooms_of[name] = rooms = [self.rooms[node] for node in above if node in self.rooms]
            pipeline = self.pipelines[name]
            ranks = pipeline.topology.ranks
            held = [ranks[rank] for rank in pipeline.awake]
            trained_on = [self._slots_of(cluster.gpus) for cluster in pipeline.held.values()]
            for room in rooms:
                room.pipelines.append(name)
                room.slots.update(*held, *trained_on)
        for gpu, claim in self.claimed.items() if self.rooms else ():
            self.take_room(claim.pipeline, (gpu,))

    def rooms_of(self, name: str) -> list[Room]:
        """The limits that a pipeline counts towards."""
        return self._rooms_of.get(name, [])

    def is_near_limit(self, name: str) -> bool:
        """Whether one more rank of a pipeline could exceed a limit."""
        if not self.rooms:
            return False
        return any(len(room.slots) + self.tp[name] > room.most for room in self.rooms_of(name))

    def empty(self, result: Plan, name: str, rank: int, because: Reason) -> None:
        """Puts a rank to sleep for a limit: its GPUs are given away once it sleeps."""
        self.shrink(result, name, rank, because)
        self.emptied.update(self.ranks_of(name)[rank])
        self.claim(self.ranks_of(name)[rank])

    def has_room(self, name: str, gpus: tuple[int, ...]) -> bool:
        """Whether a pipeline can have these GPUs within all limits."""
        return all(room.has(self._slots_of(gpus)) for room in self.rooms_of(name))

    def too_small(self, name: str, gpus: tuple[int, ...]) -> Room | None:
        """A limit below what these GPUs of a pipeline alone count: it was lowered."""
        return next((room for room in self.rooms_of(name) if len(self._slots_of(gpus)) > room.most), None)

    def take_room(self, name: str, gpus: tuple[int, ...]) -> None:
        """Counts GPUs that a pipeline gets, or waits for."""
        for room in self.rooms_of(name):
            room.slots.update(self._slots_of(gpus))

    def lack(self, room: Room, gpus: tuple[int, ...] = ()) -> int:
        """How many slots are missing for these, beside those that are being freed."""
        freeing = sum(self.kind[gpu] == FREEING or gpu in self.emptied for gpu in room.slots.difference(gpus))
        more = sum([gpu not in room.slots for gpu in self._slots_of(gpus)])
        return len(room.slots) + more - freeing - room.most

    def _slots_of(self, gpus: tuple[int, ...]) -> Sequence[int]:
        return gpus if gpus[-1:] < (self.slots,) else [gpu for gpu in gpus if gpu < self.slots]

    def spare_ranks(self, name: str) -> float:
        """How many ranks of a pipeline may be taken with the least harm: all of one that runs in gaps."""
        return math.inf if name in self.scavengers else self.counts[name]

    def gpus_of(self, name: str) -> int:
        """GPUs that a pipeline holds or is about to hold, for training and for generation."""
        return self.fixed_gpus[name] + self.counts[name] * self.tp[name]

    def _kinds(self) -> bytearray:
        """Kind of each GPU by its holder; also counts the ranks that are up."""
        # Nearly all ranks that hold GPUs serve. The leases name them; only the others are read one by one.
        kind = bytearray([FREE if lease is None else RANK if lease.rank >= 0 else BLOCKED for lease in self.owner])
        active = Phase.SERVING
        for name, pipeline in self.pipelines.items():
            fenced, up = pipeline.fenced, len(pipeline.awake)
            for rank, awake in pipeline.awake.items():
                if awake.phase is active and not fenced:
                    continue
                what, gpus = _KIND_OF_PHASE[awake.phase], pipeline.topology.ranks[rank]
                if what != RANK:
                    up -= 1
                elif awake.phase is not active:
                    self.waking_gpus.update(gpus)
                if awake.phase is Phase.BUILDING:
                    self.building[name] = self.building.get(name, 0) + 1
                for gpu in gpus:
                    kind[gpu] = BLOCKED if fenced else what
            self.counts[name] = len(pipeline.claimed_ranks) + up
        for gpu in self.claimed:
            kind[gpu] = BLOCKED
        for gpu in self.quarantined:
            kind[gpu] = BLOCKED
        return kind

    def ranks_of(self, name: str) -> tuple[tuple[int, ...], ...]:
        return self.pipelines[name].topology.ranks

    def shrink(self, result: Plan, name: str, rank: int, because: Reason) -> None:
        """Puts a rank to sleep, once per plan; one that is already falling asleep needs no order."""
        awake = self.pipelines[name].awake[rank]
        if awake.phase in SLEEP_PHASES or (name, rank) in self.shrunk:
            return
        self.shrunk.add((name, rank))
        self.counts[name] -= 1
        for gpu in self.ranks_of(name)[rank]:
            if self.kind[gpu] == RANK:
                self.kind[gpu] = FREEING
        result.shrinks.append(Shrink(name, rank, because))

    def claim(self, gpus: Iterable[int]) -> None:
        for gpu in gpus:
            self.kind[gpu] = BLOCKED

    def waits_to_train(self, name: str) -> bool:
        """Whether a pipeline's training waits for GPUs that it has no promise of."""
        pipeline = self.pipelines[name]
        return name not in self.promised and any(
            queued.want.priority is Priority.ACTOR_TRAINING and not has_claim(self.claimed, pipeline, cluster)
            for cluster, queued in pipeline.wants.items()
        )

    def claim_fixed(self, name: str, gpus: tuple[int, ...]) -> None:
        self.promised.add(name)
        self.claim(gpus)
        self.take_room(name, gpus)
        self.fixed_gpus[name] += self._count(gpus)

    def reserve(self, gpus: Iterable[int], reservation: Reservation) -> None:
        for gpu in gpus:
            self.reserved.setdefault(gpu, []).append(reservation)
            if reservation.queued is None:
                alone = self.kept_for.get(gpu, reservation.name) == reservation.name
                self.kept_for[gpu] = reservation.name if alone else ""
            elif reservation.free_at < self.first_start.get(gpu, math.inf):
                self.first_start[gpu] = reservation.free_at

    @property
    def kept(self) -> Set[int]:
        """GPUs that some generation cannot have though they are free."""
        return self.first_start.keys() | self.kept_for.keys()

    def may_be_passed(self, reservation: Reservation) -> bool:
        """Whether a later request may yet be let past, counting those that this plan has let past already; an
        unscheduled pipeline and one of high priority never.
        """
        queued = reservation.queued
        if queued is None or self.pipelines[reservation.name].spec.is_high:
            return False
        return queued.passed + self.passings[reservation.label] < self.limits.max_backfills

    def estimate(self, pipeline: PipelineState, priority: Priority) -> float | None:
        """How long this pipeline's holds of this kind have lasted, seconds; None before the first has ended."""
        return pipeline.hold_estimates.get(priority)

    def free_at(self, gpu: int) -> float:
        """Time at which a blocked GPU is expected back, estimated from past holds; infinity if there is no estimate.

        A kind of hold that its pipeline has not had before is expected to last as long as those of other pipelines.
        Generation that is about to wake there can be evicted at once.
        """
        claim, lease = self.claimed.get(gpu), self.owner[gpu]
        if gpu in self.quarantined:
            return math.inf
        if claim is not None:
            queued = self.pipelines[claim.pipeline].wants.get(claim.cluster)
            if claim.rank >= 0:
                return self.now
            return math.inf if queued is None else self.now + self.usual(claim.pipeline, queued.want.priority)
        if lease is None:
            return math.inf
        if lease.rank >= 0:
            return self.built_at(lease.pipeline, lease.rank)
        held = self.pipelines[lease.pipeline].held.get(lease.cluster)
        return math.inf if held is None else max(held.since + self.usual(lease.pipeline, held.priority), self.now)

    def built_at(self, name: str, rank: int) -> float:
        """Time at which an engine that is built ahead is expected to be ready; infinity for a rank that failed."""
        holder = self.pipelines[name]
        awake = holder.awake.get(rank)
        if awake is None or awake.phase is not Phase.BUILDING:
            return math.inf
        return max(awake.since + (holder.build_s or 0.0), self.now)

    def usual(self, name: str, priority: Priority) -> float:
        """How long a hold lasts, by those of the pipeline, else by those of all; infinity before there was any."""
        seconds = self.estimate(self.pipelines[name], priority)
        if seconds is not None:
            return seconds
        known = self._usual_holds.get(priority)
        if known is None:
            past = [p.hold_estimates[priority] for p in self.pipelines.values() if priority in p.hold_estimates]
            known = self._usual_holds[priority] = sum(past) / len(past) if past else math.inf
        return known

    def rise_s(self, name: str, rank: int) -> float:
        """How long a rank is expected to take until it serves; 0 before any has."""
        pipeline = self.pipelines[name]
        return (pipeline.handover_s if rank in pipeline.warm else pipeline.start_s) or 0.0

    def why_blocked(self, gpu: int) -> Reason:
        if gpu in self.quarantined:
            return ("quarantined", gpu)
        claim = self.claimed.get(gpu)
        if claim is not None:
            return ("claimed", gpu, f"{claim.cluster} of {claim.pipeline}")
        lease = self.owner[gpu]
        awake = self.pipelines[lease.pipeline].awake.get(lease.rank) if lease is not None else None
        if lease is not None and awake is not None and awake.phase is Phase.BUILDING:
            return ("building", gpu, lease.pipeline)
        if lease is not None:
            return ("held", gpu, f"{lease.cluster} of {lease.pipeline}")
        return ("claimed", gpu, "a request earlier in the queue")


_WORTH_HANDOVERS = 4.0
"""How many times the hand-over a time slice lasts, so that at most a fifth of a GPU's time goes into moving it."""
_LONGEST_SLICE = 4.0
"""How many times the time slice of a pipeline of weight 1 that of a heavy one lasts at most, whatever its weight, since
others wait for its end."""


def slice_seconds(plan_state: PlanState, name: str) -> float:
    """Seconds that a rank serves before another pipeline may take it: a multiple of its hand-over time, at most
    `max_slice_s` (`min_hold_s` before the first hand-over), scaled by the pipeline's weight, and at least its own
    `slice_s`.

    At most `max_slice_s` x `_LONGEST_SLICE` or its own `slice_s`: the longest that others wait for it.
    """
    known = plan_state.time_slices.get(name)
    if known is None:
        pipeline, hold = plan_state.pipelines[name], plan_state.limits.min_hold_s
        if pipeline.handover_s is not None:
            hold = min(_WORTH_HANDOVERS * pipeline.handover_s, plan_state.limits.max_slice_s)
        hold *= min(max(pipeline.spec.weight, 0.1), _LONGEST_SLICE)
        known = plan_state.time_slices[name] = max(hold, pipeline.spec.slice_s)
    return known


def guaranteed_seconds(pipeline: PipelineState, limits: Limits) -> float:
    """For how long a guaranteed rank of a pipeline serves at least, even if a request waits for its GPUs."""
    return max(limits.min_hold_s, pipeline.spec.slice_s)


def guaranteed_from(pipeline: PipelineState, limits: Limits) -> float:
    """Time from which a pipeline without a rank is guaranteed one; infinity if it does not wait for one.

    One whose slices are long has no use for the short ones that others get meanwhile: it waits for one slice at most.
    """
    since, slice_s = pipeline.unscheduled_since, pipeline.spec.slice_s
    if since is None or pipeline.spec.scavenges:
        return math.inf
    longest = limits.aging_s * Priority.GENERATION
    return since + (min(slice_s, longest) if slice_s else longest)


def trained_on_within(
    plan_state: PlanState, gpus: tuple[int, ...], seconds: float | None, but: str | None = None
) -> bool:
    """Whether a pipeline other than `but` may ask for these GPUs to train on within so many seconds (None:
    unknown), by its past steps.
    """
    for name, pipeline in plan_state.pipelines.items():
        if pipeline.fenced or name == but or pipeline.topology.training_gpus.isdisjoint(gpus):
            continue
        usual = pipeline.generation_s
        if seconds is None or usual is None or pipeline.demand.remaining == 0:
            return True
        if plan_state.now + seconds > pipeline.batch_since + usual:
            return True
    return False


def rank_state(plan_state: PlanState, gpus: tuple[int, ...], name: str, rank: int) -> int:
    """The worst of a rank's GPUs; one that is reserved against the rank counts as blocked."""
    kind = plan_state.kind
    worst = kind[gpus[0]] if len(gpus) == 1 else max(kind[gpu] for gpu in gpus)
    if worst != BLOCKED and reserved_against(plan_state, gpus, name, rank):
        return BLOCKED
    return worst


def reserved_against(plan_state: PlanState, gpus: tuple[int, ...], name: str, rank: int) -> bool:
    """Whether one of the GPUs is reserved for another pipeline's first rank, or for a request that will start before
    this rank could have had a slice.
    """
    first_start, kept_for = plan_state.first_start, plan_state.kept_for
    if not first_start and not kept_for:
        return False
    for gpu in gpus:
        if gpu in first_start and first_start[gpu] <= _slice_ends(plan_state, name, rank):
            return True
        if kept_for.get(gpu, name) != name:
            return True
    return False


def _slice_ends(plan_state: PlanState, name: str, rank: int) -> float:
    """End of the first slice of a rank that is woken now."""
    return plan_state.now + plan_state.rise_s(name, rank) + slice_seconds(plan_state, name)


def candidates(plan_state: PlanState, pipeline: PipelineState) -> Sequence[int]:
    """Ranks that could wake: asleep, not claimed, not cooling off after a failure, on nodes that stay, and likely to
    serve for as long as is of use; those first whose engine has been built before.
    """
    name = pipeline.topology.pipeline
    asleep = plan_state.asleep.get(name)
    if asleep is None:
        asleep = plan_state.asleep[name] = _of_use(plan_state, pipeline, _asleep(plan_state, pipeline))
    building = plan_state.building.get(name, 0)
    if building and 0 < plan_state.useful[name] <= plan_state.counts[name] + building:
        # Those stand sooner than any whose engine were begun now.
        return [rank for rank in asleep if rank in pipeline.warm]
    return asleep


def _of_use(plan_state: PlanState, pipeline: PipelineState, asleep: Sequence[int]) -> Sequence[int]:
    """Ranks on whose GPUs no training is expected before their slice has ended; all once one is guaranteed."""
    slice_s, name, ranks = pipeline.spec.slice_s, pipeline.topology.pipeline, pipeline.topology.ranks
    if not (slice_s or pipeline.spec.scavenges) or plan_state.now >= guaranteed_from(pipeline, plan_state.limits):
        return asleep
    return [
        rank
        for rank in asleep
        if not trained_on_within(plan_state, ranks[rank], plan_state.rise_s(name, rank) + slice_s, but=name)
    ]


def _asleep(plan_state: PlanState, pipeline: PipelineState) -> Sequence[int]:
    up, claimed, warm = pipeline.awake, pipeline.claimed_ranks, pipeline.warm
    asleep: Sequence[int] = pipeline.wake_order
    if up or claimed:
        asleep = [rank for rank in asleep if rank not in up and rank not in claimed]
    if warm and len(warm) < len(pipeline.topology.ranks):
        asleep = [rank for rank in asleep if rank in warm] + [rank for rank in asleep if rank not in warm]
    if pipeline.cooling:
        asleep = [rank for rank in asleep if pipeline.cooling.get(rank, 0.0) <= plan_state.now]
    if plan_state.withheld:
        ranks = pipeline.topology.ranks
        asleep = [rank for rank in asleep if plan_state.withheld.isdisjoint(ranks[rank])]
    return asleep


def expand(
    plan_state: PlanState, result: Plan, name: str, rank: int, because: Reason, *, guaranteed: bool = False
) -> None:
    gpus, kind = plan_state.pipelines[name].topology.ranks[rank], plan_state.kind
    for gpu in gpus:
        kind[gpu] = BLOCKED
    if plan_state.rooms:
        plan_state.take_room(name, gpus)
    plan_state.counts[name] += 1
    result.expands.append(Expand(name, rank, gpus, guaranteed, because))
