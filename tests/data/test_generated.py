"""Datasets that are generated: reasoning-gym's tasks and sliding puzzles."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.config import DatasetConfig
from nemo_rl.data.datasets.registry import load_response_dataset
from nemo_rl.data.datasets.sliding_puzzle import DIRECTIONS, action_for, moved, shown, slid, solved_board
from nemo_rl.data.interfaces import DataError


def entry(**keys: Any) -> DatasetConfig:
    return DatasetConfig.model_validate({"prompt_file": None, "num_problems": 40, "held_out": 10, **keys})


def reasoning_gym(**keys: Any) -> DatasetConfig:
    return entry(**{"dataset_name": "reasoning_gym", "task": "spell_backward", "env_name": "reasoning_gym", **keys})


def puzzle(**keys: Any) -> DatasetConfig:
    return entry(**{"dataset_name": "sliding_puzzle", "env_name": "sliding_puzzle", **keys})


@pytest.mark.slow
@pytest.mark.parametrize("make", [reasoning_gym, puzzle])
def test_generated_rows_are_the_same_each_time_and_splits_share_none(make: Any) -> None:
    train, again = load_response_dataset(make()), load_response_dataset(make())
    held_out = load_response_dataset(make(split="validation"))
    assert train.dataset[:]["messages"] == again.dataset[:]["messages"]
    questions, kept = ({row["messages"][0]["content"] for row in part.dataset} for part in (train, held_out))
    assert (len(questions), len(kept)) == (40, 10)
    assert not questions & kept


def test_a_reasoning_gym_row_carries_the_reference_of_its_problem() -> None:
    row = load_response_dataset(reasoning_gym(task_config={"max_word_len": 5})).dataset[3]
    state = json.loads(row["state"])
    assert (state["task"], json.loads(state["settings"])) == ("spell_backward", {"max_word_len": 5})
    word, answer = row["messages"][0]["content"].split(": ")[-1], row["messages"][1]["content"]
    assert answer == word[::-1]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (reasoning_gym(task=None), "data.train.task: reasoning_gym needs the name of a task"),
        (reasoning_gym(task="spell_backwards"), "no task 'spell_backwards'. Did you mean 'spell_backward'"),
        (
            reasoning_gym(task_config={"max_wrod_len": 5}),
            "data.train.task_config: task spell_backward refuses .*max_wrod_len",
        ),
        (
            reasoning_gym(task_config={"min_word_len": 9, "max_word_len": 3}),
            "data.train.task_config: task spell_backward refuses",
        ),
        (reasoning_gym(env_name="math"), "data.train.env_name: reasoning_gym is judged by env_name: reasoning_gym"),
        (reasoning_gym(task="coin_flip", num_problems=5000), "distinct problems with these settings, too few"),
        (reasoning_gym(split="test"), "data.train.split: reasoning_gym has no split 'test'"),
        (puzzle(task_config={"size": 1}), r"data.train.task_config.size: .*greater than or equal to 2"),
        (puzzle(task_config={"shuffle": 4}), r"task_config.shuffle: .*Did you mean 'shuffle_moves'"),
        (puzzle(task_config={"size": 2, "shuffle_moves": 1}), "gives 2 distinct problems"),
    ],
)
def test_wrong_settings_are_named_by_their_key(config: DatasetConfig, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_response_dataset(config)


@given(st.integers(2, 5), st.lists(st.sampled_from(sorted(DIRECTIONS)), max_size=30))
def test_a_move_can_be_taken_back(size: int, moves: list[str]) -> None:
    back = {"up": "down", "down": "up", "left": "right", "right": "left"}
    plan_state = solved_board(size)
    for direction in moves:
        after = moved(plan_state, direction)
        if after is not None:
            assert sorted(tile for line in after for tile in line) == list(range(size * size))
            assert moved(after, back[direction]) == plan_state
            assert slid(plan_state, *map(int, action_for(plan_state, direction).split()[1:])) == after
            plan_state = after


def test_a_board_is_shown_in_columns() -> None:
    assert shown([[1, 2, 3], [4, 5, 6], [7, 8, 0]]) == "1 2 3\n4 5 6\n7 8 ."
    assert shown(solved_board(4)).splitlines()[-1] == "13 14 15  ."
