"""Advantages: each estimator against loops, stages on parts of a batch against the whole, and the switches of known
algorithms.
"""

import math
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.algorithms.grpo.advantages import compute_advantages, row_advantages
from nemo_rl.compat.advantage_estimator import (
    ADVANTAGE_ESTIMATORS,
    GDPOAdvantageEstimator,
    GRPOAdvantageEstimator,
    OPDAdvantageEstimator,
    ReinforcePlusPlusAdvantageEstimator,
)
from nemo_rl.config import AdvEstimatorConfig, ClippedPGLossConfig, GRPOConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.store import StageOutput, TokenStage
from tests.experience.plane_in_process import ApplyInProcess

LOSS = ClippedPGLossConfig()
KL_IN_REWARD = ClippedPGLossConfig(
    use_kl_in_reward=True, reference_policy_kl_penalty=0.1, reference_policy_kl_type="k2"
)


def tokens(rows: int, seed: int = 0, width: int = 7) -> BatchedDataDict[Any]:
    rng = np.random.default_rng(seed)
    mask = np.zeros((rows, width))
    for row in range(rows):
        mask[row, rng.integers(1, 4) : rng.integers(4, width + 1)] = 1
    logprobs = {
        name: torch.tensor(-rng.exponential(1, (rows, width)))
        for name in ("prev_logprobs", "reference_policy_logprobs", "teacher_logprobs")
    }
    return BatchedDataDict(
        {"token_mask": torch.tensor(mask), "sample_mask": torch.ones(rows, dtype=torch.float64), **logprobs}
    )


def prompts(groups: list[int]) -> torch.Tensor:
    return torch.tensor([[group, group + 1] for group in groups])


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_grpo_is_reward_minus_baseline_over_deviation(leave_one_out: bool, normalize: bool) -> None:
    groups, rewards = [0, 1, 0, 1, 0, 1], [1.0, 0.0, 0.2, 0.0, 0.7, 0.0]
    cfg = AdvEstimatorConfig(normalize_rewards=normalize, use_leave_one_out_baseline=leave_one_out)
    advantages = GRPOAdvantageEstimator(cfg, LOSS).compute_advantage(
        prompts(groups), torch.tensor(rewards, dtype=torch.float64), tokens(6)["token_mask"]
    )
    for i in range(6):
        others = [rewards[j] for j in range(6) if groups[j] == groups[i] and not (leave_one_out and j == i)]
        expected, std = rewards[i] - np.mean(others), np.std(others, ddof=1)
        if normalize and std > 1e-12:
            expected /= std + 1e-6
        assert advantages[i].tolist() == pytest.approx([expected] * 7, rel=1e-6, abs=1e-9)


def test_gdpo_normalises_each_component_then_the_batch() -> None:
    groups = [0, 0, 0, 1, 1, 1]
    components = {"reward/b": [1.0, 0.0, 0.5, 0.0, 2.0, 1.0], "reward/a": [0.0, 0.0, 1.0, 3.0, 1.0, 1.0]}
    cfg = AdvEstimatorConfig(name="gdpo", use_leave_one_out_baseline=False, reward_weights=[2.0, 0.5])  # of a, then b
    batch = {name: torch.tensor(column, dtype=torch.float64) for name, column in components.items()}
    mask = tokens(6)["token_mask"]
    advantages = GDPOAdvantageEstimator(cfg, LOSS).compute_advantage(
        prompts(groups), torch.zeros(6), mask, repeated_batch=batch
    )
    total = np.zeros(6)
    for name, weight in (("reward/a", 2.0), ("reward/b", 0.5)):
        for group in (0, 1):
            own = [i for i in range(6) if groups[i] == group]
            values = np.array([components[name][i] for i in own])
            total[own] += weight * (values - values.mean()) / (values.std(ddof=1) + 1e-6)
    expected = (total - total.mean()) / total.std(ddof=1)
    assert advantages[:, 0].tolist() == pytest.approx(expected.tolist(), rel=1e-6)


@pytest.mark.parametrize(
    ("components", "weights", "message"),
    [
        (["reward/a"], None, "at least two"),
        (["reward/a", "reward/b"], [1.0], "1 weights"),
        (["reward/a", "reward/b"], {"a": 1.0, "c": 1.0}, "reward/c"),
    ],
)
def test_gdpo_refuses_components_it_cannot_weigh(components: list[str], weights: Any, message: str) -> None:
    cfg = AdvEstimatorConfig(name="gdpo", reward_weights=weights)
    with pytest.raises(ValueError, match=message):
        row_advantages(
            cfg,
            torch.zeros(2),
            {name: torch.zeros(2) for name in components},
            torch.zeros(2, dtype=torch.long),
            torch.ones(2),
        )


@pytest.mark.parametrize("loss_cfg", [LOSS, KL_IN_REWARD])
@pytest.mark.parametrize("minus_baseline", [True, False])
def test_reinforce_plus_plus_whitens_over_all_trained_tokens(
    loss_cfg: ClippedPGLossConfig, minus_baseline: bool
) -> None:
    groups, rewards = [0, 0, 1, 1], [1.0, 0.0, 0.3, 0.9]
    data = tokens(4, seed=3)
    mask, o, f = (data[name].numpy() for name in ("token_mask", "prev_logprobs", "reference_policy_logprobs"))
    cfg = AdvEstimatorConfig(name="reinforce_plus_plus", minus_baseline=minus_baseline)
    advantages = ReinforcePlusPlusAdvantageEstimator(cfg, loss_cfg).compute_advantage(
        prompts(groups),
        torch.tensor(rewards, dtype=torch.float64),
        data["token_mask"],
        logprobs_policy=data["prev_logprobs"],
        logprobs_reference=data["reference_policy_logprobs"],
    )
    raw = np.zeros_like(mask)
    for i in range(4):
        mean = np.mean([rewards[j] for j in range(4) if groups[j] == groups[i]]) if minus_baseline else 0.0
        for t in range(mask.shape[1]):
            kl = min((f[i, t] - o[i, t]) ** 2 / 2, 10.0) if loss_cfg.use_kl_in_reward else 0.0
            raw[i, t] = rewards[i] - mean - 0.1 * kl
    trained = raw[mask > 0]
    white = (raw - trained.mean()) / math.sqrt(max(trained.var(), 1e-8))
    torch.testing.assert_close(advantages, torch.tensor(np.where(mask > 0, white, 0.0)), rtol=1e-6, atol=1e-9)


def test_kl_in_reward_names_the_logprobs_it_lacks() -> None:
    cfg = AdvEstimatorConfig(name="reinforce_plus_plus")
    with pytest.raises(KeyError, match="reference_policy_logprobs"):
        ReinforcePlusPlusAdvantageEstimator(cfg, KL_IN_REWARD).compute_advantage(
            prompts([0, 0]), torch.ones(2), tokens(2)["token_mask"]
        )


def test_distillation_is_teacher_minus_student_on_trained_tokens() -> None:
    data = tokens(3)
    inputs = {name: data[name] for name in ("teacher_logprobs", "prev_logprobs")}
    advantages = OPDAdvantageEstimator(AdvEstimatorConfig(name="opd"), LOSS).compute_advantage(
        prompts([0, 0, 1]), torch.zeros(3), data["token_mask"], **inputs
    )
    torch.testing.assert_close(advantages, (data["teacher_logprobs"] - data["prev_logprobs"]) * data["token_mask"])


class ApplyOnShards:
    """Runs a stage on parts of a batch, each pickled as if sent to another process, and joins what comes back."""

    def __init__(self, parts: list[BatchedDataDict[Any]]) -> None:
        self.parts = parts

    def __call__(self, stage: TokenStage) -> Mapping[str, torch.Tensor]:
        outputs: list[StageOutput] = []
        for part in self.parts:
            there = pickle.loads(pickle.dumps(stage))
            output = there(BatchedDataDict({name: part[name] for name in stage.reads}))
            assert set(output.columns) == set(stage.writes)
            part.update(output.columns)
            outputs.append(output)
        return {name: torch.cat([output.rows[name] for output in outputs]) for name in outputs[0].rows}


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    cut=st.integers(1, 7),
    name=st.sampled_from(sorted(ADVANTAGE_ESTIMATORS)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_stages_on_parts_give_the_bits_of_the_whole(seed: int, cut: int, name: str, dtype: torch.dtype) -> None:
    cfg = GRPOConfig(adv_estimator={"name": name}, advantage_clip_low=-1.0, advantage_clip_high=1.5)
    batch = tokens(8, seed)
    for key, column in batch.items():
        batch[key] = column.to(dtype)
    batch["row_advantages"] = torch.randn(8, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    parts = [BatchedDataDict(batch.slice(0, cut).data), BatchedDataDict(batch.slice(cut, 8).data)]
    apart = compute_advantages(ApplyOnShards(parts), cfg, KL_IN_REWARD)
    together = compute_advantages(ApplyInProcess(batch), cfg, KL_IN_REWARD)
    assert apart == together
    assert torch.equal(torch.cat([part["advantages"] for part in parts]), batch["advantages"])
    trained = batch["advantages"][batch["token_mask"] > 0]
    if name == "opd":
        gap = (batch["teacher_logprobs"] - batch["prev_logprobs"])[batch["token_mask"] > 0].double().mean().item()
        assert together["on_policy_distillation/teacher_student_logprob_gap_mean"] == pytest.approx(gap)
    assert together["advantages/min"] == pytest.approx(trained.min().item())
    assert together["advantages/max"] == pytest.approx(trained.max().item())
    assert together["advantages/mean"] == pytest.approx(trained.double().mean().item())
    assert together["advantages/sum"] == pytest.approx(trained.double().sum().item(), abs=1e-9)
    assert -1.0 <= together["advantages/min"] <= together["advantages/max"] <= 1.5


def test_metrics_of_advantages_leave_out_what_is_not_trained() -> None:
    batch = tokens(3)
    batch["row_advantages"] = torch.tensor([-5.0, 0.25, 7.0], dtype=torch.float64)
    batch["sample_mask"] = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    metrics = compute_advantages(ApplyInProcess(batch), GRPOConfig(), LOSS)
    assert {metrics[f"advantages/{name}"] for name in ("min", "max", "mean")} == {0.25}


def test_a_batch_without_trained_tokens_has_zero_advantage_metrics() -> None:
    batch = tokens(2)
    batch["sample_mask"].zero_()
    batch["row_advantages"] = torch.ones(2)
    for name in ("grpo", "reinforce_plus_plus"):
        metrics = compute_advantages(ApplyInProcess(batch), GRPOConfig(adv_estimator={"name": name}), LOSS)
        assert set(metrics.values()) == {0.0}


def test_a_stage_names_the_columns_it_lacks() -> None:
    with pytest.raises(KeyError, match="broadcast_advantages reads"):
        compute_advantages(ApplyInProcess(tokens(2)), GRPOConfig(), LOSS)


def test_the_baseline_of_an_empty_batch_is_empty() -> None:
    from nemo_rl.algorithms.grpo.advantages import calculate_baseline_and_std_per_prompt

    nothing = torch.zeros(0)
    baseline, std = calculate_baseline_and_std_per_prompt(torch.zeros(0, 4, dtype=torch.long), nothing, nothing)
    assert baseline.shape == std.shape == (0,)
