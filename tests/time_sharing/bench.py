"""The scheduler's core with an obedient agent for every pipeline, unless told otherwise; the wire is the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_rl.time_sharing.planning import planner
from nemo_rl.time_sharing.planning.plan import Plan, Snapshot
from nemo_rl.time_sharing.planning.validator import validate
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import (
    ACTOR_INFER,
    ACTOR_TRAIN,
    Answer,
    Command,
    CommandOutcome,
    Demand,
    Limits,
    Priority,
    Status,
    Verb,
    Want,
)
from nemo_rl.time_sharing.scheduling.liveness import SteadyClock
from nemo_rl.time_sharing.scheduling.scheduler import Scheduler
from nemo_rl.utils.record import MemoryRecord, RecordWriter


def valid_plan(snapshot: Snapshot, now: float) -> Plan:
    """The planner's plan, which breaks no rule."""
    plan = planner.plan(snapshot, now)
    assert validate(snapshot, plan) == []
    return plan


class Bench:
    """`silent` pipelines answer nothing, `failing` ones fail at a verb; `sent` is every command that reached an
    agent.
    """

    def __init__(self, gpus: int = 4, log: Path | None = None) -> None:
        self.clock = SteadyClock()
        clock = lambda: self.clock.now  # noqa: E731
        written = None if log is None else RecordWriter(log, source="scheduler", clock=clock, flush_interval_s=0.0)
        self.record: Any = written or MemoryRecord(clock=clock)
        self.inbox: list[Command] = []
        self.silent: set[str] = set()
        self.failing: set[tuple[str, Verb]] = set()
        self.sent: list[Command] = []
        self.seqs: dict[str, int] = {}
        self.now = 0.0
        self.scheduler = Scheduler(
            self.record, self.inbox.append, self.clock, rule=valid_plan, explains=log is not None
        )
        self.scheduler.open(
            Pool(1, gpus), Limits(lease_s=1e6, isolation_s=0.0, plan_interval_s=0.0, quarantine_s=50.0), 0.0
        )

    @property
    def state(self):  # type: ignore[no-untyped-def]
        return self.scheduler.state

    def register(self, name: str, train: list[int], infer: list[int], incarnation: int = 0, **options: object) -> None:
        self.scheduler.register(
            name,
            "ns",
            {ACTOR_TRAIN: 1, ACTOR_INFER: 1},
            {ACTOR_TRAIN: train, ACTOR_INFER: infer},
            self.now,
            incarnation=incarnation,
            **options,
        )

    def status(self, name: str, **fields: object) -> None:
        self.seqs[name] = self.seqs.get(name, 0) + 1
        self.scheduler.status(
            Status(name, self.state.pipelines[name].incarnation, self.seqs[name], term=self.state.term, **fields),
            self.now,
        )  # type: ignore[arg-type]
        self.settle()

    def settle(self, seconds: float = 0.0) -> None:
        """Lets time pass in small steps and answers every command of agents that are not silent."""
        end = self.now + seconds
        while True:
            while self.inbox:
                self._answer(self.inbox.pop(0))
            if self.now >= end:
                return
            self.now = min(self.now + 1.0, end)
            self.scheduler.tick(self.now)

    def _answer(self, command: Command) -> None:
        self.sent.append(command)
        if command.pipeline in self.silent and command.verb is not Verb.REAP:
            return
        outcome = CommandOutcome.FAILED if (command.pipeline, command.verb) in self.failing else CommandOutcome.DONE
        version = 0 if command.verb is Verb.SERVE else -1
        self.scheduler.answer(
            Answer(command.command, command.pipeline, command.incarnation, outcome, version), self.now
        )

    def phases(self, name: str) -> dict[int, str]:
        return {rank: awake.phase.value for rank, awake in self.state.pipelines[name].awake.items()}

    def serves(self, name: str) -> bool:
        """Whether a new pipeline of this name gets GPU 0 to train on and a rank, over a plan and over time."""
        self.register(name, [0], [0, 1])
        self.status(name, demand=Demand(100, 0, 1, 1), wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0),))
        self.settle(5.0)
        return ACTOR_TRAIN in self.state.pipelines[name].held and self.phases(name) == {1: "serving"}
