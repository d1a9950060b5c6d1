"""The planner's working copy of the GPUs while one plan is made: who could give what, what is claimed and what is
reserved.

It starts from a snapshot and records each decision, so that later decisions of the same plan see earlier ones. The
snapshot stays as it was.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from nemo_rl.time_sharing.log.ledger import PipelineState, QueuedWant
from nemo_rl.time_sharing.planning.hold_graph import HoldGraph, unscheduled
from nemo_rl.time_sharing.planning.plan import Plan, Reason, Shrink, Snapshot
from nemo_rl.time_sharing.protocol.types import FALLING, Phase, Priority

FREE, FREEING, RANK, BLOCKED = 0, 1, 2, 3
"""What a GPU is to the plan: idle; being freed by a rank that is falling asleep; under a waking or awake rank; out of
reach (fixed, claimed, failed)."""


class Reservation(NamedTuple):
    """A request that waits for a GPU: its label, its pipeline, when the GPUs are expected free, and the request (None:
    an unscheduled pipeline).
    """

    label: str
    name: str
    free_at: float
    queued: QueuedWant | None

    @property
    def waiter(self) -> str:
        """Who waits, as `HoldGraph` names it."""
        return self.name if self.queued is not None else unscheduled(self.name)


def useful_ranks(pipeline: PipelineState) -> int:
    """How many ranks a pipeline can use: enough for its remaining samples, within its maximum share, at least one while
    it has demand.
    """
    remaining = pipeline.demand.remaining
    if remaining <= 0 or pipeline.leaving or pipeline.fenced:
        return 0
    ranks = len(pipeline.topology.ranks)
    most = max(int(pipeline.spec.max_share * ranks + 1e-9), 1)
    return min(math.ceil(remaining / pipeline.spec.rank_batch), most, ranks)


class PlanState:
    """GPUs and ranks as they will be once the decisions so far are carried out."""

    def __init__(self, snapshot: Snapshot, now: float) -> None:
        self.now = now
        self.limits = snapshot.limits
        self.pipelines = snapshot.pipelines
        self.owner = snapshot.owner
        self.claimed = snapshot.claimed
        self.quarantined = snapshot.quarantined
        self.reserved: dict[int, list[Reservation]] = {}
        self.passings: Counter[str] = Counter()
        self.shrunk: set[tuple[str, int]] = set()
        self.no_expand: set[str] = set()
        self.initialising: set[str] = set()
        self.tp: dict[str, int] = {name: p.topology.tp for name, p in snapshot.pipelines.items()}
        self.turns: dict[str, float] = {}
        self.useful: dict[str, int] = {name: useful_ranks(p) for name, p in snapshot.pipelines.items()}
        self.counts: dict[str, int] = {}
        self.kind = self._kinds()
        # GPUs on which a pipeline trains count as its share: it is being served, though not with generation.
        self.fixed_gpus: dict[str, int] = {
            name: sum(len(held.gpus) for held in p.held.values()) for name, p in snapshot.pipelines.items()
        }
        fixed_claims = {id(c): c for c in snapshot.claimed.values() if c.rank < 0}.values()
        for claim in fixed_claims:
            self.fixed_gpus[claim.pipeline] += len(claim.gpus)
        self.holds = HoldGraph(snapshot.pipelines, fixed_claims)

    def gpus_of(self, name: str) -> int:
        """GPUs that a pipeline holds or is about to hold, for training and for generation."""
        return self.fixed_gpus[name] + self.counts[name] * self.tp[name]

    def _kinds(self) -> bytearray:
        """What each GPU is, by who holds it; counts the ranks that are up on the way."""
        kind = bytearray(len(self.owner))
        for name, pipeline in self.pipelines.items():
            ranks, up = pipeline.topology.ranks, 0
            for held in pipeline.held.values():
                for gpu in held.gpus:
                    kind[gpu] = BLOCKED
            for rank, awake in pipeline.awake.items():
                falling = awake.phase in FALLING
                up += not falling
                blocked = pipeline.fenced or awake.phase is Phase.FAILED
                what = BLOCKED if blocked else FREEING if falling else RANK
                for gpu in ranks[rank]:
                    kind[gpu] = what
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
        if awake.phase in FALLING or (name, rank) in self.shrunk:
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
        self.fixed_gpus[name] += len(gpus)
        self.holds.hold(name, gpus)

    def reserve(self, gpus: Iterable[int], reservation: Reservation) -> None:
        for gpu in gpus:
            self.reserved.setdefault(gpu, []).append(reservation)

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
        """When a blocked GPU is expected back, as far as past holds tell; infinity when they do not."""
        lease = self.owner[gpu]
        if lease is None or lease.rank >= 0:
            return float("inf")
        holder = self.pipelines[lease.pipeline]
        held = holder.held.get(lease.cluster)
        seconds = None if held is None else self.estimate(holder, held.priority)
        return float("inf") if held is None or seconds is None else max(held.since + seconds, self.now)

    def why_blocked(self, gpu: int) -> Reason:
        if gpu in self.quarantined:
            return ("quarantined", gpu)
        claim = self.claimed.get(gpu)
        if claim is not None:
            return ("claimed", gpu, f"{claim.cluster} of {claim.pipeline}")
        lease = self.owner[gpu]
        if lease is not None:
            return ("held", gpu, f"{lease.cluster} of {lease.pipeline}")
        return ("claimed", gpu, "a request earlier in the queue")
