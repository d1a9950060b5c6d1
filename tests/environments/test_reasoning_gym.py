"""reasoning-gym's verifiers behind the environment, in their own processes."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from nemo_rl.config import DatasetConfig, ReasoningGymEnvConfig
from nemo_rl.data.datasets.registry import load_response_dataset
from nemo_rl.environments.math_environment import ReasoningGymEnvironment

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    keys = {
        "dataset_name": "reasoning_gym",
        "env_name": "reasoning_gym",
        "num_problems": 4,
        "held_out": 0,
        "prompt_file": None,
    }
    tasks = [("spell_backward", {}), ("countdown", {"min_numbers": 3, "max_numbers": 3})]
    parts = [
        load_response_dataset(DatasetConfig.model_validate({**keys, "task": task, "task_config": settings})).dataset
        for task, settings in tasks
    ]
    return [row for part in parts for row in part]


@pytest.fixture(scope="module")
def environment() -> Iterator[ReasoningGymEnvironment]:
    made = ReasoningGymEnvironment({"num_workers": 1})
    yield made
    made.shutdown()


def judge(environment: ReasoningGymEnvironment, rows: list[dict[str, Any]], responses: list[str]) -> Any:
    logs = [[{"role": "user", "content": ""}, {"role": "assistant", "content": response}] for response in responses]
    return environment.step(logs, [json.loads(row["state"]) for row in rows])


def test_right_answers_score_one_and_nonsense_less(
    environment: ReasoningGymEnvironment, rows: list[dict[str, Any]]
) -> None:
    right = judge(environment, rows, [f" {row['messages'][1]['content']}\n" for row in rows])
    assert right.rewards.tolist() == [1.0] * len(rows)
    wrong = judge(environment, rows, ["((("] * len(rows))
    assert max(wrong.rewards.tolist()) < 0.5
    assert all(wrong.terminateds.tolist())


def test_a_tag_says_which_part_is_the_answer(
    environment: ReasoningGymEnvironment, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tag goes along with each response; verifiers take seconds to start.
    monkeypatch.setattr(environment, "cfg", ReasoningGymEnvConfig.model_validate({"answer_tag": "answer"}))
    row, answer = rows[0], rows[0]["messages"][1]["content"]
    result = judge(environment, [row] * 2, [f"let me see <answer>{answer}</answer>", answer])
    assert result.rewards.tolist() == [1.0, 0.0]
    assert result.answers == [answer, None]
