"""The planner's working copy of the GPUs: donors, claims and reservations of the plan being made.

It starts from a snapshot and records each decision, so that later decisions of the same plan see earlier ones. The
snapshot does not change.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from nemo_rl.time_sharing.log.ledger import Lease, PipelineState, QueuedWant
from nemo_rl.time_sharing.planning.plan import Plan, Reason, Shrink, Snapshot
from nemo_rl.time_sharing.protocol.types import SLEEP_PHASES, Phase, Priority

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


class PlanState:
    """GPUs and ranks as they will be once the decisions so far are carried out."""

    def __init__(self, snapshot: Snapshot, now: float) -> None:
        self.now = now
        self.limits = snapshot.limits
        self.pipelines = snapshot.pipelines
        self.owner = snapshot.owner
        self.claimed = snapshot.claimed
        self.quarantined = snapshot.quarantined
        self.slots = snapshot.slots
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
        self._usual_holds: dict[Priority, float] = {}
        self.useful: dict[str, int] = {name: useful_ranks(p) for name, p in snapshot.pipelines.items()}
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

    def claim_fixed(self, name: str, gpus: tuple[int, ...]) -> None:
        self.claim(gpus)
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
        unscheduled pipeline never.
        """
        queued = reservation.queued
        return queued is not None and queued.passed + self.passings[reservation.label] < self.limits.max_backfills

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
            return math.inf if queued is None else self.now + self._usual(claim.pipeline, queued.want.priority)
        if lease is None:
            return math.inf
        if lease.rank >= 0:
            return self._built_at(lease)
        held = self.pipelines[lease.pipeline].held.get(lease.cluster)
        return math.inf if held is None else max(held.since + self._usual(lease.pipeline, held.priority), self.now)

    def _built_at(self, lease: Lease) -> float:
        """Time at which an engine that is built ahead is expected to be ready; infinity for a rank that failed."""
        holder = self.pipelines[lease.pipeline]
        awake = holder.awake.get(lease.rank)
        if awake is None or awake.phase is not Phase.BUILDING:
            return math.inf
        return max(awake.since + (holder.build_s or 0.0), self.now)

    def _usual(self, name: str, priority: Priority) -> float:
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
