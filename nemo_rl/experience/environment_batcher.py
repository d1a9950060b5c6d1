"""Gathers single environment steps into batched calls.

Samples finish one by one; an environment is called with many conversations at once, in a thread, so that neither the
event loop nor the environment pays per sample. Knows environments only by their checked call. Invariant: every sample's
step reaches its environment exactly once, and a failed call fails every sample that was in it, by the environment's
name.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from nemo_rl.config import EnvConfig
from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.environments.call import step_environment
from nemo_rl.environments.interfaces import Conversation
from nemo_rl.environments.registry import section_of

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_GATHER_S = 0.01
_CALLS = 32


@dataclass(frozen=True)
class EnvironmentHandle:
    """An environment of this run: its name, the actor or object, and the deadline of one call in seconds."""

    name: str
    handle: object
    timeout_s: float = 600.0

    @classmethod
    def of(cls, name: str, actor: ActorHandle[object], env_configs: EnvConfig) -> EnvironmentHandle:
        """An actor with the deadline that `env.<name>.step_timeout_s` gives it."""
        section = section_of(name, env_configs)
        return cls(name, actor) if section is None else cls(name, actor, section.step_timeout_s)


@dataclass(frozen=True)
class StepOutcome:
    """One sample's part of an environment's answer.

    Attributes:
        observation: Message with `role` and `content`.
        metadata: What the environment wants back at its next step; None leaves what it was given.
        stop_strings: Strings that end the next response.
        reward: Total reward of this step.
        components: `reward/<name>` parts, empty for a plain reward.
        terminated: Whether the episode is over.
        answer: What the environment read as the answer; None where it read none.
    """

    observation: dict[str, object]
    metadata: object
    stop_strings: list[str] | None
    reward: float
    components: dict[str, float]
    terminated: bool
    answer: str | None = None


@cache
def _calls_of(environment: str) -> ThreadPoolExecutor:
    """The threads that wait for an environment: one that hangs holds up neither others nor the store."""
    return ThreadPoolExecutor(_CALLS, thread_name_prefix=f"environment-{environment}")


class EnvironmentBatcher:
    """Batches steps of one environment; lives on one event loop."""

    def __init__(self, environment: EnvironmentHandle) -> None:
        self._environment = environment
        self._waiting: list[tuple[LLMMessageLogType, object, asyncio.Future[StepOutcome]]] = []

    async def step(self, message_log: LLMMessageLogType, metadata: object) -> StepOutcome:
        """The environment's answer to one conversation.

        Raises:
            EnvironmentFailure: The environment raised, hung or answered with the wrong shape.
        """
        answer: asyncio.Future[StepOutcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((message_log, metadata, answer))
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_later(_GATHER_S, lambda: asyncio.ensure_future(self._flush()))
        return await answer

    async def _flush(self) -> None:
        batch = self._waiting
        self._waiting = []
        logs, metadata = [Conversation.of(log) for log, _, _ in batch], [meta for _, meta, _ in batch]
        environment = self._environment
        call = asyncio.get_running_loop().run_in_executor(
            _calls_of(environment.name),
            partial(
                step_environment,
                environment.handle,
                logs,
                metadata,
                timeout_s=environment.timeout_s,
                name=environment.name,
            ),
        )
        (result,) = await asyncio.gather(call, return_exceptions=True)
        for row, (_, _, answer) in enumerate(batch):
            if answer.done():
                continue
            if isinstance(result, BaseException):
                answer.set_exception(result)
            else:
                answer.set_result(_row(result, row))


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
