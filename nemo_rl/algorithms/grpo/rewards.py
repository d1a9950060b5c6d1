"""Reward scaling and length shaping, and a warning about steps that teach nothing (equal rewards in every group, or no
trained token).

Invariants: inputs are never changed in place, so the raw rewards can still be logged; a series of useless steps is
reported once it is a few steps long, and again each time it has doubled.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nemo_rl.config import GRPOConfig, RewardScalingConfig, RewardShapingConfig
from nemo_rl.experience.rollouts import RolloutWatch

logger = logging.getLogger(__name__)

COMPONENT_PREFIX = "reward/"
_SPELL = 4


@dataclass(frozen=True)
class ProcessedRewards:
    """Rewards of the samples [B] after each stage."""

    rewards_B: torch.Tensor
    unshaped_B: torch.Tensor  # scaled but not shaped; input of dynamic sampling
    components: dict[str, torch.Tensor]  # scaled `reward/<name>` columns


def process_rewards(
    rewards_B: torch.Tensor,
    components: Mapping[str, torch.Tensor],
    response_lengths_B: torch.Tensor,
    truncated_B: torch.Tensor,
    cfg: GRPOConfig,
) -> ProcessedRewards:
    """Applies scaling, then shaping, where configured.

    Args:
        rewards_B: total reward of each sample.
        components: `reward/<name>` columns, if the environment gives several.
        response_lengths_B: tokens of each sample's first assistant message.
        truncated_B: whether the response was cut off.
        cfg: `reward_scaling` and `reward_shaping` are read.
    """
    scaled = {
        "total": rewards_B,
        **{name: column for name, column in components.items() if name.startswith(COMPONENT_PREFIX)},
    }
    if cfg.reward_scaling.enabled:
        scaled = {name: scale_rewards(column, cfg.reward_scaling) for name, column in scaled.items()}
    unshaped_B = scaled.pop("total")
    shaped_B = (
        shape_rewards(unshaped_B, response_lengths_B, truncated_B, cfg.reward_shaping)
        if cfg.reward_shaping.enabled
        else unshaped_B
    )
    return ProcessedRewards(shaped_B, unshaped_B, scaled)


def scale_rewards(rewards_B: torch.Tensor, cfg: RewardScalingConfig) -> torch.Tensor:
    """Clamps to the source range, then maps linearly onto the target range. Raises ValueError: empty source range."""
    source, target = cfg.source_max - cfg.source_min, cfg.target_max - cfg.target_min
    if source <= 0:
        raise ValueError(f"grpo.reward_scaling.source_max={cfg.source_max} must be above source_min={cfg.source_min}")
    outside = int(((rewards_B < cfg.source_min) | (rewards_B > cfg.source_max)).sum())
    if outside:
        logger.warning(
            "rewards_clamped=%d of=%d source_min=%g source_max=%g",
            outside,
            len(rewards_B),
            cfg.source_min,
            cfg.source_max,
        )
    return cfg.target_min + (rewards_B.clamp(cfg.source_min, cfg.source_max) - cfg.source_min) / source * target


def shape_rewards(
    rewards_B: torch.Tensor, response_lengths_B: torch.Tensor, truncated_B: torch.Tensor, cfg: RewardShapingConfig
) -> torch.Tensor:
    """Penalises responses near the length limit (DAPO, https://arxiv.org/abs/2503.14476, eq. 13).

    `r + min(-(length - (max_response_length - buffer)) / buffer * penalty, 0)`: no floor, so a response beyond
    `max_response_length` loses more than the penalty, as in NeMo-RL. With `stop_properly_penalty_coef`, truncated
    rewards are multiplied by it instead and the overlong keys are ignored.

    Args:
        response_lengths_B: tokens of each sample's first assistant message.
        truncated_B: whether the response was cut off.

    Raises ValueError: the buffer is empty, or longer than `max_response_length`.
    """
    if cfg.stop_properly_penalty_coef is not None:
        return torch.where(truncated_B.bool(), rewards_B * cfg.stop_properly_penalty_coef, rewards_B)
    buffer = cfg.overlong_buffer_length
    if not 0 < buffer <= cfg.max_response_length:
        raise ValueError(
            f"grpo.reward_shaping.overlong_buffer_length={buffer} must lie in 1 .. "
            f"max_response_length={cfg.max_response_length}"
        )
    excess_B = response_lengths_B.to(rewards_B.dtype) - (cfg.max_response_length - buffer)
    return rewards_B + (-excess_B / buffer * cfg.overlong_buffer_penalty).clamp(max=0)


class RewardWatch:
    """Watches the rewards of a run; `rollouts` watches how its samples end."""

    def __init__(self) -> None:
        self.rollouts = RolloutWatch()
        self._equal = 0
        self._say_at = _SPELL

    def observe(self, step: int, rows: Mapping[str, torch.Tensor], trained_tokens: float) -> str | None:
        """A warning about the finished step, or None.

        Args:
            step: Its number, from 1.
            rows: `reward`, `prompt_number` (equal for the samples of a group) and `valid` (whether the reward counts),
                one value per sample.
            trained_tokens: Number of tokens in the loss.
        """
        if trained_tokens == 0:
            return f"step {step} trained no token, so the weights did not change: every sample was masked or cut off"
        rewards = rows["reward"][rows["valid"]].double()
        if not _equal_within_groups(rewards, rows["prompt_number"][rows["valid"]]):
            self._equal, self._say_at = 0, _SPELL
            return None
        self._equal += 1
        if self._equal < self._say_at:
            return None
        self._say_at *= 2
        low, high = float(rewards.min()), float(rewards.max())
        values = f"{low:g}" if low == high else f"between {low:g} and {high:g}"
        return (
            f"step {step}: for {self._equal} steps all samples of a prompt have had the same reward (now {values}), so "
            "there is nothing to learn from; are the prompts too hard or too easy, does the environment judge answers "
            f"(samples/train_data_step{step}.jsonl), is grpo.num_generations_per_prompt large enough?"
        )


def _equal_within_groups(rewards_B: torch.Tensor, groups_B: torch.Tensor) -> bool:
    _, index_B = groups_B.unique(return_inverse=True)
    first_G = torch.full((int(index_B.max()) + 1,), torch.nan, dtype=rewards_B.dtype)
    first_G[index_B] = rewards_B
    return bool(torch.equal(first_G[index_B], rewards_B))
