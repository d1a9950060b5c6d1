"""A reward from a plain function, `env.<name>.function`, called once per response.

Parameters are filled by name: `response`, `expected` (the row's `ground_truth`), `messages` (the whole conversation),
values that the row's processor put into `extra_env_info`, and the further keys of `env.<name>`. A function with other
required parameters is refused before anything starts.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from nemo_rl.config.dotted import import_dotted
from nemo_rl.config.errors import ConfigError, did_you_mean
from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.environments.interfaces import (
    EnvironmentFailure,
    EnvironmentInterface,
    EnvironmentReturn,
    expected_of,
    response_of,
)

_GIVEN = ("response", "expected", "messages")
_NO_REWARDS = ("list", "List", "tuple", "Tuple", "str", "None", "NoneType")
_FORM = "write it as def reward(response: str, expected: str, **row) -> float"


def reward_function(
    path: str, key: str, arguments: Iterable[str] = (), row: Iterable[str] | None = None
) -> Callable[..., object]:
    """The function behind `env.<name>.function`.

    Args:
        path: its dotted path.
        key: the dotted key of the environment, for messages.
        arguments: further keys of the environment, which become keyword arguments.
        row: names that rows bring along; None while no row is known.

    Raises ConfigError: it cannot be imported or called, or its parameters cannot be filled by name.
    """
    function = import_dotted(path, f"{key}.function")
    if isinstance(function, type) or not callable(function):
        what = f"a class; name it as {key}.class" if isinstance(function, type) else f"no function; {_FORM}"
        raise ConfigError([f"{key}.function: {path} is {what}"])
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError([f"{key}.function: the parameters of {path} cannot be read ({error}); {_FORM}"]) from error
    parameters, returns = signature.parameters.values(), signature.return_annotation
    named = {one.name: one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    arguments = list(arguments)
    problems: list[str] = []
    if "response" not in named and not takes_any:
        problems.append(f"{key}.function: {path} has no parameter named response; {_FORM}")
    for name in arguments:
        if name in _GIVEN:
            problems.append(f"{key}.{name}: every call has a {name} of its own; leave the key out")
        elif name not in named and not takes_any:
            problems.append(f"{key}.{name}: {path} has no such parameter.{did_you_mean(name, named)}")
    filled = {*_GIVEN, *arguments, *(row or ())}
    missing = [one.name for one in named.values() if one.default is one.empty and one.name not in filled]
    if missing and row is not None:
        rows = ", ".join(sorted(row)) or "nothing"
        remedy = "give the parameter a default, or set it as a key" if "response" in named else _FORM
        problems.append(
            f"{key}.function: {path} wants {', '.join(missing)}, which neither {key} nor a row gives: rows give {rows} "
            f"(data.*.processor decides); {remedy}"
        )
    returned = returns if isinstance(returns, str) else getattr(returns, "__name__", "")
    if returned.partition("[")[0] in _NO_REWARDS:
        problems.append(
            f"{key}.function: {path} returns {returned}; a call judges one response, and returns a number or a dict of "
            "parts"
        )
    if any(one.kind is one.POSITIONAL_ONLY and one.default is one.empty for one in parameters):
        problems.append(f"{key}.function: {path} has parameters without names; {_FORM}")
    if problems:
        raise ConfigError(problems)
    return function


class FunctionEnvironment(EnvironmentInterface[object]):
    """Episodes of one turn that a function rewards; an `async` function judges the responses of a call side by side.
    `cfg`: `function`, its dotted path; `key`, the environment's dotted key; `arguments`, keyword arguments.
    """

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        self._path, self._arguments = str(cfg["function"]), dict(cfg["arguments"])
        self._function = reward_function(self._path, str(cfg["key"]), self._arguments)
        parameters = inspect.signature(self._function).parameters.values()
        self._takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
        self._names = {one.name for one in parameters}

    @override
    def step(
        self, message_log_batch: Sequence[LLMMessageLogType], metadata: Sequence[object]
    ) -> EnvironmentReturn[object]:
        responses = [response_of(log) for log in message_log_batch]
        calls = [
            {**(known if isinstance(known, Mapping) else {}), **self._arguments}
            | {"response": response, "expected": expected_of(known), "messages": list(log)}
            for response, log, known in zip(responses, message_log_batch, metadata, strict=True)
        ]

        answers = [self._call(call) for call in calls]
        waiting = [row for row, answer in enumerate(answers) if isinstance(answer, Awaitable)]
        for row, answer in zip(waiting, asyncio.run(_side_by_side([answers[row] for row in waiting])), strict=True):
            answers[row] = answer
        results = [self._read(answer, call) for answer, call in zip(answers, calls, strict=True)]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""} for _ in responses],
            metadata=list(metadata),
            next_stop_strings=None,
            rewards=_columns(results),
            terminateds=torch.ones(len(responses), dtype=torch.bool),
            answers=[response.strip() for response in responses],
        )

    def _call(self, arguments: Mapping[str, object]) -> object:
        taken = {name: value for name, value in arguments.items() if self._takes_any or name in self._names}
        try:
            return self._function(**taken)
        except Exception as error:
            raise self._failure(f"raised {error!r}", arguments) from error

    def _read(self, result: object, arguments: Mapping[str, object]) -> float | dict[str, float]:
        if isinstance(result, Exception):
            raise self._failure(f"raised {result!r}", arguments) from result
        parts = result if isinstance(result, Mapping) else {"": result}
        numbers: dict[str, float] = {}
        for name, value in parts.items():
            number = _number(value)
            if number is None:
                raise self._failure(f"returned {result!r:.100}, no finite number or dict of them", arguments)
            numbers[str(name)] = number
        if not numbers:
            raise self._failure("returned an empty dict", arguments)
        return numbers if isinstance(result, Mapping) else numbers[""]

    def _failure(self, what: str, arguments: Mapping[str, object]) -> EnvironmentFailure:
        return EnvironmentFailure(
            f"{self._path} {what} for the response {arguments['response']!r:.200}, "
            f"expected {arguments['expected']!r:.100}"
        )


# No method: Ray would take the class for one whose methods all run on an event loop.
async def _side_by_side(answers: Sequence[Any]) -> list[object]:
    return await asyncio.gather(*answers, return_exceptions=True)


def _number(value: Any) -> float | None:
    if isinstance(value, (str, bytes)) or value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _columns(results: Sequence[float | dict[str, float]]) -> torch.Tensor | dict[str, torch.Tensor]:
    parts = [result for result in results if isinstance(result, dict)]
    if not parts:
        return torch.tensor(results, dtype=torch.float32)
    if len(parts) < len(results):
        raise EnvironmentFailure("the reward function returned a dict for some responses and a number for others")
    names = sorted({name for part in parts for name in part})
    # A part that a response has no value for is 0 there.
    return {
        name if name.startswith("reward/") else f"reward/{name}": torch.tensor([part.get(name, 0.0) for part in parts])
        for name in names
    }
