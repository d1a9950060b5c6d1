"""Log-probabilities of given tokens from hidden states, without ever holding the logits of the whole row.

The output projection, the softmax and the pick of the target run chunk by chunk, recomputed in the backward pass; with
tensor parallelism each rank holds a slice of the vocabulary. On one GPU the backward pass is written out: forward keeps
one number per token, the logarithm of its sum over the vocabulary, and backward turns the logits, made again, into
their gradient in one pass. Temperature and the filters of generation are applied to the logits exactly as generation
applied them. Invariant: values and gradients are those of a log-softmax, whatever the chunk.

Shapes: T tokens, C tokens of a chunk, D hidden size, V vocabulary, W this rank's slice of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nemo_rl.loss.interfaces import GivenScores
from nemo_rl.models.policy.collectives import copy_to_ranks, gather_logits
from nemo_rl.models.policy.logits import LogitTransform, filter_logits
from nemo_rl.models.policy.sampling_mask import KeptTokens
from nemo_rl.models.policy.topk import GivenTokens, given_scores, joined_scores, log_total, logits_at

_AUTOMATIC_CHUNK_BYTES = 256 << 20
FUSED_CHUNK_BYTES = 2 << 30
"""Of float32 logits; in half precision two such chunks are a chunk's logits and their gradient."""


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities [T] after the filters, and before them (the same tensor where nothing is filtered). `given`:
    scores of tokens that the caller named.
    """

    logprobs_T: torch.Tensor
    unfiltered_T: torch.Tensor
    given: GivenScores | None = None


def local_logits(hidden_CD: torch.Tensor, weight_WD: torch.Tensor, bias_W: torch.Tensor | None) -> torch.Tensor:
    """This rank's slice of the raw logits."""
    return F.linear(hidden_CD, weight_WD, bias_W)


def chunk_size(width: int, chunk: int | None = None) -> int:
    """Tokens whose logits exist at a time: `chunk`, or as many as stay under 256 MiB. `width`: this rank's slice of the
    vocabulary.
    """
    return chunk or max(1, _AUTOMATIC_CHUNK_BYTES // (4 * width))


def _pick(logits_CW: torch.Tensor, target_C: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    return logits_at(logits_CW, target_C[:, None], group).squeeze(-1)


def _score_chunk(
    hidden_CD: torch.Tensor,
    weight_WD: torch.Tensor,
    bias_W: torch.Tensor | None,
    target_C: torch.Tensor,
    ids_Ck: torch.Tensor | None,
    rest: bool,
    transform: LogitTransform,
    group: dist.ProcessGroup | None,
    kept: KeptTokens | None = None,
) -> TokenScores:
    logits_CW = transform.model_logits(local_logits(hidden_CD, weight_WD, bias_W))
    total_C = log_total(logits_CW, group)
    given = None if ids_Ck is None else given_scores(logits_CW, ids_Ck, total_C, rest=rest, group=group)
    if kept is not None:
        width = logits_CW.shape[-1]
        first = 0 if group is None else width * dist.get_rank(group)
        kept_CW = logits_CW.masked_fill(kept.excluded(first, width), float("-inf"))
        kept_C = _pick(kept_CW, target_C, group) - log_total(kept_CW, group)
        return TokenScores(kept_C, kept_C, given)
    unfiltered_C = _pick(logits_CW, target_C, group) - total_C
    if not transform.filters:
        return TokenScores(unfiltered_C, unfiltered_C, given)
    logits_CV = filter_logits(gather_logits(logits_CW, group), top_p=transform.top_p, top_k=transform.top_k)
    return TokenScores(_pick(logits_CV, target_C, None) - log_total(logits_CV, None), unfiltered_C, given)


def score_tokens(
    hidden_TD: torch.Tensor,
    weight_WD: torch.Tensor,
    bias_W: torch.Tensor | None,
    target_T: torch.Tensor,
    transform: LogitTransform,
    *,
    given: GivenTokens | None = None,
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
        given: Further tokens to score after each token.
        chunk: Tokens at a time; None chooses so that a chunk's logits stay under 256 MiB, or 2 GiB on one GPU.
        group: Ranks that share the vocabulary, or None.
        kept: Recorded sets over which each softmax runs, instead of what the filters would keep; None without.
    """
    if hidden_TD.is_cuda and group is None and not transform.filters and given is None and kept is None:
        logprobs_T = fused_logprobs(hidden_TD, weight_WD, bias_W, target_T, transform, chunk=chunk)
        return TokenScores(logprobs_T, logprobs_T)
    hidden_TD = copy_to_ranks(hidden_TD, group)
    tokens, rest = hidden_TD.shape[0], given is not None and given.rest
    size = chunk_size(weight_WD.shape[0], chunk)
    parts: list[TokenScores] = []
    for start in range(0, max(tokens, 1), size):
        part = slice(start, start + size)
        kept_C = None if kept is None else kept.at(part)
        ids_Ck = None if given is None else given.ids_Tk[part]
        arguments = (hidden_TD[part], weight_WD, bias_W, target_T[part], ids_Ck, rest, transform, group, kept_C)
        recomputed = tokens > size and torch.is_grad_enabled()
        parts.append(
            checkpoint(_score_chunk, *arguments, use_reentrant=False) if recomputed else _score_chunk(*arguments)
        )
    return parts[0] if len(parts) == 1 else _joined(parts, filters=transform.filters and kept is None)


def _joined(parts: Sequence[TokenScores], *, filters: bool) -> TokenScores:
    logprobs_T = torch.cat([part.logprobs_T for part in parts])
    unfiltered_T = torch.cat([part.unfiltered_T for part in parts]) if filters else logprobs_T
    given = [part.given for part in parts if part.given is not None]
    return TokenScores(logprobs_T, unfiltered_T, joined_scores(given) if given else None)


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
    size = chunk or max(1, FUSED_CHUNK_BYTES // (4 * weight_VD.shape[0]))
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
def _fused(function: Callable[..., object], device: str) -> Callable[..., Any]:
    """The arithmetic on a chunk's logits as one kernel on GPUs; on a host compiling it costs more than it saves."""
    return torch.compile(function, dynamic=True) if device == "cuda" else function
