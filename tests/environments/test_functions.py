"""Rewards that are plain functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_rl.config import ConfigError, EnvConfig
from nemo_rl.environments.call import step_environment
from nemo_rl.environments.environment_registry import check_rows, environment_class, environment_settings
from nemo_rl.environments.interfaces import EnvironmentFailure

HERE = __name__


def exact(response: str, expected: str) -> float:
    return float(response == expected)


def weighed(response: str, expected: str, *, partial: float, word: str = "", **row: Any) -> dict[str, float]:
    return {"right": float(response == expected), "word": partial * (word in response)}


async def slow(response: str, **row: Any) -> float:
    return len(response) / row["length"]


async def slow_error(response: str) -> float:
    raise KeyError(response)


def turns(response: str, messages: list[dict[str, Any]]) -> int:
    return len(messages)


def odd(response: str) -> Any:
    return {"raise": 1 / (response != "raise"), "text": "much", "none": None, "nan": float("nan"), "empty": {}}[
        response
    ]


def mixed(response: str) -> Any:
    return {"part": 1.0} if response == "a" else 1.0


class Judge:
    def __call__(self, response: str) -> float:
        return 2.0


judge = Judge()
not_callable = 3


def bare(text: str) -> float:
    return 0.0


def unnamed(response: str, text: str, /) -> float:
    return 0.0


def built(function: str, **arguments: object) -> Any:
    section = EnvConfig.read({"mine": {"function": f"{HERE}.{function}", **arguments}}).of("mine")
    return environment_class("mine", section)(environment_settings(section, "mine"))


def rewards(function: str, responses: list[str], known: list[Any], **arguments: object) -> Any:
    asked = [{"role": "user", "content": "?"}]
    logs = [[*asked, {"role": "assistant", "content": response}] for response in responses]
    found = step_environment(built(function, **arguments), logs, known, timeout_s=30, name="mine")
    assert bool(found.terminateds.all())
    return found.rewards


def test_a_function_rewards_every_response_with_what_its_parameters_name() -> None:
    known = [{"ground_truth": "4", "word": "no", "length": 2}, {"ground_truth": "5", "word": "x", "length": 4}]
    assert rewards("exact", ["4", "4"], known).tolist() == [1.0, 0.0]
    parts = rewards("weighed", ["4", "x"], known, partial=0.5)
    assert {name: values.tolist() for name, values in parts.items()} == {
        "reward/right": [1.0, 0.0],
        "reward/word": [0.0, 0.5],
    }
    assert rewards("slow", ["4", "4"], known).tolist() == [0.5, 0.25]
    assert rewards("turns", ["4"], [None]).tolist() == [2.0]
    assert torch.equal(rewards("judge", ["4", "5"], known), torch.tensor([2.0, 2.0]))


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("raise", r"odd raised ZeroDivisionError.* for the response 'raise', expected '7'"),
        ("text", "returned 'much', no finite number or dict"),
        ("none", "returned None, no finite number"),
        ("nan", "returned nan, no finite number"),
        ("empty", "returned an empty dict"),
    ],
)
def test_what_a_function_may_not_return_is_named_with_the_response(response: str, message: str) -> None:
    with pytest.raises(EnvironmentFailure, match=message):
        rewards("odd", [response], [{"ground_truth": "7"}])


def test_an_error_of_an_async_function_is_named_with_its_response() -> None:
    with pytest.raises(EnvironmentFailure, match="slow_error raised KeyError.*for the response '4', expected '5'"):
        rewards("slow_error", ["4"], [{"answer": "5"}])


def test_numbers_and_parts_do_not_mix() -> None:
    with pytest.raises(EnvironmentFailure, match="a dict for some responses and a number for others"):
        rewards("mixed", ["a", "b"], [{}, {}])


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("gone", {}, "has no 'gone'"),
        ("exactt", {}, "Did you mean 'exact'"),
        ("not_callable", {}, "is no function; write it as def reward"),
        ("Judge", {}, "is a class; name it as env.mine.class"),
        ("bare", {}, "no parameter named response"),
        ("unnamed", {}, "parameters without names"),
        ("exact", {"partial": 1}, "env.mine.partial: .* has no such parameter"),
        ("weighed", {"response": "x"}, "env.mine.response: every call has a response of its own"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_at_the_start(
    function: str, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        built(function, **arguments)


def test_what_a_function_wants_of_rows_is_looked_for_in_the_first_one() -> None:
    env = EnvConfig.read({"math": {"function": f"{HERE}.weighed"}, "other": {"function": f"{HERE}.exact"}})
    rows: Any = {"sums": [{"extra_env_info": {"ground_truth": "4"}}], "more": [{"extra_env_info": {"answer": "4"}}]}
    with pytest.raises(ConfigError, match="wants partial, which neither env.math nor a row gives: rows give ground_t"):
        check_rows(rows, {"sums": "math", "more": "other"}, env)
    rows["sums"][0]["extra_env_info"] |= {"partial": 1}
    check_rows(rows, {"sums": "math", "more": "other"}, env)
    for unknown in (None, {}, {"ground_truth": None}):
        rows["more"][0]["extra_env_info"] = unknown
        with pytest.raises(ConfigError, match="exact wants expected, and rows of more have no expected answer"):
            check_rows(rows, {"more": "other"}, env)
