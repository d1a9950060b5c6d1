"""Entries of the scheduler's ledger: leases, queues, claims, and the state of each pipeline.

Plain records that `state.SchedulerState` keeps and changes; planner, validator and executor read them. They decide
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from nemo_rl.time_sharing.protocol.topology import Topology
from nemo_rl.time_sharing.protocol.types import Demand, Phase, PipelineSpec, Priority, Want


class Lease(NamedTuple):
    """Holder of a GPU: a fixed cluster (`rank` -1) or a generation rank, under the epoch of its grant."""

    pipeline: str
    cluster: str
    rank: int
    epoch: int


@dataclass(slots=True)
class Claim:
    """Next holder of some GPUs, once all of them are free."""

    plan: int
    pipeline: str
    cluster: str
    rank: int
    request: int
    gpus: tuple[int, ...]
    guaranteed: bool = False
    ahead: bool = False

    @property
    def key(self) -> tuple[str, str, int]:
        return self.pipeline, self.cluster, self.rank


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
class PipelineState:
    """One registered pipeline. `unscheduled_since`: since when it has demand but no rank awake or about to be.
    `service`: GPU-seconds of generation had. `builds`: whether its engines can be built; `build_s`: how long that took.
    `batch_since`: since when the samples that are waited for are; `generation_s`: how long that takes until training is
    asked for. `warm`: ranks whose engine stands, so that their next wake builds none; `handover_s`: how long such a
    wake takes until the rank serves; `start_s`: the same for one that builds its engine. `wake_order`: its ranks, those
    first whose GPUs the fewest others train on, and among them those that its own training spares. `expired`: by
    cluster, the newest request that waited too long.
    """

    topology: Topology
    incarnation: int
    registered_at: float
    demand: Demand = Demand()
    wants: dict[str, QueuedWant] = field(default_factory=dict)
    held: dict[str, HeldCluster] = field(default_factory=dict)
    awake: dict[int, AwakeRank] = field(default_factory=dict)
    claimed_ranks: set[int] = field(default_factory=set)
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
    wake_order: tuple[int, ...] = ()
    builds: bool = False
    build_s: float | None = None
    batch_since: float = 0.0
    generation_s: float | None = None

    @property
    def spec(self) -> PipelineSpec:
        return self.topology.spec

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


@dataclass(slots=True)
class PendingCommand:
    """A command that has not ended."""

    command: str
    pipeline: str
    verb: str
    rank: int
    cluster: str
    epoch: int
    deadline: float
    incarnation: int


@dataclass(slots=True)
class Quarantine:
    """GPUs that are out of use, and the processes to end before they come back."""

    gpus: tuple[int, ...]
    pipeline: str
    incarnation: int
    rank: int
    until: float

    @property
    def whose(self) -> tuple[str, int, int]:
        """The pipeline, its incarnation and the rank (-1: all of it) whose processes are to be ended."""
        return self.pipeline, self.incarnation, self.rank
