"""The checked call: an environment that raises, hangs, or returns the wrong number of anything gives an error that
names it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from nemo_rl.environments.call import step_environment
from nemo_rl.environments.interfaces import EnvironmentFailure, EnvironmentReturn

LOGS = [[{"role": "user", "content": str(n)}] for n in range(3)]


def good(size: int = 3, **changes: Any) -> EnvironmentReturn[Any]:
    parts: dict[str, Any] = {
        "observations": [{"role": "environment", "content": ""}] * size,
        "metadata": [None] * size,
        "next_stop_strings": [None] * size,
        "rewards": torch.ones(size),
        "terminateds": torch.ones(size),
        "answers": None,
    }
    return EnvironmentReturn(**{**parts, **changes})


class Scripted:
    def __init__(self, behaviour: Callable[[], Any]) -> None:
        self.behaviour = behaviour

    def step(self, message_log_batch: Any, metadata: Any) -> Any:
        return self.behaviour()


def call(behaviour: Callable[[], Any], timeout_s: float = 5.0) -> EnvironmentReturn[Any]:
    return step_environment(Scripted(behaviour), LOGS, [{}] * 3, timeout_s=timeout_s, name="mine")


def fails() -> Any:
    raise KeyError("ground_truth")


def test_a_good_return_is_normalised() -> None:
    result = call(lambda: good(rewards=[1, 0, 1], next_stop_strings=None))
    assert (
        isinstance(result.rewards, torch.Tensor)
        and result.rewards.dtype == torch.float32
        and result.rewards.tolist() == [1.0, 0.0, 1.0]
    )
    assert (
        result.terminateds.dtype == torch.bool
        and result.answers == [None] * 3
        and result.next_stop_strings == [None] * 3
    )


def test_reward_components_are_kept_apart() -> None:
    result = call(lambda: good(rewards={"reward/a": torch.ones(3), "reward/b": torch.zeros(3)}))
    assert isinstance(result.rewards, dict) and set(result.rewards) == {"reward/a", "reward/b"}


WRONG: list[tuple[Callable[[], Any], str]] = [
    (fails, r"environment mine raised on 3 conversations: KeyError\('ground_truth'\)"),
    (lambda: None, "environment mine returned a NoneType, not an EnvironmentReturn"),
    (lambda: good(rewards=torch.ones(2)), r"rewards of shape \[2\] for 3 conversations; expected \[3\]"),
    (lambda: good(rewards=torch.ones(3, 1)), r"rewards of shape \[3, 1\]"),
    (lambda: good(rewards=["x"] * 3), "rewards that are no numbers"),
    (
        lambda: good(rewards=torch.tensor([1.0, float("nan"), 0.0])),
        r"rewards that are not finite, for conversations \[1\]",
    ),
    (lambda: good(rewards={"a": torch.ones(3)}), "components are named reward/<name>"),
    (lambda: good(rewards={"reward/a": torch.ones(4)}), r"reward/a of shape \[4\]"),
    (lambda: good(terminateds=torch.ones(1)), r"terminateds of shape \[1\]"),
    (lambda: good(observations=[]), "returned 0 observations for 3 conversations"),
    (lambda: good(observations=["text"] * 3), "observations of conversation 0: 'text' .str. is not a message"),
    *(
        (
            lambda message=message: good(observations=[{"role": "tool", "content": ""}] * 2 + [message]),
            f"environment mine: observations of conversation 2: {problem}",
        )
        for message, problem in (
            ({"role": "tool", "content": None}, r"content must be text, not None \(NoneType\)"),
            ({"role": "tool", "content": {"result": 3}}, r"content must be text, not \{'result': 3\} \(dict\)"),
            ({"role": "user", "content": [{"type": "text", "text": "a"}]}, r"content must be text, not \[.*\(list\)"),
            ({"role": "user", "content": 7}, r"content must be text, not 7 \(int\)"),
            ({"role": None, "content": "a"}, r"role must be text, not None"),
            ({"role": "", "content": "a"}, r"role is empty"),
            ({"role": "tool", "content": "a", "generation_logprobs": [0.0]}, "generation_logprobs is not"),
        )
    ),
    (lambda: good(rewards=[1.0, None, 0.0]), r"rewards that are no numbers: conversation 1 has None \(NoneType\)"),
    (lambda: good(rewards=[1.0, 0.0, "0.5"]), r"rewards that are no numbers: conversation 2 has '0.5' \(str\)"),
    (lambda: good(rewards=[1.0, [0.0, 1.0], 0.0]), "rewards that are no numbers, in a list"),
    (lambda: good(rewards={"reward/a": [1, "x", 2]}), "reward/a that are no numbers: conversation 1 has 'x'"),
    (lambda: good(rewards="111"), "rewards that are no numbers, in a str"),
    (lambda: good(rewards=torch.ones(3, dtype=torch.complex64)), "expected real numbers"),
    (lambda: good(terminateds=[True, "no", False]), r"terminateds that are no numbers: conversation 1 has 'no'"),
    (lambda: good(terminateds=[1.0, 0.0, 0.5]), r"terminateds that are neither true nor false, .* \[2\]: 0.5"),
    (lambda: good(terminateds=[1.0, float("nan"), 2]), r"terminateds that are neither true nor false, .* \[1, 2\]"),
    (lambda: good(metadata="abc"), "returned a str as metadata"),
    (lambda: good(metadata=[{}, {"mask_sample": "False"}, {}]), "metadata of conversation 1: mask_sample must be true"),
    (lambda: good(answers=["a", None, 3]), r"answers of conversation 2: 3 \(int\) is neither text nor None"),
    (lambda: good(answers="abc"), "returned a str as answers"),
    (lambda: good(next_stop_strings=["ab", None, None]), r"next_stop_strings of conversation 0: 'ab' \(str\) is not"),
    (lambda: good(next_stop_strings=[None, [""], None]), "next_stop_strings of conversation 1: "),
    (lambda: good(metadata=[None] * 4), "returned 4 metadata for 3"),
    (lambda: good(answers=["x"]), "returned 1 answers for 3"),
    (lambda: good(next_stop_strings=[["a"]]), "returned 1 next_stop_strings for 3"),
]


@pytest.mark.parametrize(("behaviour", "message"), WRONG)
def test_a_wrong_return_is_refused_by_name(behaviour: Callable[[], Any], message: str) -> None:
    with pytest.raises(EnvironmentFailure, match=message):
        call(behaviour)


def test_an_environment_that_hangs_is_given_up() -> None:
    with pytest.raises(
        EnvironmentFailure,
        match=r"environment mine did not answer for 3 conversations within 0.2 s; .*env.mine.step_timeout_s",
    ):
        call(lambda: time.sleep(30), timeout_s=0.2)


def test_a_call_past_its_deadline_is_cancelled_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an actor goes on with an answer that nobody waits for, and the next call waits for it."""
    cancelled: list[object] = []

    class Actor:
        step = SimpleNamespace(remote=lambda *_: "the call")

    def get(reference: object, timeout: float) -> None:
        raise ray.exceptions.GetTimeoutError(f"{reference} after {timeout}")

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "cancel", lambda reference, force: cancelled.append((reference, force)))
    with pytest.raises(EnvironmentFailure, match="within 3 s"):
        step_environment(Actor(), [[]], [None], timeout_s=3.0, name="judge")
    assert cancelled == [("the call", False)]
