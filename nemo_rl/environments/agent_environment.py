"""Episodes that an agent plays by itself, `env.<name>.agent`: it calls the model over HTTP, uses its own tools, and
returns its reward.

An agent is a function `(task, base_url, session)`, or a class with a method `run` of these parameters that is built
with the further keys of `env.<name>`. An `async def` runs as a coroutine, anything else in a thread; each replica is a
process. What the model said is recorded where the requests arrive, not here.
"""

from __future__ import annotations

import asyncio
import inspect
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from numbers import Real
from typing import Any

import torch
from typing_extensions import override

from nemo_rl.config.dotted import import_dotted
from nemo_rl.config.errors import ConfigError
from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.environments.interfaces import AgentSession, EnvironmentInterface, EnvironmentReturn, expected_of
from nemo_rl.environments.other_interpreter import AgentError, OtherInterpreter
from nemo_rl.environments.other_python.agent_process import overflow_of, played

_PARAMETERS = ("task", "base_url", "session")
_FORM = "write it as def agent(task, base_url, session) -> float, or as a class with such a method run"
_RESTART_S = 60.0
FAILED, OVERFLOW = "agent_failed", "agent_overflow"
"""Keys of the metadata that come back from an agent which raised: what it raised, and how that tells of a prompt that
left no room (`overflow_of`).
"""
UNNAMED = "reward/unnamed"
"""The part of a reward that a plain number is, where other episodes of its call earn parts."""
# Agents mostly wait, for the model or for a tool.
AGENTS_AT_ONCE = 64


Agent = Callable[[dict[str, object], str, AgentSession], Any]


def check_agent(path: str, key: str, arguments: Mapping[str, object]) -> None:
    """Whether there is an agent behind `env.<name>.agent`; builds nothing.

    Args:
        path: Its dotted path.
        key: The dotted key of the environment, for messages.
        arguments: Further keys of the environment: of the constructor, or keyword arguments of the function.

    Raises ConfigError: it cannot be imported, or does not take these parameters.
    """
    found = import_dotted(path, f"{key}.agent")
    is_class = isinstance(found, type)
    run = getattr(found, "run", None) if is_class else found
    if not callable(run):
        raise ConfigError([f"{key}.agent: {path} cannot be called; {_FORM}"])
    own = [name for name in _PARAMETERS if name in arguments]
    if own:
        raise ConfigError([f"{key}.{own[0]}: every call has a {own[0]} of its own; leave the key out"])
    try:
        if is_class:
            inspect.signature(found).bind(**arguments)
            inspect.signature(run).bind(None, *_PARAMETERS)
        else:
            inspect.signature(run).bind(*_PARAMETERS, **arguments)
    except TypeError as error:
        given = ", ".join(arguments) or "none"
        raise ConfigError([f"{key}.agent: {path}: {error} (further keys of {key}: {given}); {_FORM}"]) from error


def agent_of(path: str, key: str, arguments: Mapping[str, object]) -> Agent:
    """The agent, built where it is a class. See `check_agent`."""
    check_agent(path, key, arguments)
    found = import_dotted(path, f"{key}.agent")
    return found(**arguments).run if isinstance(found, type) else partial(found, **arguments)


class AgentEnvironment(EnvironmentInterface[object]):
    """Whole episodes. `cfg`: `agent`, its dotted path; `key`, the environment's dotted key; `arguments`, of the agent;
    `python`, the interpreter that plays it, or None; `calls`, agents at once.
    """

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        self._path = str(cfg["agent"])
        key, arguments, calls = str(cfg["key"]), cfg["arguments"], int(cfg["calls"])
        self._agent: Agent
        self._elsewhere: OtherInterpreter | None = None
        if cfg.get("python") is not None:
            self._elsewhere = OtherInterpreter(str(cfg["python"]), self._path, arguments, calls=calls, key=key)
            self._agent = self._elsewhere.run
        else:
            self._agent = agent_of(self._path, key, arguments)
        self._threads = ThreadPoolExecutor(calls, thread_name_prefix="agent")

    @override
    async def step(  # pyrefly: ignore[bad-override]
        self, message_log_batch: Sequence[LLMMessageLogType], metadata: Sequence[Any]
    ) -> EnvironmentReturn[object]:
        """Plays B episodes side by side. `metadata`: the session and the row of each."""
        played = await asyncio.gather(
            *(self._play(log, known) for log, known in zip(message_log_batch, metadata, strict=True))
        )
        rewards = [reward for reward, _ in played]
        names = sorted({name for reward in rewards for name in reward})
        if len(names) > 1 and "" in names:
            # An episode's reward must not depend on the other episodes of its call.
            rewards = [{name or UNNAMED: value for name, value in reward.items()} for reward in rewards]
            names = sorted({name or UNNAMED for name in names})
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""} for _ in played],
            metadata=[failure for _, failure in played],
            next_stop_strings=None,
            rewards=torch.tensor([reward.get("", 0.0) for reward in rewards])
            if names in ([], [""])
            else {name: torch.tensor([reward.get(name, 0.0) for reward in rewards]) for name in names},
            terminateds=torch.ones(len(played), dtype=torch.bool),
        )

    def close(self) -> None:
        """Ends the process of another interpreter."""
        if self._elsewhere is not None:
            self._elsewhere.close()

    async def _play(self, log: LLMMessageLogType, known: Mapping[str, Any]) -> tuple[dict[str, float], object]:
        session: AgentSession = known["session"]
        row = known["row"] if isinstance(known["row"], Mapping) else {}
        messages = [{"role": message["role"], "content": message.get("text", message["content"])} for message in log]
        task = {**row, "messages": messages, "expected": expected_of(row)}
        # A call that is made again after this actor died begins with an empty session.
        await asyncio.to_thread(_restart, session)
        try:
            result = await played(self._agent, self._threads, task, session.base_url, session)
            return _numbers(result, self._path), None
        # SystemExit: a script's exit() would otherwise end this actor, and leave no reason.
        except (Exception, SystemExit) as error:  # noqa: BLE001 - who opened the session knows whether it ran out of room
            overflow = error.overflow if isinstance(error, AgentError) else overflow_of(error)
            return {}, {FAILED: f"{self._path} raised {error!r:.2000}", OVERFLOW: overflow}


def _restart(session: AgentSession) -> None:
    url = session.base_url.removesuffix("/v1") + "/restart"
    headers = {"Authorization": f"Bearer {session.api_key}"}
    request = urllib.request.Request(url, method="POST", headers=headers)
    with urllib.request.urlopen(request, timeout=_RESTART_S):
        pass


def _numbers(result: object, path: str) -> dict[str, float]:
    """A reward as its parts; a plain number has no name."""
    parts = result if isinstance(result, Mapping) else {"": result}
    numbers: dict[str, float] = {}
    for name, given in parts.items():
        # Numbers of numpy and torch have no dimensions.
        value = given.item() if getattr(given, "ndim", None) == 0 else given
        if not isinstance(value, Real):
            raise TypeError(f"{path} returned {result!r:.200}; expected a number, or a dict of numbers")
        numbers[f"reward/{name}" if name and not str(name).startswith("reward/") else str(name)] = float(value)
    if not numbers:
        raise TypeError(f"{path} returned an empty dict; expected a number, or a dict of numbers")
    return numbers
