"""The rollout metrics of a batch, under the names NeMo-RL's dashboards have.

Pure arithmetic over finished trajectories. Invariant: every metric is defined for every non-empty batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from nemo_rl.experience.rollouts import Trajectory


def rollout_metrics(trajectories: Sequence[Trajectory], max_turns: int) -> dict[str, object]:
    """Turns, terminations, token counts and rewards; `histogram/*` are lists with one entry per sample.

    Args:
        trajectories: Finished samples, at least one.
        max_turns: The limit on turns.
    """
    turns = np.array([t.turns for t in trajectories], dtype=np.float64)
    generated = np.array([sum(t.generated) for t in trajectories], dtype=np.float64)
    per_turn = np.array([tokens for t in trajectories for tokens in t.generated] or [0], dtype=np.float64)
    observed = np.array([t.observed for t in trajectories], dtype=np.float64)
    total = np.array([sum(len(m["token_ids"]) for m in t.message_log) for t in trajectories], dtype=np.float64)
    rewards = np.array([t.reward for t in trajectories], dtype=np.float64)
    stopped_by_limit = np.array([not t.terminated and not t.truncated and t.turns >= max_turns for t in trajectories])
    return {
        "total_turns": float(turns.sum()),
        "avg_turns_per_sample": float(turns.mean()),
        "max_turns_per_sample": float(turns.max()),
        "turns_per_sample/p95": float(np.percentile(turns, 95)),
        "turns_per_sample/p99": float(np.percentile(turns, 99)),
        "natural_termination_rate": float(np.mean([t.terminated for t in trajectories])),
        "truncation_rate": float(np.mean([t.truncated for t in trajectories])),
        "max_turns_reached_rate": float(stopped_by_limit.mean()),
        "mean_total_tokens_per_sample": float(total.mean()),
        "mean_gen_tokens_per_sample": float(generated.mean()),
        "mean_env_tokens_per_sample": float(observed.mean()),
        "max_gen_tokens_per_sample": float(generated.max()),
        "max_gen_tokens_per_turn/max": float(per_turn.max()),
        "max_gen_tokens_per_turn/mean": float(per_turn.mean()),
        "max_gen_tokens_per_turn/p95": float(np.percentile(per_turn, 95)),
        "mean_total_reward": float(rewards.mean()),
        "max_total_reward": float(rewards.max()),
        "min_total_reward": float(rewards.min()),
        "histogram/gen_tokens_length": generated.tolist(),
        "histogram/input_tokens_length": (total - generated - observed).tolist(),
        "histogram/total_tokens_length": total.tolist(),
    }


def merged_rollout_metrics(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The metrics of several equally large groups as those of one batch: totals add up, extremes stay extremes,
    histograms join, the rest is averaged.

    Args:
        parts: What `rollout_metrics` gave for each group.
    """
    merged: dict[str, object] = {}
    for name in parts[0] if parts else ():
        values = [part[name] for part in parts]
        if name.startswith("histogram/"):
            merged[name] = [value for part in values for value in part]
        elif name.startswith("total_"):
            merged[name] = float(sum(values))
        elif name.startswith("max_") and not name.endswith(("/mean", "/p95", "_rate")):
            merged[name] = max(values)
        elif name.startswith("min_"):
            merged[name] = min(values)
        else:
            merged[name] = float(np.mean(values))
    return merged
