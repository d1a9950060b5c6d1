"""Losses and rewards in the shapes in which NeMo-RL's documentation calls them; the work is done by those of ours.

Invariant: what is called in our own shape goes through unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nemo_rl import loss
from nemo_rl.algorithms.grpo import rewards
from nemo_rl.config import RewardScalingConfig, RewardShapingConfig


class _LogprobsFirst:
    """Calls of a loss with the log-probabilities as the first of four arguments by position."""

    def __call__(self, *given: object, **named: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss and its metrics, of `(data, seqs, toks, next_token_logprobs=...)` or `(next_token_logprobs, data,
        seqs, toks)`.
        """
        if given and isinstance(given[0], torch.Tensor):
            named, given = {"next_token_logprobs": given[0], **named}, given[1:]
        whole: Any = super()
        return whole.__call__(*given, **named)


class PositionalClippedPGLossFn(_LogprobsFirst, loss.ClippedPGLossFn):
    """See `nemo_rl.loss.ClippedPGLossFn`."""


class PositionalNLLLossFn(_LogprobsFirst, loss.NLLLossFn):
    """See `nemo_rl.loss.NLLLossFn`."""


def scale_rewards(batch: Any, cfg: RewardScalingConfig | Mapping[str, object]) -> object:
    """Scales `total_reward` and every `reward/<name>` of a batch, where `enabled`, and returns the batch; rewards [B]
    alone are scaled as they are.
    """
    cfg = RewardScalingConfig.read(cfg)
    if isinstance(batch, torch.Tensor):
        return rewards.scale_rewards(batch, cfg)
    if cfg.enabled:
        names = [name for name in batch if name == "total_reward" or name.startswith(rewards.COMPONENT_PREFIX)]
        for name in names:
            batch[name] = rewards.scale_rewards(batch[name], cfg)
    return batch


def apply_reward_shaping(batch: Any, cfg: Any, *ours: Any) -> object:
    """Shapes `total_reward` of a batch with `message_log` and perhaps `truncated`, where `enabled`, keeps it as it was
    under `unshaped_total_reward`, and returns the batch. Called as `shape_rewards(rewards, lengths, truncated, cfg)` it
    is that function.
    """
    if isinstance(batch, torch.Tensor):
        return rewards.shape_rewards(batch, cfg, *ours)
    cfg = RewardShapingConfig.read(cfg)
    if cfg.enabled:
        total_B = batch["total_reward"]
        lengths_B = torch.tensor([_first_response(log) for log in batch["message_log"]])
        truncated_B = torch.as_tensor(batch["truncated"] if "truncated" in batch else torch.zeros(len(total_B)))
        batch["unshaped_total_reward"] = total_B
        batch["total_reward"] = rewards.shape_rewards(total_B, lengths_B, truncated_B, cfg)
    return batch


def _first_response(log: Any) -> int:
    return next((len(message["token_ids"]) for message in log if message["role"] == "assistant"), 0)
