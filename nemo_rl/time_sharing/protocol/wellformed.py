"""Validates messages of pipelines: counts, requests, and the shape of statuses and answers.

The scheduler logs these messages and plans with them, so a malformed number would stop every pipeline, and again after
each restart. Each function returns the fault in words, or ""; its caller decides what to do with a bad message.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from nemo_rl.time_sharing.protocol.types import (
    ACTOR_INFER,
    ACTOR_TRAIN,
    Answer,
    CommandOutcome,
    Demand,
    EndedRequest,
    GivenBack,
    Held,
    Priority,
    Status,
    Want,
)

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
    return what + (
        "; GPUs for generation come rank by rank: report demand (begin_progress) instead" if generates else ""
    )


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
