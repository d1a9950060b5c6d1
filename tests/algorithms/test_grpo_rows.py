"""GRPO's row stages: rewards, baselines, dynamic sampling and masks; and steps that teach nothing are spoken of, and
only these.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.algorithms.grpo.advantages import (
    RewardWatch,
    calculate_baseline_and_std_per_prompt,
    group_ids,
    group_statistics,
    process_rewards,
    row_advantages,
    scale_rewards,
    shape_rewards,
)
from nemo_rl.algorithms.grpo.collect import DynamicSamplingError, sampling_metrics, select_rows
from nemo_rl.algorithms.grpo.stages import (
    filter_rows,
    mask_by_sequence_error,
    newest_tokens_only,
    score_rewards,
    sequence_error_stage,
    skipped_sequence_error_metrics,
    valid_rewards,
)
from nemo_rl.config import AdvEstimatorConfig, GRPOConfig, RewardScalingConfig, RewardShapingConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.store import sample_starts

REWARDS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.5, 1.0, -1.0, 1e3]), st.booleans()),
    min_size=1,
    max_size=24,
)


def baseline_by_loops(
    rewards: list[float], groups: list[int], valid: list[bool], leave_one_out: bool
) -> tuple[list[float], list[float]]:
    baselines, stds = [], []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        members = [j for j in range(len(rewards)) if groups[j] == group and valid[j]]
        behind = [rewards[j] for j in members if not (leave_one_out and j == i)]
        if len(members) <= 1 or not behind:
            baselines.append(reward)
            stds.append(0.0)
            continue
        mean = math.fsum(behind) / len(behind)
        # (E[r^2] - E[r]^2) n / (n - 1), in the form that does not cancel.
        variance = math.fsum((r - mean) ** 2 for r in behind) / (len(behind) - 1) if len(behind) > 1 else 0.0
        baselines.append(mean)
        stds.append(0.0 if len(set(behind)) == 1 else math.sqrt(variance))
    return baselines, stds


@given(rows=REWARDS, leave_one_out=st.booleans())
def test_baseline_and_deviation_equal_their_formula(rows: list[tuple[int, float, bool]], leave_one_out: bool) -> None:
    groups, rewards, valid = (list(column) for column in zip(*rows, strict=True))
    prompts = torch.tensor([[group, 7] for group in groups])
    baseline, std = calculate_baseline_and_std_per_prompt(
        prompts, torch.tensor(rewards, dtype=torch.float64), torch.tensor(valid), leave_one_out
    )
    expected_baseline, expected_std = baseline_by_loops(rewards, groups, valid, leave_one_out)
    assert baseline.tolist() == pytest.approx(expected_baseline, rel=1e-9, abs=1e-12)
    assert std.tolist() == pytest.approx(expected_std, rel=1e-9, abs=1e-12)


@given(reward=st.floats(-1e3, 1e3, width=32), size=st.integers(1, 20), leave_one_out=st.booleans())
def test_equal_rewards_have_a_deviation_of_exactly_zero(reward: float, size: int, leave_one_out: bool) -> None:
    statistics = group_statistics(
        torch.full((size,), reward), torch.zeros(size, dtype=torch.long), torch.ones(size), leave_one_out=leave_one_out
    )
    assert statistics.std_B.tolist() == [0.0] * size


def scored(
    rewards: list[float], group: int, masked: dict[str, list[int]] | None = None, **keys: Any
) -> BatchedDataDict:
    """Rows of groups of `group` samples after scoring; `masked` names the rows that have each flag (or no mask)."""
    size, masked = len(rewards), masked or {}
    flags = {
        name: torch.tensor([row in masked.get(name, ()) for row in range(size)])
        for name in ("truncated", "mask_sample", "invalid_tool_call", "no_loss")
    }
    rows = BatchedDataDict(
        total_reward=torch.tensor(rewards),
        response_lengths=torch.ones(size),
        prompt_number=torch.arange(size) // group,
        sample_mask=(~flags.pop("no_loss")).float(),
        **flags,
    )
    estimator = {"use_leave_one_out_baseline": keys["use_leave_one_out_baseline"], **keys.get("adv_estimator", {})}
    cfg = GRPOConfig.read(keys | {"adv_estimator": estimator})
    score_rewards(rows, cfg)
    filter_rows(rows, cfg)
    return rows


@given(
    rewards=st.lists(st.sampled_from([0.0, 1.0, 100.0, -3.0]), min_size=2, max_size=8),
    leave_one_out=st.booleans(),
    unit=st.sampled_from([0.01, 7.0, 1000.0]),
)
def test_a_group_is_judged_as_a_whole_and_with_its_deviation_no_advantage_has_a_unit(
    rewards: list[float], leave_one_out: bool, unit: float
) -> None:
    def rows(scale: float) -> BatchedDataDict:
        scaled = [scale * reward for reward in rewards]
        keys = {"use_leave_one_out_baseline": leave_one_out, "adv_estimator": {"zero_deviation": "group"}}
        return scored(scaled, len(rewards), **keys)

    one = rows(1.0)
    assert one["std"].tolist() == [one["std"][0].item()] * len(rewards)
    assert (one["std"][0] > 0) == (len(set(rewards)) > 1)
    torch.testing.assert_close(rows(unit)["row_advantages"], one["row_advantages"], rtol=1e-3, atol=1e-3)


def test_the_only_success_of_a_group_is_kept_and_measured_as_its_key_says() -> None:
    for reward in (1.0, 100.0):
        for zero_deviation, alone in (("unnormalized", reward), ("group", 8**0.5)):
            keys = {"use_leave_one_out_baseline": True, "adv_estimator": {"zero_deviation": zero_deviation}}
            rows = scored([reward] + [0.0] * 7, 8, **keys)
            cfg = GRPOConfig(num_prompts_per_step=1, num_generations_per_prompt=8, use_dynamic_sampling=True)
            assert select_rows(rows["std"], kept_before=0, num_gen_batches=1, cfg=cfg).keep == list(range(8))
            assert rows["row_advantages"].tolist() == pytest.approx([alone] + [-(7**-0.5)] * 7, abs=1e-3)


@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [
        # A recipe of NeMo-RL's: one right answer of 16, one wrong of 16, and pairs, whose deviations are all 0.
        ([1.0] + [0.0] * 15, [1.0] + [-0.2582] * 15),
        ([0.0] + [1.0] * 15, [-1.0] + [0.2582] * 15),
        ([1.0, 0.0], [1.0, -1.0]),
        ([5.0, 2.0], [3.0, -3.0]),
        # Two of four: every deviation is above 0.
        ([1.0, 1.0, 0.0, 0.0], [1.1547, 1.1547, -1.1547, -1.1547]),
    ],
)
def test_without_a_key_of_ours_a_recipe_has_the_advantages_of_nemo_rl(
    rewards: list[float], advantages: list[float]
) -> None:
    rows = scored(rewards, len(rewards), use_leave_one_out_baseline=True)
    assert rows["row_advantages"].tolist() == pytest.approx(advantages, abs=1e-4)


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize(
    ("flag", "keys", "counts"),
    [
        ("mask_sample", {"should_mask_flagged_samples": True}, False),
        ("invalid_tool_call", {"invalid_tool_call_strategy": "mask"}, False),
        ("no_loss", {}, False),
        ("truncated", {"overlong_filtering": True}, True),
        ("mask_sample", {}, True),
        ("invalid_tool_call", {}, True),
    ],
)
def test_rewards_count_where_they_say_something_of_the_answer(
    flag: str, keys: dict[str, Any], counts: bool, leave_one_out: bool
) -> None:
    rows = scored([1.0, 1.0, 1.0, 0.0], 4, {flag: [3]}, use_leave_one_out_baseline=leave_one_out, **keys)
    without = scored([1.0, 1.0, 1.0], 3, use_leave_one_out_baseline=leave_one_out)
    assert rows["valid"].tolist() == [True, True, True, counts]
    assert bool(rows["std"].any()) == counts
    for name in ("baseline", "row_advantages"):
        assert (rows[name][:3].tolist() == without[name].tolist()) == (not counts)
    assert valid_rewards(rows).mean().item() == (0.75 if counts else 1.0)


def test_gdpo_and_reinforce_plus_plus_take_their_statistics_over_valid_samples() -> None:
    groups, valid = torch.zeros(4, dtype=torch.long), torch.tensor([True, True, True, False])
    parts = {"reward/a": torch.tensor([1.0, 0.0, 0.0, 9.0]), "reward/b": torch.tensor([0.0, 1.0, 0.0, 9.0])}
    for name in ("gdpo", "reinforce_plus_plus"):
        cfg = AdvEstimatorConfig(name=name, use_leave_one_out_baseline=False)

        def rows(keep: slice, cfg: AdvEstimatorConfig = cfg) -> torch.Tensor:
            columns = {part: column[keep] for part, column in parts.items()}
            return row_advantages(cfg, columns["reward/a"] + columns["reward/b"], columns, groups[keep], valid[keep])

        torch.testing.assert_close(rows(slice(4))[:3], rows(slice(3)))


def test_rows_with_equal_prompts_form_a_group() -> None:
    ids = group_ids(torch.tensor([[5, 6, 0], [1, 2, 3], [5, 6, 0], [5, 6, 1]]))
    assert ids[0] == ids[2]
    assert len(set(ids.tolist())) == 3


def test_scaling_clamps_and_maps_linearly_and_says_what_it_clamped(caplog: pytest.LogCaptureFixture) -> None:
    cfg = RewardScalingConfig(enabled=True, source_min=0, source_max=2, target_min=-1, target_max=1)
    assert scale_rewards(torch.tensor([-3.0, 0.0, 1.0, 1.5, 9.0]), cfg).tolist() == [-1, -1, 0, 0.5, 1]
    assert "rewards_clamped=2 of=5" in caplog.text
    with pytest.raises(ValueError, match="source_max"):
        scale_rewards(torch.ones(1), RewardScalingConfig(source_min=1, source_max=1))


def test_overlong_shaping_has_no_floor() -> None:
    cfg = RewardShapingConfig(
        enabled=True, overlong_buffer_length=10, overlong_buffer_penalty=2, max_response_length=100
    )
    lengths = torch.tensor([50, 90, 95, 100, 110])
    assert shape_rewards(torch.ones(5), lengths, torch.zeros(5), cfg).tolist() == pytest.approx([1, 1, 0, -1, -3])


def test_the_stop_properly_coefficient_replaces_the_overlong_penalty() -> None:
    cfg = RewardShapingConfig(
        enabled=True, overlong_buffer_length=10, max_response_length=20, stop_properly_penalty_coef=0.25
    )
    assert shape_rewards(torch.ones(2), torch.tensor([500, 500]), torch.tensor([True, False]), cfg).tolist() == [
        0.25,
        1.0,
    ]


def test_rewards_are_scaled_before_they_are_shaped_and_the_unshaped_ones_are_kept() -> None:
    cfg = GRPOConfig(
        reward_scaling={"enabled": True, "target_min": -1, "target_max": 1},
        reward_shaping={"enabled": True, "overlong_buffer_length": 10, "max_response_length": 20},
    )
    rewards = torch.tensor([1.0, 0.0])
    processed = process_rewards(
        rewards, {"reward/format": torch.tensor([0.5, 1.0])}, torch.tensor([15, 5]), torch.zeros(2), cfg
    )
    assert processed.unshaped_B.tolist() == [1.0, -1.0]
    assert processed.rewards_B.tolist() == [0.5, -1.0]
    assert processed.components["reward/format"].tolist() == [0.0, 1.0]
    assert rewards.tolist() == [1.0, 0.0]


@given(
    batches=st.lists(st.lists(st.sampled_from([0.0, 0.5]), min_size=8, max_size=8), min_size=1, max_size=6),
    prompts=st.integers(1, 4),
)
def test_dynamic_sampling_keeps_the_first_good_rows_and_names_every_other(
    batches: list[list[float]], prompts: int
) -> None:
    cfg = GRPOConfig(num_prompts_per_step=prompts, num_generations_per_prompt=4, use_dynamic_sampling=True)
    kept: list[tuple[int, int]] = []
    for number, std in enumerate(batches, start=1):
        selection = select_rows(torch.tensor(std), kept_before=len(kept), num_gen_batches=number, cfg=cfg)
        assert sorted(selection.keep + selection.drop) == list(range(8))
        assert all(std[row] != 0 for row in selection.keep)
        kept += [(number, row) for row in selection.keep]
        assert selection.surplus == sum(std[row] != 0 for row in selection.drop)
        assert selection.complete == (len(kept) == prompts * 4)
        if selection.complete:
            break
    good = [(number, row) for number, std in enumerate(batches, start=1) for row in range(8) if std[row] != 0]
    assert kept == good[: prompts * 4]


def test_dynamic_sampling_gives_up_after_its_generation_batches() -> None:
    cfg = GRPOConfig(num_prompts_per_step=2, num_generations_per_prompt=2, dynamic_sampling_max_gen_batches=3)
    std = torch.tensor([0.0, 0.0, 0.5, 0.5])
    assert not select_rows(std * 0, kept_before=2, num_gen_batches=3, cfg=cfg).complete
    with pytest.raises(DynamicSamplingError, match=r"only 2 of 4 .* grpo.dynamic_sampling_max_gen_batches=3"):
        select_rows(std * 0, kept_before=2, num_gen_batches=4, cfg=cfg)
    selection = select_rows(std, kept_before=2, num_gen_batches=4, cfg=cfg)
    metrics = sampling_metrics(
        [selection] * 4, torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    )
    assert metrics == {
        "dynamic_sampling_num_gen_batches": 4,
        "dynamic_sampling_num_discarded_valid_samples": 0,
        "reward": 1.0,
        "filtered_reward": 0.5,
    }


def test_truncated_and_flagged_samples_lose_their_loss() -> None:
    def masked(**switches: bool) -> tuple[list[float], dict[str, float]]:
        rows = BatchedDataDict(
            sample_mask=torch.tensor([1.0, 1.0, 1.0, 0.0]),
            truncated=torch.tensor([False, True, False, True]),
            mask_sample=torch.tensor([True, True, False, True]),
        )
        metrics = filter_rows(rows, GRPOConfig(**switches))
        return rows["sample_mask"].tolist(), metrics

    assert masked() == ([1, 1, 1, 0], {})
    assert masked(overlong_filtering=True) == ([1, 0, 1, 0], {})
    assert masked(should_mask_flagged_samples=True) == ([0, 0, 1, 0], {"num_mask_sample_filtered": 2})
    both = masked(overlong_filtering=True, should_mask_flagged_samples=True)
    assert both == ([0, 0, 1, 0], {"num_mask_sample_filtered": 1})


def test_an_invalid_tool_call_costs_a_sample_its_loss_or_its_reward() -> None:
    def treated(strategy: Literal["mask", "zero_reward"] | None) -> tuple[list[float], list[float], dict[str, float]]:
        rows = BatchedDataDict(
            total_reward=torch.tensor([1.0, 1.0, 0.5, 1.0]),
            response_lengths=torch.ones(4),
            truncated=torch.zeros(4, dtype=torch.bool),
            prompt_number=torch.tensor([0, 0, 1, 1]),
            invalid_tool_call=torch.tensor([True, False, False, True]),
            sample_mask=torch.tensor([1.0, 1.0, 1.0, 0.0]),
        )
        scaling = {"enabled": True, "target_min": -1.0}
        cfg = GRPOConfig.read({"invalid_tool_call_strategy": strategy, "reward_scaling": scaling})
        score_rewards(rows, cfg)
        metrics = filter_rows(rows, cfg)
        assert rows["total_reward"].tolist() == [1.0, 1.0, 0.5, 1.0]
        return rows["reward"].tolist(), rows["sample_mask"].tolist(), metrics

    assert treated(None) == ([1, 1, 0, 1], [1, 1, 1, 0], {})
    assert treated("mask") == ([1, 1, 0, 1], [0, 1, 1, 0], {"num_invalid_tool_calls": 2})
    assert treated("zero_reward") == ([-1, 1, 0, -1], [1, 1, 1, 0], {"num_invalid_tool_calls": 2})


def test_sequences_whose_engines_disagree_are_masked() -> None:
    rng = np.random.default_rng(0)
    previous, generation = (torch.tensor(-rng.exponential(1, (3, 6))) for _ in range(2))
    token_mask = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]])
    generation[0] = previous[0]
    previous[0, 5] = torch.nan  # not trained
    columns = BatchedDataDict({"prev_logprobs": previous, "generation_logprobs": generation, "token_mask": token_mask})
    error = sequence_error_stage()(columns).rows["seq_mult_prob_error"]
    for row in (1, 2):
        own = token_mask[row].bool()
        assert error[row].item() == pytest.approx(
            (generation[row] - previous[row])[own].abs().exp().mean().item(), rel=1e-6
        )
    assert error[0].item() == pytest.approx(1.0)

    error = torch.tensor([1.0, 1.5, 3.0, torch.nan, 9.0])
    mask, metrics = mask_by_sequence_error(
        error, torch.tensor([1, 1, 1, 1, 0]), torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0]), threshold=2.0
    )
    assert mask.tolist() == [1, 1, 0, 0, 0]
    assert metrics["num_masked_seqs_by_logprob_error"] == 2
    assert metrics["masked_correct_pct"] == 0.5
    assert metrics["max_seq_mult_prob_error_after_mask"] == 1.5
    assert metrics["mean_seq_mult_prob_error_after_mask"] == pytest.approx(1.25)


def test_without_a_threshold_nothing_is_masked_but_all_is_measured() -> None:
    mask, metrics = mask_by_sequence_error(torch.tensor([5.0, 7.0]), torch.ones(2), torch.zeros(2), threshold=None)
    assert mask.tolist() == [1, 1]
    assert metrics["max_seq_mult_prob_error"] == 7
    assert metrics.keys() == skipped_sequence_error_metrics().keys()
    assert set(skipped_sequence_error_metrics().values()) == {0.0}


def rows(rewards: list[float], groups: list[int]) -> dict[str, Any]:
    valid = torch.ones(len(rewards), dtype=torch.bool)
    return {"reward": torch.tensor(rewards), "prompt_number": torch.tensor(groups), "valid": valid}


def test_equal_rewards_of_valid_samples_are_spoken_of() -> None:
    watch, same = RewardWatch(), rows([1.0, 1.0, 0.0, 1.0], [0, 0, 0, 0])
    same["valid"][2] = False
    assert [watch.observe(step, same, 9.0) is None for step in range(1, 5)] == [True, True, True, False]


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


def test_newest_tokens_are_told_among_those_that_are_trained() -> None:
    columns: BatchedDataDict[Any] = BatchedDataDict(
        token_mask=torch.tensor([[0, 1, 1, 1, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]),
        token_versions=torch.tensor([[9, 3, 4, 4, 9], [7, 2, 2, 9, 9], [5, 6, 7, 8, 9]]),
    )
    kept = newest_tokens_only(columns)
    assert kept.columns["token_mask"].tolist() == [[0, 0, 1, 1, 0], [0, 1, 1, 0, 0], [0] * 5]
    assert kept.rows["masked_tokens"].tolist() == [1, 0, 0]


@given(
    counts=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    rewards=st.lists(st.sampled_from([0.0, 1.0, 3.0]), min_size=4, max_size=4),
    leave_one_out=st.booleans(),
)
def test_a_sample_counts_once_however_many_rows_its_branches_make(
    counts: list[int], rewards: list[float], leave_one_out: bool
) -> None:
    cfg = GRPOConfig.read({"adv_estimator": {"use_leave_one_out_baseline": leave_one_out}})
    samples = BatchedDataDict(
        total_reward=torch.tensor(rewards),
        response_lengths=torch.arange(4).float(),
        truncated=torch.zeros(4, dtype=torch.bool),
        mask_sample=torch.zeros(4, dtype=torch.bool),
        invalid_tool_call=torch.zeros(4, dtype=torch.bool),
        sample_mask=torch.ones(4),
        prompt_number=torch.tensor([0, 0, 1, 1]),
        sample_number=torch.tensor([0, 1, 0, 1]),
    )
    sample_of = [sample for sample, count in enumerate(counts) for _ in range(count)]
    rows = samples.select_indices(sample_of)
    # What a further branch says of itself does not matter to its sample.
    rows["response_lengths"] = torch.where(sample_starts(rows), rows["response_lengths"], 99.0)
    score_rewards(samples, cfg)
    score_rewards(rows, cfg)
    for name in ("reward", "baseline", "std", "row_advantages"):
        assert rows[name].tolist() == samples[name][sample_of].tolist()
    assert valid_rewards(rows).tolist() == rewards
    std = torch.tensor([0.0, 0.5, 0.5, 0.5])[sample_of]
    full = GRPOConfig(num_prompts_per_step=1, num_generations_per_prompt=2, use_dynamic_sampling=True)
    selection = select_rows(std, kept_before=0, num_gen_batches=1, cfg=full, sample_B=torch.tensor(sample_of))
    assert [sample_of[row] for row in selection.keep] == [1] * counts[1] + [2] * counts[2]
    assert selection.complete and selection.surplus == 1
