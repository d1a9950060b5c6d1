"""Scores of a packed row whose tokens are cut over context-parallel ranks.

Each rank scores one contiguous slice; here the slices are joined. Invariant: every rank of a replica has the scores of
the whole row, and gradients flow into its own slice only, so that the sum over ranks counts each token once.

Shapes: T tokens of the row or of this rank's slice, D hidden size, W this rank's slice of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from nemo_rl.models.policy.attention import Segments
from nemo_rl.models.policy.collectives import copy_to_ranks, gather_logits
from nemo_rl.models.policy.logits import LogitTransform
from nemo_rl.models.policy.packed import PackedBatch
from nemo_rl.models.policy.sampling_mask import SamplingMaskError
from nemo_rl.models.policy.scoring import TokenScores, chunk_size, local_logits, score_tokens
from nemo_rl.models.policy.topk import LikelyTokens, likely_tokens


@dataclass(frozen=True)
class RowSlice:
    """This rank's place among those that share a row."""

    group: dist.ProcessGroup | None = None  # they, or None where there is one
    rank: int = 0  # this rank's number among them
    ranks: int = 1

    def mine(self, batch: PackedBatch) -> slice:
        """This rank's tokens of the row."""
        tokens = batch.input_ids_T.shape[0] // self.ranks
        return slice(tokens * self.rank, tokens * (self.rank + 1))

    def segments(self, batch: PackedBatch) -> Segments:
        """The row's sequence borders, for attention."""
        return Segments(batch.cu_seqlens, batch.max_seqlen, self.group, self.mine(batch).start, batch.keys)

    def wanted(self, batch: PackedBatch) -> torch.Tensor | None:
        """Wanted positions inside this rank's slice of the row."""
        if batch.wanted_W is None or self.group is None:
            return batch.wanted_W
        mine = self.mine(batch)
        local = batch.wanted_W - mine.start
        local = local[(local >= 0) & (local < mine.stop - mine.start)]
        return local if local.numel() else local.new_zeros(1)

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """Every slice of the row; only this rank's carries a gradient."""
        if self.group is None:
            return local
        parts = [torch.empty_like(local) for _ in range(self.ranks)]
        dist.all_gather(parts, local.detach().contiguous(), group=self.group)
        parts[self.rank] = local
        return torch.cat(parts)


RowOutput = TokenScores | LikelyTokens | torch.Tensor
"""What a pass over a row gives: scores of tokens, the most likely tokens, or logits [T, V]."""


@dataclass(frozen=True)
class Projection:
    """The output projection as this rank holds it."""

    weight_WD: torch.Tensor  # its rows for this rank's part of the vocabulary
    bias_W: torch.Tensor | None = None  # its bias, or None
    group: dist.ProcessGroup | None = None  # ranks that share the vocabulary, or None
    chunk: int | None = None  # tokens whose logits exist at a time; None chooses


def score_row(
    hidden_TD: torch.Tensor,
    head: Projection,
    batch: PackedBatch,
    transform: LogitTransform,
    cut: RowSlice,
    *,
    logits: bool = False,
    likely: int = 0,
) -> RowOutput:
    """Scores of the row's targets, and of the batch's given tokens if it has any.

    Args:
        hidden_TD: Final hidden states of this rank's slice, the same on every rank that shares the vocabulary.
        cut: How the row is cut over ranks.
        logits: Whether the transformed logits [T, V] are wanted instead.
        likely: How many of the most likely tokens of each position are wanted instead; 0 for none.
    """
    if logits:
        if batch.kept is not None:
            raise SamplingMaskError("sampling masks apply to log-probabilities; a loss of whole logits takes none")
        raw_TV = gather_logits(
            local_logits(copy_to_ranks(hidden_TD, head.group), head.weight_WD, head.bias_W), head.group
        )
        return cut.whole(transform.model_logits(raw_TV))
    if likely:
        size = chunk_size(head.weight_WD.shape[0], head.chunk)
        tokens = likely_tokens(hidden_TD, head.weight_WD, head.bias_W, likely, transform, chunk=size, group=head.group)
        return LikelyTokens(cut.whole(tokens.logprobs_Tk), cut.whole(tokens.ids_Tk))
    target_T, wanted = batch.target_ids_T[cut.mine(batch)], cut.wanted(batch)
    kept = None if batch.kept is None else batch.kept.at(cut.mine(batch))
    given = None if batch.given is None else batch.given.at(cut.mine(batch))
    if wanted is not None:
        hidden_TD, target_T = hidden_TD[wanted], target_T[wanted]
        kept = None if kept is None else kept.at(wanted)
        given = None if given is None else given.at(wanted)
    scores = score_tokens(
        hidden_TD,
        head.weight_WD,
        head.bias_W,
        target_T,
        transform,
        given=given,
        chunk=head.chunk,
        group=head.group,
        kept=kept,
    )
    logprobs_T = cut.whole(_placed(scores.logprobs_T, wanted, batch, cut))
    same = scores.unfiltered_T is scores.logprobs_T
    unfiltered_T = logprobs_T if same else cut.whole(_placed(scores.unfiltered_T, wanted, batch, cut))
    whole = None if scores.given is None else scores.given.map(lambda of: cut.whole(_placed(of, wanted, batch, cut)))
    return TokenScores(logprobs_T, unfiltered_T, whole)


def _placed(scores: torch.Tensor, wanted: torch.Tensor | None, batch: PackedBatch, cut: RowSlice) -> torch.Tensor:
    """Scores at their positions of the (slice of the) row, zero elsewhere."""
    if wanted is None:
        return scores
    mine = cut.mine(batch)
    return scores.new_zeros((mine.stop - mine.start, *scores.shape[1:])).index_copy(0, wanted, scores)
