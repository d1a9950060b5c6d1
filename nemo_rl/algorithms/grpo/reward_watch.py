"""Says when steps go by that teach nothing: rewards that are equal within every group, or no trained token at all.

Sees finished steps; changes nothing. Invariant: a spell of such steps is spoken of when it is a few steps long, and
again each time it has doubled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_SPELL = 4


class RewardWatch:
    """Watches the steps of a run."""

    def __init__(self) -> None:
        self._equal = 0
        self._say_at = _SPELL

    def observe(self, step: int, rows: Mapping[str, Any], trained_tokens: float) -> str | None:
        """What to tell the person about a finished step, if anything.

        Args:
            step: Its number, from 1.
            rows: `reward`, and `prompt_number`, which is equal for the samples of a group; one value per sample.
            trained_tokens: Tokens of the step that the loss counted.
        """
        if trained_tokens == 0:
            return f"step {step} trained no token, so the weights did not change: every sample was masked or cut off"
        rewards = rows["reward"].double()
        if not _equal_within_groups(rewards, rows["prompt_number"]):
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
