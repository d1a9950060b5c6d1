"""Values of time-sharing: priorities, rank phases, clusters, demand, and the messages between the scheduler and a
pipeline's agent.

All are frozen. Nothing here knows a clock, a log or Ray. A lower priority number wins; 0 to 5 are fixed (all GPUs of a
cluster or none, not preempted while held), 6 is elastic (rank by rank, preempted by 0 to 5 at any time).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum, IntEnum
from typing import Any, NamedTuple

LONGEST_STOP_S = 1800.0
"""How long a command may have, at most, to finish what it does when its GPUs are wanted back."""
ADAPTERS_STOP_S = 900.0
"""How long a job of adapters has for its steps then, where its file does not say."""
KILLED_S = 30.0
"""How long processes that are killed may take to be gone."""


SCHEDULER = "scheduler"


class Priority(IntEnum):
    """Purpose of a GPU request; smaller numbers are served first."""

    INITIALIZATION = 0
    ACTOR_TRAINING = 1
    CRITIC_TRAINING = 2
    OLD_LOG_PROBS = 3
    REF_LOG_PROBS = 4
    VALUE_COMPUTE = 5
    GENERATION = 6

    @property
    def tag(self) -> str:
        """Three or four letters, as traces and tables show it."""
        return _TAGS[self]


_TAGS = ("INIT", "TRN", "CRT", "OLD", "REF", "VAL", "GEN")

ACTOR_TRAIN, ACTOR_INFER = "actor_train", "actor_infer"
CLUSTER_NAMES = (ACTOR_TRAIN, ACTOR_INFER)
HIGH, SCAVENGER = "high", "scavenger"
JOB_PRIORITIES = (HIGH, "normal", SCAVENGER)
"""Of a job: `high` comes first, `scavenger` uses what others leave."""
UNMEASURED_RANK_BATCH = 64
"""Samples that one rank runs at once at good speed, until its engines have shown how many."""


class Phase(str, Enum):
    """State of one generation rank as the scheduler sees it. A rank holds its GPUs in every phase but ASLEEP; it takes
    requests in SERVING only. BUILDING: its engine is built ahead of its first wake and goes to sleep when it is ready.
    The steps of a rise or a fall are the job's own (`agents.agent.LocalPhase`).
    """

    # Equal to its text, so hashed like it; the hash of Enum is a Python call, and every plan looks up the phases of all
    # ranks.
    __hash__ = str.__hash__

    ASLEEP = "asleep"
    BUILDING = "building"
    RISING = "rising"
    SERVING = "serving"
    FALLING = "falling"
    FAILED = "failed"

    @classmethod
    def _missing_(cls, value: object) -> Phase | None:
        # Logs that were written when the scheduler commanded each step of a rise and a fall.
        earlier = {"active": cls.SERVING, "draining": cls.FALLING, "sleeping": cls.FALLING}
        rising = dict.fromkeys(("waking", "syncing", "ready"), cls.RISING)
        return (earlier | rising).get(value) if isinstance(value, str) else None


SLEEP_PHASES = frozenset({Phase.FALLING, Phase.FAILED, Phase.BUILDING})


class Verb(str, Enum):
    """Commands of the scheduler to an agent (REAP: to the daemon that ends processes), each answered once.

    GRANT: a fixed cluster is the pipeline's. SERVE: the rank wakes, loads the newest weights and takes requests once
    they are published. VACATE: the rank's requests go elsewhere, it sleeps, and its memory is free. BUILD: the rank's
    engine is built, and sleeps.
    """

    GRANT = "grant"
    BUILD = "build"
    SERVE = "serve"
    VACATE = "vacate"
    REAP = "reap"

    @classmethod
    def _missing_(cls, value: object) -> Verb | None:
        rise = dict.fromkeys(("wake", "sync", "publish", "route"), cls.SERVE)
        fall = dict.fromkeys(("drain", "sleep"), cls.VACATE)
        return (rise | fall).get(value) if isinstance(value, str) else None


class CommandOutcome(str, Enum):
    """How a command ended. REFUSED: makes no sense to the agent."""

    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"


class ClusterSpec(NamedTuple):
    """One worker cluster of a pipeline: its name, the GPUs of one rank, and the GPU ids it is mapped to, sorted."""

    name: str
    tp_size: int
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """How a pipeline shares GPUs, chosen when it is registered.

    Attributes:
        weight: Its claim on contended GPUs relative to others, 1e-6 to 1000.
        min_share: Least part of the GPUs it is mapped to while it has demand, 0 to `max_share`.
        max_share: Largest such part, up to 1.
        staleness: How many versions old the tokens of a trained group may be, from 0; None for no bound.
        rank_batch: How many samples one rank runs at once at good speed, from 1; more ranks than remaining samples /
            rank_batch are of no use to it.
        slice_s: Seconds that a rank must serve to be of use, 0 (any time) to 3600: what takes long to start makes no
            progress in shorter ones.
        drain_s: Seconds that taking its work off a rank may take, 0 to 3600; the limit of all counts if it is longer.
        user: Who submitted it, on a pool for a team; else empty.
        group: That user's group then.
        priority: One of `JOB_PRIORITIES`.
    """

    weight: float = 1.0
    min_share: float = 0.0
    max_share: float = 1.0
    staleness: int | None = 1
    rank_batch: int = 1
    slice_s: float = 0.0
    drain_s: float = 0.0
    user: str = ""
    group: str = ""
    priority: str = "normal"

    @property
    def is_high(self) -> bool:
        """Whether its requests come before those of others that are not much older."""
        return self.priority == HIGH

    @property
    def scavenges(self) -> bool:
        """Whether it runs in gaps only."""
        return self.priority == SCAVENGER

    def options(self) -> dict[str, Any]:
        """These options by name, without the fields of a class that has more."""
        return {option.name: getattr(self, option.name) for option in fields(PipelineOptions)}


@dataclass(frozen=True, slots=True)
class PipelineSpec(PipelineOptions):
    """Registration of a pipeline. Build it with `topology.register`, which checks every rule."""

    pipeline: str
    namespace: str
    clusters: tuple[ClusterSpec, ...]


class Demand(NamedTuple):
    """Standing generation demand of the step being waited for: `target` and `done` in units of `unit` samples each; a
    larger `seq` replaces. `rank_batch`: as measured; 0 for that of the registration.
    """

    target: int = 0
    done: int = 0
    unit: int = 1
    seq: int = 0
    rank_batch: int = 0

    @property
    def remaining(self) -> int:
        """Samples still to be generated; a `done` above the target counts as the target."""
        return max(self.target - self.done, 0) * self.unit


class Want(NamedTuple):
    """A fixed cluster that a pipeline waits for, or wants at another priority while it holds it. `request` is unique in
    the pipeline's life.
    """

    cluster: str
    priority: Priority
    request: int
    step: int = -1


class Held(NamedTuple):
    """A fixed cluster that a pipeline believes it holds, under the epoch of the grant."""

    cluster: str
    epoch: int
    priority: Priority


class GivenBack(NamedTuple):
    """The newest hold of a cluster that the pipeline has given back, and the weight version it had published by
    then.
    """

    cluster: str
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class Status:
    """An agent's whole state, repeated with each heartbeat, so that a lost status is healed by the next.

    A status with a smaller `seq` than the last of the same incarnation is late and ignored. `awake`: the ranks that
    hold GPU memory, with their epochs. `serving`: those of them that take requests. `broken`: those that cannot (a
    refresh failed). `term`: the newest scheduler term the agent has heard of. `builds`: whether its engines can be
    built and may be, ahead of their first wakes.
    """

    pipeline: str
    incarnation: int
    seq: int
    demand: Demand = Demand()
    wants: tuple[Want, ...] = ()
    holds: tuple[Held, ...] = ()
    given_back: tuple[GivenBack, ...] = ()
    awake: tuple[tuple[int, int], ...] = ()
    serving: tuple[int, ...] = ()
    broken: tuple[int, ...] = ()
    leaving: bool = False
    term: int = 0
    builds: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """One thing to do. Repeating it changes nothing: the agent answers a known `command` from memory; an `epoch` older
    than the rank's is refused.
    """

    command: str
    term: int
    pipeline: str
    incarnation: int
    verb: Verb
    rank: int = -1
    epoch: int = 0
    cluster: str = ""
    gpus: tuple[int, ...] = ()
    priority: Priority = Priority.GENERATION
    step: int = -1
    request: int = -1

    @property
    def order(self) -> tuple[int, int]:
        """Commands of one rank are obeyed in this order only: (term that made it, number within the term)."""
        term, _, number = self.command.partition(".")
        return int(term), int(number)


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a command. `version` is the weight version that a SYNC loaded; `seq` counts together with the statuses,
    so that the newer message is known.
    """

    command: str
    pipeline: str
    incarnation: int
    outcome: CommandOutcome
    version: int = -1
    detail: str = ""
    seq: int = 0


class EndedRequest(NamedTuple):
    """A request that will never be granted, and why: it expired, or it is none that can be made."""

    request: int
    reason: str


class Reply(NamedTuple):
    """The scheduler's reply to a status: its term, and whether this incarnation is registered; an unregistered one must
    stop its work on GPUs.

    `ended`: requests of the status that ended without a grant, repeated until the agent withdraws them. `refused`:
    other parts of the status that were refused, with reasons.
    """

    pipeline: str
    incarnation: int
    term: int
    registered: bool
    ended: tuple[EndedRequest, ...] = ()
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """Every bound and delay of the scheduler, in seconds unless said otherwise. The defaults suit minutes-long steps.

    max_backfills: how often a waiting request is passed. max_initialising: how many pipelines may initialise at the
    same time, 0 for any number; set it where starting processes is what a machine runs out of (their number, host
    memory), and not GPUs. measure_s: how often is measured what pipelines gain by running at the same time on shared
    GPUs, 0 for never; trial_steps: steps that they make together before; turn_s: how long those run that gain nothing,
    in turn. high_lead_s: how much older requests of other jobs are that come before those of a job of high priority;
    high_wait_s: for how long such a job is to wait for its training GPUs at most.
    """

    aging_s: float = 60.0
    min_hold_s: float = 10.0
    max_slice_s: float = 60.0
    hysteresis: float = 0.10
    max_backfills: int = 4
    max_initialising: int = 0
    max_hold_s: float = 3600.0
    heartbeat_s: float = 5.0
    lease_s: float = 30.0
    isolation_s: float = 300.0
    retry_s: float = 2.0
    drain_s: float = 60.0
    sleep_s: float = 60.0
    wake_s: float = 120.0
    sync_s: float = 150.0
    route_s: float = 30.0
    grant_s: float = 30.0
    reap_s: float = 60.0
    request_s: float = 86400.0
    quarantine_s: float = 300.0
    plan_interval_s: float = 0.25
    replan_s: float = 5.0
    max_tick_s: float = 5.0
    measure_s: float = 3600.0
    trial_steps: int = 20
    turn_s: float = 300.0
    high_lead_s: float = 600.0
    high_wait_s: float = 300.0

    def deadline_of(self, verb: Verb, drain_s: float = 0.0) -> float:
        """How long one command may take, retries included: the sum of its steps, whose own limits its agent keeps.
        `drain_s`: of the pipeline's registration.
        """
        return {
            Verb.GRANT: self.grant_s,
            Verb.BUILD: self.wake_s + self.sleep_s,
            Verb.SERVE: self.wake_s + self.sync_s + self.route_s,
            Verb.VACATE: max(self.drain_s, drain_s) + self.sleep_s,
            Verb.REAP: self.reap_s,
        }[verb]


COUNTS = frozenset({"max_backfills", "max_initialising", "trial_steps"})


def limits_from(values: Mapping[str, float]) -> Limits:
    """Limits from plain numbers by name; omitted ones keep their defaults. Raises TypeError for an unknown name."""
    typed: dict[str, Any] = {name: int(value) if name in COUNTS else value for name, value in values.items()}
    return replace(Limits(), **typed)


MAX_COUNT = 10**12
"""More samples, steps or GPUs than any run has; products of counts and weights stay finite numbers far beyond it."""


def is_whole(value: object, least: int = 0, most: int = MAX_COUNT) -> bool:
    """Whether `value` is an int (no bool, no float, no enum) within bounds."""
    return type(value) is int and least <= value <= most


def demand_problem(demand: object) -> str:
    """Fault of a demand in words; "" if it is valid."""
    if not isinstance(demand, Demand):
        return f"demand is {shown(demand)}, expected a Demand"
    for name, value in zip(Demand._fields, demand, strict=True):
        least = 1 if name == "unit" else 0
        if not is_whole(value, least):
            return f"demand {name}={shown(value)} must be a whole number from {least} to {MAX_COUNT:.0e}"
    return ""


def want_problem(want: object, clusters: Iterable[str]) -> str:
    """Fault of a fixed request of a pipeline that is registered with `clusters`; "" if it is valid."""
    if not isinstance(want, Want) or not isinstance(want.cluster, str):
        return f"request {shown(want)} is no Want"
    if not is_whole(want.request) or not is_whole(want.step, -1):
        return f"request {shown(want.request)} of step {shown(want.step)}: both must be whole numbers"
    return cannot_be_requested(want.cluster, want.priority, clusters)


def cannot_be_requested(cluster: str, priority: object, clusters: Iterable[str]) -> str:
    """Why `cluster` at `priority` is nothing to ask for as a whole."""
    fixed = [ACTOR_TRAIN] if ACTOR_TRAIN in clusters else []
    named = priority.name if isinstance(priority, Priority) else shown(priority)
    if cluster in fixed and isinstance(priority, Priority) and priority is not Priority.GENERATION:
        return ""
    what = (
        f"{cluster!r} at {named} cannot be requested: requests are for one of the registered fixed "
        f"clusters {fixed} at INITIALIZATION to VALUE_COMPUTE"
    )
    generates = cluster == ACTOR_INFER or priority is Priority.GENERATION
    return what + ("; GPUs for generation come rank by rank: report demand (set_demand) instead" if generates else "")


def status_problem(status: Status) -> str:
    """Fault in the shape of a status; "" if there is none. Its demand and requests are checked separately."""
    if not isinstance(status.pipeline, str) or type(status.incarnation) is not int or type(status.seq) is not int:
        return (
            f"a status of {shown(status.pipeline)}, incarnation {shown(status.incarnation)}, number "
            f"{shown(status.seq)} names no pipeline"
        )
    if not is_whole(status.term) or not isinstance(status.leaving, bool) or not isinstance(status.builds, bool):
        flags = f"leaving={shown(status.leaving)} and builds={shown(status.builds)} bools"
        return f"term={shown(status.term)} must be a whole number, {flags}"
    parts = (status.wants, status.holds, status.given_back, status.awake, status.serving, status.broken)
    if not all(isinstance(part, tuple) for part in parts):
        return "wants, holds, given_back, awake, serving and broken must be tuples"
    if not all(
        isinstance(h, Held) and isinstance(h.cluster, str) and type(h.epoch) is int and isinstance(h.priority, Priority)
        for h in status.holds
    ):
        return f"holds={shown(status.holds)} must be Held(cluster, epoch, priority)"
    if not all(
        isinstance(b, GivenBack) and isinstance(b.cluster, str) and type(b.epoch) is int and is_whole(b.version, -1)
        for b in status.given_back
    ):
        return f"given_back={shown(status.given_back)} must be GivenBack(cluster, epoch, version)"
    if not all(
        isinstance(pair, tuple) and len(pair) == 2 and all(type(n) is int for n in pair) for pair in status.awake
    ):
        return f"awake={shown(status.awake)} must be pairs (rank, epoch)"
    if not all(type(rank) is int for rank in (*status.serving, *status.broken)):
        return f"serving={shown(status.serving)} and broken={shown(status.broken)} must be ranks"
    return ""


class Admissible(NamedTuple):
    """A status without what cannot be taken of it: which of its requests are over for that, and what else was
    left out.
    """

    status: Status
    ended: tuple[EndedRequest, ...] = ()
    refused: tuple[str, ...] = ()


def admissible(status: Status, clusters: Iterable[str]) -> Admissible:
    """The valid part of a status of a pipeline that is registered with `clusters`; a malformed status is refused whole
    and gets number -1.
    """
    if problem := status_problem(status):
        return Admissible(Status(status.pipeline, status.incarnation, -1), (), (problem,))
    problem = demand_problem(status.demand)
    bad = {i: text for i, want in enumerate(status.wants) if (text := want_problem(want, clusters))}
    if not problem and not bad:
        return Admissible(status)
    numbered = {i for i in bad if isinstance(status.wants[i], Want) and is_whole(status.wants[i].request)}
    ended = tuple(EndedRequest(status.wants[i].request, bad[i]) for i in numbered)
    refused = ((problem,) if problem else ()) + tuple(text for i, text in bad.items() if i not in numbered)
    good = tuple(want for i, want in enumerate(status.wants) if i not in bad)
    return Admissible(replace(status, demand=Demand(seq=-1) if problem else status.demand, wants=good), ended, refused)


def answer_problem(answer: Answer) -> str:
    """Fault in the shape of an answer; "" if there is none."""
    if (
        not isinstance(answer.command, str)
        or not isinstance(answer.pipeline, str)
        or not isinstance(answer.outcome, CommandOutcome)
    ):
        return (
            f"command={shown(answer.command)}, pipeline={shown(answer.pipeline)}, "
            f"outcome={shown(answer.outcome)} is no answer"
        )
    if type(answer.incarnation) is not int or type(answer.seq) is not int or not is_whole(answer.version, -1):
        return (
            f"incarnation={shown(answer.incarnation)}, seq={shown(answer.seq)}, "
            f"version={shown(answer.version)} must be whole numbers"
        )
    return ""


def shown(value: object) -> str:
    """`value` in at most 80 characters, for messages: a malformed value may be long, and an int of more than 4,300
    digits has no text at all.
    """
    if type(value) is int and abs(value) > MAX_COUNT**2:
        return f"an int of {value.bit_length()} bits"
    text = repr(value) if not isinstance(value, tuple) else f"({', '.join(shown(v) for v in value[:8])})"
    return text if len(text) <= 80 else text[:77] + "..."
