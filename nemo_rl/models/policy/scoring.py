"""Log-probabilities of given tokens from hidden states, without ever holding the logits of the whole row.

The output projection, the softmax and the pick of the target run chunk by chunk, recomputed in the backward pass; with
tensor parallelism each rank holds a slice of the vocabulary. On one GPU the backward pass is written out: forward keeps
one number per token, the logarithm of its sum over the vocabulary, and backward turns the logits, made again, into
their gradient in one pass. Temperature and the filters of generation are applied to the logits exactly as generation
applied them. Invariant: values and gradients are those of a log-softmax, whatever the chunk.

Shapes: T tokens, C tokens of a chunk, D hidden size, V vocabulary, W this rank's slice of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nemo_rl.models.policy.logits import LogitTransform, filter_logits
from nemo_rl.models.policy.sampling_mask import KeptTokens

_AUTOMATIC_CHUNK_BYTES = 256 << 20
_FUSED_CHUNK_BYTES = 2 << 30
"""Of float32 logits; in half precision two such chunks are a chunk's logits and their gradient."""


class _SumOverRanks(torch.autograd.Function):
    """Sum of every rank's part; its gradient flows to each part unchanged."""

    @staticmethod
    def forward(ctx: object, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # pyrefly: ignore[bad-override]  # torch's stub takes any arguments, a function has its own
        total = local.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _CopyToRanks(torch.autograd.Function):
    """The same tensor on every rank; its gradient is the sum of what every rank did with it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # pyrefly: ignore[bad-override]  # torch's stub takes any arguments, a function has its own
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _GatherVocabulary(torch.autograd.Function):
    """Logits of the whole vocabulary on every rank; each rank's gradient is its own slice."""

    @staticmethod
    def forward(ctx: Any, local_CW: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # pyrefly: ignore[bad-override]  # torch's stub takes any arguments, a function has its own
        ctx.group = group
        parts = [torch.empty_like(local_CW) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, local_CW.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].chunk(dist.get_world_size(ctx.group), dim=-1)[dist.get_rank(ctx.group)].contiguous(), None


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities [T] after the filters, and before them (the same tensor where nothing is filtered)."""

    logprobs_T: torch.Tensor
    unfiltered_T: torch.Tensor


def copy_to_ranks(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Marks the entry of a region in which every rank of `group` works on the same tensor."""
    return tensor if group is None else _CopyToRanks.apply(tensor, group)


def local_logits(hidden_CD: torch.Tensor, weight_WD: torch.Tensor, bias_W: torch.Tensor | None) -> torch.Tensor:
    """This rank's slice of the raw logits."""
    return F.linear(hidden_CD, weight_WD, bias_W)


def gather_logits(logits_CW: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Logits over the whole vocabulary."""
    return logits_CW if group is None else _GatherVocabulary.apply(logits_CW, group)


def _pick(logits_CW: torch.Tensor, target_C: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Log-softmax of the targets over a vocabulary that may be split over ranks."""
    if group is None:
        return logits_CW.gather(-1, target_C[:, None]).squeeze(-1) - logits_CW.logsumexp(dim=-1)
    width = logits_CW.shape[-1]
    peak_C = logits_CW.detach().amax(dim=-1)
    dist.all_reduce(peak_C, op=dist.ReduceOp.MAX, group=group)
    shifted_CW = logits_CW - peak_C[:, None]
    total_C = _SumOverRanks.apply(shifted_CW.exp().sum(dim=-1), group)
    own_C = target_C - width * dist.get_rank(group)
    mine_C = (own_C >= 0) & (own_C < width)
    picked_C = shifted_CW.gather(-1, own_C.clamp(0, width - 1)[:, None]).squeeze(-1).masked_fill(~mine_C, 0.0)
    return _SumOverRanks.apply(picked_C, group) - total_C.log()


def _score_chunk(
    hidden_CD: torch.Tensor,
    weight_WD: torch.Tensor,
    bias_W: torch.Tensor | None,
    target_C: torch.Tensor,
    transform: LogitTransform,
    group: dist.ProcessGroup | None,
    kept: KeptTokens | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_CW = transform.model_logits(local_logits(hidden_CD, weight_WD, bias_W))
    if kept is not None:
        width = logits_CW.shape[-1]
        first = 0 if group is None else width * dist.get_rank(group)
        kept_C = _pick(logits_CW.masked_fill(kept.excluded(first, width), float("-inf")), target_C, group)
        return kept_C, kept_C
    unfiltered_C = _pick(logits_CW, target_C, group)
    if not transform.filters:
        return unfiltered_C, unfiltered_C
    logits_CV = filter_logits(gather_logits(logits_CW, group), top_p=transform.top_p, top_k=transform.top_k)
    return _pick(logits_CV, target_C, None), unfiltered_C


def score_tokens(
    hidden_TD: torch.Tensor,
    weight_WD: torch.Tensor,
    bias_W: torch.Tensor | None,
    target_T: torch.Tensor,
    transform: LogitTransform,
    *,
    chunk: int | None = None,
    group: dist.ProcessGroup | None = None,
    kept: KeptTokens | None = None,
) -> TokenScores:
    """Log-probability of `target_T` after each token.

    Args:
        hidden_TD: Final hidden states, the same on every rank of `group`.
        weight_WD: Output projection, this rank's slice of the vocabulary.
        bias_W: Its bias, or None.
        transform: Temperature, filters and the model's own logit scaling.
        chunk: Tokens at a time; None chooses so that a chunk's logits stay under 256 MiB, or 2 GiB on one GPU.
        group: Ranks that share the vocabulary, or None.
        kept: Recorded sets over which each softmax runs, instead of what the filters would keep; None without.
    """
    if hidden_TD.is_cuda and group is None and not transform.filters and kept is None:
        logprobs_T = fused_logprobs(hidden_TD, weight_WD, bias_W, target_T, transform, chunk=chunk)
        return TokenScores(logprobs_T, logprobs_T)
    hidden_TD = copy_to_ranks(hidden_TD, group)
    tokens = hidden_TD.shape[0]
    size = chunk or max(1, _AUTOMATIC_CHUNK_BYTES // (4 * weight_WD.shape[0]))
    if tokens <= size:
        return TokenScores(*_score_chunk(hidden_TD, weight_WD, bias_W, target_T, transform, group, kept))
    filtered: list[torch.Tensor] = []
    unfiltered: list[torch.Tensor] = []
    for start in range(0, tokens, size):
        arguments = (
            hidden_TD[start : start + size],
            weight_WD,
            bias_W,
            target_T[start : start + size],
            transform,
            group,
            None if kept is None else kept.at(slice(start, start + size)),
        )
        one, other = (
            checkpoint(_score_chunk, *arguments, use_reentrant=False)
            if torch.is_grad_enabled()
            else _score_chunk(*arguments)
        )
        filtered.append(one)
        unfiltered.append(other)
    logprobs_T = torch.cat(filtered)
    return TokenScores(logprobs_T, torch.cat(unfiltered) if transform.filters and kept is None else logprobs_T)


# -- on one GPU -------------------------------------------------------------------------------------------------------


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
        bias_V: Its bias, or None.
        transform: Temperature and the model's own logit scaling; its filters are not applied.
        chunk: Tokens whose logits exist at a time; None chooses so that they stay under 2 GiB in float32.
    """
    size = chunk or max(1, _FUSED_CHUNK_BYTES // (4 * weight_VD.shape[0]))
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
