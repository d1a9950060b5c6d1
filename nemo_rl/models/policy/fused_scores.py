"""Log-probabilities on one GPU with a backward pass of their own: logits are made twice and their gradient once.

Forward keeps one number per token, the logarithm of its sum over the vocabulary; backward makes the logits again and
turns them into their gradient in one pass, and the gradient of the projection's weight is summed over chunks in
float32. Knows no filters and no ranks, for which `scoring` lets autograd do it. Invariant: values and gradients are
those of a log-softmax, whatever the chunk.

Shapes: T tokens, C tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from nemo_rl.models.policy.scoring import LogitTransform

_CHUNK_BYTES = 2 << 30
"""Of float32 logits; in half precision two such chunks are a chunk's logits and their gradient."""


def fused_logprobs(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    target_T: torch.Tensor,
    transform: LogitTransform,
    *,
    chunk: int | None = None,
) -> torch.Tensor:
    """Log-probability [T] of `target_T` after each token, in float32.

    Args:
        hidden_TD: Final hidden states.
        weight_VD: Output projection.
        bias_V: Its bias, or None.
        target_T: Token ids.
        transform: Temperature and the model's own logit scaling; its filters are not applied.
        chunk: Tokens whose logits exist at a time; None chooses so that they stay under 2 GiB in float32.
    """
    size = chunk or max(1, _CHUNK_BYTES // (4 * weight_VD.shape[0]))
    return _Logprobs.apply(hidden_TD, weight_VD, bias_V, target_T, transform, size)


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  # torch's stub takes any arguments, a function has its own
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_T: torch.Tensor,
        transform: LogitTransform,
        size: int,
    ) -> torch.Tensor:
        score = _fused(_scores, hidden_TD.device.type)
        logprobs_T, total_T = (hidden_TD.new_empty(len(hidden_TD), dtype=torch.float32) for _ in range(2))
        for start in range(0, len(hidden_TD), size):
            part = slice(start, start + size)
            raw_CV = F.linear(hidden_TD[part], weight_VD, bias_V)
            logprobs_T[part], total_T[part] = score(raw_CV, target_T[part], transform)
        ctx.save_for_backward(hidden_TD, weight_VD, bias_V, target_T, total_T)
        ctx.transform, ctx.size = transform, size
        return logprobs_T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_TD, weight_VD, bias_V, target_T, total_T = ctx.saved_tensors
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        gradient = _fused(_raw_gradient, hidden_TD.device.type)
        hidden_grad_TD = torch.empty_like(hidden_TD) if to_hidden else None
        weight_grad_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if to_weight else None
        bias_grad_V = torch.zeros_like(bias_V, dtype=torch.float32) if to_bias else None
        for start in range(0, len(hidden_TD), ctx.size):
            part = slice(start, start + ctx.size)
            raw_CV = F.linear(hidden_TD[part], weight_VD, bias_V)
            raw_CV = gradient(raw_CV, target_T[part], total_T[part], grads[0][part], ctx.transform)
            if hidden_grad_TD is not None:
                torch.mm(raw_CV, weight_VD, out=hidden_grad_TD[part])
            if weight_grad_VD is not None:
                _add_product(weight_grad_VD, raw_CV.t(), hidden_TD[part])
            if bias_grad_V is not None:
                bias_grad_V += raw_CV.sum(0, dtype=torch.float32)
        return (
            hidden_grad_TD,
            None if weight_grad_VD is None else weight_grad_VD.to(weight_VD.dtype),
            None if bias_grad_V is None or bias_V is None else bias_grad_V.to(bias_V.dtype),
            None,
            None,
            None,
        )


def _scores(
    raw_CV: torch.Tensor, target_C: torch.Tensor, transform: LogitTransform
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_CV = transform.model_logits(raw_CV)
    total_C = logits_CV.logsumexp(dim=-1)
    return logits_CV.gather(-1, target_C[:, None]).squeeze(-1) - total_C, total_C


def _raw_gradient(
    raw_CV: torch.Tensor,
    target_C: torch.Tensor,
    total_C: torch.Tensor,
    gradient_C: torch.Tensor,
    transform: LogitTransform,
) -> torch.Tensor:
    """Gradient of the raw logits, in their precision."""
    probability_CV = (transform.model_logits(raw_CV) - total_C[:, None]).exp()
    chosen_CV = torch.arange(raw_CV.shape[-1], device=raw_CV.device)[None] == target_C[:, None]
    logits_grad_CV = (chosen_CV.float() - probability_CV) * gradient_C[:, None]
    return transform.raw_gradient(raw_CV, logits_grad_CV).to(raw_CV.dtype)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Adds `a @ b` to a float32 matrix, which half-precision products on a GPU never leave."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


@cache
def _fused(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The arithmetic on a chunk's logits as one kernel on GPUs; on a host compiling it costs more than it saves."""
    return torch.compile(function, dynamic=True) if device == "cuda" else function
