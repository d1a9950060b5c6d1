"""Accounts of a pool: who had its GPUs, for what, and what came of it.

A fold over the scheduler's events; steps, samples and tokens are read from the records of the jobs, where they are
given. Invariant: at every moment each slot of a node that is not away is on one account for one use, so the sums are
the pool's time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from functools import cache
from typing import NamedTuple

from nemo_rl.config.errors import UserError
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.state import InconsistentLog, PipelineState, SchedulerState, StateSaved
from nemo_rl.time_sharing.protocol.types import SCHEDULER, Phase, Priority
from nemo_rl.utils import record_events as rec
from nemo_rl.utils.record import Entry

DAY_S = 86400.0
_SECONDS = re.compile(r"\d+\.\d+")
POOL = "(no job)"
"""Name of the account of GPUs that no job has."""
_NO_USER = "(no user)"
BY = ("job", "user", "group", "day", "use")


class Use(str, Enum):
    """What a GPU is used for."""

    STARTED = "started"  # a model is loaded or an engine built
    TRAINED = "trained"  # training, or log-probabilities for it
    GENERATED = "generated"  # an engine serves, and its job has samples to generate
    HELD_IDLE = "held idle"  # an engine serves, and its job has nothing to generate
    HANDED_OVER = "handed over"  # promised to a job, waking, or falling asleep
    LOST = "lost to faults"  # of a job that is cut off or an engine that failed, or in quarantine for it
    FREE = "free"  # no job has it


class AccountKey(NamedTuple):
    """Whose account, on which day (UTC). `user` and `group` are "" where the pool has no team."""

    day: str
    job: str
    user: str = ""
    group: str = ""


@dataclass
class Account:
    """GPU-seconds by use, and the work done with them. Samples are those trained, tokens those generated."""

    seconds: dict[Use, float] = field(default_factory=lambda: dict.fromkeys(Use, 0.0))
    steps: int = 0
    samples: int = 0
    tokens: int = 0

    @property
    def total_s(self) -> float:
        """GPU-seconds of all uses."""
        return sum(self.seconds.values())

    def add(self, other: Account) -> None:
        """Adds another account to this one."""
        for use, seconds in other.seconds.items():
            self.seconds[use] += seconds
        self.steps += other.steps
        self.samples += other.samples
        self.tokens += other.tokens


class UnaccountableLog(UserError, ValueError):
    """The log contradicts itself, so that it does not say who had what."""


class Accounts:
    """Folds records entry by entry.

    Attributes:
        by_key: The accounts so far.
        pool_s: GPU-seconds that the pool had so far; the sum of all accounts.
    """

    def __init__(self) -> None:
        self.by_key: dict[AccountKey, Account] = {}
        self.pool_s = 0.0
        self._state = SchedulerState()
        self._uses: list[tuple[str, Use | None]] = []  # None while the node is away
        self._since: list[float] = []
        self._counted_to = 0.0
        self._group_samples: dict[tuple[str, str], int] = {}
        self._owners: dict[str, tuple[str, str]] = {}

    def take(self, entry: Entry) -> None:
        """The next entry. Raises UnaccountableLog: it contradicts those before it."""
        if entry.source != SCHEDULER:
            self._take_work(entry)
            return
        event, state = entry.event, self._state
        if isinstance(event, ev.PoolOpened) and self._uses:
            # Nothing is left of what the log said before.
            self.until(entry.time)._uses.clear()
        if isinstance(event, ev.Registered):
            self._own(event, entry.time)
        if isinstance(event, ev.NodeDraining | ev.NodeAway | ev.NodeHere):
            self._count_pool(entry.time)
        had_work = isinstance(event, ev.DemandReported) and self._has_work(event.pipeline)
        try:
            before = {*self._slots_of(event)} if isinstance(event, ev.Unregistered) else set()
            state.apply(event, entry.time)
            if isinstance(event, ev.DemandReported) and self._has_work(event.pipeline) == had_work:
                return
            if len(self._uses) != state.pool.slots:
                self._uses = [(POOL, Use.FREE)] * state.pool.slots
                self._since = [entry.time] * state.pool.slots
                self._counted_to = entry.time
            changed = {slot: self._use_of(slot) for slot in before.union(self._slots_of(event))}
        except (InconsistentLog, KeyError) as error:
            raise UnaccountableLog(
                f"entry {entry.seq} ({type(event).__name__}) at {entry.time:.3f} s contradicts those before it: "
                f"{error}; python -m nemo_rl.time_sharing check says more"
            ) from error
        for slot, use in changed.items():
            if use != self._uses[slot]:
                self._settle(slot, entry.time)
                self._uses[slot] = use

    def _own(self, event: ev.Registered, at: float) -> None:
        """A job of this name belongs to this user from now on; what is left of an earlier one's is settled first."""
        owner = (event.user, event.group)
        if self._owners.get(event.pipeline, owner) != owner:
            for slot, (job, _) in enumerate(self._uses):
                if job == event.pipeline:
                    self._settle(slot, at)
        self._owners[event.pipeline] = owner

    def _has_work(self, pipeline: str) -> bool:
        known = self._state.pipelines.get(pipeline)
        return known is not None and known.demand.remaining > 0

    def until(self, time: float) -> Accounts:
        """Settles all accounts up to `time`, seconds on the log's clock."""
        for slot in range(len(self._uses)):
            self._settle(slot, time)
        self._count_pool(time)
        return self

    def _count_pool(self, until: float) -> None:
        pool = self._state.pool
        here = (pool.nodes - len(self._state.away)) * pool.gpus_per_node
        self.pool_s += here * max(until - self._counted_to, 0.0)
        self._counted_to = max(until, self._counted_to)

    def _settle(self, slot: int, until: float) -> None:
        """Puts the time of a slot since its last change on its account, day by day."""
        job, use = self._uses[slot]
        begin, gpus = self._since[slot], 1.0 / self._state.pool.slots_per_gpu
        while use is not None and begin < until:
            end = min(until, (begin // DAY_S + 1) * DAY_S)
            self._account(job, begin).seconds[use] += gpus * (end - begin)
            begin = end
        self._since[slot] = max(until, self._since[slot])

    def _account(self, job: str, time: float) -> Account:
        key = AccountKey(_day_of(time // DAY_S), job, *self._owners.get(job, ("", "")))
        if (found := self.by_key.get(key)) is None:
            found = self.by_key[key] = Account()
        return found

    def _slots_of(self, event: object) -> Iterable[int]:
        """The slots whose use an event may change, as the state knows them now."""
        match event:
            case StateSaved() | ev.PoolOpened():
                return range(len(self._uses))
            case ev.Claimed() | ev.Granted() | ev.GpusQuarantined() | ev.GpusCleared():
                slots: Iterable[int] = event.gpus
            case ev.NodeDraining() | ev.NodeAway() | ev.NodeHere():
                slots = self._state.pool.units_of([event.node])
            case ev.RankMoved():
                slots = self._state.pipeline(event.pipeline).topology.ranks[event.rank]
            case ev.DemandReported() | ev.ClaimDropped() | ev.PriorityChanged() | ev.Released() | ev.Fenced():
                slots = self._state.pipeline(event.pipeline).topology.mapped_gpus
            case ev.Unregistered():
                pipeline = self._state.pipelines.get(event.pipeline)
                slots = () if pipeline is None else pipeline.topology.mapped_gpus
            case _:
                return ()
        return (slot for slot in slots if slot < len(self._uses))

    def _use_of(self, slot: int) -> tuple[str, Use | None]:
        state = self._state
        if state.pool.node_of(slot) in state.away:
            return POOL, None
        if slot in state.quarantined:
            return next(q.pipeline for q in reversed(state.quarantines) if slot in q.gpus), Use.LOST
        lease, claim = state.owner[slot], state.claimed.get(slot)
        if lease is None:
            return (POOL, Use.FREE) if claim is None else (claim.pipeline, Use.HANDED_OVER)
        pipeline = state.pipelines[lease.pipeline]
        if pipeline.fenced:
            return lease.pipeline, Use.LOST
        if lease.rank < 0:
            starts = pipeline.held[lease.cluster].priority is Priority.INITIALIZATION
            return lease.pipeline, Use.STARTED if starts else Use.TRAINED
        return lease.pipeline, _use_of_rank(pipeline, lease.rank)

    def _take_work(self, entry: Entry) -> None:
        job, event = entry.source.partition("/")[0], entry.event
        match event:
            case rec.GroupAdmitted():
                self._group_samples[job, event.group_id] = event.samples
            case rec.GroupDropped():
                self._group_samples.pop((job, event.group_id), None)
            case rec.GroupTrained():
                self._account(job, entry.time).samples += self._group_samples.pop((job, event.group_id), 0)
            case rec.StepFinished():
                self._account(job, entry.time).steps += 1
            case rec.TokensGenerated():
                tokens = sum(span.end - span.start for span in event.spans)
                self._account(job, entry.time).tokens += tokens
            case _:
                pass


@cache
def _day_of(number: float) -> str:
    return datetime.fromtimestamp(number * DAY_S, UTC).strftime("%Y-%m-%d")


def _use_of_rank(pipeline: PipelineState, rank: int) -> Use:
    phase = pipeline.awake[rank].phase
    if phase is Phase.SERVING:
        return Use.GENERATED if pipeline.demand.remaining else Use.HELD_IDLE
    if phase is Phase.FAILED:
        return Use.LOST
    builds = phase is Phase.BUILDING or (phase is Phase.RISING and rank not in pipeline.warm)
    return Use.STARTED if builds else Use.HANDED_OVER


def accounts_of(entries: Sequence[Entry]) -> Accounts:
    """The accounts of whole records, merged by time, up to the scheduler's last entry. Raises UnaccountableLog: they
    contradict themselves, or no pool was opened in them.
    """
    accounts = Accounts()
    for entry in entries:
        accounts.take(entry)
    last = next((entry.time for entry in reversed(entries) if entry.source == SCHEDULER), None)
    if last is None or not accounts._uses:
        raise UnaccountableLog("the records hold no scheduler's log; give scheduler.jsonl of the pool's folder")
    return accounts.until(last)


def accounts_if_any(entries: Sequence[Entry]) -> Accounts | None:
    """As `accounts_of`; None where the records have no accounts."""
    try:
        return accounts_of(entries)
    except UnaccountableLog:
        return None


def statement(accounts: Accounts, by: str) -> list[list[str]]:
    """Rows of a table, the first with the names of its columns, the last with the sums. `by`: one of `BY`."""
    if by == "use":
        whole = _sums(accounts, lambda key: "")[""]
        total = max(accounts.pool_s, 1e-9)
        uses = [[use.value, f"{s:.3f}", f"{s / total:.1%}"] for use, s in whole.seconds.items()]
        return [["use", "GPU-seconds", "share"], *uses, ["all", f"{whole.total_s:.3f}", f"{whole.total_s / total:.1%}"]]
    rows = _sums(accounts, lambda key: POOL if key.job == POOL and by != "day" else getattr(key, by) or _NO_USER)
    names = [by, *(use.value for use in Use), "all", "steps", "samples", "tokens"]
    everything = _sums(accounts, lambda key: "all")
    return [names, *([name, *_row(account)] for name, account in (*sorted(rows.items()), *everything.items()))]


def in_whole_seconds(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Rows of a statement as people read them.

    >>> in_whole_seconds([["a", "1234.500", "7", "12.3%"]])
    [['a', '1,234', '7', '12.3%']]
    """
    return [[f"{float(cell):,.0f}" if _SECONDS.fullmatch(cell) else cell for cell in row] for row in rows]


def _sums(accounts: Accounts, name: Callable[[AccountKey], str]) -> dict[str, Account]:
    sums: dict[str, Account] = {}
    for key, account in accounts.by_key.items():
        sums.setdefault(name(key), Account()).add(account)
    return sums


def _row(account: Account) -> list[str]:
    seconds = [f"{seconds:.3f}" for seconds in (*account.seconds.values(), account.total_s)]
    return [*seconds, str(account.steps), str(account.samples), str(account.tokens)]
