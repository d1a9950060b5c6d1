"""Mathematical and multiple-choice answers, the verifiers' deadline, and the other one-turn environments."""

from __future__ import annotations

import pickle
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.compat.calls import chunk_list_to_workers
from nemo_rl.config import ConfigError, EnvConfig, MasterConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments import environment_registry, math_environment
from nemo_rl.environments.call import step_environment
from nemo_rl.environments.code_environment import CodeJaccardEnvironment, jaccard
from nemo_rl.environments.environment_registry import (
    environment_class,
    environment_settings,
    register_env,
    section_of,
    start_lines,
)
from nemo_rl.environments.interfaces import GIVEN_UP, Conversation, EnvironmentFailure, UnknownEnvironment, response_of
from nemo_rl.environments.math_environment import (
    MathEnvironment,
    MathMultiRewardEnvironment,
    ReasoningGymEnvironment,
    VerifierPool,
)
from nemo_rl.environments.verifiers import (
    Verdict,
    dapo_math_verify,
    english_multichoice,
    hf_math_verify,
    multilingual_multichoice,
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
    pool = VerifierPool("hf_math_verify", 1, deadline_s=4.0)
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
    pool = VerifierPool("hf_math_verify", 1, deadline_s=4.0)
    try:
        digits = "(" + "1" * 4000 + ")"
        verdicts = pool.verify(
            [
                ("\\boxed{" + digits + "^{" + "9" * 9 + "}}", "\\sin(" + digits + "^{" + "9" * 9 + "})"),
                ("\\boxed{1/2}", "0.5"),
            ]
        )
        assert [verdict.reward for verdict in verdicts] == [0.0, 1.0]
        assert [verdict.given_up for verdict in verdicts] == [True, False]
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
    ("response", "expected", "reward"),
    [
        ("The answer is \\boxed{\\frac{1}{2}}.", "0.5", 1.0),
        ("I get $\\boxed{1+x^2}$", "x^2+1", 1.0),
        ("so \\boxed{3} is wrong, rather \\boxed{4}", "4", 0.0),
        ("It is 3, \\boxed{4} rather", "4", 1.0),
        ("It costs 1,000 dollars", "1000", 1.0),
        ("The final answer is $\\{1, 2\\}$", "\\{2, 1\\}", 1.0),
        ("\\boxed{(1, 2)}", "(2, 1)", 0.0),
        ("\\boxed{50\\%}", "50\\%", 1.0),
        ("\\boxed{50\\%}", "50%", 1.0),
        ("\\boxed{50%}", "50\\%", 1.0),
        ("so $12.5\\%$ of them", "12.5%", 1.0),
        ("\\boxed{50\\%}", "5%", 0.0),
        ("\\boxed{60%}", "50\\%", 0.0),
        ("\\boxed{x = 5}", "5", 1.0),
        # Small numbers differ by their size, not by their decimals.
        ("$1/2^{98}$", "1/2^{99}", 0.0),
        ("$1/2^{99}$", "1/2^{99}", 1.0),
        ("$0.0000001$", "1\\times 10^{-7}", 1.0),
        ("$0.0000002$", "1\\times 10^{-7}", 0.0),
        ("$10^{-30}$", "0", 0.0),
        ("0.166667", "\\frac{1}{6}", 1.0),
        ("$(1/2^{98}, 0)$", "(1/2^{99}, 0)", 0.0),
        ("$\\{1/2^{40}, 1\\}$", "\\{1, 1/2^{41}\\}", 0.0),
        ("$\\{1/2^{41}, 1\\}$", "\\{1, 1/2^{41}\\}", 1.0),
        ("$x = 1/2^{50}$", "x = 1/2^{51}", 0.0),
        ("$[0, 1/2^{60}]$", "[0, 1/2^{61}]", 0.0),
        ("\\boxed{\\frac{x}{2}}", "0.5x", 1.0),
        # An interval and a chain of inequalities.
        ("\\boxed{0<x<12.5}", "(0, 12.5)", 1.0),
        ("0 < x < 12.5", "(0, 12.5)", 1.0),
        ("0 ≤ x < 12.5", "[0, 12.5)", 1.0),
        ("$(0, 12.5)$", "0<x<12.5", 1.0),
        ("0 < x < 12.5", "(0, 12.6)", 0.0),
        ("0 < x < 12.5", "[0, 12.5)", 0.0),
        ("I do not know.", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_mathematical_equality_by_a_table_of_cases(response: str, expected: str, reward: float) -> None:
    assert hf_math_verify(response, expected).reward == reward


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("$\\frac12$", "\\frac{1}{2}"),
        ("\\dfrac{1}{2}", "\\frac{1}{2}"),
        ("1,234", "1234"),
        ("1{,}234", "1234"),
        ("12,\\!345.5", "12345.5"),
        ("\\$1,000,000", "1000000"),
        ("\\boxed{7}.", "7"),
        ("\\boxed{\\text{no}}", "no"),
        ("x = 5", "5"),
        ("The final answer is $5$. I hope it is correct.", "5"),
        ("\\text{yes}", "yes"),
        ("\\textbf{(C)}", "(C)"),
        ("12 degrees", "12"),
        ("90^\\circ", "90"),
        ("25\\text{ square feet}", "25"),
        ("5\\text{m}^2", "5"),
        ("7^{\\mathrm{th}}", "7"),
        ("a 7", "7"),
        ("50\\%", "50"),
        ("\\left(1, 2\\right)", "(1,2)"),
        ("3\\text{ and }5", "3,5"),
        ("\\sqrt2", "\\sqrt{2}"),
        ("**4**", "4"),
    ],
)
def test_dapo_writes_answers_plainly(given: str, wanted: str) -> None:
    assert dapo_math_verify(f"Thinking.\nAnswer: {given}", wanted) == Verdict(1.0, wanted)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("7.0", "7"), ("07", "7"), ("1/2", "0.5"), ("1,2", "12"), ("2,1", "1,2"), ("-5", "5"), ("x+1", "1+x"), ("", "7")],
)
def test_dapo_compares_writing_and_not_values(given: str, wanted: str) -> None:
    assert dapo_math_verify(f"Answer: {given}", wanted).reward == 0.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Answer: 3\nAnswer: 4", "4"),
        ("ANSWER : 4\nThat was all.", "4"),
        ("Answer:\n4", "4"),
        ("It is 4", None),
        ("\\boxed{4}", None),
        (f"Answer: 3{'.' * 310}", None),
        (f"Answer: 3{' ' * 320}Answer: 4", "4"),
        ("", None),
    ],
)
def test_dapo_reads_the_last_answer_line_of_the_last_300_characters(response: str, answer: str | None) -> None:
    verdict = dapo_math_verify(response, "4")
    assert verdict == Verdict(float(answer == "4"), answer)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Answer: A, no.\nAnswer: (C)", "A"),
        ("Answer:c", "C"),
        ("**Answer:** C", "C"),
        ("Answer: $\\boxed{\\text{C}}$", "C"),
        ("Final Answer: C) because", "C"),
        ("Answer: I", "I"),
        ("Answer: I think it is C", None),
        ("answer: a few of them; Answer: C", "C"),
        ("Answer: Cats", None),
        ("Answer: K", None),
        ("I choose C", None),
        ("", None),
    ],
)
def test_the_first_choice_is_read(response: str, answer: str | None) -> None:
    assert english_multichoice(response, "C") == Verdict(float(answer == "C"), answer)
    if "Final" not in response:
        answer = answer if answer is None or answer in "ABCD" else None
        assert multilingual_multichoice(response, "(C)") == Verdict(float(answer == "C"), answer)


@pytest.mark.parametrize(
    "response",
    [
        "Réponse : B",
        "答案:B",
        "答案\uff1a\uff08\uff22\uff09",
        "정답: B입니다",
        "الإجابة: ب",
        "Antwort: B",
        "উত্তর: ব",
        "Respuesta: **B**",
        "答曰: B",
        "উত্তরঃ ব",
        "答え:B",
        "الجواب النهائي: ب",
        "الإجابة الصحيحة هي: B",
        "Ìdáhùn: B",
        "答复\uff1aB",
    ],
)
def test_choices_are_read_in_many_languages(response: str) -> None:
    assert multilingual_multichoice(response, "B") == Verdict(1.0, "B")


def test_questions_in_many_languages_have_four_choices() -> None:
    for letter in "EFGHIJ":
        assert multilingual_multichoice(f"Answer: {letter}", letter) == Verdict(0.0, None)
        assert english_multichoice(f"Answer: {letter}", letter) == Verdict(1.0, letter)


def test_a_word_that_begins_with_a_choice_is_none() -> None:
    for response in ("Antwort: Berlin", "الإجابة: باب", "Réponse : Bé"):
        assert multilingual_multichoice(response, "B").answer is None, response


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
            MathMultiRewardEnvironment: [],
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
    # Correctness, integer and format of each response; the expected answer is 12.
    expected = {
        "<think>3 *\n4</think>\n<answer>12</answer>": (1, 1, 1),
        "<think>nearly</think>\n<answer>12.5</answer>": (0, 0, 1),
        "<think>two lines</think>\n\n<answer> 12 </answer>": (1, 1, 0),
        " <think>a blank</think>\n<answer>+12</answer>": (0, 0, 0),
        "<answer>12</answer>": (1, 1, 0),
        "<think>cut off at its stop string</think>\n<answer>12": (1, 1, 0),
        "<think>or</think>\n<answer>12</answer> no: <answer>x</answer>": (0, 0, 0),
        "<think>once</think>\n<answer>12</answer><answer>12</answer>": (1, 1, 0),
        "<think>once</think>\n<think>twice</think>\n<answer>12</answer>": (1, 1, 0),
        "<think>the same number</think>\n<answer>\\frac{24}{2}</answer>": (0, 0, 1),
        "12": (1, 1, 0),
    }
    result = judged(MathMultiRewardEnvironment({"num_workers": 1}), *((text, "12") for text in expected))
    assert list(result.rewards) == ["reward/correctness", "reward/integer", "reward/format"]
    assert list(zip(*(column.tolist() for column in result.rewards.values()), strict=True)) == list(expected.values())


def test_a_validation_is_measured_by_prompts_lengths_and_ends(math: MathEnvironment) -> None:
    columns = {
        "rewards": torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 1.0]),
        "generated_lengths": torch.tensor([4, 8, 8, 8, 8, 6]),
        "truncated": torch.tensor([False, True, False, True, True, False]),
        "prompt_number": torch.tensor([0, 0, 1, 1, 2, 2]),
    }
    _, measured = math.global_post_process_and_metrics(BatchedDataDict(columns))
    assert measured == pytest.approx(
        {
            "verify_timeouts": measured["verify_timeouts"],
            "accuracy": 1 / 3,
            "pass@samples_per_prompt": 2 / 3,
            "fraction_of_samples_properly_ended": 0.5,
            "generation_lengths": 7.0,
            "correct_solution_generation_lengths": 5.0,
        }
    )
    _, without = math.global_post_process_and_metrics(BatchedDataDict(columns | {"rewards": torch.zeros(6)}))
    assert without["correct_solution_generation_lengths"] == without["pass@samples_per_prompt"] == 0
    assert set(math.global_post_process_and_metrics(BatchedDataDict())[1]) == {"verify_timeouts"}


def test_code_is_compared_by_its_words() -> None:
    result = judged(
        CodeJaccardEnvironment({}),
        ("```\nx = 1\n```", "```\nx = 1\n```"),
        ("y", "x"),
        ("a b c", "b c d"),
        # Fences and what stands beside them are words as others are.
        ("Sure: ``` x = 1 ```", "``` x = 1 ```"),
    )
    assert torch.allclose(result.rewards, torch.tensor([1.0, 0.0, 0.5, 4 / 5 * 13 / 19]))


def test_texts_without_words_are_equal_and_sets_of_words_count_once() -> None:
    assert jaccard("", " ") == 1.0
    assert jaccard("", "x") == 0.0
    assert jaccard("x y", " Y  X ") == pytest.approx(3 / 4)
    assert jaccard("x, y", "x y") == pytest.approx(1 / 3 * 3 / 4)
    assert jaccard("aa bb cc", "aa bb") == pytest.approx(2 / 3 * 5 / 8)


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


def test_registered_names_need_no_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_registry, "CLASSES", dict(environment_registry.CLASSES))
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
    pool = VerifierPool("hf_math_verify", 1, deadline_s=4.0)
    began = time.monotonic()
    with pytest.raises(EnvironmentFailure, match="ended with exit code 1: ImportError: planted: no antlr") as failure:
        pool.verify([("1", "1")])
    assert time.monotonic() - began < 60 and "Traceback" in str(failure.value)
    pool.shutdown()


def processes_of(pool: VerifierPool) -> list[subprocess.Popen[bytes]]:
    return [worker.process for worker in pool._workers]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "how"), [("idle", signal.SIGKILL), ("starting", signal.SIGSEGV), ("at work", signal.SIGSEGV)]
)
def test_a_verifier_process_that_is_killed_is_replaced_and_costs_no_reward(
    when: str, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = VerifierPool("hf_math_verify", 1, deadline_s=20.0)
    pairs = [("\\boxed{x+x}", "2x"), ("\\boxed{1/2}", "0.5"), ("\\boxed{3}", "4")]
    try:
        if when == "idle":
            pool.verify(pairs[:1])
            processes_of(pool)[0].send_signal(how)
            processes_of(pool)[0].wait(10)
        else:
            reply = math_environment._Verifier.reply

            def killed(worker: Any, within_s: float, request: Any = None) -> Any:
                if (request is None) == (when == "starting"):
                    monkeypatch.setattr(math_environment._Verifier, "reply", reply)
                    worker.process.send_signal(how)
                return reply(worker, within_s, request)

            monkeypatch.setattr(math_environment._Verifier, "reply", killed)
        assert [verdict.reward for verdict in pool.verify(pairs)] == [1.0, 1.0, 0.0] and pool.timeouts == 0
    finally:
        pool.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("size", [10, 1 << 20])
def test_a_verifier_process_that_is_stopped_is_replaced_by_the_deadline(size: int) -> None:
    pool = VerifierPool("hf_math_verify", 1, deadline_s=4.0)
    try:
        pool.verify([("\\boxed{x+x}", "2x")])
        processes_of(pool)[0].send_signal(signal.SIGSTOP)
        response = " " * size + "\\boxed{x+x}"
        # What it held is verified by the process that follows it.
        assert [verdict.reward for verdict in pool.verify([(response, "2x")] * 2)] == [1.0, 1.0]
        assert pool.timeouts == 0
    finally:
        pool.shutdown()


@pytest.mark.parametrize("kind", [MathEnvironment, ReasoningGymEnvironment])
def test_an_answer_that_takes_too_long_is_marked_in_the_metadata(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = kind({})
    late = [Verdict(0.0, None, given_up=True), Verdict(1.0, "4")]
    monkeypatch.setattr(judge._pool, "verify", lambda pairs: late)
    logs = [[{"role": "user", "content": ""}, {"role": "assistant", "content": "It is 4"}]] * 2
    assert judge.step(logs, [{"ground_truth": "4"}] * 2).metadata == [
        {"ground_truth": "4", GIVEN_UP: True},
        {"ground_truth": "4"},
    ]


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("reasoning_gym", {}, "the answer is the whole response.*answer_tag=answer"),
        ("reasoning_gym", {"answer_tag": "answer"}, "what stands in <answer></answer>; a response without it earns 0"),
        ("dapo", {}, "read from the last line `Answer: ...`"),
        ("math", {"verifier_type": "english_multichoice"}, "`Answer:` with a letter"),
    ],
)
def test_the_form_that_a_judge_wants_of_answers_is_said_at_the_start(
    name: str, settings: dict[str, object], said: str
) -> None:
    (line,) = start_lines([name], EnvConfig.read({name: settings}))
    assert re.search(said, line)


def test_a_judge_that_finds_any_answer_says_nothing_at_the_start() -> None:
    assert start_lines(["math"], EnvConfig.read({})) == []
