"""Steps that teach nothing are spoken of, and only these."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.algorithms.grpo.rewards import RewardWatch


def rows(rewards: list[float], groups: list[int]) -> dict[str, Any]:
    return {"reward": torch.tensor(rewards), "prompt_number": torch.tensor(groups)}


def test_equal_rewards_are_spoken_of_after_a_few_steps_and_each_time_their_number_doubled() -> None:
    watch, same = RewardWatch(), rows([0.0, 0.0, 1.0, 1.0], [3, 3, 8, 8])
    said = {step: watch.observe(step, same, 9.0) for step in range(1, 17)}
    assert [step for step, line in said.items() if line] == [4, 8, 16]
    assert "for 8 steps all samples of a prompt have had the same reward (now between 0 and 1)" in (said[8] or "")
    assert watch.observe(17, rows([0.0, 1.0, 1.0, 1.0], [3, 3, 8, 8]), 9.0) is None
    assert watch.observe(18, same, 9.0) is None


def test_a_step_without_a_trained_token_is_spoken_of_at_once() -> None:
    assert "step 3 trained no token" in (RewardWatch().observe(3, rows([1.0, 0.0], [0, 0]), 0.0) or "")


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=12))
def test_rewards_are_equal_where_every_group_has_one_value(samples: list[tuple[int, float]]) -> None:
    watch = RewardWatch()
    for step in range(1, 5):
        line = watch.observe(step, rows([value for _, value in samples], [group for group, _ in samples]), 1.0)
    groups = {group: {value for other, value in samples if other == group} for group, _ in samples}
    assert (line is not None) == all(len(values) == 1 for values in groups.values())
