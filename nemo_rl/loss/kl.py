"""KL divergence between two policies, estimated from the log-probabilities of sampled tokens.

Knows nothing of masks or reductions. Invariant: tokens whose log-ratio the input clamp cut carry no gradient through
their weight, so one broken token cannot push the policy.
"""

from typing import Literal, TypeAlias

import torch

KLType: TypeAlias = Literal["k1", "k2", "k3"]


def calculate_kl(
    logprobs: torch.Tensor,
    logprobs_reference: torch.Tensor,
    kl_type: KLType = "k3",
    input_clamp_value: float | None = 20.0,
    output_clamp_value: float | None = 10.0,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) from samples of the policy (http://joschu.net/blog/kl-approx.html).

    With `L = clamp(reference - policy)`: k1 is `-L`, k2 is `L**2 / 2`, k3 is `exp(L) - 1 - L`.
    k1 is unbiased and noisy, k2 biased, k3 unbiased and never negative.

    Args:
        logprobs: log-probabilities of the sampled tokens under the policy, any shape.
        logprobs_reference: the same under the reference.
        kl_type: estimator.
        input_clamp_value: L is clamped to plus or minus this; None does not clamp.
        output_clamp_value: the weighted result is clamped to plus or minus this; None does not clamp.
        weight: multiplies the estimate before the output clamp; detached where the input clamp bit.

    Returns:
        The estimate, in the shape of `logprobs`.

    Raises:
        ValueError: unknown `kl_type`.
    """
    raw = logprobs_reference - logprobs
    log_ratio = raw if input_clamp_value is None else raw.clamp(-input_clamp_value, input_clamp_value)
    if kl_type == "k1":
        kl = -log_ratio
    elif kl_type == "k2":
        kl = log_ratio.square() / 2
    elif kl_type == "k3":
        kl = torch.expm1(log_ratio) - log_ratio
    else:
        raise ValueError(f"kl_type={kl_type!r} must be k1, k2 or k3")
    if weight is not None:
        kl = kl * (
            weight if input_clamp_value is None else torch.where(raw.abs() > input_clamp_value, weight.detach(), weight)
        )
    return kl if output_clamp_value is None else kl.clamp(-output_clamp_value, output_clamp_value)


def jensen_shannon(logprobs_a: torch.Tensor, logprobs_b: torch.Tensor) -> torch.Tensor:
    """Per-token k3 estimate of the Jensen-Shannon divergence: the mean of both policies' KL to their even mixture."""
    log_mixture = torch.logaddexp(logprobs_a, logprobs_b) - torch.log(logprobs_a.new_tensor(2.0))
    to_mixture = (calculate_kl(own, log_mixture, "k3", None, None) for own in (logprobs_a, logprobs_b))
    return sum(to_mixture, start=torch.zeros_like(log_mixture)) / 2
