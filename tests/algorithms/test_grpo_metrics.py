"""Step metrics: joining microbatches, batch statistics, throughput, validation; seeds and the public path."""

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.algorithms import utils
from nemo_rl.algorithms.grpo.stages import Experience, joined_experience, mask_and_weigh
from nemo_rl.algorithms.grpo.step_reports import (
    accuracy_by_task,
    aggregate_microbatch_metrics,
    batch_metrics,
    step_metrics,
    throughput_metrics,
    validation_metrics,
)
from nemo_rl.config import ClippedPGLossConfig, GRPOConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import GIVEN_UP
from nemo_rl.experience.rollouts import RolloutWatch, SampleOutcome, Trajectory, rollout_metrics
from nemo_rl.experience.store import InProcessStore


def test_microbatch_metrics_are_summed_averaged_or_taken_at_the_extremum() -> None:
    microbatches = [
        {
            "loss": 0.1,
            "lr": 1e-3,
            "global_valid_toks": 9,
            "probs_ratio_min": float("inf"),
            "probs_ratio_clamped_max": -float("inf"),
            "num_valid_samples": 2,
        },
        {
            "loss": torch.tensor(0.2),
            "lr": 1e-3,
            "global_valid_toks": 9,
            "probs_ratio_min": 0.5,
            "probs_ratio_clamped_max": -float("inf"),
            "num_valid_samples": 3,
        },
    ]
    metrics = aggregate_microbatch_metrics({name: [found[name] for found in microbatches] for name in microbatches[0]})
    assert metrics == pytest.approx(
        {
            "loss": 0.3,
            "lr": 1e-3,
            "global_valid_toks": 9,
            "probs_ratio_min": 0.5,
            "probs_ratio_clamped_max": -1.0,
            "num_valid_samples": 5,
        }
    )
    assert np.isnan(aggregate_microbatch_metrics({"loss": [1.0, float("nan")]})["loss"])


def test_batch_metrics_say_how_many_samples_have_a_decided_baseline() -> None:
    metrics = batch_metrics(
        torch.tensor([1.0, 1.0, 0.0, 0.0]),
        torch.tensor([1.0, 0.5, 0.0, 0.0]),
        torch.tensor([4, 4, 6, 6]),
        torch.tensor([10, 10, 10, 11]),
    )
    assert metrics == {
        "reward": 0.5,
        "baseline_reward/pct_0": 0.5,
        "baseline_reward/pct_1": 0.25,
        "baseline_reward/pct_mixed": 0.25,
        "mean_prompt_length": 5.0,
        "total_num_tokens": 41.0,
    }


def test_throughput_counts_the_devices_that_did_the_work() -> None:
    seconds = {"total_step_time": 10.0, "policy_training": 2.0, "policy_and_reference_logprobs": 3.0, "generation": 4.0}
    metrics = throughput_metrics(
        20, 1000.0, seconds, num_devices=4, train_devices=2, generation_devices=4, generated_tokens=800.0
    )
    assert metrics["samples_per_sec"] == 2.0
    assert metrics["tokens_per_sec_per_gpu"] == 25.0
    assert metrics["policy_training_tokens_per_sec_per_gpu"] == 250.0
    assert metrics["training_worker_group_tokens_per_sec"] == 200.0
    assert metrics["generation_tokens_per_sec_per_gpu"] == 50.0
    assert "samples_per_sec" not in throughput_metrics(
        20, 1.0, {}, num_devices=1, train_devices=1, generation_devices=1, generated_tokens=1.0
    )


def test_validation_counts_a_prompt_as_solved_when_any_of_its_samples_is() -> None:
    metrics = validation_metrics(
        torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([3, 5, 7, 9]), generations_per_prompt=2
    )
    assert metrics == {"accuracy": 0.25, "avg_length": 6.0, "pass_k": 0.5}
    assert "pass_k" not in validation_metrics(torch.ones(2), torch.ones(2))


def test_validation_may_take_the_best_of_a_prompts_samples() -> None:
    rewards, lengths = torch.tensor([0.5, 0.0, -1.0, 1.0, -2.0, -3.0]), torch.ones(6)
    tasks = ["a", "a", "b", "b", "b", "b"]
    best = validation_metrics(rewards, lengths, tasks, generations_per_prompt=2, best_at_k=True)
    assert best["accuracy"] == pytest.approx((0.5 + 1.0 - 2.0) / 3)
    assert (best["accuracy/a"], best["accuracy/b"]) == (0.5, -0.5)
    plain = validation_metrics(rewards, lengths, tasks, generations_per_prompt=2)
    assert plain["accuracy"] == best["mean_accuracy"] == pytest.approx(-0.75)
    assert "mean_accuracy" not in plain and plain["accuracy/b"] == -1.25 and plain["pass_k"] == best["pass_k"]
    one = validation_metrics(rewards, lengths, best_at_k=True)
    assert one["accuracy"] == one["mean_accuracy"] == plain["accuracy"]


def test_a_seed_fixes_every_generator() -> None:
    draws = []
    for _ in range(2):
        utils.set_seed(2**40 + 3)
        draws.append((random.random(), np.random.rand(), torch.rand(()).item()))
    assert draws[0] == draws[1]


def test_the_public_path_offers_the_functions_of_their_rooms() -> None:
    values = torch.tensor([1.0, 3.0])
    assert utils.masked_mean(values, torch.ones(2)).item() == pytest.approx(2.0)
    assert utils.calculate_kl(values, values).abs().max() == 0
    assert utils.calculate_baseline_and_std_per_prompt(torch.zeros(2, 1), values, torch.ones(2))[0].tolist() == [
        3.0,
        1.0,
    ]
    with pytest.raises(AttributeError, match="get_model"):
        _ = utils.get_model


def test_replayed_rollouts_have_no_generation_rate() -> None:
    seconds = {"total_step_time": 2.0, "policy_training": 1.0, "generation": 0.1}
    metrics = throughput_metrics(
        8, 64.0, seconds, num_devices=1, train_devices=1, generation_devices=0, generated_tokens=32.0
    )
    assert metrics["samples_per_sec"] == 4.0
    assert not any(name.startswith("generation") for name in metrics)


def test_each_task_has_its_own_accuracy_once_there_are_several() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])
    assert accuracy_by_task(rewards, ["sums", "words", "sums", "words"]) == {
        "accuracy/sums": 1.0,
        "accuracy/words": 0.5,
    }
    assert accuracy_by_task(rewards, ["sums"] * 4) == {}


def test_samples_cut_short_are_told_once_until_they_have_been_few() -> None:
    watch = RolloutWatch()

    def said(truncated: float, unfinished: float = 0.0, max_turns: int = 5) -> str:
        rates = {"truncation_rate": truncated, "max_turns_reached_rate": unfinished}
        return "\n".join(watch.observe("step 3", rates, max_new_tokens=64, max_turns=max_turns))

    assert said(0.39) == ""
    first = said(0.4)
    assert "step 3: 40% of the samples were cut off" in first
    assert "policy.generation.max_new_tokens=64" in first and "policy.generation.stop_token_ids" in first
    assert said(1.0) == said(0.3) == said(0.9) == "", "it is the same situation still"
    assert said(0.1) == "" and "90%" in said(0.9)
    assert "max_tokens" not in first
    agents = {"truncation_rate": 0.9, "agent_branches_per_sample": 1.0}
    (line,) = RolloutWatch().observe("step 1", agents, max_new_tokens=64, max_turns=1)
    assert "the agent's own max_tokens" in line
    assert said(0.0, unfinished=0.3) == ""
    assert "50% of the episodes were cut after grpo.max_rollout_turns=5" in said(0.0, unfinished=0.5)
    assert "2% of the episodes were cut after grpo.max_rollout_turns=1" in "\n".join(
        RolloutWatch().observe("step 1", {"max_turns_reached_rate": 0.02}, max_new_tokens=64, max_turns=1)
    )


def test_metrics_of_several_optimizer_steps_are_means_of_sums_and_extremes_of_extremes() -> None:
    rows = BatchedDataDict(
        reward=torch.tensor([1.0, 0.0, 5.0]),
        valid=torch.tensor([True, True, False]),
        baseline=torch.tensor([0.0, 1.0, 0.0]),
        prompt_lengths=torch.ones(3),
        total_lengths=torch.full((3,), 4.0),
    )
    measured = {"kl": [1.0, 3.0], "ratio_max": [1.0, 3.0], "ratio_min": [1.0, 3.0], "lr": [0.1, 0.3]}
    result: Any = {"loss": torch.tensor([1.0, 2.0]), "grad_norm": 0.5, "all_mb_metrics": measured}
    found = step_metrics(GRPOConfig(), 1, Experience(BatchedDataDict(), rows, metrics={"kept": 1.0}), result)
    assert {name: found[name] for name in ("kl", "ratio_max", "ratio_min", "lr", "loss", "kept")} == {
        "kl": 2.0,
        "ratio_max": 3.0,
        "ratio_min": 1.0,
        "lr": 0.2,
        "loss": 1.5,
        "kept": 1.0,
    }
    # What is said of rewards is said of those that count.
    assert (found["reward"], found["baseline_reward/pct_0"], found["baseline_reward/pct_1"]) == (0.5, 0.5, 0.5)


def test_a_prompt_is_solved_by_one_sample_of_full_reward() -> None:
    rewards = torch.tensor([0.5, 0.5, 0.0, 1.0, 2.0, 0.0])
    assert validation_metrics(rewards, torch.ones(6), generations_per_prompt=2)["pass_k"] == pytest.approx(2 / 3)
    assert "pass_k" not in validation_metrics(rewards, torch.ones(6))


def test_samples_of_a_later_part_go_on_counting_where_the_earlier_ended() -> None:
    store = InProcessStore(0)
    tokens = BatchedDataDict(
        input_ids=torch.ones(2, 3), input_lengths=torch.tensor([3, 3]), token_mask=torch.ones(2, 3)
    )
    rows = BatchedDataDict(
        sample_mask=torch.ones(2), row_advantages=torch.tensor([1.0, -1.0]), reward=torch.tensor([1.0, 0.0])
    )
    part = Experience(store.write(tokens), rows)
    mask_and_weigh(part, store, GRPOConfig(), ClippedPGLossConfig(force_on_policy_ratio=True), 2, first_row=6)
    assert store.read(part.handle, ["sample_index"])["sample_index"].tolist() == [6, 7]
    assert store.read(part.handle, ["advantages"])["advantages"][:, 1].tolist() == [1.0, -1.0]


_OUTCOMES = st.builds(
    SampleOutcome,
    turns=st.integers(1, 9),
    generated=st.lists(st.integers(1, 99), min_size=1, max_size=4),
    observed=st.integers(0, 20),
    tokens=st.integers(500, 900),
    reward=st.sampled_from([0.0, 0.5, 1.0]),
    components=st.dictionaries(st.sampled_from(["reward/a", "reward/b"]), st.sampled_from([0.0, 1.0])),
    truncated=st.booleans(),
    ended=st.booleans(),
    out_of_turns=st.booleans(),
    unverified=st.booleans(),
    branches=st.none() | st.integers(1, 3),
)


@given(st.lists(_OUTCOMES, min_size=1, max_size=12), st.sets(st.integers(1, 11)))
def test_samples_of_a_step_are_counted_alike_whole_and_in_parts(samples: list[SampleOutcome], cuts: set[int]) -> None:
    store, rows = InProcessStore(0), BatchedDataDict(number=torch.arange(len(samples)))
    ends = sorted({0, len(samples), *(cut for cut in cuts if cut < len(samples))})
    parts = [Experience(store.write(rows.slice(a, b)), rows.slice(a, b), samples[a:b]) for a, b in pairwise(ends)]
    joined = joined_experience(parts, store)
    assert rollout_metrics(joined.samples) == rollout_metrics(samples)
    metrics: dict[str, Any] = rollout_metrics(samples)
    assert metrics["turns_per_sample/p95"] == np.percentile([sample.turns for sample in samples], 95)
    # A part of a reward that an environment does not give counts as 0 there.
    for name in {name for sample in samples for name in sample.components}:
        assert metrics[name] == np.mean([sample.components.get(name, 0.0) for sample in samples])


def test_answers_that_no_verifier_judged_in_time_are_counted_and_said_once() -> None:
    judged = [
        Trajectory([], metadata={"ground_truth": "4", GIVEN_UP: True}),
        Trajectory([], metadata={}),
        Trajectory([]),
    ]
    metrics = rollout_metrics([trajectory.outcome(1) for trajectory in judged])
    assert metrics["unverified_rate"] == pytest.approx(1 / 3)
    watch = RolloutWatch()
    (line,) = watch.observe("step 4", metrics, max_new_tokens=64, max_turns=9)
    assert (
        "step 4: 33.3% of the answers were not verified within env.*.verify_timeout_s, or run_timeout_s of code" in line
    )
    assert watch.observe("step 5", metrics, max_new_tokens=64, max_turns=9) == []
