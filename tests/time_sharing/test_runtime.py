"""The agent's runtime between the pipeline's driver and the scheduler: what the driver's calls raise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from nemo_rl.time_sharing.agent_parts import ProtocolError
from nemo_rl.time_sharing.runtime import AgentRuntime, Dismissed, RequestEnded
from nemo_rl.time_sharing.scheduler import Scheduler
from nemo_rl.time_sharing.steady_clock import SteadyClock
from nemo_rl.time_sharing.topology import Pool
from nemo_rl.time_sharing.types import ACTOR_INFER, ACTOR_TRAIN, Answer, Command, Limits, Outcome, Priority, Reply, Status, Verb
from nemo_rl.utils.record import MemoryRecord, NullRecord


class NoEngine:
    def drain(self, rank: int) -> None: ...

    def sleep(self, rank: int) -> None: ...

    def wake(self, rank: int) -> None: ...

    def load(self, rank: int, version: int) -> None: ...

    def set_routable(self, rank: int, active: bool) -> None: ...


class LocalScheduler:
    """The scheduler's core in this process, on a clock that the test moves; it is the link of every agent, and ends nobody's processes."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.now = limits, 0.0
        self._lock = threading.RLock()
        self._agents: dict[str, AgentRuntime] = {}
        self.core = Scheduler(MemoryRecord(), self._send, SteadyClock(max_step_s=1e9))
        self.core.open(Pool(1, 2), limits, 0.0)

    def start(self, name: str) -> AgentRuntime:
        mappings = {ACTOR_TRAIN: [0], ACTOR_INFER: [0, 1]}
        with self._lock:
            topology = self.core.register(name, "ns", dict.fromkeys(mappings, 1), mappings, self.now)
        self._agents[name] = agent = AgentRuntime(topology, 0, NoEngine(), self, NullRecord(), self.limits)
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
        for agent in self._agents.values():
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
            self.answer(Answer(command.command, command.pipeline, command.incarnation, Outcome.DONE))
        else:
            threading.Thread(target=self._agents[command.pipeline].command, args=(command,)).start()


LIMITS = Limits(heartbeat_s=0.02, lease_s=1e6, retry_s=0.02, plan_interval_s=0.0, request_s=60.0, max_hold_s=1e6)


@pytest.fixture
def scheduler() -> Iterator[LocalScheduler]:
    scheduler = LocalScheduler(LIMITS)
    yield scheduler
    scheduler.close()


def test_a_driver_whose_request_expires_is_told_so_and_gets_its_gpus_when_it_asks_again(scheduler: LocalScheduler) -> None:
    holder, late = scheduler.start("holder"), scheduler.start("late")
    holder.acquire(ACTOR_TRAIN, Priority.INITIALIZATION, -1, 60.0)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            late.acquire(ACTOR_TRAIN, Priority.INITIALIZATION, -1, 60.0)
        except TimeoutError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    scheduler.wait_until(lambda: bool(scheduler.core.state.pipelines["late"].wants))
    scheduler.pass_time(61.0)
    waiting.join(60.0)
    assert len(errors) == 1 and isinstance(errors[0], RequestEnded)
    assert str(errors[0]).startswith("late: actor_train for INITIALIZATION of step -1 was not granted: it waited longer than request_s=60")
    holder.release(ACTOR_TRAIN)
    late.acquire(ACTOR_TRAIN, Priority.INITIALIZATION, -1, 60.0)


def test_generation_is_not_acquired_but_reported(scheduler: LocalScheduler) -> None:
    agent = scheduler.start("a")
    with pytest.raises(ProtocolError, match=r"report demand \(begin_progress\) instead"):
        agent.acquire(ACTOR_INFER, Priority.INITIALIZATION, -1, 60.0)
    agent.acquire(ACTOR_TRAIN, Priority.INITIALIZATION, -1, 60.0)


def test_a_driver_that_waits_while_its_pipeline_is_fenced_is_dismissed(scheduler: LocalScheduler) -> None:
    holder, late = scheduler.start("holder"), scheduler.start("late")
    holder.acquire(ACTOR_TRAIN, Priority.INITIALIZATION, -1, 60.0)
    threading.Timer(0.05, scheduler.unregister, ("late",)).start()
    with pytest.raises(Dismissed, match="incarnation 0 is no longer registered"):
        late.acquire(ACTOR_TRAIN, Priority.INITIALIZATION, -1, 60.0)
    assert late.fenced
