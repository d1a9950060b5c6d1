"""Metrics of a policy-gradient microbatch: how well training and generation agree, and where the ratios lie.

Pure functions of masked log-probabilities; nothing here has a gradient or reads a value back from the device.
Invariant: means divide by the global count they are given, so they add up over microbatches; minima and maxima of
nothing are infinite.

Shapes: B rows, T next-token positions.
"""

import torch

from nemo_rl.loss.interfaces import Count, LossMetrics
from nemo_rl.loss.kl import calculate_kl, jensen_shannon
from nemo_rl.loss.normalization import masked_mean


@torch.no_grad()
def agreement_metrics(
    current_BT: torch.Tensor,
    previous_BT: torch.Tensor,
    generation_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    global_valid_toks: Count,
) -> LossMetrics:
    """Distances between the training engine (o), the generating engine (g) and the current policy (c), as means over
    trained tokens.

    `token_mult_prob_error` is the mean of exp|g - o|: 1 when both engines agree. `approx_entropy` is -E[exp(c - g) c],
    the entropy of the current policy estimated from tokens of the generating one.
    """

    def mean(values_BT: torch.Tensor) -> torch.Tensor:
        return masked_mean(values_BT, mask_BT, global_normalization_factor=global_valid_toks)

    return {
        "token_mult_prob_error": mean((generation_BT - previous_BT).abs().exp()),
        "gen_kl_error": mean(calculate_kl(generation_BT, previous_BT, "k3", None, None)),
        "policy_kl_error": mean(calculate_kl(previous_BT, generation_BT, "k3", None, None)),
        "js_divergence_error": mean(jensen_shannon(previous_BT, generation_BT)),
        "approx_entropy": -mean((current_BT - generation_BT).exp() * current_BT),
    }


@torch.no_grad()
def ratio_metrics(
    ratio_BT: torch.Tensor, clamped_BT: torch.Tensor, mask_BT: torch.Tensor, global_valid_toks: Count
) -> LossMetrics:
    """Mean, smallest and largest probability ratio of trained tokens, before and after clipping."""
    metrics: LossMetrics = {}
    for name, values_BT in (("probs_ratio", ratio_BT), ("probs_ratio_clamped", clamped_BT)):
        metrics[name] = masked_mean(values_BT, mask_BT, global_normalization_factor=global_valid_toks)
        metrics[f"{name}_min"] = torch.where(mask_BT != 0, values_BT, torch.inf).amin()
        metrics[f"{name}_max"] = torch.where(mask_BT != 0, values_BT, -torch.inf).amax()
    return metrics
