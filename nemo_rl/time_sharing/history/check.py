"""Proves from a record alone that a run kept the rules of time-sharing, or shows the first place where it did not.

Shares nothing with the planner, the executor or the agent but the event classes: what it knows of GPUs, queues and weights it works out again from the
events. Invariants are numbered as in docs/time_sharing_scheduler.md and looked after by the four modules beside this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from nemo_rl.time_sharing.history.gpus import GpuChecks
from nemo_rl.time_sharing.history.order import OrderChecks
from nemo_rl.time_sharing.history.prompts import PromptChecks
from nemo_rl.time_sharing.history.waiting import WaitChecks
from nemo_rl.utils.record import Entry

INVARIANTS = {
    1: "no GPU is granted twice",
    2: "every prompt is trained exactly once or accounted for",
    3: "no token under a wrong version",
    4: "staleness bound",
    5: "training GPUs are given back only after publish",
    6: "no training grant while an expand is in flight",
    7: "no request to a leaving shard",
    8: "every wait within its deadline",
    9: "no starvation beyond the bound",
    10: "conservation of GPUs",
}

Handler = Callable[[Entry, Any], None]


class Violation(NamedTuple):
    """One broken invariant: which, where in the record, and what happened in words."""

    invariant: int
    seq: int
    time: float
    message: str

    def __str__(self) -> str:
        return f"invariant {self.invariant} ({INVARIANTS[self.invariant]}) broken at entry {self.seq}, {self.time:.3f} s: {self.message}"


class Checks(Protocol):
    """A group of invariants: which events it wants to see, and what it finds missing at the end."""

    found: list[tuple[int, str]]

    def handlers(self) -> dict[type, Handler]: ...

    def finish(self) -> None: ...


def check(entries: Iterable[Entry], *, first_only: bool = False, ended: bool = True) -> list[Violation]:
    """Every violation in a record, in order; [] proves that there is none.

    Arguments: entries in the order in which they happened; first_only stops at the first; ended says that the run is over, so that what is still open
    counts as missing (a record of a running or crashed run is checked with False).
    """
    groups: list[Checks] = [GpuChecks(), PromptChecks(), OrderChecks(), WaitChecks()]
    table: dict[type, list[tuple[Checks, Handler]]] = {}
    for group in groups:
        for kind, handler in group.handlers().items():
            table.setdefault(kind, []).append((group, handler))
    violations: list[Violation] = []
    seq, time = 0, 0.0
    for entry in entries:
        seq, time = entry.seq, entry.time
        for group, handler in table.get(type(entry.event), ()):
            handler(entry, entry.event)
            if group.found:
                violations += [Violation(number, seq, time, message) for number, message in group.found]
                group.found.clear()
                if first_only:
                    return violations
    if ended:
        for group in groups:
            group.finish()
            violations += [Violation(number, seq, time, message) for number, message in group.found]
    return violations[:1] if first_only else violations


def pipeline_of(source: str) -> str:
    """The pipeline that a source belongs to."""
    return source.partition("/")[0]
