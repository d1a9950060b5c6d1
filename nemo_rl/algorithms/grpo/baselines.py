"""Baseline and spread of the rewards within each prompt's group of samples.

Row arithmetic only; knows nothing of tokens. Invariant: the spread of rewards that are all equal is exactly 0, whatever their value,
because dynamic sampling drops groups by that test.

Shapes: B samples, P prompts, G samples of the largest group.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GroupStatistics:
    """Per sample [B]: the baseline its reward is compared with, and the standard deviation of the rewards behind that baseline."""

    baseline_B: torch.Tensor
    std_B: torch.Tensor


def group_ids(prompts: torch.Tensor) -> torch.Tensor:
    """Group of each sample: rows with equal prompts form one.

    Args:
        prompts: [B, L] padded prompt tokens, or [B] any id that samples of one prompt share.

    Returns:
        [B] in `0 .. P-1`. Two equal prompts in one step share a group, as in NeMo-RL.
    """
    return torch.unique(prompts, dim=0, return_inverse=True)[1]


def group_statistics(rewards_B: torch.Tensor, group_ids_B: torch.Tensor, valid_B: torch.Tensor, *, leave_one_out: bool) -> GroupStatistics:
    """Baseline and spread of each sample's group.

    The baseline is the mean of the group's valid rewards, or, leaving one out, of those of the other samples; the standard deviation is the unbiased one of the
    same set, and 0 where that set has fewer than two rewards. A sample with at most one valid reward in its group is its own baseline.

    Leaving one out makes the deviation a sample's own: the one odd sample of a group has deviation 0 (the others are equal), so its advantage
    is not normalised and dynamic sampling drops it alone; with two samples per prompt every deviation is 0. This is NeMo-RL's behaviour.

    Args:
        rewards_B: rewards.
        group_ids_B: group of each sample, from 0.
        valid_B: 0 for samples that take no part.
        leave_one_out: leave each sample out of its own baseline.
    """
    slots = _slots(group_ids_B)
    groups, width = int(group_ids_B.max()) + 1, int(slots.max()) + 1
    rewards_PG = torch.zeros(groups, width, dtype=torch.float64)
    valid_PG = torch.zeros(groups, width, dtype=torch.bool)
    rewards_PG[group_ids_B, slots] = rewards_B.double()
    valid_PG[group_ids_B, slots] = valid_B.bool()

    behind_PGG = valid_PG[:, None, :].expand(groups, width, width)
    if leave_one_out:
        behind_PGG = behind_PGG & ~torch.eye(width, dtype=torch.bool)
    count_PG = behind_PGG.sum(-1)
    rewards_PGG = rewards_PG[:, None, :].expand(groups, width, width)
    mean_PG = torch.where(behind_PGG, rewards_PGG, 0).sum(-1) / count_PG
    squares_PG = torch.where(behind_PGG, (rewards_PGG - mean_PG[..., None]).square(), 0).sum(-1)
    spread_PG = torch.where(behind_PGG, rewards_PGG, -torch.inf).amax(-1) - torch.where(behind_PGG, rewards_PGG, torch.inf).amin(-1)
    # Rounding of the mean gives equal rewards a tiny variance; their range is exactly 0.
    std_PG = torch.where((count_PG > 1) & (spread_PG > 0), (squares_PG / (count_PG - 1)).sqrt(), 0)
    alone_PG = (valid_PG.sum(-1) <= 1)[:, None] | (count_PG == 0)
    baseline_PG = torch.where(alone_PG, rewards_PG, mean_PG)
    std_PG = torch.where(alone_PG, 0, std_PG)
    dtype = rewards_B.dtype if rewards_B.dtype.is_floating_point else torch.float32
    return GroupStatistics(baseline_PG[group_ids_B, slots].to(dtype), std_PG[group_ids_B, slots].to(dtype))


def calculate_baseline_and_std_per_prompt(
    prompts: torch.Tensor, rewards: torch.Tensor, valid_mask: torch.Tensor, leave_one_out_baseline: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """NeMo-RL's signature of `group_statistics`: `prompts` [B, L] tokens, `rewards` [B], `valid_mask` [B]; returns baseline [B] and standard deviation [B]."""
    statistics = group_statistics(rewards.cpu(), group_ids(prompts).cpu(), valid_mask.cpu(), leave_one_out=leave_one_out_baseline)
    return statistics.baseline_B.to(rewards.device), statistics.std_B.to(rewards.device)


def _slots(group_ids_B: torch.Tensor) -> torch.Tensor:
    """Position of each sample within its group."""
    order = torch.argsort(group_ids_B, stable=True)
    counts = torch.bincount(group_ids_B)
    starts = torch.cumsum(counts, 0) - counts
    slots = torch.empty_like(order)
    slots[order] = torch.arange(len(order)) - starts[group_ids_B[order]]
    return slots
