"""What is computed from the ratio of two policies' probabilities of sampled tokens: KL divergence and importance
weights.

KL is between any two policies; importance weights between the training engine (o) and the engine that generated the
tokens (g), with their truncation. Decides how much each token counts when engines, or weight versions, disagree; knows
nothing of advantages. Invariants: tokens whose log-ratio the input clamp cut carry no gradient through their weight, so
one broken token cannot push the policy; importance weights carry no gradient, and one that is not finite counts as 0;
with bounds, a ratio too large for a float ends at its bound.

Shapes: B rows, T next-token positions (a padded row's length minus one).
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from nemo_rl.loss.normalization import masked_mean

_LARGEST_LOG = 60.0
"""Ratios stay below e**60: their exponential, and its product with an advantage, are finite in float32."""

KLType: TypeAlias = Literal["k1", "k2", "k3"]
TruncationType: TypeAlias = Literal["tis", "icepop", "seq-mask-tis"]


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """The ratio of a log-ratio, finite and with a finite gradient wherever the log-ratio is not infinite or NaN.

    A plain exponential overflows to infinity, whose gradient is NaN even where a clamp of the ratio drops it.
    """
    return log_ratio.clamp(max=_LARGEST_LOG).exp()


def calculate_kl(
    logprobs: torch.Tensor,
    logprobs_reference: torch.Tensor,
    kl_type: KLType = "k3",
    input_clamp_value: float | None = 20.0,
    output_clamp_value: float | None = 10.0,
    importance_sampling_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) from samples of the policy (http://joschu.net/blog/kl-approx.html).

    With `L = clamp(reference - policy)`: k1 is `-L`, k2 is `L**2 / 2`, k3 is `exp(L) - 1 - L`. k1 is unbiased and
    noisy, k2 biased, k3 unbiased and never negative.

    Args:
        logprobs: log-probabilities of the sampled tokens under the policy, any shape.
        logprobs_reference: the same under the reference.
        input_clamp_value: L is clamped to plus or minus this; None does not clamp.
        output_clamp_value: the weighted result is clamped to plus or minus this; None does not clamp.
        importance_sampling_weights: multiply the estimate before the output clamp; detached where the input clamp bit.

    Returns the estimate, in the shape of `logprobs`. Raises ValueError: unknown `kl_type`.
    """
    raw = logprobs_reference - logprobs
    log_ratio = raw if input_clamp_value is None else raw.clamp(-input_clamp_value, input_clamp_value)
    if kl_type == "k1":
        kl = -log_ratio
    elif kl_type == "k2":
        kl = log_ratio.square() / 2
    elif kl_type == "k3":
        kl = torch.expm1(log_ratio.clamp(max=_LARGEST_LOG)) - log_ratio
    else:
        raise ValueError(f"kl_type={kl_type!r} must be k1, k2 or k3")
    weight = importance_sampling_weights
    if weight is not None:
        kl = kl * (
            weight if input_clamp_value is None else torch.where(raw.abs() > input_clamp_value, weight.detach(), weight)
        )
    return kl if output_clamp_value is None else kl.clamp(-output_clamp_value, output_clamp_value)


def jensen_shannon(logprobs_a: torch.Tensor, logprobs_b: torch.Tensor) -> torch.Tensor:
    """Per-token Jensen-Shannon divergence as NeMo-RL logs it: the mean over both policies p of `exp(d) - d - 1` with
    `d = p - log_mixture`, their even mixture.
    """
    log_mixture = torch.logaddexp(logprobs_a, logprobs_b) - torch.log(logprobs_a.new_tensor(2.0))
    to_mixture = (calculate_kl(log_mixture, own, "k3", None, None) for own in (logprobs_a, logprobs_b))
    return sum(to_mixture, start=torch.zeros_like(log_mixture)) / 2


@dataclass(frozen=True)
class Truncation:
    """Bounds on importance weights.

    Attributes:
        kind: `tis` clamps weights (https://fengyao.notion.site/off-policy-rl); `icepop` zeroes those outside
            (https://ringtech.notion.site/icepop); `seq-mask-tis` zeroes whole sequences whose geometric mean ratio is
            outside, and leaves the weights of the others as they are.
    """

    kind: TruncationType
    upper: float
    lower: float | None = None  # smallest weight; None is 0, which only `tis` allows


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
    # A log-ratio that is not finite says nothing; one that is finite but large says "at least the upper bound".
    broken_BT = ~torch.isfinite(log_weights_BT)
    weights_BT = torch.where(broken_BT, 0, bounded_exp(log_weights_BT))
    outside_BT = (weights_BT < lower) | (weights_BT > truncation.upper)
    kept_BT = (
        torch.where(broken_BT, 0, weights_BT.clamp(lower, truncation.upper))
        if truncation.kind == "tis"
        else torch.where(outside_BT, 0, weights_BT)
    )
    return ImportanceWeights(kept_BT, outside_BT.to(weights_BT.dtype))
