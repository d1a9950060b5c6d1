"""Collecting a step: groups are numbered and recorded, dynamic sampling fills the step and drops the rest by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.grpo.collect import DynamicSamplingError, training_plan, validation_plan
from nemo_rl.algorithms.grpo.run import GRPOState
from nemo_rl.config import load_master_config
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.rollout_source import Rollout
from nemo_rl.experience.rollouts import RolloutPlan
from nemo_rl.experience.store import joined_rows
from nemo_rl.utils.record_events import GroupAdmitted, GroupCommitted, GroupDropped
from tests.virtual_world import CONFIG, PROMPTS, SAMPLES, World

SAMPLING = ("grpo.use_dynamic_sampling=true", "grpo.use_leave_one_out_baseline=false")


def world_of(tmp_path: Path, *pairs: tuple[float, float], overrides: Sequence[str] = ()) -> World:
    """Collects step 5 from prompts 0, 1, 2, ..., each of whose two samples have the next pair of rewards."""
    world = World(tmp_path, "grpo.async_grpo.enabled=false", *overrides, state=GRPOState(step=5))
    world.rewards = lambda prompt, sample: pairs[prompt][sample]
    return world


def test_without_dynamic_sampling_a_step_is_one_batch_and_every_group_is_recorded(tmp_path: Path) -> None:
    world = world_of(tmp_path, (0, 1), (1, 1), (0, 0))
    experience = world.run.source.next_experience()
    assert experience.rows.size == experience.handle.size == PROMPTS * SAMPLES
    assert [event.group_id for event in world.events(GroupAdmitted)] == ["5-0", "5-1", "5-2"]
    assert [event.group_id for event in world.events(GroupCommitted)] == ["5-0", "5-1", "5-2"]
    assert experience.rows["reward"].tolist() == [0, 1, 1, 1, 0, 0]


def test_dynamic_sampling_fills_the_step_with_groups_that_differ(tmp_path: Path) -> None:
    world = world_of(tmp_path, (0, 1), (1, 1), (0, 0), (1, 0), (0, 0), (0, 1), overrides=SAMPLING)
    experience = world.run.source.next_experience()
    assert experience.handle["content"] == ["0/0", "0/1", "3/0", "3/1", "5/0", "5/1"]
    assert experience.handle.size == experience.rows.size == 6
    assert world.attempts == [0, 1]
    assert [event.group_id for event in world.events(GroupDropped)] == ["5-1", "5-2", "5-4"]
    assert len(world.events(GroupAdmitted)) == 6
    assert experience.metrics["dynamic_sampling_num_gen_batches"] == 2.0


def test_dynamic_sampling_that_finds_nothing_ends_with_the_keys_that_help(tmp_path: Path) -> None:
    at_most_two = (SAMPLING[0], "grpo.dynamic_sampling_max_gen_batches=2")
    world = world_of(tmp_path, *[(1, 1)] * 30, overrides=at_most_two)
    with pytest.raises(
        DynamicSamplingError, match="only 0 of 6 samples .* raise grpo.dynamic_sampling_max_gen_batches=2"
    ):
        world.run.source.next_experience()
    assert world.attempts == [0, 1, 2]


def test_a_reward_component_that_some_tasks_do_not_give_is_zero_for_them() -> None:
    math = BatchedDataDict({"total_reward": torch.ones(2), "reward/correctness": torch.tensor([1.0, 0.5])})
    game = BatchedDataDict({"total_reward": torch.zeros(1), "reward/moves": torch.tensor([3.0])})
    rows = joined_rows([math, game, math])
    assert rows["reward/correctness"].tolist() == [1.0, 0.5, 0.0, 1.0, 0.5]
    assert rows["reward/moves"].tolist() == [0.0, 0.0, 3.0, 0.0, 0.0]
    assert rows["total_reward"].tolist() == [1.0, 1.0, 0.0, 1.0, 1.0]
    assert "reward/moves" not in math


def test_dynamic_sampling_joins_batches_whose_tasks_give_different_components(tmp_path: Path) -> None:
    world = world_of(tmp_path, (0, 1), (1, 1), (0, 0), (1, 0), (0, 0), (0, 1), overrides=SAMPLING)
    of_batch = world.roll_out

    def with_component(batch: BatchedDataDict[Any], plan: RolloutPlan, attempt: int) -> Rollout:
        rollout = of_batch(batch, plan, attempt)
        if attempt:
            rollout.columns.rows["reward/format"] = torch.ones(batch.size)
        return rollout

    world.roll_out = with_component  # type: ignore[method-assign]
    assert world.run.source.next_experience().rows["reward/format"].tolist() == [0, 0, 1, 1, 1, 1]


def test_validation_draws_the_same_at_every_validation_and_never_what_training_draws() -> None:
    config = load_master_config(CONFIG, [])
    first, training = validation_plan(config, 0), training_plan(config, 5)
    assert validation_plan(config, 0) == first != validation_plan(config, 1)
    assert training.step == 5 and first.step > 1 << 32
