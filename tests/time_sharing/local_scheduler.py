"""The scheduler's core in this process with real agents around it, every message on a thread of its own; its clock is
moved by the test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from nemo_rl.time_sharing.agents.runtime import AgentRuntime, Engine
from nemo_rl.time_sharing.protocol.topology import Pool, Topology
from nemo_rl.time_sharing.protocol.types import (
    ACTOR_INFER,
    ACTOR_TRAIN,
    Answer,
    Command,
    CommandOutcome,
    Limits,
    Reply,
    Status,
    Verb,
)
from nemo_rl.time_sharing.scheduling.liveness import SteadyClock
from nemo_rl.time_sharing.scheduling.scheduler import Scheduler
from nemo_rl.utils.record import MemoryRecord, NullRecord


class Hearer(Protocol):
    """What takes the scheduler's commands for a pipeline."""

    def command(self, command: Command) -> None: ...


class NoEngine:
    def drain(self, rank: int) -> None: ...

    def sleep(self, rank: int) -> None: ...

    def wake(self, rank: int) -> None: ...

    def load(self, rank: int, version: int) -> int:
        return version

    def set_routable(self, rank: int, active: bool) -> None: ...


class LocalScheduler:
    """The scheduler's core in this process, on a clock that the test moves; it is the link of every agent, and ends
    nobody's processes.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits, self.now = limits, 0.0
        self._lock = threading.RLock()
        self._runtimes: list[AgentRuntime] = []
        self.agents: dict[str, Hearer] = {}
        self.core = Scheduler(MemoryRecord(), self._send, SteadyClock(max_step_s=1e9))
        self.core.open(Pool(1, 2), limits, 0.0)

    def register(self, name: str, mappings: Mapping[str, Sequence[int]], **options: Any) -> Topology:
        with self._lock:
            return self.core.register(name, "ns", dict.fromkeys(mappings, 1), mappings, self.now, **options)

    def start(self, name: str, engine: Engine | None = None) -> AgentRuntime:
        """A pipeline that trains on GPU 0 and generates on both, with engines that do nothing by default."""
        topology = self.register(name, {ACTOR_TRAIN: [0], ACTOR_INFER: [0, 1]})
        self.agents[name] = agent = AgentRuntime(topology, 0, engine or NoEngine(), self, NullRecord(), self.limits)
        self._runtimes.append(agent)
        agent.start()
        return agent

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = threading.Event()
        for _ in range(3000):
            with self._lock:
                if condition():
                    return
            deadline.wait(0.01)
        raise TimeoutError("the condition never held")

    def pass_time(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds
            self.core.tick(self.now)

    def unregister(self, name: str) -> None:
        with self._lock:
            self.core.unregister(name, self.now)

    def status(self, status: Status, replied: Callable[[Reply], None]) -> None:
        threading.Thread(target=self._status, args=(status, replied)).start()

    def answer(self, answer: Answer) -> None:
        threading.Thread(target=self._answer, args=(answer,)).start()

    def close(self) -> None:
        for agent in self._runtimes:
            agent.closed.set()

    def _status(self, status: Status, replied: Callable[[Reply], None]) -> None:
        with self._lock:
            reply = self.core.status(status, self.now)
        replied(reply)

    def _answer(self, answer: Answer) -> None:
        with self._lock:
            self.core.answer(answer, self.now)

    def _send(self, command: Command) -> None:
        if command.verb is Verb.REAP:
            self.answer(Answer(command.command, command.pipeline, command.incarnation, CommandOutcome.DONE))
        else:
            threading.Thread(target=self.agents[command.pipeline].command, args=(command,)).start()
