"""Watches one agent from outside: which commands reach it, what it answers, what it does.

Its contract: a command of another incarnation or of a scheduler that was replaced changes nothing; a repeated one is
answered again; a rank obeys its commands in the order in which they were made, under the epoch of its present lease and
never under one that is over; a grant is taken for the request that is open. Raises Misbehaviour; changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from nemo_rl.time_sharing.agents.agent import Agent
from nemo_rl.time_sharing.agents.agent_parts import REFRESH
from nemo_rl.time_sharing.protocol.types import Answer, Command, Outcome, Phase, Reply, Verb
from nemo_rl.time_sharing.simulation.watch import Misbehaviour


class _Seen(NamedTuple):
    """What can be seen of an agent."""

    ranks: tuple[tuple[Phase, int | None], ...]
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
        self._over: dict[int, int] = {}
        self._up: dict[int, int] = {}
        self._refreshes = False

    def answered(self, answer: Answer) -> None:
        """The agent sends an answer."""
        self._answers.append(answer)
        self._known[answer.command] = answer

    def heard(self, reply: Reply) -> None:
        """A reply is on its way to the agent."""
        if reply.incarnation == self._agent.incarnation and not self._dismissed:
            self._dismissed = not reply.registered
            self._term = max(self._term, reply.term) if reply.registered else self._term

    def obeys(self, command: Command, obey: Callable[[Command], None]) -> None:
        """Has a command obeyed and judges what comes of it."""
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
        refused = any(a.command == command.command and a.outcome is Outcome.REFUSED for a in given)
        if known is not None:
            self._nothing_but(1, before, after, command, "is a repeated one and has its answer")
            if given[0] != known:
                self._bad(command, f"was answered {known.outcome.value}, and now {given[0].outcome.value}")
        elif must_refuse:
            if not refused:
                self._bad(command, must_refuse)
            self._nothing_but(1, before, after, command, must_refuse)
        elif command.verb is Verb.DRAIN and current and refused:
            self._bad(command, "is the newest of this rank, which may always be drained, and is refused")
        elif command.verb is Verb.GRANT and wanted and refused:
            self._bad(command, "is what the pipeline waits for, and is refused")
        if known is None and not refused and command.rank >= 0:
            self._newest[command.rank] = max(own, order)
        self.check()

    def check(self) -> None:
        """Judges what the agent is doing."""
        agent = self._agent
        for index, rank in enumerate(agent.ranks):
            if rank.phase is not Phase.ASLEEP:
                self._up[index] = rank.epoch
            elif index in self._up:
                self._over[index] = max(self._up.pop(index), self._over.get(index, 0))
        if self._refreshes and agent.published == agent.cached:
            self._refreshes = False
        busy = any(rank.busy is not None and rank.phase is Phase.ACTIVE for rank in agent.ranks)
        refreshing = any(rank.busy is not None and rank.busy.kind == REFRESH for rank in agent.ranks)
        if self._refreshes and not busy and not refreshing:
            raise Misbehaviour(f"{self._who} has version {agent.cached} everywhere and does not publish it")

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
        asleep = command.rank not in self._up
        if command.verb is Verb.WAKE and asleep and command.epoch <= self._over.get(command.rank, -1):
            return f"wakes the rank under epoch {command.epoch}, which is over"
        return ""

    def _nothing_but(self, answers: int, before: _Seen, after: _Seen, command: Command, why: str) -> None:
        if after != before._replace(answers=before.answers + answers):
            self._bad(command, f"{why}: {before} becomes {after}")

    def _bad(self, command: Command, what: str) -> None:
        where = f"rank {command.rank}" if command.rank >= 0 else command.cluster
        raise Misbehaviour(f"{self._who}: {command.verb.value} of {where} ({command.command}) {what}")


def _order(command: Command) -> tuple[int, int]:
    term, _, number = command.command.partition(".")
    return int(term), int(number)
