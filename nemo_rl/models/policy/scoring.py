"""Log-probabilities of given tokens, and the k most likely tokens, from hidden states, without ever holding the logits
of the whole row.

The output projection, the softmax and the pick of the target run chunk by chunk, recomputed in the backward pass; with
tensor parallelism each rank holds a slice of the vocabulary. On one GPU the backward pass is written out: forward keeps
one number per token, the logarithm of its sum over the vocabulary, and backward turns the logits, made again, into
their gradient in one pass. Training does to its logits exactly what generation did before it drew a token: the model's
own scaling, the temperature, and the filters; the softmax of a token with a recorded sampling mask runs over that set
instead of over what the training engine's own logits would keep. Invariants: values and gradients are those of a
log-softmax, whatever the chunk; the most likely token is never excluded; a sampled token is in its own set; the k most
likely tokens are exact, since every rank offers its own k.

Shapes: B rows, S tokens of a padded row, T tokens of a row or of some places of it, C tokens of a chunk, D hidden size,
V vocabulary, W this rank's slice of it, M recorded ids, k given or most likely tokens of a position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nemo_rl.data_plane.field_schema import SAMPLING_MASK_FIELDS
from nemo_rl.loss.interfaces import GivenScores
from nemo_rl.models.policy.model_config import text_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig


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
    """Identity on every rank; its gradient is the sum over the ranks' gradients."""

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


def sum_over_ranks(local: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum of every rank's part; the part itself without a group."""
    return local if group is None else _SumOverRanks.apply(local, group)


def copy_to_ranks(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Marks the entry of a region in which every rank of `group` works on the same tensor."""
    return tensor if group is None else _CopyToRanks.apply(tensor, group)


def gather_logits(logits_CW: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Logits over the whole vocabulary."""
    return logits_CW if group is None else _GatherVocabulary.apply(logits_CW, group)


@dataclass(frozen=True)
class LogitTransform:
    """Transformation from raw logits to the distribution that generation drew from."""

    temperature: float = 1.0
    top_p: float = 1.0  # nucleus mass; 1 keeps all
    top_k: int | None = None  # keeps the k largest; None keeps all
    softcap: float | None = None  # the model's own tanh cap on final logits, or None
    scale: float = 1.0  # the model's own factor on final logits

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
    """Sets the logits of excluded tokens to -inf: first top-k, then top-p of the rest, as vLLM does. The most likely
    token is always kept.
    """
    ordered, indices = logits_CV.sort(dim=-1, descending=False)
    if top_k is not None and top_k < logits_CV.shape[-1]:
        threshold = ordered[:, logits_CV.shape[-1] - top_k].unsqueeze(-1)
        ordered = ordered.masked_fill(ordered < threshold, float("-inf"))
    if top_p < 1.0:
        mass = ordered.softmax(dim=-1).cumsum(dim=-1)
        # In vLLM's precision: with equal logits the sum may end exactly there.
        excluded = mass <= 1.0 - torch.full((), top_p, dtype=torch.float32, device=mass.device)
        excluded[:, -1] = False
        ordered = ordered.masked_fill(excluded, float("-inf"))
    return torch.empty_like(logits_CV).scatter(-1, indices, ordered)


def logit_transform(
    temperature: float | None, top_p: float, top_k: int | None, model: PretrainedConfig
) -> LogitTransform:
    """Logit transformation of generation, with the model's own. `temperature`: of generation; None or 0 is 1. `model`:
    the model's Hugging Face configuration.
    """
    config = text_config(model)
    softcap = getattr(config, "final_logit_softcapping", None)
    return LogitTransform(temperature or 1.0, top_p, top_k, softcap, _factor(config))


# Cohere; Falcon-H1; Muse Glimmer.
_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
# `logits_scaling` is a divisor in Granite's and MiniCPM's families, and a factor in this one.
_SCALED_UP = ("hyperclovax",)


def _factor(model: PretrainedConfig) -> float:
    """The model's own factor on final logits."""
    factor = next((value for name in _FACTORS if (value := getattr(model, name, None))), 1.0)
    scaling = getattr(model, "logits_scaling", None) or 1.0
    return factor * scaling if model.model_type in _SCALED_UP else factor / scaling


@dataclass(frozen=True)
class GivenTokens:
    """Tokens whose scores are wanted after each position. `rest`: whether sums over the other tokens are wanted too."""

    ids_Tk: torch.Tensor
    rest: bool = False

    def at(self, tokens: slice | torch.Tensor) -> GivenTokens:
        """The given tokens of some positions."""
        return GivenTokens(self.ids_Tk[tokens], self.rest)


def joined_scores(parts: Sequence[GivenScores]) -> GivenScores:
    """The scores of consecutive tokens in one."""

    def joined(columns: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        there = [column for column in columns if column is not None]
        return torch.cat(there) if there else None

    return GivenScores(
        torch.cat([part.logprobs for part in parts]),
        joined([part.rest_mass for part in parts]),
        joined([part.rest_entropy for part in parts]),
    )


@dataclass(frozen=True)
class LikelyTokens:
    """The k most likely tokens, most likely first, with their log-probabilities over the whole vocabulary."""

    logprobs_Tk: torch.Tensor
    ids_Tk: torch.Tensor


def log_total(logits_CW: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Logarithm of the sum of exponentials [C] over the whole vocabulary."""
    if group is None:
        return logits_CW.logsumexp(dim=-1)
    peak_C = logits_CW.detach().amax(dim=-1)
    dist.all_reduce(peak_C, op=dist.ReduceOp.MAX, group=group)
    return sum_over_ranks((logits_CW - peak_C[:, None]).exp().sum(dim=-1), group).log() + peak_C


def logits_at(logits_CW: torch.Tensor, ids_Ck: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Logits [C, k] of tokens, with gradient, from whichever rank has them."""
    if group is None:
        return logits_CW.gather(-1, ids_Ck)
    own_Ck, mine_Ck = _own_ids(ids_Ck, logits_CW.shape[-1], group)
    picked_Ck = logits_CW.gather(-1, own_Ck.clamp(0, logits_CW.shape[-1] - 1)).masked_fill(~mine_Ck, 0.0)
    return sum_over_ranks(picked_Ck, group)


def given_scores(
    logits_CW: torch.Tensor,
    ids_Ck: torch.Tensor,
    total_C: torch.Tensor,
    *,
    rest: bool,
    group: dist.ProcessGroup | None,
) -> GivenScores:
    """Scores of given tokens from a chunk's logits. `total_C`: `log_total` of them."""
    logprobs_Ck = logits_at(logits_CW, ids_Ck, group) - total_C[:, None]
    if not rest:
        return GivenScores(logprobs_Ck)
    width = logits_CW.shape[-1]
    own_Ck, mine_Ck = (ids_Ck, None) if group is None else _own_ids(ids_Ck, width, group)
    # Tokens of other ranks are marked in a column behind the vocabulary.
    places_Ck = own_Ck if mine_Ck is None else torch.where(mine_Ck, own_Ck, width)
    given_CW = torch.zeros((len(ids_Ck), width + 1), dtype=torch.bool, device=ids_Ck.device)
    given_CW = given_CW.scatter_(1, places_Ck, True)[:, :width]
    # Every rank's part depends on the total, so that its gradient is the sum of theirs.
    logprobs_CW = logits_CW - copy_to_ranks(total_C, group)[:, None]
    # One minus the sum of the given ones would lose all digits of a small rest.
    rest_CW = logprobs_CW.exp().masked_fill(given_CW, 0.0)
    sums = torch.stack([rest_CW.sum(dim=-1), (rest_CW * logprobs_CW).sum(dim=-1)])
    mass_C, entropy_C = sum_over_ranks(sums, group)
    return GivenScores(logprobs_Ck, mass_C, entropy_C)


def _own_ids(ids_Ck: torch.Tensor, width: int, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, torch.Tensor]:
    own_Ck = ids_Ck - width * dist.get_rank(group)
    return own_Ck, (own_Ck >= 0) & (own_Ck < width)


@torch.no_grad()
def likely_tokens(
    hidden_TD: torch.Tensor,
    weight_WD: torch.Tensor,
    bias_W: torch.Tensor | None,
    k: int,
    transform: LogitTransform,
    *,
    chunk: int,
    group: dist.ProcessGroup | None = None,
) -> LikelyTokens:
    """The k most likely tokens after each position, without filters.

    Args:
        hidden_TD: Final hidden states, the same on every rank of `group`.
        weight_WD: Output projection, this rank's slice of the vocabulary.
        k: At most the size of the whole vocabulary.
        chunk: Positions whose logits exist at a time.
        group: Ranks that share the vocabulary, or None.
    """
    logprobs: list[torch.Tensor] = []
    ids: list[torch.Tensor] = []
    for start in range(0, len(hidden_TD), chunk):
        logits_CW = transform.model_logits(F.linear(hidden_TD[start : start + chunk], weight_WD, bias_W))
        values_Ck, ids_Ck = _largest(logits_CW, k, group)
        logprobs.append(values_Ck - log_total(logits_CW, group)[:, None])
        ids.append(ids_Ck)
    return LikelyTokens(torch.cat(logprobs), torch.cat(ids))


def _largest(logits_CW: torch.Tensor, k: int, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, torch.Tensor]:
    width = logits_CW.shape[-1]
    values_Ck, ids_Ck = logits_CW.topk(min(k, width), dim=-1)
    if group is None:
        return values_Ck, ids_Ck
    ids_Ck = ids_Ck + width * dist.get_rank(group)
    offers = []
    for mine in (values_Ck, ids_Ck):
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine.contiguous(), group=group)
        offers.append(torch.cat(parts, dim=-1))
    best_Ck, places_Ck = offers[0].topk(k, dim=-1)
    return best_Ck, offers[1].gather(-1, places_Ck)


COUNTS, IDS = SAMPLING_MASK_FIELDS


class SamplingMaskError(ValueError):
    """Recorded sets do not fit the batch."""


@dataclass(frozen=True)
class KeptTokens:
    """The sets that the targets of a row's places were drawn from, one after the other.

    Attributes:
        counts_T: Ids of each place's set; 0 for the whole vocabulary.
    """

    counts_T: torch.Tensor
    ids_M: torch.Tensor

    def at(self, places: torch.Tensor | slice) -> KeptTokens:
        """The sets of some places, ascending."""
        chosen_T = torch.zeros(len(self.counts_T), dtype=torch.bool, device=self.counts_T.device)
        chosen_T[places] = True
        return KeptTokens(self.counts_T[places], self.ids_M[chosen_T.repeat_interleave(self.counts_T)])

    def excluded(self, first_id: int, ids: int) -> torch.Tensor:
        """[T, ids] whether each of the ids from `first_id` on lies outside a place's set."""
        excluded_TW = (self.counts_T > 0)[:, None].expand(-1, ids).contiguous()
        place_M = torch.arange(len(self.counts_T), device=self.ids_M.device).repeat_interleave(self.counts_T)
        own_M = self.ids_M.long() - first_id
        here_M = (own_M >= 0) & (own_M < ids)
        excluded_TW[place_M[here_M], own_M[here_M]] = False
        return excluded_TW


def packed_masks(data: Mapping[str, torch.Tensor], source_T: torch.Tensor, padding: int) -> KeptTokens | None:
    """The sets of a packed row's targets on the host; None for a batch without.

    Args:
        source_T: Flat index into the padded [B, S] batch of the token at each place; its target is the next token.
        padding: Places after them that hold none.

    Raises SamplingMaskError: one of the two columns is missing, they do not fit each other or the batch, or a set does
    not contain the sampled token.
    """
    if COUNTS not in data and IDS not in data:
        return None
    if COUNTS not in data or IDS not in data:
        raise SamplingMaskError(f"a batch with sampling masks needs both columns {COUNTS} and {IDS}")
    ids_M, counts_BS = checked_mask_ids(data), data[COUNTS].cpu().long()
    counts_N = counts_BS.reshape(-1)
    target_T = source_T + 1
    # A row's last column has no target inside it; the next flat index belongs to another row.
    inside_T = target_T % counts_BS.shape[1] != 0
    target_T = torch.where(inside_T, target_T, 0)
    counts_T = torch.where(inside_T, counts_N[target_T], 0)
    begin_T = (counts_N.cumsum(0) - counts_N)[target_T]
    within_M = torch.arange(int(counts_T.sum())) - (counts_T.cumsum(0) - counts_T).repeat_interleave(counts_T)
    chosen_M = ids_M[begin_T.repeat_interleave(counts_T) + within_M]
    return KeptTokens(torch.cat([counts_T, counts_T.new_zeros(padding)]), chosen_M)


def checked_mask_ids(data: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The ids of all sets of a batch. Raises SamplingMaskError: see `packed_masks`."""
    counts_BS, ids_BS = data[COUNTS].cpu().long(), data["input_ids"].cpu()
    if counts_BS.shape != ids_BS.shape or (counts_BS.numel() and int(counts_BS.min()) < 0):
        raise SamplingMaskError(
            f"{COUNTS} {list(counts_BS.shape)}: expected counts of at least 0, {list(ids_BS.shape)} as input_ids"
        )
    ids_M = _flat_ids(data[IDS], counts_BS)
    _require_sampled_tokens(counts_BS, ids_M, ids_BS)
    return ids_M


def _flat_ids(column: torch.Tensor | Sequence[torch.Tensor], counts_BS: torch.Tensor) -> torch.Tensor:
    totals = counts_BS.sum(dim=1).tolist()
    parts = [torch.as_tensor(row).cpu().reshape(-1) for row in column]
    padded = isinstance(column, torch.Tensor)
    fits = len(parts) == len(totals) and all(
        len(part) >= total if padded else len(part) == total for part, total in zip(parts, totals, strict=True)
    )
    if not fits:
        raise SamplingMaskError(
            f"{IDS} has {[len(part) for part in parts][:8]} ids per row, {COUNTS} adds up to {totals[:8]}"
        )
    none = torch.zeros(0, dtype=torch.int32)
    return torch.cat([none, *(part[:total].to(torch.int32) for part, total in zip(parts, totals, strict=True))])


def _require_sampled_tokens(counts_BS: torch.Tensor, ids_M: torch.Tensor, ids_BS: torch.Tensor) -> None:
    counts_N = counts_BS.reshape(-1)
    place_M = torch.arange(len(counts_N)).repeat_interleave(counts_N)
    found_N = torch.zeros(len(counts_N), dtype=torch.bool)
    found_N[place_M[ids_M == ids_BS.reshape(-1)[place_M]]] = True
    missing = ((counts_N > 0) & ~found_N).nonzero().flatten()
    if len(missing):
        row, position = divmod(int(missing[0]), counts_BS.shape[1])
        raise SamplingMaskError(
            f"row {row}, token {position}: the recorded set of {int(counts_BS[row, position])} ids does not contain "
            f"the sampled token {int(ids_BS[row, position])} ({len(missing)} such tokens): the mask belongs to another "
            "token or engine"
        )


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
    logits_CW = transform.model_logits(F.linear(hidden_CD, weight_WD, bias_W))
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
