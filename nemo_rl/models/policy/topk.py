"""The k most likely tokens of each position, and scores of given tokens, of a vocabulary that ranks may share.

Both work on a chunk of positions: the caller cuts rows, so that the logits of a row never exist at once. Exact: every
rank offers its own k most likely tokens, and the k most likely of all offers are those of the vocabulary.

Shapes: T tokens of a row, C tokens of a chunk, D hidden size, V vocabulary, W this rank's slice of it, k given or most
likely tokens of a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional as F

from nemo_rl.loss.interfaces import GivenScores
from nemo_rl.models.policy.collectives import copy_to_ranks, sum_over_ranks
from nemo_rl.models.policy.logits import LogitTransform


@dataclass(frozen=True)
class GivenTokens:
    """Tokens whose scores are wanted after each position. `rest`: whether sums over the other tokens are wanted too."""

    ids_Tk: torch.Tensor
    rest: bool = False

    def at(self, tokens: slice | torch.Tensor) -> GivenTokens:
        """Those of some positions."""
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
