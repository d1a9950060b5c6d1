"""Masked means over global counts, and the counts themselves.

Everything here is linear in one over the count, which is what lets a global batch be cut anywhere and a split train
step divide once at the end. Invariant: what lies under a zero of the mask never reaches the result, not even as NaN or
infinity.

Shapes: B rows, S tokens of a padded row.
"""

from collections.abc import Mapping
from typing import Any

import torch

from nemo_rl.loss.interfaces import Count, LossFunction, LossType, MetricNormalizer

EPSILON = 1e-8


def masked_mean(
    values: torch.Tensor, mask: torch.Tensor, dim: int | None = None, global_normalization_factor: Count | None = None
) -> torch.Tensor:
    """Sum of `values * mask` over a count.

    Args:
        mask: the same shape (or one that broadcasts to it); where it is 0, `values` may hold anything.
        dim: dimension to reduce; all when None.
        global_normalization_factor: the count to divide by; the sum of `mask` when None.

    Returns `sum(values * mask) / (count + 1e-8)`.
    """
    mask = mask.to(values.dtype).expand_as(values)
    weighted = torch.where(mask != 0, values * mask, 0)
    total, own = (weighted.sum(), mask.sum()) if dim is None else (weighted.sum(dim), mask.sum(dim))
    return total / ((own if global_normalization_factor is None else global_normalization_factor) + EPSILON)


def sequence_mean(
    values_BS: torch.Tensor, token_mask_BS: torch.Tensor, sample_mask_B: torch.Tensor, global_valid_seqs: Count
) -> torch.Tensor:
    """Mean over each row's own tokens, then the sum over rows divided by the global number of sequences."""
    return masked_mean(
        masked_mean(values_BS, token_mask_BS, dim=-1), sample_mask_B, global_normalization_factor=global_valid_seqs
    )


def count_valid(data: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """This batch's sequences and trained tokens, to be summed over ranks and microbatches.

    Args:
        data: `sample_mask` [B], and `token_mask` [B, S] (every token counts where it is absent, of `input_ids` [B, S]).

    Returns two float64 scalars: sequences, and tokens a next-token loss sees (column 0 has no prediction). Raises
    KeyError: `sample_mask` is missing.
    """
    if "sample_mask" not in data:
        raise KeyError(f"a training batch needs the column sample_mask [B]; it has {sorted(data)}")
    sample_mask_B = data["sample_mask"].double()
    sequences = sample_mask_B.sum()
    if "token_mask" not in data:
        return sequences, sequences * data["input_ids"].shape[1]
    return sequences, (data["token_mask"][:, 1:].double() * sample_mask_B[:, None]).sum()


def gradient_count(loss_type: LossType, valid_seqs: Count, valid_toks: Count) -> Count:
    """The count that divides loss and gradient; 1 for a batch without any, whose loss is 0 anyway."""
    count = valid_toks if loss_type is LossType.TOKEN_LEVEL else valid_seqs
    return torch.where(count > 0, count, 1) if isinstance(count, torch.Tensor) else count if count > 0 else 1.0


def normalize_metrics(
    sums: Mapping[str, Any], loss_fn: LossFunction, valid_seqs: Count, valid_toks: Count
) -> dict[str, Any]:
    """Metrics of a call with both counts 1, as that call with the true counts would have given them.

    Args:
        sums: metrics of one or more such calls.
        loss_fn: the loss they come from.
        valid_seqs: sequences of the global batch.
        valid_toks: trained tokens of the global batch.
    """
    by_gradient = gradient_count(loss_fn.loss_type, valid_seqs, valid_toks)
    denominators: dict[MetricNormalizer | None, Count] = {
        None: by_gradient,
        MetricNormalizer.TOKENS: gradient_count(LossType.TOKEN_LEVEL, valid_seqs, valid_toks),
        MetricNormalizer.SEQUENCES: gradient_count(LossType.SEQUENCE_LEVEL, valid_seqs, valid_toks),
        MetricNormalizer.NONE: 1.0,
    }
    return {
        name: value if is_extremum(name) else value / denominators[loss_fn.metric_normalizations.get(name)]
        for name, value in sums.items()
    }


def is_extremum(name: str) -> bool:
    """Whether a metric is a minimum or maximum, which is neither summed nor divided."""
    return "_min" in name or "_max" in name
