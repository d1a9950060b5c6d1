"""Collecting a step: groups are numbered and recorded, dynamic sampling fills the step and drops the rest by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.accelerators import Accelerators
from nemo_rl.algorithms.grpo.collect import (
    DynamicSamplingError,
    SynchronousSource,
    training_plan,
    validation_plan,
)
from nemo_rl.config import load_master_config
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.rollout_source import Rollout
from nemo_rl.experience.rollouts import RolloutPlan
from nemo_rl.experience.store import InProcessStore, RolloutColumns, joined_rows
from nemo_rl.utils.record import MemoryRecord
from nemo_rl.utils.record_events import GroupAdmitted, GroupCommitted, GroupDropped
from nemo_rl.utils.timer import Timer

CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"
PROMPTS, SAMPLES = 3, 2


class Rollouts:
    """Gives each prompt's two samples the next pair of rewards."""

    def __init__(self, *pairs: tuple[float, float]) -> None:
        self._pairs = iter(pairs)
        self.attempts: list[int] = []

    def roll_out(self, batch: BatchedDataDict[Any], plan: RolloutPlan, attempt: int) -> Rollout:
        self.attempts.append(attempt)
        rewards = torch.tensor([reward for _ in range(batch.size // SAMPLES) for reward in next(self._pairs)])
        rows = batch.size
        return Rollout(
            RolloutColumns(
                BatchedDataDict(
                    input_ids=torch.arange(rows)[:, None].repeat(1, 4),
                    input_lengths=torch.full((rows,), 4),
                    content=[
                        f"{prompt}/{sample}"
                        for prompt, sample in zip(
                            batch["prompt_number"].tolist(), batch["sample_number"].tolist(), strict=True
                        )
                    ],
                ),
                BatchedDataDict(
                    total_reward=rewards,
                    truncated=torch.zeros(rows, dtype=torch.bool),
                    sample_mask=torch.ones(rows),
                    prompt_lengths=torch.full((rows,), 2),
                    response_lengths=torch.full((rows,), 2),
                    generated_lengths=torch.full((rows,), 2),
                    prompt_number=batch["prompt_number"],
                    sample_number=batch["sample_number"],
                    weight_version=torch.full((rows,), 5),
                ),
            ),
            {"rollouts": float(attempt)},
        )


class Prompts:
    """Batches of prompts 0, 1, 2, ..."""

    def __iter__(self) -> Iterator[BatchedDataDict[Any]]:
        for first in range(0, 10 * PROMPTS, PROMPTS):
            yield BatchedDataDict(idx=list(range(first, first + PROMPTS)), length=torch.ones(PROMPTS))

    def state_dict(self) -> dict[str, Any]:
        return {}


def source_of(rollouts: Any, *overrides: str) -> SynchronousSource:
    """Collects step 5 from prompts 0, 1, 2, ... of epoch 0."""
    base = [
        f"grpo.num_prompts_per_step={PROMPTS}",
        f"grpo.num_generations_per_prompt={SAMPLES}",
        "policy.train_global_batch_size=6",
    ]
    config = load_master_config(
        CONFIG, [*base, "policy.train_micro_batch_size=2", "policy.logprob_batch_size=2", *overrides]
    )
    run: Any = SimpleNamespace(
        config=config,
        train_loader=Prompts(),
        state=SimpleNamespace(step=5, epoch=0, step_in_epoch=0),
        store=InProcessStore(0),
        record=MemoryRecord(),
        timer=Timer(),
        rollouts=rollouts,
        adapter="",
        accelerators=Accelerators(),
        progress=SimpleNamespace(phase=lambda name: None),
    )
    return SynchronousSource(run)


def events(source: SynchronousSource, kind: type) -> list[Any]:
    record: Any = source._run.record
    return [entry.event for entry in record.entries if isinstance(entry.event, kind)]


def test_without_dynamic_sampling_a_step_is_one_batch_and_every_group_is_recorded() -> None:
    source = source_of(Rollouts((0, 1), (1, 1), (0, 0)))
    experience = source.next_experience()
    assert experience.rows.size == experience.handle.size == PROMPTS * SAMPLES
    assert [event.group_id for event in events(source, GroupAdmitted)] == ["5-0", "5-1", "5-2"]
    assert [event.group_id for event in events(source, GroupCommitted)] == ["5-0", "5-1", "5-2"]
    assert experience.rows["reward"].tolist() == [0, 1, 1, 1, 0, 0]


def test_dynamic_sampling_fills_the_step_with_groups_that_differ() -> None:
    source = source_of(
        Rollouts((0, 1), (1, 1), (0, 0), (1, 0), (0, 0), (0, 1), (1, 0)),
        "grpo.use_dynamic_sampling=true",
        "grpo.use_leave_one_out_baseline=false",
    )
    experience = source.next_experience()
    assert experience.handle["content"] == ["0/0", "0/1", "3/0", "3/1", "5/0", "5/1"]
    assert experience.handle.size == experience.rows.size == 6
    assert source._run.rollouts.attempts == [0, 1]
    assert [event.group_id for event in events(source, GroupDropped)] == ["5-1", "5-2", "5-4"]
    assert len(events(source, GroupAdmitted)) == 6
    assert experience.metrics["dynamic_sampling_num_gen_batches"] == 2.0


def test_dynamic_sampling_that_finds_nothing_ends_with_the_keys_that_help() -> None:
    source = source_of(
        Rollouts(*[(1, 1)] * 30), "grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=2"
    )
    with pytest.raises(
        DynamicSamplingError, match="only 0 of 6 samples .* raise grpo.dynamic_sampling_max_gen_batches=2"
    ):
        source.next_experience()
    assert source._run.rollouts.attempts == [0, 1, 2]


def test_a_reward_component_that_some_tasks_do_not_give_is_zero_for_them() -> None:
    math = BatchedDataDict({"total_reward": torch.ones(2), "reward/correctness": torch.tensor([1.0, 0.5])})
    game = BatchedDataDict({"total_reward": torch.zeros(1), "reward/moves": torch.tensor([3.0])})
    rows = joined_rows([math, game, math])
    assert rows["reward/correctness"].tolist() == [1.0, 0.5, 0.0, 1.0, 0.5]
    assert rows["reward/moves"].tolist() == [0.0, 0.0, 3.0, 0.0, 0.0]
    assert rows["total_reward"].tolist() == [1.0, 1.0, 0.0, 1.0, 1.0]
    assert "reward/moves" not in math


def test_dynamic_sampling_joins_batches_whose_tasks_give_different_components() -> None:
    rollouts: Any = Rollouts((0, 1), (1, 1), (0, 0), (1, 0), (0, 0), (0, 1))
    of_batch = rollouts.roll_out

    def with_component(batch: BatchedDataDict[Any], plan: RolloutPlan, attempt: int) -> Rollout:
        rollout = of_batch(batch, plan, attempt)
        if attempt:
            rollout.columns.rows["reward/format"] = torch.ones(batch.size)
        return rollout

    rollouts.roll_out = with_component
    source = source_of(rollouts, "grpo.use_dynamic_sampling=true", "grpo.use_leave_one_out_baseline=false")
    assert source.next_experience().rows["reward/format"].tolist() == [
        0.0,
        0.0,
        1.0,
        1.0,
        1.0,
        1.0,
    ]


def test_validation_draws_the_same_at_every_validation_and_never_what_training_draws() -> None:
    config = load_master_config(CONFIG, [])
    first, training = validation_plan(config, 0), training_plan(config, 5)
    assert validation_plan(config, 0) == first != validation_plan(config, 1)
    assert training.step == 5 != first.step
