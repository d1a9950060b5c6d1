"""Metrics of a training step: aggregation, batch statistics and rates.

Metric names are those of NeMo-RL's dashboards. Invariants: aggregation does not depend on the cut into microbatches,
since losses normalise by global counts; the logged step is the number of completed steps, from 1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, SupportsFloat

import torch

from nemo_rl.algorithms.grpo.stages import Experience, valid_rewards
from nemo_rl.config import GRPOConfig
from nemo_rl.loss.interfaces import is_extremum
from nemo_rl.models.policy.interfaces import TrainResult

if TYPE_CHECKING:
    from nemo_rl.utils.log_backends import Metrics

logger = logging.getLogger(__name__)

_AVERAGED = frozenset(
    {"lr", "wd", "reward", "filtered_reward", "global_valid_seqs", "global_valid_toks", "mean_prompt_length"}
    | {"router_replay_share", "router_replay_changed", "moe/load_balancing_loss"}
)


def aggregate_microbatch_metrics(metrics: Mapping[str, Sequence[SupportsFloat]]) -> dict[str, float]:
    """Aggregates each metric over microbatches and ranks.

    Summed, except: values that every microbatch repeats (learning rate, weight decay, rewards, global counts, prompt
    length) are averaged, and `*_min` and `*_max` take the extremum of the finite ones, -1 when there is none.

    Args:
        metrics: values per name, numbers or scalar tensors.
    """
    return {
        name: _aggregate(name, [float(value) for value in values]) for name, values in metrics.items() if len(values)
    }


def _aggregate(name: str, values: Sequence[float]) -> float:
    if is_extremum(name):
        finite = [value for value in values if math.isfinite(value)]
        return (min(finite) if "_min" in name else max(finite)) if finite else -1.0
    total = math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
    return total / len(values) if name in _AVERAGED else total


def batch_metrics(
    rewards_B: torch.Tensor, baseline_B: torch.Tensor, prompt_lengths_B: torch.Tensor, total_lengths_B: torch.Tensor
) -> dict[str, float]:
    """Statistics of the trained batch.

    Args:
        rewards_B: rewards of valid samples, as used for advantages.
        baseline_B: baseline of each of these; 0 (or 1) means that the rest of its group failed (or succeeded).
        total_lengths_B: tokens of each prompt with its response.

    Returns `reward`, `baseline_reward/{pct_0,pct_1,pct_mixed}` (fractions), `mean_prompt_length`, `total_num_tokens`.
    """
    zero, one = ((baseline_B == value).double().mean().item() for value in (0, 1))
    return {
        "reward": rewards_B.double().mean().item(),
        "baseline_reward/pct_0": zero,
        "baseline_reward/pct_1": one,
        "baseline_reward/pct_mixed": max(1.0 - zero - one, 0.0),
        "mean_prompt_length": prompt_lengths_B.double().mean().item(),
        "total_num_tokens": total_lengths_B.double().sum().item(),
    }


def throughput_metrics(
    samples: int,
    tokens: float,
    seconds: Mapping[str, float],
    *,
    num_devices: int,
    train_devices: int,
    generation_devices: int,
    generated_tokens: float,
) -> dict[str, float]:
    """The `performance/` metrics that follow from the times of a step.

    Args:
        tokens: tokens trained on, prompts included.
        seconds: durations by timer name (`total_step_time`, `policy_training`, `policy_and_reference_logprobs`,
            `generation`); absent or 0 gives no metric.
        generation_devices: accelerators that generate; none while rollouts are replayed.
    """
    metrics: dict[str, float] = {}

    def rate(name: str, amount: float, timer: str, devices: int) -> None:
        if seconds.get(timer, 0.0) > 0 and devices:
            metrics[name] = amount / seconds[timer]
            metrics[f"{name}_per_gpu"] = metrics[name] / devices

    rate("samples_per_sec", samples, "total_step_time", num_devices)
    rate("tokens_per_sec", tokens, "total_step_time", num_devices)
    rate("policy_training_tokens_per_sec", tokens, "policy_training", train_devices)
    rate("policy_and_reference_logprobs_tokens_per_sec", tokens, "policy_and_reference_logprobs", train_devices)
    rate("generation_tokens_per_sec", generated_tokens, "generation", generation_devices)
    training = seconds.get("policy_training", 0.0) + seconds.get("policy_and_reference_logprobs", 0.0)
    if training > 0:
        metrics["training_worker_group_tokens_per_sec"] = tokens / training
        metrics["training_worker_group_tokens_per_sec_per_gpu"] = tokens / training / train_devices
    return metrics


def validation_metrics(
    rewards_B: torch.Tensor,
    response_lengths_B: torch.Tensor,
    tasks: Sequence[str] = (),
    *,
    generations_per_prompt: int = 1,
    best_at_k: bool = False,
) -> dict[str, float]:
    """`accuracy`, `accuracy/<task>` where there are several tasks, `avg_length`, and with several generations per
    prompt `pass_k`: the fraction of prompts with one that has the full reward of 1.

    An accuracy is the mean reward; with `best_at_k` the mean over prompts of the best reward among their generations,
    beside which `mean_accuracy` is the mean reward.

    Args:
        rewards_B: rewards; the generations of a prompt are next to each other.
        tasks: the task of each sample.
        best_at_k: whether the best of k counts.
    """
    judged_B = rewards_B.view(-1, generations_per_prompt).amax(1) if best_at_k else rewards_B
    metrics = {"accuracy": judged_B.double().mean().item(), "avg_length": response_lengths_B.double().mean().item()}
    if best_at_k:
        metrics["mean_accuracy"] = rewards_B.double().mean().item()
    metrics |= accuracy_by_task(judged_B, tasks[::generations_per_prompt] if best_at_k else tasks)
    if generations_per_prompt > 1:
        solved = (rewards_B.view(-1, generations_per_prompt) >= 1).any(dim=1)
        metrics["pass_k"] = solved.double().mean().item()
    return metrics


def accuracy_by_task(rewards_B: torch.Tensor, tasks: Sequence[str]) -> dict[str, float]:
    """`accuracy/<task>`, the mean reward of each task's samples; empty for a single task. `tasks`: the task of each
    sample.
    """
    names = sorted(set(tasks))
    if len(names) < 2:
        return {}
    of_task = {name: torch.tensor([task == name for task in tasks]) for name in names}
    return {f"accuracy/{name}": rewards_B[rows].double().mean().item() for name, rows in of_task.items()}


def step_metrics(cfg: GRPOConfig, step: int, experience: Experience, result: TrainResult) -> Metrics:
    """The `train/` metrics of step `step` (from 1)."""
    rows = experience.rows
    metrics: Metrics = dict(experience.metrics)
    baseline_B = rows["baseline"][rows["valid"]] if bool(rows["valid"].any()) else rows["baseline"]
    in_batch = batch_metrics(valid_rewards(rows), baseline_B, rows["prompt_lengths"], rows["total_lengths"])
    if cfg.use_dynamic_sampling:
        in_batch.pop("reward")
    metrics |= in_batch
    metrics |= aggregate_microbatch_metrics(result["all_mb_metrics"])
    # Metrics of several optimizer steps are sums over them; their mean is what one step looked like.
    steps = max(1, len(result["loss"]))
    if steps > 1:
        metrics |= {
            n: metrics[n] / steps
            for n in result["all_mb_metrics"]
            if n not in _AVERAGED and "_min" not in n and "_max" not in n
        }
    metrics["loss"] = float(result["loss"].mean())
    metrics["grad_norm"] = result["grad_norm"]
    metrics |= {key: result[key] for key in ("lr", "wd") if key in result}
    if result.get("skipped_steps"):
        metrics["skipped_steps"] = float(result["skipped_steps"])
        logger.warning(
            "step=%d optimizer=skipped reason=no_trained_token: weights, optimizer and schedule stay as they were",
            step,
        )
    return metrics
