"""Checks of a simulation that a record cannot show: real time against the scheduler's, the scheduler's state, and each
agent from outside: its commands, answers and operations.

The contract of an agent: a command of another incarnation or of a replaced scheduler changes nothing; a repeated one is
answered again; a rank obeys its commands in the order in which they were made, under the epoch of its present lease and
never under one that is over; a grant is taken for the request that is open. Every check raises Misbehaviour; none
changes the watched objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from nemo_rl.time_sharing.agents.agent import Agent, LocalPhase, Operation, RankStep
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.log.state import Lease, PipelineState, SchedulerState
from nemo_rl.time_sharing.protocol.types import (
    ACTOR_INFER,
    ACTOR_TRAIN,
    Answer,
    Command,
    CommandOutcome,
    Limits,
    Phase,
    Reply,
    Status,
    Verb,
)
from nemo_rl.utils.record import Entry

_UP = frozenset({Phase.RISING, Phase.SERVING})


def problems(state: SchedulerState) -> Iterator[str]:
    """Contradictions within the state."""
    yield from _owners(state)
    yield from _claims(state)
    if state.quarantined != {gpu for quarantine in state.quarantines for gpu in quarantine.gpus}:
        yield f"GPUs {sorted(state.quarantined)} are withheld, in quarantine are {state.quarantines}"
    trainers = [0] * len(state.owner)
    for pipeline in state.pipelines.values():
        for gpu in {gpu for cluster in pipeline.spec.clusters if cluster.name == ACTOR_TRAIN for gpu in cluster.gpus}:
            trainers[gpu] += 1
    if state.trainers != trainers:
        yield f"the numbers of pipelines that train on each GPU are {trainers}, kept is {state.trainers}"
    for name, pipeline in state.pipelines.items():
        if state.incarnations.get(name, -1) < pipeline.incarnation:
            yield f"{name} is registered as incarnation {pipeline.incarnation}, used are {state.incarnations.get(name)}"
        if pipeline.fenced and pipeline.wants:
            yield f"{name} is fenced and waits for {sorted(pipeline.wants)}"
        if _lacks_a_rank(pipeline) != (pipeline.unscheduled_since is not None):
            yield f"{name} is said to wait for a first rank since {pipeline.unscheduled_since}, which is not so"
        newest = max((want.want.request for want in pipeline.wants.values()), default=-1)
        if newest > pipeline.last_request:
            yield f"{name} waits for request {newest}, its newest is {pipeline.last_request}"


def _owners(state: SchedulerState) -> Iterator[str]:
    owner: list[Lease | None] = [None] * len(state.owner)
    for name, pipeline in state.pipelines.items():
        for cluster, held in pipeline.held.items():
            for gpu in held.gpus:
                owner[gpu] = Lease(name, cluster, -1, held.epoch)
        for rank, awake in pipeline.awake.items():
            for gpu in pipeline.topology.ranks[rank]:
                owner[gpu] = Lease(name, ACTOR_INFER, rank, awake.epoch)
    for gpu, (kept, real) in enumerate(zip(state.owner, owner, strict=True)):
        if kept != real:
            yield f"GPU {gpu} is on the ledger of {kept}, and {real} has it"
    newest = max((lease.epoch for lease in owner if lease is not None), default=0)
    if newest > state.epoch:
        yield f"a lease has epoch {newest}, the newest is said to be {state.epoch}"


def _claims(state: SchedulerState) -> Iterator[str]:
    claimed = {gpu: claim for claim in state.claims.values() for gpu in claim.gpus}
    if state.claimed != claimed:
        yield f"GPUs {sorted(state.claimed)} are claimed, by the claims {sorted(claimed)}"
    for name, pipeline in state.pipelines.items():
        ranks = {rank for whose, _, rank in state.claims if whose == name and rank >= 0}
        if pipeline.claimed_ranks != ranks:
            yield f"ranks {sorted(pipeline.claimed_ranks)} of {name} are to wake, by the claims {sorted(ranks)}"
    for whose, cluster, _ in state.claims:
        if whose not in state.pipelines:
            yield f"{whose}/{cluster} claims GPUs and is not registered"


def _lacks_a_rank(pipeline: PipelineState) -> bool:
    """Whether it has work for generation and no rank that is up or claimed."""
    if pipeline.demand.remaining <= 0 or pipeline.withdraws or pipeline.fenced or pipeline.claimed_ranks:
        return False
    return not any(rank.phase in _UP for rank in pipeline.awake.values())


_SLACK_S = 5.0
_AUDIT_EVERY = 20
"""Entries of the log."""
_TAKES_STOCK = (ev.Granted, ev.Released, ev.RankMoved, ev.Requested, ev.RequestDropped, ev.DemandReported, ev.Fenced)


class Misbehaviour(AssertionError):
    """The scheduler or an agent violated its contract."""


class SchedulerWatch:
    """Watches one scheduler, from its start to its end."""

    def __init__(self, limits: Limits, entries: list[Entry], now: float, real: float) -> None:
        self._limits, self._entries = limits, entries
        self._now, self._real = now, real
        self._audited = self._read = len(entries)
        self._heard: dict[tuple[str, int], tuple[int, float]] = {}
        """Number and time of the newest status, by pipeline and incarnation."""
        self._took_stock: set[str] = set()
        self._began = self._spared_at = now
        self._isolated = False
        self._jumps = 0

    def jumped(self) -> None:
        """The clock of the machine was set."""
        self._jumps += 1

    def observe(self, state: SchedulerState, now: float, real: float) -> None:
        """After each tick."""
        if now - self._now > real - self._real + self._jumps * self._limits.max_tick_s + 1e-6:
            raise Misbehaviour(f"{real - self._real:.1f} s passed, and {now - self._now:.1f} s on the steady clock")
        self._now, self._real, self._jumps = now, real, 0
        self._read_log()
        if self._read >= self._audited + _AUDIT_EVERY:
            self.audit(state)
        if not self._isolated:
            self._check_silence(state, now)

    def audit(self, state: SchedulerState) -> None:
        """Raises where the state contradicts itself."""
        self._audited = len(self._entries)
        problem = next(problems(state), None)
        if problem is not None:
            raise Misbehaviour(problem)

    def status_comes(self, state: SchedulerState, status: Status, now: float) -> int:
        """Before a status is taken at `now`; returns how long the log may be if the status changes nothing."""
        self._read_log()
        key = (status.pipeline, status.incarnation)
        pipeline = state.pipelines.get(status.pipeline)
        if pipeline is not None and pipeline.incarnation == status.incarnation:
            newest, _ = self._heard.get(key, (-1, 0.0))
            if status.seq > newest:
                self._heard[key] = (status.seq, now)
            if status.term >= state.term or not state.recovering or pipeline.registered_at >= self._began:
                self._took_stock.add(status.pipeline)
        return len(self._entries)

    def status_taken(self, state: SchedulerState, status: Status, began: int) -> None:
        """Checks that an inventory comes from a status of the present term, not from one sent before the restart."""
        if status.pipeline in self._took_stock or not state.recovering:
            return
        for entry in self._entries[began:]:
            if isinstance(entry.event, _TAKES_STOCK) and entry.event.pipeline == status.pipeline:
                raise Misbehaviour(f"a status of term {status.term} is taken for an inventory of term {state.term}")

    def _read_log(self) -> None:
        for entry in self._entries[self._read :]:
            self._check(entry)
        self._read = len(self._entries)

    def _check(self, entry: Entry) -> None:
        event = entry.event
        if isinstance(event, ev.SchedulerStarted | ev.Isolated | ev.Reconnected):
            self._spared_at, self._isolated = entry.time, isinstance(event, ev.Isolated)
        elif isinstance(event, ev.Fenced) and event.reason.startswith("no heartbeat"):
            _, heard = self._heard.get((event.pipeline, event.incarnation), (-1, float("-inf")))
            if entry.time < heard + self._limits.lease_s:
                raise Misbehaviour(
                    f"{event.pipeline} was heard at {heard:.1f} s and is fenced at {entry.time:.1f} s for its silence"
                )

    def _check_silence(self, state: SchedulerState, now: float) -> None:
        for name, pipeline in state.pipelines.items():
            _, heard = self._heard.get((name, pipeline.incarnation), (-1, 0.0))
            since = max(heard, self._spared_at, pipeline.registered_at)
            if not pipeline.fenced and now > since + self._limits.lease_s + _SLACK_S:
                raise Misbehaviour(f"{name} was heard last at {since:.1f} s and is not fenced at {now:.1f} s")


class _Seen(NamedTuple):
    """Externally visible state of an agent."""

    ranks: tuple[tuple[LocalPhase, int | None], ...]
    holds: tuple[tuple[str, int], ...]
    answers: int


class AgentWatch:
    """One incarnation of a pipeline's agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._answers: list[Answer] = []
        self._known: dict[str, Answer] = {}
        self._term = 0
        self._dismissed = False
        self._newest: dict[int, tuple[int, int]] = {}
        self._steps: dict[int, Operation] = {}
        self._over: dict[int, int] = {}
        self._up: dict[int, int] = {}
        self._refreshes = False

    def answered(self, answer: Answer) -> None:
        """The agent sends an answer."""
        self._answers.append(answer)
        self._known[answer.command] = answer

    def heard(self, reply: Reply) -> None:
        """Notes a reply that is delivered to the agent."""
        if reply.incarnation == self._agent.incarnation and not self._dismissed:
            self._dismissed = not reply.registered
            self._term = max(self._term, reply.term) if reply.registered else self._term

    def obeys(self, command: Command, obey: Callable[[Command], None]) -> None:
        """Passes a command to the agent and checks the effect."""
        self.check()
        before, known = self._seen(), self._known.get(command.command)
        foreign = command.incarnation != self._agent.incarnation or command.term < self._term or self._dismissed
        wanted = self._is_wanted(command)
        must_refuse = self._must_refuse(command)
        own, order = self._newest.get(command.rank, (0, 0)), _order(command)
        current = order > own and command.epoch >= self._epoch_of(command.rank)
        obey(command)
        after = self._seen()
        given = self._answers[before.answers :]
        if foreign:
            self._nothing_but(0, before, after, command, "is none for this incarnation now")
            return
        self._term = command.term
        refused = any(a.command == command.command and a.outcome is CommandOutcome.REFUSED for a in given)
        if known is not None:
            self._nothing_but(1, before, after, command, "is a repeated one and has its answer")
            if given[0] != known:
                self._bad(command, f"was answered {known.outcome.value}, and now {given[0].outcome.value}")
        elif must_refuse:
            if not refused:
                self._bad(command, must_refuse)
            self._nothing_but(1, before, after, command, must_refuse)
        elif command.verb is Verb.BUILD and self._is_over(command):
            self._nothing_but(1, before, after, command, "builds the rank's engine under an epoch that is over")
        elif command.verb is Verb.VACATE and current and refused:
            self._bad(command, "is the newest of this rank, which may always be vacated, and is refused")
        elif command.verb is Verb.GRANT and wanted and refused:
            self._bad(command, "is what the pipeline waits for, and is refused")
        if known is None and not refused and command.rank >= 0:
            self._newest[command.rank] = max(own, order)
        self.check()

    def check(self) -> None:
        """Checks the agent's present state."""
        agent = self._agent
        for index, rank in enumerate(agent.ranks):
            if rank.phase is not LocalPhase.ASLEEP:
                self._up[index] = rank.epoch
            elif index in self._up:
                self._over[index] = max(self._up.pop(index), self._over.get(index, 0))
        if self._refreshes and agent.published == agent.cached:
            self._refreshes = False
        busy = any(rank.busy is not None and rank.phase is LocalPhase.ROUTED for rank in agent.ranks)
        refreshing = any(rank.busy is not None and rank.busy.kind is RankStep.REFRESH for rank in agent.ranks)
        if self._refreshes and not busy and not refreshing:
            raise Misbehaviour(f"{self._who} has version {agent.cached} everywhere and does not publish it")

    def begins(self, operation: Operation) -> None:
        """The agent has a step performed; no other of that rank may be under way."""
        if (other := self._steps.get(operation.rank)) is not None:
            raise Misbehaviour(f"{self._who}: {operation} begins while {other} is under way")
        self._steps[operation.rank] = operation

    def ends(self, operation: Operation) -> None:
        """A step is over."""
        if self._steps.get(operation.rank) == operation:
            del self._steps[operation.rank]

    def rank_ended(self, rank: int) -> None:
        """The processes of a rank are ended, and with them what they did."""
        self._steps.pop(rank, None)

    def refreshes(self) -> None:
        """The agent must bring its new weights to every rank and then publish them."""
        self._refreshes = True

    @property
    def _who(self) -> str:
        return f"{self._agent.topology.pipeline} ({self._agent.incarnation})"

    def _seen(self) -> _Seen:
        ranks = tuple((r.phase, r.busy.number if r.busy is not None else None) for r in self._agent.ranks)
        holds = tuple((cluster, held.epoch) for cluster, held in self._agent.holds.items())
        return _Seen(ranks, holds, len(self._answers))

    def _epoch_of(self, rank: int) -> int:
        return self._agent.ranks[rank].epoch if 0 <= rank < len(self._agent.ranks) else 0

    def _is_wanted(self, command: Command) -> bool:
        want = self._agent.wants.get(command.cluster)
        return want is not None and want.request == command.request and command.cluster not in self._agent.holds

    def _must_refuse(self, command: Command) -> str:
        """Why a command may not be obeyed, "" for one that may."""
        if command.verb is Verb.GRANT:
            held = command.cluster in self._agent.holds
            return "" if held or self._is_wanted(command) else "is a grant that was not asked for"
        if command.epoch < self._epoch_of(command.rank):
            return f"is of epoch {command.epoch}, the rank is at {self._epoch_of(command.rank)}"
        if _order(command) < self._newest.get(command.rank, (0, 0)):
            return f"was made before {self._newest[command.rank]}, which the rank has obeyed"
        if command.verb is Verb.SERVE and self._is_over(command):
            return f"wakes the rank under epoch {command.epoch}, which is over"
        return ""

    def _is_over(self, command: Command) -> bool:
        return command.rank not in self._up and command.epoch <= self._over.get(command.rank, -1)

    def _nothing_but(self, answers: int, before: _Seen, after: _Seen, command: Command, why: str) -> None:
        if after != before._replace(answers=before.answers + answers):
            self._bad(command, f"{why}: {before} becomes {after}")

    def _bad(self, command: Command, what: str) -> None:
        where = f"rank {command.rank}" if command.rank >= 0 else command.cluster
        raise Misbehaviour(f"{self._who}: {command.verb.value} of {where} ({command.command}) {what}")


def _order(command: Command) -> tuple[int, int]:
    term, _, number = command.command.partition(".")
    return int(term), int(number)
