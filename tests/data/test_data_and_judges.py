"""Which data go with which judge: every data set gives its expected answer, or the pair is refused."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_rl.config import ConfigError, DatasetConfig, EnvConfig
from nemo_rl.data.datasets.registry import load_response_dataset
from nemo_rl.data.setup import processed
from nemo_rl.environments.environment_registry import check_rows, environment_settings
from nemo_rl.environments.function_environment import FunctionEnvironment

HERE = __name__


def exact(response: str, expected: str) -> float:
    return float(response == expected)


GENERATED = {
    "arithmetic": ({}, "arithmetic"),
    "digits": ({"task": "sort"}, "digits"),
    "sliding_puzzle": ({"task_config": {"size": 2}}, "sliding_puzzle"),
    "reasoning_gym": ({"task": "spell_backward"}, "reasoning_gym_spell_backward"),
}


def prompts_of(name: str, tokenizer: Any, **keys: Any) -> Any:
    entry = {"dataset_name": name, "env_name": "mine", "num_problems": 3, "held_out": 0, "prompt_file": None, **keys}
    raw = load_response_dataset(DatasetConfig.model_validate(entry))
    return processed([(raw, raw.dataset)], tokenizer, 500)


@pytest.mark.parametrize("name", GENERATED)
def test_every_generated_data_set_gives_a_judge_of_ones_own_its_answers(name: str, tokenizer: Any) -> None:
    keys, task = GENERATED[name]
    rows = prompts_of(name, tokenizer, **keys)
    check_rows({task: rows}, {task: "mine"}, EnvConfig.read({"mine": {"function": f"{HERE}.exact"}}))
    answers = [rows.dataset[number]["messages"][-1]["content"] for number in range(len(rows))]
    section = EnvConfig.read({"mine": {"function": f"{HERE}.exact"}}).of("mine")
    judge = FunctionEnvironment(environment_settings(section, "mine"))
    logs = [[{"role": "user", "content": ""}, {"role": "assistant", "content": answer}] for answer in answers]
    judged = judge.step(logs, [rows[number]["extra_env_info"] for number in range(len(rows))])
    assert judged.rewards.tolist() == [1.0] * len(rows)


def test_a_task_with_many_right_answers_is_refused_for_a_judge_that_wants_one(tokenizer: Any) -> None:
    rows = prompts_of("reasoning_gym", tokenizer, task="propositional_logic")
    env = EnvConfig.read({"mine": {"function": f"{HERE}.exact"}})
    with pytest.raises(ConfigError, match="wants expected, and rows of logic have no expected answer"):
        check_rows({"logic": rows}, {"logic": "mine"}, env)


@pytest.mark.parametrize(
    ("data", "environment", "message"),
    [
        ("arithmetic", "reasoning_gym", "reasoning_gym judges by task, settings, seed, size, index"),
        ("arithmetic", "sliding_puzzle", "sliding_puzzle judges by board, moves, which rows of x do not give: they gi"),
        ("sliding_puzzle", "reasoning_gym", "reasoning_gym judges by task"),
        ("propositional_logic", "math_multi_reward", "math_multi_reward judges by ground_truth"),
        ("propositional_logic", "code_jaccard", "code_jaccard judges by ground_truth"),
    ],
)
def test_data_that_an_environment_cannot_judge_are_refused(
    data: str, environment: str, message: str, tokenizer: Any
) -> None:
    if data == "propositional_logic":
        rows = prompts_of("reasoning_gym", tokenizer, task=data)
    else:
        rows = prompts_of(data, tokenizer, **GENERATED[data][0])
    with pytest.raises(ConfigError, match=message):
        check_rows({"x": rows}, {"x": environment}, EnvConfig.read({}))
