"""Proves from a record alone that a run kept the rules of time-sharing, or shows the first violation.

Shares only the event classes with planner, executor and agent: it derives the state of GPUs, queues and weights from
the events again. Invariants are numbered as in docs/time_sharing_scheduler.md; each module beside this one checks some.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from nemo_rl.time_sharing.history.clocks import Clocks
from nemo_rl.time_sharing.history.ends import EndChecks
from nemo_rl.time_sharing.history.fairness import FairnessChecks
from nemo_rl.time_sharing.history.gpus import AccountChecks, GpuChecks
from nemo_rl.time_sharing.history.ledger import Checks, Ledger
from nemo_rl.time_sharing.history.order import OrderChecks
from nemo_rl.time_sharing.history.prompt_checks import PromptChecks
from nemo_rl.time_sharing.history.quota_checks import QuotaChecks
from nemo_rl.time_sharing.history.references import References
from nemo_rl.time_sharing.history.rule_checks import RuleChecks
from nemo_rl.time_sharing.history.waiting import WaitChecks
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.protocol.types import SCHEDULER
from nemo_rl.utils.record import Entry, Handler, RecordError
from nemo_rl.utils.record_events import RecordOpened, UnknownEvent

INVARIANTS = {
    1: "no GPU is granted twice",
    2: "every prompt is trained exactly once or accounted for",
    3: "no token under a wrong version or adapter",
    4: "staleness bound",
    5: "training GPUs are given back only after publish",
    6: "no training grant while an expand is in flight",
    7: "no request to a leaving shard",
    8: "every wait within its deadline",
    9: "no starvation beyond the bound",
    10: "conservation of GPUs",
    11: "each decision follows from what was before",
}

_BEGINNING = frozenset({RecordOpened, ev.LogSigned, ev.PoolOpened, ev.NodeAway})
"""What a new scheduler writes before it says that it has started; a log of which nothing is left begins again with the
pool."""


class Violation(NamedTuple):
    """One broken invariant: which, where in the record, and what happened in words."""

    invariant: int
    seq: int
    time: float
    message: str

    def __str__(self) -> str:
        return (
            f"invariant {self.invariant} ({INVARIANTS[self.invariant]}) broken at entry {self.seq}, "
            f"{self.time:.3f} s: {self.message}"
        )


class NothingToCheck(RecordError):
    """A record from which nothing can be proven: it is empty, or the scheduler's part of it has no beginning."""


def check(entries: Iterable[Entry], *, first_only: bool = False, ended: bool = True) -> list[Violation]:
    """Every violation in a record, in order; [] proves that there is none.

    Arguments: entries in the order in which they happened, which are read twice (an iterator is kept whole for that);
    first_only stops at the first; ended says that the run is over, so that what is still open counts as missing (a
    record of a running or crashed run is checked with False; what is open and overdue is found in both). Raises
    NothingToCheck for an empty record, and for one with scheduling in it whose pool was never opened. A record without
    any scheduling, of one training run, is checked for what it holds: its prompts, versions and waits.
    """
    record = list(entries) if isinstance(entries, Iterator) else entries
    kinds, gaps = survey(record)
    alone = ev.PoolOpened not in kinds
    clocks, ledger = Clocks(), Ledger()
    references = References(ledger)
    groups: list[Checks | FairnessChecks] = [
        GpuChecks(ledger),
        AccountChecks(ledger),
        QuotaChecks(ledger),
        PromptChecks(),
        OrderChecks(ledger),
        WaitChecks(ledger),
        RuleChecks(ledger),
        EndChecks(ledger),
        FairnessChecks(),
        ledger,
    ]
    if alone:
        groups = [PromptChecks(), WaitChecks(ledger), ledger]
    table: dict[type, list[tuple[Checks | FairnessChecks, Handler]]] = {}
    for group in groups:
        for kind, handler in group.handlers().items():
            table.setdefault(kind, []).append((group, handler))
    judges, latest = references.judges(), clocks.latest
    violations: list[Violation] = []
    entry = Entry(0, 0.0, "", None)
    for index, given in enumerate(record):
        # A run by itself: its parts are one pipeline that owns its accelerators. Adapters on one base are one each.
        entry = replace(given, source=f"run/{given.source}") if alone and "/" not in given.source else given
        if gaps and index == gaps[0]:
            gaps.pop(0)
            references.tail_lost()
            for group in groups:
                group.tail_lost(entry)
        time, kind = entry.time, type(entry.event)
        problem = None
        if latest.get(entry.source, time) <= time:
            latest[entry.source] = time
        else:
            problem = clocks.went_back(entry.source, time)
        judge = judges.get(kind)
        nonsense = judge(entry.event) if judge is not None else None
        if problem is not None or nonsense is not None:
            violations += [
                Violation(10, entry.seq, time, message) for message in (problem, nonsense) if message is not None
            ]
        if nonsense is None:
            for group, handler in table.get(kind, ()):
                handler(entry, entry.event)
                if group.found:
                    violations += [Violation(number, entry.seq, time, message) for number, message in group.found]
                    group.found.clear()
        if violations and first_only:
            break
    if violations and first_only:
        return violations[:1]
    for group in groups:
        group.finish(clocks, ended)
        violations += [Violation(number, entry.seq, entry.time, message) for number, message in group.found]
    return violations[:1] if first_only else violations


class Survey(NamedTuple):
    """Which kinds of events a record has, and where its scheduler's log lost its end and a new scheduler went on
    without it (its `SchedulerStarted` says `complete=False`): for each the index behind the last entry that is left.

    From there to the `InventoryDone` of the new scheduler the ledger may contradict the rest of the record without
    mistake: lost events may be in another copy, or missing. The pipelines' own records are whole, and are judged
    throughout.
    """

    kinds: frozenset[type]
    lost_tails: list[int]


def survey(record: Iterable[Entry]) -> Survey:
    """Reads a record once. Raises NothingToCheck when silence of a check would prove nothing."""
    kinds: set[type] = set()
    lost_tails: list[int] = []
    count = behind = 0
    for index, entry in enumerate(record):
        kind = type(entry.event)
        kinds.add(kind)
        count = index + 1
        if isinstance(entry.event, ev.SchedulerStarted) and not entry.event.complete:
            lost_tails.append(behind)
        if entry.source == SCHEDULER and kind not in _BEGINNING:
            behind = index + 1
    if not kinds - {RecordOpened, UnknownEvent}:
        raise NothingToCheck(
            f"the record has {count} entries and none that a check knows: nothing can be proven from "
            "it; give the record of a run "
            f"(the scheduler's and those of its pipelines, or the one that `simulate --log` writes)"
        )
    scheduling = sorted(kind.__name__ for kind in kinds if kind.__module__ == ev.__name__)
    if scheduling and ev.PoolOpened not in kinds:
        raise NothingToCheck(
            f"the record speaks of time-sharing ({', '.join(scheduling[:3])}) but has no ts_pool_opened, "
            "with which a scheduler's log begins: "
            "what was shared, and under which limits, is unknown; give the scheduler's whole log beside the "
            "records of its pipelines"
        )
    return Survey(frozenset(kinds), lost_tails)
