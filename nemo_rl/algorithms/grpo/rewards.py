"""Reward scaling and length shaping: row arithmetic between the environment's rewards and the baselines.

Knows nothing of groups or tokens. Invariant: inputs are never changed in place, so the raw rewards can still be logged.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nemo_rl.config import GRPOConfig, RewardScalingConfig, RewardShapingConfig

logger = logging.getLogger(__name__)

COMPONENT_PREFIX = "reward/"


@dataclass(frozen=True)
class ProcessedRewards:
    """Rewards of the samples [B] after each stage.

    Attributes:
        rewards_B: what advantages are made of.
        unshaped_B: scaled but not shaped; dynamic sampling judges groups by these.
        components: scaled `reward/<name>` columns.
    """

    rewards_B: torch.Tensor
    unshaped_B: torch.Tensor
    components: dict[str, torch.Tensor]


def process_rewards(
    rewards_B: torch.Tensor,
    components: Mapping[str, torch.Tensor],
    response_lengths_B: torch.Tensor,
    truncated_B: torch.Tensor,
    cfg: GRPOConfig,
) -> ProcessedRewards:
    """Scaling, then shaping, as far as switched on.

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
    """Clamp to the source range, then map linearly onto the target range.

    Raises:
        ValueError: the source range is empty.
    """
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
    """Take reward from responses that come near the length limit (DAPO, https://arxiv.org/abs/2503.14476, eq. 13).

    `r + min(-(length - (max_response_length - buffer)) / buffer * penalty, 0)`: no floor, so a response beyond
    `max_response_length` loses more than the penalty, as in NeMo-RL. With `stop_properly_penalty_coef`, truncated
    rewards are multiplied by it instead and the overlong keys are ignored.

    Args:
        rewards_B: rewards.
        response_lengths_B: tokens of each sample's first assistant message.
        truncated_B: whether the response was cut off.
        cfg: the shaping section.

    Raises:
        ValueError: the buffer is empty, or longer than `max_response_length`.
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
