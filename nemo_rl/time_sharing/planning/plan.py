"""Inputs and outputs of the planner, and its decisions in words.

A plan is a set of intentions, not of timings: the executor carries each out as soon as the GPUs it needs are free.
Every operation carries the reason for it, so that `explain` never has to guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from nemo_rl.time_sharing.log.ledger import Claim, Lease, PipelineState
from nemo_rl.time_sharing.log.state import SchedulerState
from nemo_rl.time_sharing.protocol.types import Limits, Priority

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

    @classmethod
    def of(cls, state: SchedulerState) -> Snapshot:
        return cls(state.limits, state.pipelines, state.owner, state.claimed, state.quarantined, state.pool.slots)


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
    "share": "its pipeline has {0} of {1:.1f} GPUs that its remaining work entitles it to",
    "ahead": "the GPUs are idle now, and it will wake at once when it is wanted",
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
    "guaranteed": "GPU {0} is in its guaranteed time slice of {1}",
    "building": "an engine of {1} is being built on GPU {0} and cannot be stopped before it stands",
    "initialising": "{0} initialise now, as many as may at the same time",
    "expanding": "an expand of its own pipeline is under way, and the next training may not begin before it has ended",
}
_OF_A_GPU = ("held", "claimed", "reserved", "quarantined", "guaranteed", "building")  # whose first value is one
_ABOUT_TIME = ("backfill", "unscheduled", "time_slice")


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
