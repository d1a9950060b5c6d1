"""Mathematical and multiple-choice answers, the verifiers' deadline, and the other one-turn environments."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.compat.rollouts import chunk_list_to_workers
from nemo_rl.config import ConfigError, EnvConfig, MasterConfig
from nemo_rl.environments.call import step_environment
from nemo_rl.environments.code_environment import CodeJaccardEnvironment
from nemo_rl.environments.interfaces import Conversation, EnvironmentFailure, UnknownEnvironment, response_of
from nemo_rl.environments.math_environment import MathEnvironment, MathMultiRewardEnvironment, ReasoningGymEnvironment
from nemo_rl.environments.registry import environment_class, environment_settings, register_env, section_of
from nemo_rl.environments.verifier_pool import VerifierPool
from nemo_rl.environments.verifiers import (
    Verdict,
    dapo_math_verify,
    english_multichoice,
    hf_math_verify,
    multilingual_multichoice,
    plainly,
    quick,
)


@pytest.fixture(scope="module")
def math() -> Iterator[MathEnvironment]:
    environment = MathEnvironment({"num_workers": 2, "verify_timeout_s": 5})
    yield environment
    environment.shutdown()


def judged(environment: Any, *pairs: tuple[str, str]) -> Any:
    logs = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": response}] for response, _ in pairs]
    return step_environment(
        environment, logs, [{"ground_truth": answer} for _, answer in pairs], timeout_s=120, name="math"
    )


@pytest.mark.slow
def test_answers_are_compared_as_mathematics(math: MathEnvironment) -> None:
    pairs = [
        ("So it is \\boxed{\\frac{1}{2}}", "0.5"),
        ("19", "19"),
        ("-3", "3"),
        ("The answer is $x^2+1$", "1+x^2"),
        ("no idea", "4"),
        ("\\boxed{5}", "4"),
    ]
    result = judged(math, *pairs)
    assert result.rewards.tolist() == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    assert result.terminateds.all() and result.answers[1] == "19"
    assert [observation["content"] for observation in result.observations[:3]] == ["Environment: correct"] * 2 + [
        "Environment: incorrect"
    ]


@pytest.mark.slow
def test_a_pathological_expression_earns_nothing_and_holds_nothing_up() -> None:
    pool = VerifierPool("hf_math_verify", 1, deadline_s=1.0)
    try:
        verdicts = pool.verify(
            [("\\boxed{9^{9^{9^{9}}}}", "9^{9^{9^{9}}}+1"), ("\\boxed{\\frac{2}{4}}", "\\frac{1}{2}")]
        )
        assert [verdict.reward for verdict in verdicts] == [0.0, 1.0]
        assert pool.verify([("\\boxed{x+x}", "2x")])[0].reward == 1.0
    finally:
        pool.shutdown()


@pytest.mark.slow
def test_a_verifier_stuck_in_c_code_is_ended_by_its_deadline() -> None:
    pool = VerifierPool("hf_math_verify", 1, deadline_s=1.0)
    try:
        digits = "(" + "1" * 4000 + ")"
        verdicts = pool.verify(
            [
                ("\\boxed{" + digits + "^{" + "9" * 9 + "}}", "\\sin(" + digits + "^{" + "9" * 9 + "})"),
                ("\\boxed{1/2}", "0.5"),
            ]
        )
        assert [verdict.reward for verdict in verdicts] == [0.0, 1.0]
        assert pool.timeouts == 1
    finally:
        pool.shutdown()


@pytest.mark.parametrize(
    ("response", "expected", "reward"),
    [("19", "19", 1.0), (" 19\n", "19", 1.0), ("-7", "-7", 1.0), ("18", "19", 0.0), ("019", "19", 1.0)],
)
def test_plain_integers_need_no_verifier(response: str, expected: str, reward: float) -> None:
    verdict = quick(response, expected)
    assert verdict is not None and verdict.reward == reward == hf_math_verify(response, expected).reward


def test_anything_else_does() -> None:
    assert quick("19.0", "19") is None and quick("19", "x") is None and quick("it is 19", "19") is None


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("$\\frac12$", "\\frac{1}{2}"),
        ("1,234", "1234"),
        ("\\boxed{7}.", "7"),
        ("x = 5", "5"),
        ("\\text{yes}", "yes"),
        ("12 degrees", "12"),
        ("50\\%", "50"),
        ("\\left(1, 2\\right)", "(1,2)"),
        ("\\sqrt2", "\\sqrt{2}"),
    ],
)
def test_dapo_writes_answers_plainly(given: str, wanted: str) -> None:
    assert plainly(given) == wanted
    assert dapo_math_verify(f"Thinking.\nAnswer: {given}", wanted).reward == 1.0


def test_dapo_reads_the_last_answer_line_only() -> None:
    assert dapo_math_verify("Answer: 3\nAnswer: 4", "4").reward == 1.0
    assert dapo_math_verify("Answer: 4\nAnswer: 3", "4").reward == 0.0
    assert dapo_math_verify("It is 4", "4").answer is None


def test_choices_are_read_in_many_languages() -> None:
    assert english_multichoice("Answer: A, no.\nAnswer: (C)", "C").reward == 1.0
    assert english_multichoice("I choose C", "C").reward == 0.0
    for response in ("Réponse : B", "答案:B", "الإجابة: ب", "Antwort: B", "উত্তর: ব"):
        assert multilingual_multichoice(response, "B").reward == 1.0, response


HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Answer: 4"},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "<answer>\\boxed{4}</answer> Answer: 4"},
    {"role": "user", "content": "And 4 + 4?"},
]


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(
    "environment", [MathEnvironment, MathMultiRewardEnvironment, ReasoningGymEnvironment, CodeJaccardEnvironment]
)
def test_judges_read_this_rollouts_turns_and_not_the_prompts_history(
    environment: type, marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def verify(pool: object, pairs: list[tuple[str, str]]) -> list[Verdict]:
        read.extend(response for response, _ in pairs)
        return [Verdict(0.0, None) for _ in pairs]

    monkeypatch.setattr(VerifierPool, "verify", verify)
    logs: list[Any] = [
        [*HISTORY, {"role": "assistant", "content": answer, "generation_logprobs": torch.zeros(1)}]
        for answer in ("<answer>8</answer>", "I do not know.")
    ]
    judge = environment({})
    if marked:
        logs = [Conversation.of(log) for log in logs]
        assert all(not isinstance(value, torch.Tensor) for log in logs for message in log for value in message.values())
    result = judge.step(logs, [{"ground_truth": "4"}] * 2)
    assert "4" not in "".join(read) + "".join(map(str, result.answers))
    assert (
        read
        == {
            MathEnvironment: ["<answer>8</answer>", "I do not know."],
            MathMultiRewardEnvironment: [""],  # a plain integer needs no verifier
            ReasoningGymEnvironment: ["<answer>8</answer>", "I do not know."],
            CodeJaccardEnvironment: [],
        }[environment]
    )


def test_a_response_is_all_turns_of_the_rollout_whatever_role_the_environment_speaks_in() -> None:
    turns = [
        {"role": "assistant", "content": "a", "generation_logprobs": torch.zeros(1)},
        {"role": "user", "content": "more?"},
        {"role": "assistant", "content": "b", "generation_logprobs": torch.zeros(1)},
    ]
    sent = pickle.loads(pickle.dumps(Conversation.of([*HISTORY, *turns])))
    assert response_of(sent) == "ab" and sent[-1] == {"role": "assistant", "content": "b"}
    assert response_of([*HISTORY, turns[0], {"role": "tool", "content": "?"}, turns[2]]) == "ab"
    assert response_of([turns[0]]) == "a"


def test_several_rewards_have_names() -> None:
    environment = MathMultiRewardEnvironment({"num_workers": 1})
    try:
        rewards = judged(
            environment,
            ("<think>3 * 4</think>\n<answer>12</answer>", "12"),
            ("<think>nearly</think><answer>12.5</answer>", "12"),
            ("<answer>12</answer>", "12"),
            ("<think>cut off at its stop string</think><answer>12", "12"),
            ("<think>or</think><answer>\\frac{24}{2}</answer> no: <answer>x</answer>", "12"),
            ("\\boxed{12}", "12"),
        ).rewards
        assert {name: values.tolist() for name, values in rewards.items()} == {
            "reward/correctness": [1.0, 0.0, 1.0, 1.0, 0.0, 0.0],
            "reward/integer": [1.0, 0.0, 1.0, 1.0, 0.0, 0.0],
            "reward/format": [1.0, 1.0, 0.0, 0.0, 0.0, 0.0],
        }
    finally:
        environment.shutdown()


def test_code_is_compared_by_its_words() -> None:
    result = judged(
        CodeJaccardEnvironment({}), ("Sure:\n```python\nx = 1\n```", "```\nx = 1\n```"), ("y", "x"), ("a b c", "b c d")
    )
    assert torch.allclose(result.rewards, torch.tensor([1.0, 0.0, 0.5]))


class TheirEnvironment:
    def __init__(self, cfg: dict[str, Any]) -> None:
        self.cfg = cfg

    def step(self, message_log_batch: Any, metadata: Any) -> Any:
        size = len(metadata)
        return (
            [{"role": "environment", "content": ""}] * size,
            metadata,
            None,
            torch.full((size,), float(self.cfg["bonus"])),
            torch.ones(size),
            None,
        )


def test_a_users_environment_is_one_class_and_one_line() -> None:
    env = MasterConfig(env={"mine": {"class": f"{__name__}.TheirEnvironment", "bonus": 3}}).env
    section = section_of("mine", env)
    assert environment_settings(section) == {"bonus": 3}


def test_unknown_environments_are_named_with_the_nearest() -> None:
    with pytest.raises(
        UnknownEnvironment,
        match=r"data.\*.env_name: 'mth' is no environment. Did you mean 'math'\? A new one needs env.mth.class",
    ):
        environment_class("mth", None)
    with pytest.raises(UnknownEnvironment, match="'vlm' is not built yet"):
        environment_class("vlm", None)
    with pytest.raises(ConfigError, match=r"env.mine.class: 'gone.Env' cannot be imported"):
        environment_class("mine", section_of("mine", EnvConfig.model_validate({"mine": {"class": "gone.Env"}})))
    with pytest.raises(ConfigError, match=r"env.mine.class: collections.OrderedDict has no method step"):
        environment_class(
            "mine", section_of("mine", EnvConfig.model_validate({"mine": {"class": "collections.OrderedDict"}}))
        )


def test_registered_names_need_no_mapping() -> None:
    register_env("mine_for_this_test", "nemo_rl.environments.code_environment.CodeJaccardEnvironment")
    assert environment_class("mine_for_this_test", None) is CodeJaccardEnvironment
    with pytest.raises(UnknownEnvironment, match="there is an environment 'math' already"):
        register_env("math", "a.B")


def test_built_in_environments_have_their_defaults_without_a_mapping() -> None:
    assert environment_settings(section_of("code_jaccard", EnvConfig()))["num_workers"] == 8


def test_work_is_shared_out_without_empty_shares() -> None:
    assert chunk_list_to_workers([1, 2, 3, 4, 5], 2) == [[1, 2, 3], [4, 5]]
    assert chunk_list_to_workers([1], 4) == [[1]] and chunk_list_to_workers([], 3) == []


def test_a_verifier_that_cannot_start_says_why_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('planted: no antlr')")
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = VerifierPool("hf_math_verify", 1, deadline_s=1.0)
    began = time.monotonic()
    with pytest.raises(EnvironmentFailure, match="ended with exit code 1: ImportError: planted: no antlr") as failure:
        pool.verify([("1", "1")])
    assert time.monotonic() - began < 20 and "Traceback" in str(failure.value)
    pool.shutdown()
