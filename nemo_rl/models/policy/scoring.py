"""Log-probabilities of given tokens from hidden states, without ever holding the logits of the whole row.

The output projection, the softmax and the pick of the target run chunk by chunk, recomputed in the backward pass, on
one GPU by `fused_scores`; with tensor parallelism each rank holds a slice of the vocabulary. Temperature and the
filters of generation are applied to the logits exactly as generation applied them. Knows no model family. Invariant:
the numbers do not depend on the chunk size.

Shapes: T tokens, C tokens of a chunk, D hidden size, V vocabulary, W this rank's slice of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nemo_rl.models.policy.fused_scores import fused_logprobs

_AUTOMATIC_CHUNK_BYTES = 256 << 20


@dataclass(frozen=True)
class LogitTransform:
    """What turns raw logits into the distribution that generation drew from.

    Attributes:
        temperature: Divides the logits.
        top_p: Nucleus mass; 1 keeps all.
        top_k: Keeps the k largest; None keeps all.
        softcap: The model's own tanh cap on final logits, or None.
        scale: The model's own factor on final logits.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    softcap: float | None = None
    scale: float = 1.0

    @property
    def filters(self) -> bool:
        """Whether some tokens are excluded."""
        return self.top_p < 1.0 or self.top_k is not None

    def unfiltered(self) -> LogitTransform:
        """The same without the filters."""
        return LogitTransform(self.temperature, softcap=self.softcap, scale=self.scale)

    def model_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Float32 logits as the model defines them, divided by the temperature."""
        logits = logits.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits if self.temperature == 1.0 else logits / self.temperature

    def raw_gradient(self, raw: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Gradient of the raw logits from the one of `model_logits(raw)`."""
        if self.temperature != 1.0:
            gradient = gradient / self.temperature
        if self.softcap is not None:
            gradient = gradient * (1 - torch.tanh(raw.float() * self.scale / self.softcap).square())
        return gradient * self.scale if self.scale != 1.0 else gradient


def filter_logits(logits_CV: torch.Tensor, *, top_p: float, top_k: int | None) -> torch.Tensor:
    """Sets the logits of excluded tokens to -inf: first top-k, then top-p on what is left, as vLLM does.

    The most likely token is always kept.
    """
    ordered, indices = logits_CV.sort(dim=-1, descending=False)
    if top_k is not None and top_k < logits_CV.shape[-1]:
        threshold = ordered[:, logits_CV.shape[-1] - top_k].unsqueeze(-1)
        ordered = ordered.masked_fill(ordered < threshold, float("-inf"))
    if top_p < 1.0:
        mass = ordered.softmax(dim=-1).cumsum(dim=-1)
        excluded = mass <= 1.0 - top_p
        excluded[:, -1] = False
        ordered = ordered.masked_fill(excluded, float("-inf"))
    return torch.empty_like(logits_CV).scatter(-1, indices, ordered)


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
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_CW = transform.model_logits(local_logits(hidden_CD, weight_WD, bias_W))
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
) -> TokenScores:
    """Log-probability of `target_T` after each token.

    Args:
        hidden_TD: Final hidden states, the same on every rank of `group`.
        weight_WD: Output projection, this rank's slice of the vocabulary.
        bias_W: Its bias, or None.
        target_T: Token ids.
        transform: Temperature, filters and the model's own logit scaling.
        chunk: Tokens at a time; None chooses so that a chunk's logits stay under 256 MiB, or 2 GiB in `fused_scores`.
        group: Ranks that share the vocabulary, or None.
    """
    if hidden_TD.is_cuda and group is None and not transform.filters:
        logprobs_T = fused_logprobs(hidden_TD, weight_WD, bias_W, target_T, transform, chunk=chunk)
        return TokenScores(logprobs_T, logprobs_T)
    hidden_TD = copy_to_ranks(hidden_TD, group)
    tokens = hidden_TD.shape[0]
    size = chunk or max(1, _AUTOMATIC_CHUNK_BYTES // (4 * weight_WD.shape[0]))
    if tokens <= size:
        return TokenScores(*_score_chunk(hidden_TD, weight_WD, bias_W, target_T, transform, group))
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
        )
        one, other = (
            checkpoint(_score_chunk, *arguments, use_reentrant=False)
            if torch.is_grad_enabled()
            else _score_chunk(*arguments)
        )
        filtered.append(one)
        unfiltered.append(other)
    logprobs_T = torch.cat(filtered)
    return TokenScores(logprobs_T, torch.cat(unfiltered) if transform.filters else logprobs_T)
