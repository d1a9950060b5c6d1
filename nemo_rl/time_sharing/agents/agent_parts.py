"""What an agent is made of: its host's side of the bargain, one record per rank and per hold, and the error for a
pipeline that breaks the protocol.

Only shapes; `agent.Agent` is the state machine that moves them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from nemo_rl.time_sharing.protocol.types import Answer, Command, Phase, Priority, Status, Want

REFRESH = "refresh"


class ProtocolError(RuntimeError):
    """The protocol does not allow what the pipeline asked for now; the message says what comes first."""


class Operation(NamedTuple):
    """Work in progress: `kind` drain, sleep, wake, sync or `refresh`; `version`: of sync and refresh."""

    number: int
    kind: str
    rank: int
    version: int


class Host(Protocol):
    """What carries the agent: the engines and the wire. Nothing here may call back before it returns."""

    def perform(self, operation: Operation) -> None: ...

    def answer(self, answer: Answer) -> None: ...

    def status(self, status: Status) -> None: ...

    def granted(self, cluster: str, priority: Priority, step: int) -> None: ...

    def request_ended(self, want: Want, reason: str) -> None:
        """A request ended without a grant; its cluster has to be requested again."""

    def routing_changed(self, rank: int, active: bool) -> None: ...

    def refreshed(self, version: int) -> None: ...

    def dismissed(self, left: bool) -> None: ...


@dataclass(slots=True)
class LocalRank:
    """One rank as it is: phase, epoch of its last command, version of the loaded weights (-1 none), what it does now
    and what comes next; `resident` once a wake has succeeded, `broken` when it cannot serve; `over` is the newest epoch
    whose lease has ended."""

    phase: Phase = Phase.ASLEEP
    epoch: int = 0
    version: int = -1
    busy: Operation | None = None
    doing: Command | None = None
    waiting: Command | None = None
    newest: tuple[int, int] = (0, 0)
    broken: bool = False
    resident: bool = False
    over: int = 0


@dataclass(slots=True)
class LocalHold:
    """A fixed cluster that this pipeline holds."""

    epoch: int
    gpus: tuple[int, ...]
    priority: Priority
    step: int
