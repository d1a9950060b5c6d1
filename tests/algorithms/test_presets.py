"""Published algorithms are switches: each preset, from rewards to the gradient of the loss."""

from typing import Any

import pytest
import torch

from nemo_rl.algorithms.grpo.advantages import compute_advantages, process_rewards, row_advantages
from nemo_rl.config import ClippedPGLossConfig, GRPOConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.loss import ClippedPGLossFn
from nemo_rl.loss.interfaces import count_valid
from tests.experience.plane_in_process import ApplyInProcess

ICEPOP = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "icepop",
    "truncated_importance_sampling_ratio": 5.0,
    "truncated_importance_sampling_ratio_min": 0.5,
}
PRESETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({}, {}),
    "dapo": (
        {
            "use_dynamic_sampling": True,
            "adv_estimator": {"use_leave_one_out_baseline": False},
            "reward_scaling": {"enabled": True, "target_min": -1, "target_max": 1},
            "reward_shaping": {"enabled": True, "overlong_buffer_length": 2, "max_response_length": 6},
        },
        {"ratio_clip_max": 0.28, "ratio_clip_c": 10.0, "reference_policy_kl_penalty": 0.0},
    ),
    "gspo": ({}, {"sequence_level_importance_ratios": True, "token_level_loss": False}),
    "cispo": ({}, {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 5.0}),
    "rloo": (
        {"adv_estimator": {"normalize_rewards": False}},
        {"disable_ppo_ratio": True, "reference_policy_kl_penalty": 0.0},
    ),
    "dr_grpo": ({"adv_estimator": {"normalize_rewards": False}}, {}),
    "reinforce_plus_plus": ({"adv_estimator": {"name": "reinforce_plus_plus"}}, {"use_kl_in_reward": True}),
    "prorl_v2": (
        {
            "adv_estimator": {"name": "reinforce_plus_plus"},
            "reward_shaping": {"enabled": True, "stop_properly_penalty_coef": 0.0},
        },
        {"ratio_clip_max": 0.27, "reference_policy_kl_type": "k2", "reference_policy_kl_penalty": 1e-4, **ICEPOP},
    ),
    "gdpo": ({"adv_estimator": {"name": "gdpo", "use_leave_one_out_baseline": False}}, {}),
    "strict_on_policy": ({}, {"force_on_policy_ratio": True}),
    "opd": (
        {"adv_estimator": {"name": "opd"}},
        {"disable_ppo_ratio": True, "reference_policy_kl_penalty": 0.0, **ICEPOP},
    ),
    "async_grpo": ({}, {"use_importance_sampling_correction": True}),
}
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0])
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])


def run(preset: str) -> tuple[BatchedDataDict[Any], torch.Tensor, dict[str, torch.Tensor]]:
    """Advantages of the batch, gradient with respect to the log-probabilities [6, 7], metrics.

    Old and current policy are the same, the engines differ a little.
    """
    switches, loss_switches = PRESETS[preset]
    cfg, loss_fn = GRPOConfig(**switches), ClippedPGLossFn(ClippedPGLossConfig(**loss_switches))
    generator = torch.Generator().manual_seed(0)
    current = -torch.rand(6, 7, generator=generator, dtype=torch.float64) - 0.1
    padded = torch.nn.functional.pad(current, (1, 0))
    components = {"reward/a": REWARDS.double(), "reward/b": torch.arange(6.0).double()}
    lengths = torch.tensor([3, 5, 6, 3, 3, 5])
    processed = process_rewards(REWARDS.double(), components, lengths, torch.tensor([False, False, True] * 2), cfg)
    token_mask = ((torch.arange(8) >= 2) & (torch.arange(8) < 2 + lengths[:, None])).double()
    batch: BatchedDataDict[Any] = BatchedDataDict(
        {
            "token_mask": token_mask,
            "sample_mask": torch.ones(6, dtype=torch.float64),
            "prev_logprobs": padded,
            "generation_logprobs": padded + 0.01,
            "reference_policy_logprobs": padded - 0.2,
            "teacher_logprobs": padded + 0.3,
            "row_advantages": row_advantages(
                cfg.adv_estimator, processed.rewards_B, processed.components, GROUPS, torch.ones(6)
            ),
        }
    )
    compute_advantages(ApplyInProcess(batch), cfg, loss_fn.cfg)
    leaf = current.requires_grad_()
    loss, metrics = loss_fn(batch, *count_valid(batch), next_token_logprobs=leaf)
    loss.backward()
    return batch, leaf.grad, metrics


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_pushes_trained_tokens_along_their_advantage(preset: str) -> None:
    batch, gradient, metrics = run(preset)
    trained = batch["token_mask"][:, 1:] > 0
    assert torch.isfinite(gradient).all()
    assert (gradient[~trained] == 0).all()
    assert metrics["probs_ratio"].item() == pytest.approx(1.0)
    advantages = batch["advantages"][:, 1:]
    clear = trained & (advantages.abs() > 0.05)  # beyond what the KL term pulls
    assert clear.any()
    assert (torch.sign(gradient[clear]) == -torch.sign(advantages[clear])).all()


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    batch, _, _ = run("rloo")
    assert batch["advantages"][:, 0].tolist() == pytest.approx([1.0, -0.5, -0.5, 0, 0, 0])


def test_dapo_takes_reward_near_the_length_limit() -> None:
    batch, _, _ = run("dapo")
    # Rewards 1, -1.5, -2, then 1, 1, 0.5: the long answers of an all-correct group end below their shorter siblings.
    assert batch["advantages"][5, 0] < 0 < batch["advantages"][3, 0]
    assert batch["advantages"][2, 0] < batch["advantages"][1, 0] < 0 < batch["advantages"][0, 0]


def test_prorl_gives_nothing_for_truncated_answers() -> None:
    batch, _, _ = run("prorl_v2")
    assert batch["row_advantages"].tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 1 / 3, 1 / 3, -2 / 3])


def test_distillation_follows_the_teacher() -> None:
    batch, _, _ = run("opd")
    torch.testing.assert_close(batch["advantages"], 0.3 * batch["token_mask"])
