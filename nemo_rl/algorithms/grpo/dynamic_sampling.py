"""Dynamic sampling (DAPO): keep samples whose group's rewards differ, and generate until a step is full.

Decides by row numbers alone which new rows join those already kept; it holds no rows and calls no engine.
Invariant: kept rows never exceed the step's size, and every new row is either kept or named as dropped, exactly once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_rl.config import GRPOConfig


class DynamicSamplingError(ValueError):
    """Too many generation batches had too few groups to learn from."""


@dataclass(frozen=True)
class Selection:
    """What becomes of a generation batch.

    Attributes:
        keep: rows of the new batch that join the kept ones, in order.
        drop: its other rows; nothing will read them again.
        complete: the step is full; otherwise another generation batch is needed.
        surplus: dropped rows that were good, for which there was no place.
    """

    keep: list[int]
    drop: list[int]
    complete: bool
    surplus: int


def select_rows(std_B: torch.Tensor, *, kept_before: int, num_gen_batches: int, cfg: GRPOConfig) -> Selection:
    """Choose among the rows of a new generation batch.

    Args:
        std_B: deviation of each row's group rewards, before shaping; rows where it is 0 teach nothing.
        kept_before: rows kept from earlier generation batches of this step.
        num_gen_batches: generation batches of this step, this one included.
        cfg: `num_prompts_per_step` times `num_generations_per_prompt` rows make a step.

    Raises:
        DynamicSamplingError: the step is still not full after more than `dynamic_sampling_max_gen_batches` batches.
    """
    target = cfg.num_prompts_per_step * cfg.num_generations_per_prompt
    good = torch.nonzero(std_B != 0).flatten().tolist()
    keep = good[: target - kept_before]
    complete = kept_before + len(keep) == target
    if not complete and num_gen_batches > cfg.dynamic_sampling_max_gen_batches:
        raise DynamicSamplingError(
            f"after {num_gen_batches} generation batches only {kept_before + len(keep)} of {target} samples come from groups whose rewards differ; "
            f"raise grpo.dynamic_sampling_max_gen_batches={cfg.dynamic_sampling_max_gen_batches}, or use prompts the model solves sometimes but not always"
        )
    kept = set(keep)
    return Selection(keep, [row for row in range(len(std_B)) if row not in kept], complete, len(good) - len(keep))


def sampling_metrics(selections: Sequence[Selection], generated_rewards_B: torch.Tensor, trained_rewards_B: torch.Tensor) -> dict[str, float]:
    """Metrics of one step: how much was generated, and the rewards before and after the filter.

    Args:
        selections: one per generation batch of the step.
        generated_rewards_B: rewards of all generated rows, in order; as many as were trained on are averaged.
        trained_rewards_B: rewards of the kept rows.
    """
    return {
        "dynamic_sampling_num_gen_batches": float(len(selections)),
        "dynamic_sampling_num_discarded_valid_samples": float(sum(selection.surplus for selection in selections)),
        "reward": generated_rewards_B[: len(trained_rewards_B)].double().mean().item(),
        "filtered_reward": trained_rewards_B.double().mean().item(),
    }
