"""The scheduler's events in the run record. Its whole state is a fold over these (see `state`), so an event is written
before it takes effect.

All are facts that the scheduler decided or learned, at the time of the entry; none needs another source to be
understood. Agents and trainers add `MemoryTaken` and `MemoryFreed`, the ground truth that the history checker compares
with the scheduler's ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from nemo_rl.time_sharing.protocol.quotas import QuotaNode
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import ClusterSpec, Phase, PipelineOptions, Priority
from nemo_rl.utils.record_events import event_kind


@event_kind("ts_pool_opened")
class PoolOpened:
    """The first scheduler event of a log: what there is to share, and under which limits (seconds)."""

    nodes: int
    gpus_per_node: int
    limits: Mapping[str, float] = field(default_factory=dict)
    slots_per_gpu: int = 1

    @property
    def pool(self) -> Pool:
        """The pool with its slots."""
        return Pool(self.nodes, self.gpus_per_node, self.slots_per_gpu)


@event_kind("ts_scheduler_started")
class SchedulerStarted:
    """A scheduler took over the log; `term` is larger than any before it. Not `complete`: the log may have lost its end
    before.
    """

    term: int
    complete: bool = True


@event_kind("ts_log_signed")
class LogSigned:
    """A process writes the log from here on; `boot` names the boot of its machine, "" if unknown."""

    boot: str = ""


@event_kind("ts_log_closed")
class LogClosed:
    """The scheduler was stopped and wrote nothing more: as the last line of a log it shows that the end is not
    missing.
    """


@event_kind("ts_inventory_done")
class InventoryDone:
    """After a restart every registered pipeline has reported its holds or was fenced: planning may resume."""

    term: int


@event_kind("ts_registered")
class Registered(PipelineOptions):
    """A pipeline was registered and admitted, with everything that planning and checking need to know of it."""

    pipeline: str
    incarnation: int
    namespace: str
    clusters: tuple[ClusterSpec, ...]


@event_kind("ts_user_acted")
class UserActed:
    """What a user of the pool's team did, or was refused: the action (`submit`, `cancel`, ...), the job or file that it
    concerns, and `done`, or why not. `user` is empty for a token that is no user's.
    """

    user: str
    action: str
    subject: str
    outcome: str


@event_kind("ts_quotas_set")
class QuotasSet:
    """Shares and limits of the team's groups and users from now on; use of the pool counts half after `half_life_s`."""

    nodes: tuple[QuotaNode, ...]
    half_life_s: float


@event_kind("ts_use_weighed")
class UseWeighed:
    """Slot-seconds that the jobs of each node of the quotas have had so far; older ones count less."""

    use: Mapping[str, float]


@event_kind("ts_demand")
class DemandReported:
    """Standing demand changed. `rank_batch`: as measured; 0 for that of the registration."""

    pipeline: str
    target: int
    done: int
    unit: int
    seq: int
    rank_batch: int = 0


@event_kind("ts_builds_ahead")
class BuildsAhead:
    """The engines of a pipeline can be built, and may be on idle GPUs, ahead of their
    first wakes.
    """

    pipeline: str


@event_kind("ts_requested")
class Requested:
    """A request for all GPUs of a fixed cluster, or for another priority of a held one."""

    pipeline: str
    cluster: str
    priority: Priority
    request: int
    step: int


@event_kind("ts_request_dropped")
class RequestDropped:
    """A request ended without a grant: withdrawn by its pipeline, expired, or its pipeline is gone."""

    pipeline: str
    cluster: str
    request: int
    reason: str


@event_kind("ts_claimed")
class Claimed:
    """These GPUs, free or about to be, go next to this cluster (`rank` -1) or this generation rank, and to no other.

    `passed` names the requests (`pipeline#request`) ahead in the queue that this one was let past because it will be
    done before they can start. `ahead`: the rank's engine is built there, and sleeps then.
    """

    plan: int
    pipeline: str
    cluster: str
    rank: int
    request: int
    gpus: tuple[int, ...]
    passed: tuple[str, ...] = ()
    guaranteed: bool = False
    ahead: bool = False

    @property
    def key(self) -> tuple[str, str, int]:
        return self.pipeline, self.cluster, self.rank


@event_kind("ts_plan_explained")
class PlanExplained:
    """Why each decision of a plan was made, for people; nothing else rests on it. `entitled`: see `Plan`."""

    plan: int
    sentences: tuple[str, ...]
    entitled: Mapping[str, float] = field(default_factory=dict)


@event_kind("ts_plan_rejected")
class PlanRejected:
    """A plan broke rules of the validator. Written by simulations, which carry the plan out all the same."""

    problems: tuple[str, ...]


@event_kind("ts_claim_dropped")
class ClaimDropped:
    """A claim ended without a lease; its GPUs are for the next plan."""

    pipeline: str
    cluster: str
    rank: int
    reason: str


@event_kind("ts_granted")
class Granted:
    """A fixed cluster holds its GPUs from now on, at most until `hold_until`."""

    pipeline: str
    cluster: str
    epoch: int
    gpus: tuple[int, ...]
    priority: Priority
    step: int
    request: int
    hold_until: float


@event_kind("ts_priority_changed")
class PriorityChanged:
    """A cluster goes on holding its GPUs for another purpose (log-probs, then training); the hold's end does
    not move.
    """

    pipeline: str
    cluster: str
    epoch: int
    priority: Priority
    step: int
    request: int


@event_kind("ts_released")
class Released:
    """A fixed cluster released its GPUs, their memory verified free by the agent; `version` is the version published by
    then.
    """

    pipeline: str
    cluster: str
    epoch: int
    version: int


@event_kind("ts_rank")
class RankMoved:
    """A generation rank changed phase. WAKING and BUILDING take the rank's GPUs under a new epoch, ASLEEP gives them
    back.
    """

    pipeline: str
    rank: int
    phase: Phase
    epoch: int
    version: int = -1
    guaranteed: bool = False


@event_kind("ts_rank_cooling")
class RankCooling:
    """A rank failed to wake, sync or route; it goes back to sleep and is left alone until `until`."""

    pipeline: str
    rank: int
    until: float


@event_kind("ts_command")
class CommandSent:
    """A command was first sent (resends are not repeated here); it must have ended by `deadline`."""

    command: str
    pipeline: str
    verb: str
    rank: int
    cluster: str
    epoch: int
    deadline: float
    incarnation: int = 0


@event_kind("ts_command_ended")
class CommandEnded:
    """A command is over: `done`, `failed`, `stale`, `refused` as answered, `expired` at its deadline, `fenced` with its
    pipeline.
    """

    command: str
    outcome: str


@event_kind("ts_leaving")
class Leaving:
    """A pipeline wants to end: all its ranks go to sleep, nothing more is given to it."""

    pipeline: str


@event_kind("ts_paused")
class Paused:
    """A pipeline yields for a while: its ranks sleep and it is granted nothing until `Resumed`. Its training cluster
    stays held until it releases it.
    """

    pipeline: str
    reason: str


@event_kind("ts_resumed")
class Resumed:
    """A paused pipeline takes part again."""

    pipeline: str


@event_kind("ts_sharing_measured")
class SharingMeasured:
    """Measured gain of a group that runs at the same time. `together_s`, `alone_s`: seconds per step of each member
    while all run, and while the others pause. `gain`: work done relative to running one after the other. `keeps`:
    whether the group goes on together.
    """

    together_s: Mapping[str, float]
    alone_s: Mapping[str, float]
    gain: float
    keeps: bool


@event_kind("ts_fenced")
class Fenced:
    """A pipeline is cut off: nothing it says counts any more, and its processes are being ended before its GPUs are
    given on.
    """

    pipeline: str
    incarnation: int
    reason: str


@event_kind("ts_unregistered")
class Unregistered:
    """A pipeline is gone and holds nothing."""

    pipeline: str
    incarnation: int
    reason: str


@event_kind("ts_gpus_quarantined")
class GpusQuarantined:
    """The memory of these GPUs could not be shown to be free: they are withheld until `until`, when freeing is tried
    again.
    """

    gpus: tuple[int, ...]
    pipeline: str
    incarnation: int
    rank: int
    until: float
    reason: str = ""

    @property
    def whose(self) -> tuple[str, int, int]:
        """The pipeline, its incarnation and the rank (-1: all of it) whose processes are to be ended."""
        return self.pipeline, self.incarnation, self.rank


@event_kind("ts_gpus_cleared")
class GpusCleared:
    """A quarantine is over: its pipeline occupies these GPUs no more. They are back in the pool if no other quarantine
    keeps them.
    """

    gpus: tuple[int, ...]
    pipeline: str
    incarnation: int
    rank: int


@event_kind("ts_node_draining")
class NodeDraining:
    """A node is to leave: nothing more is given there, and its engines go to sleep. `by`: when all of it is free, or
    its holder is cut off; None for no such time.
    """

    node: int
    by: float | None = None


@event_kind("ts_node_away")
class NodeAway:
    """A node has left, or has not come yet: its GPUs are none of the pool's until `NodeHere`."""

    node: int


@event_kind("ts_node_here")
class NodeHere:
    """A node has come, or stays after all: its GPUs are the pool's."""

    node: int


@event_kind("ts_clock_jumped")
class ClockJumped:
    """The machine's clock moved by more than a tick can explain; the scheduler's own time went on without the jump."""

    seconds: float


@event_kind("ts_isolated")
class Isolated:
    """Most pipelines fell silent at once, so the scheduler takes itself for cut off: until `Reconnected` it fences
    no pipeline for silence and no deadline passes.
    """

    silent: int
    registered: int


@event_kind("ts_reconnected")
class Reconnected:
    """Enough pipelines are heard again, or `isolation_s` has passed (`given_up`). Every open command and hold gets the
    seconds that this lasted.
    """

    seconds: float
    given_up: bool = False


@event_kind("ts_memory_taken")
class MemoryTaken:
    """Written by the pipeline's side: from now on `what` (`actor_train`, `rank 3`, ...) occupies memory on
    these GPUs.
    """

    what: str
    gpus: tuple[int, ...]


EVERYTHING = "everything"


@event_kind("ts_memory_freed")
class MemoryFreed:
    """Written by the pipeline's side, or by the daemon that ended its processes: the memory is verified free.

    The daemon, which does not know what had occupied quarantined GPUs, writes EVERYTHING as `what`: whatever it was, of
    this pipeline.
    """

    what: str
    gpus: tuple[int, ...]
