"""Gathers single environment steps into batched calls.

Samples finish one by one; an environment is called with many conversations at once, in a thread, so that neither the
event loop nor the environment pays per sample. As many calls run at once as the environment allows; what comes
meanwhile waits and goes together. Invariant: every sample's step reaches its environment exactly once, and a failed
call fails every sample that was in it, by the environment's name.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_rl.config import EnvConfig
from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.environments.call import step_environment
from nemo_rl.environments.environment_registry import calls_at_once, section_of
from nemo_rl.environments.interfaces import Conversation

if TYPE_CHECKING:
    from ray.actor import ActorHandle


_GATHER_S = 0.01
_LEAST_THREADS = 32


@dataclass(frozen=True)
class EnvironmentHandle:
    """An environment of this run."""

    name: str
    replicas: tuple[object, ...]  # actors or objects, each of which takes any conversation
    timeout_s: float = 600.0  # deadline of one call in seconds
    calls: int = 1  # calls that each replica works on at once
    max_batch: int | None = None  # most conversations of one call; None for no limit
    is_agent: bool = False  # whether it plays whole episodes by itself

    @classmethod
    def of(cls, name: str, replicas: Sequence[ActorHandle[object]], env_configs: EnvConfig) -> EnvironmentHandle:
        """Actors with the call settings of `env.<name>`."""
        section = section_of(name, env_configs)
        calls = calls_at_once(name, section)
        if section is None:
            return cls(name, tuple(replicas), calls=calls)
        is_agent = section.agent is not None
        # Episodes of agents end one by one: none waits for another.
        most = section.max_batch or (1 if is_agent else None)
        return cls(name, tuple(replicas), section.step_timeout_s, calls, most, is_agent)


@dataclass(frozen=True)
class StepOutcome:
    """One sample's part of an environment's answer."""

    observation: dict[str, object]  # message with `role` and `content`
    metadata: object  # input of the environment's next step; None keeps the last one
    stop_strings: list[str] | None  # strings that end the next response
    reward: float  # total reward of this step
    components: dict[str, float]  # `reward/<name>` parts, empty for a plain reward
    terminated: bool  # whether the episode is over
    answer: str | None = None  # answer that the environment extracted; None without


@dataclass
class EnvironmentQueue:
    """Load of an environment of this process: waiting conversations, running calls and their times."""

    waiting: int = 0
    running: dict[int, float] = field(default_factory=dict)
    calls: int = 0
    called: int = 0
    call_s: float = 0.0
    wait_s: float = 0.0

    def line(self, name: str, now: float) -> str:
        """Load in words, such as `environment judge: 12 conversations wait, 64 calls run, the oldest for 8 s`."""
        oldest = f", the oldest for {now - min(self.running.values()):.0f} s" if self.running else ""
        return f"environment {name}: {self.waiting} conversations wait, {len(self.running)} calls run{oldest}"

    def take_metrics(self) -> dict[str, float]:
        """Means since they were last taken."""
        if not self.calls:
            return {}
        means = {
            "calls": float(self.calls),
            "conversations_per_call": self.called / self.calls,
            "call_s": self.call_s / self.calls,
            "wait_s": self.wait_s / self.called,
        }
        self.calls, self.called, self.call_s, self.wait_s = 0, 0, 0.0, 0.0
        return means


_queues: dict[str, EnvironmentQueue] = {}


def environment_metrics_of_step() -> dict[str, float]:
    """`<name>/<metric>` of every environment that was called since the last step."""
    taken = {name: queue.take_metrics() for name, queue in list(_queues.items())}
    return {f"{name}/{metric}": value for name, means in taken.items() for metric, value in means.items()}


def environment_lines() -> str:
    """Load of the busy environments in words; empty if none is busy."""
    now = time.monotonic()
    busy = [queue.line(name, now) for name, queue in list(_queues.items()) if queue.waiting or queue.running]
    return "; ".join(busy)


class _Waiting(NamedTuple):
    message_log: LLMMessageLogType
    metadata: object
    answer: asyncio.Future[StepOutcome]
    since: float


@cache
def _threads_of(environment: str, calls: int) -> ThreadPoolExecutor:
    """The threads that wait for an environment: one that hangs holds up neither others nor the store."""
    return ThreadPoolExecutor(max(calls, _LEAST_THREADS), thread_name_prefix=f"environment-{environment}")


class EnvironmentBatcher:
    """Batches the steps of one environment, on one event loop."""

    def __init__(self, environment: EnvironmentHandle) -> None:
        self._environment = environment
        self._waiting: deque[_Waiting] = deque()
        self._running = [0] * len(environment.replicas)
        self._gathers = False
        self._queue = _queues.setdefault(environment.name, EnvironmentQueue())

    async def step(self, message_log: LLMMessageLogType, metadata: object) -> StepOutcome:
        """The environment's answer to one conversation. Raises EnvironmentFailure: the environment raised, hung or
        answered with the wrong shape.
        """
        answer: asyncio.Future[StepOutcome] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(message_log, metadata, answer, time.monotonic()))
        self._queue.waiting += 1
        self._gather()
        return await answer

    @property
    def _free(self) -> int:
        return self._environment.calls * len(self._running) - sum(self._running)

    def _gather(self) -> None:
        """Starts calls soon, if there are steps and free call slots. It waits longer the more calls run, so that
        samples that arrive one by one share a call.
        """
        if self._waiting and self._free and not self._gathers:
            self._gathers = True
            full = len(self._waiting) >= (self._environment.max_batch or math.inf)
            delay = 0.0 if full else _GATHER_S * (1 + sum(self._running))
            asyncio.get_running_loop().call_later(delay, self._begin)

    def _begin(self) -> None:
        self._gathers = False
        gone = [waiting for waiting in self._waiting if waiting.answer.done()]
        self._queue.waiting -= len(gone)
        self._waiting = deque(waiting for waiting in self._waiting if not waiting.answer.done())
        most = self._environment.max_batch or len(self._waiting)
        while self._waiting and self._free:
            batch = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            replica = self._running.index(min(self._running))
            self._running[replica] += 1
            task = asyncio.ensure_future(self._call(batch, replica))
            task.add_done_callback(lambda _, replica=replica: self._ended(replica))

    def _ended(self, replica: int) -> None:
        self._running[replica] -= 1
        self._gather()

    async def _call(self, batch: list[_Waiting], replica: int) -> None:
        environment, queue, begun = self._environment, self._queue, time.monotonic()
        call = id(batch)
        queue.waiting -= len(batch)
        queue.running[call] = begun
        queue.wait_s += sum(begun - waiting.since for waiting in batch)
        answering = asyncio.get_running_loop().run_in_executor(
            _threads_of(environment.name, environment.calls * len(self._running)),
            partial(
                step_environment,
                environment.replicas[replica],
                [Conversation.of(waiting.message_log) for waiting in batch],
                [waiting.metadata for waiting in batch],
                timeout_s=environment.timeout_s,
                name=environment.name,
            ),
        )
        try:
            (result,) = await asyncio.gather(answering, return_exceptions=True)
        finally:
            del queue.running[call]
        queue.calls, queue.called = queue.calls + 1, queue.called + len(batch)
        queue.call_s += time.monotonic() - begun
        for row, waiting in enumerate(batch):
            if waiting.answer.done():
                continue
            if isinstance(result, BaseException):
                waiting.answer.set_exception(result)
            else:
                waiting.answer.set_result(_row(result, row))


def _row(result: Any, row: int) -> StepOutcome:
    rewards = result.rewards
    components = {name: float(values[row]) for name, values in rewards.items()} if isinstance(rewards, dict) else {}
    reward = sum(components.values()) if components else float(rewards[row])
    terminated, answer = bool(result.terminateds[row]), result.answers[row]
    return StepOutcome(
        result.observations[row],
        result.metadata[row],
        result.next_stop_strings[row],
        reward,
        components,
        terminated,
        answer,
    )
