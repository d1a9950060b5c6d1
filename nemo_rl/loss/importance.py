"""Importance weights between the training engine (o) and the engine that generated the tokens (g), and their
truncation.

Decides how much each token counts when both engines, or both weight versions, disagree. Knows nothing of advantages or
ratios to the current policy. Invariant: weights carry no gradient, and one that is not finite counts as 0.

Shapes: B rows, T next-token positions (a padded row's length minus one).
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from nemo_rl.loss.normalization import masked_mean

TruncationType: TypeAlias = Literal["tis", "icepop", "seq-mask-tis"]


@dataclass(frozen=True)
class Truncation:
    """Bounds on importance weights.

    Attributes:
        kind: `tis` clamps weights (https://fengyao.notion.site/off-policy-rl); `icepop` zeroes those outside
            (https://ringtech.notion.site/icepop); `seq-mask-tis` zeroes whole sequences whose geometric mean ratio is
            outside, and leaves the weights of the others as they are.
        upper: largest weight.
        lower: smallest weight; None is 0, which only `tis` allows.
    """

    kind: TruncationType
    upper: float
    lower: float | None = None


@dataclass(frozen=True)
class ImportanceWeights:
    """Weights [B, T], and which tokens (or, for `seq-mask-tis`, sequences) lay outside the bounds: [B, T] (or [B]), 1
    or 0.
    """

    weights_BT: torch.Tensor
    out_of_bounds: torch.Tensor


def importance_weights(
    previous_BT: torch.Tensor,
    generation_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    sequence_level: bool,
    truncation: Truncation | None,
) -> ImportanceWeights:
    """Training over generation probability of each token, or of its whole sequence.

    Args:
        previous_BT: log-probabilities of the training engine before this step.
        generation_BT: those of the engine that generated.
        mask_BT: trained tokens.
        sequence_level: one weight per sequence, the product over its tokens (the exponential of a sum, where the GSPO
            ratio has a mean).
        truncation: bounds, or None.
    """
    log_ratio_BT = (previous_BT - generation_BT).detach()
    if sequence_level:
        log_weights_BT = (log_ratio_BT * mask_BT).sum(dim=-1, keepdim=True).expand_as(log_ratio_BT)
    else:
        log_weights_BT = log_ratio_BT
    weights_BT = torch.nan_to_num(log_weights_BT.exp(), nan=0.0, posinf=0.0, neginf=0.0)
    if truncation is None:
        return ImportanceWeights(weights_BT, torch.zeros_like(weights_BT))
    lower = 0.0 if truncation.lower is None else truncation.lower
    if truncation.kind == "seq-mask-tis":
        geometric_mean_B = masked_mean(log_ratio_BT, mask_BT, dim=-1).exp()
        outside_B = ~((geometric_mean_B >= lower) & (geometric_mean_B <= truncation.upper))
        return ImportanceWeights(torch.where(outside_B[:, None], 0, weights_BT), outside_B.to(weights_BT.dtype))
    outside_BT = (weights_BT < lower) | (weights_BT > truncation.upper)
    kept_BT = (
        weights_BT.clamp(lower, truncation.upper)
        if truncation.kind == "tis"
        else torch.where(outside_BT, 0, weights_BT)
    )
    return ImportanceWeights(kept_BT, outside_BT.to(weights_BT.dtype))
