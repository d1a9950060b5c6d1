"""Packs a microbatch into one row of real tokens with sequence borders; scores a row that is cut over context-parallel
ranks; and turns the row's scores into loss, metrics and log-probabilities.

Padded, dynamic and packed microbatches differ only in which sequences share a row; no compute is spent on padding and
every mode computes the same numbers. A common prefix of neighbouring rows may be stored and computed once: the rest of
each row attends to it and to itself. Prefixes are found in the tokens alone. Invariants: results are scattered to the
tokens' places in the padded batch; a token attends to exactly the tokens of its own sequence, at the same positions, so
hidden states, scores and gradients are those of separate rows up to rounding; every token has one place in the row;
every rank of a replica has the scores of the whole row, and gradients flow into its own slice only, so that the sum
over ranks counts each token once.

Shapes: B sequences, S padded width, T tokens of the row (padding segment included) or of this rank's slice, N tokens of
all sequences, K keys of the row's segments, D hidden size, V vocabulary, W this rank's slice of it, k largest logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

from nemo_rl.config import SequencePackingConfig
from nemo_rl.data_plane.field_schema import TOPK_IDS
from nemo_rl.distributed import batch_sharding
from nemo_rl.distributed.devices import to_device
from nemo_rl.loss.interfaces import ComparesWithTeacher, GivenScores, LossFunction, LossInputType
from nemo_rl.models.policy.attention import Segments, SharedKeys
from nemo_rl.models.policy.router_replay import EXPERTS, Routes, packed_routes
from nemo_rl.models.policy.scoring import (
    COUNTS,
    GivenTokens,
    KeptTokens,
    LikelyTokens,
    LogitTransform,
    SamplingMaskError,
    TokenScores,
    chunk_size,
    copy_to_ranks,
    gather_logits,
    likely_tokens,
    packed_masks,
    score_tokens,
)
from nemo_rl.models.policy.train_step import MicrobatchResult, non_finite_rows
from nemo_rl.utils.flops import Work


class SharedRun(NamedTuple):
    """Rows `[first, end)` whose first `shared` tokens are stored once; single rows or 0 share none.

    The last common token is not shared, since what it predicts differs from row to row.
    """

    first: int
    end: int
    shared: int


def shared_runs(
    ids_BS: torch.Tensor, lengths: Sequence[int], apart: Sequence[int] = (), *, cuda: bool = False
) -> list[SharedRun]:
    """Cuts neighbouring rows into the runs that save most tokens.

    Args:
        apart: Rows that share nothing with the one before them, whatever their tokens.
        cuda: Whether the row is computed on a GPU.
    """
    least = batch_sharding.WORTHWHILE if cuda else min(batch_sharding.WORTHWHILE, batch_sharding.WORTHWHILE_ON_CPU)
    rows = len(lengths)
    common = _common_with_next(ids_BS, lengths) - 1 if rows > 1 else np.zeros(0)
    common[[row - 1 for row in apart]] = 0.0
    # No run goes on where neighbours have too little in common: what lies between such places is cut by itself.
    borders = [0, *(int(row) + 1 for row in np.flatnonzero(common < least)), rows]
    return [
        SharedRun(first + run.first, first + run.end, run.shared)
        for first, end in pairwise(borders)
        for run in _best_runs(common[first : end - 1])
    ]


def _best_runs(common: np.ndarray) -> list[SharedRun]:
    """The runs of rows that have `common` tokens to share with their next neighbours; one row more than numbers."""
    rows = len(common) + 1
    if rows == 1:
        return [SharedRun(0, 1, 0)]
    # saved[e]: the most that rows [0, e) can save; a run [f, e) saves its prefix for all rows but one.
    saved, begun = np.zeros(rows + 1), [0] * (rows + 1)
    shortest = np.zeros(rows)
    for end in range(1, rows + 1):
        if end > 1:
            shortest[end - 2] = np.inf
            np.minimum(shortest[: end - 1], common[end - 2], out=shortest[: end - 1])
        total = saved[:end] + shortest[:end] * np.arange(end - 1, -1, -1)
        # Of equal cuts the one with the shortest last run.
        begun[end] = end - 1 - int(total[::-1].argmax())
        saved[end] = total[begun[end]]
    borders = [rows]
    while borders[-1]:
        borders.append(begun[borders[-1]])
    return [
        SharedRun(first, end, int(common[first : end - 1].min()) if end - first > 1 else 0)
        for first, end in pairwise(reversed(borders))
    ]


def _common_with_next(ids_BS: torch.Tensor, lengths: Sequence[int]) -> np.ndarray:
    """Tokens that each row but the last has in common with the next one."""
    differs = ids_BS[1:] != ids_BS[:-1]
    first = torch.where(differs.any(dim=1), differs.int().argmax(dim=1), ids_BS.shape[1])
    real = torch.tensor(lengths)
    return torch.minimum(first, torch.minimum(real[1:], real[:-1])).numpy().astype(float)


@dataclass(frozen=True)
class SharedRow:
    """A packed row in which runs share their prefixes, without padding. `key_T`: place of each key, segment after
    segment: a prefix that is seen again, then the segment's own tokens.
    """

    source_T: torch.Tensor  # flat index into the padded [B, S] batch of the token at each place
    place_N: torch.Tensor  # place in the row of each token of each sequence, sequence after sequence
    lengths: list[int]
    key_K: torch.Tensor
    key_lengths: list[int]


def lay_out(runs: Sequence[SharedRun], lengths: Sequence[int], width: int) -> SharedRow:
    """The row of these runs."""
    source: list[torch.Tensor] = []
    place: list[torch.Tensor] = []
    keys: list[torch.Tensor] = []
    for start, row, begin, end, prefix in _segments(runs, lengths):
        own = torch.arange(start, start + end - begin)
        seen = torch.arange(prefix, prefix + begin)
        source.append(torch.arange(row * width + begin, row * width + end))
        keys.append(torch.cat([seen, own]))
        if end == lengths[row]:
            place.append(keys[-1])
    return SharedRow(
        torch.cat(source),
        torch.cat(place),
        [len(part) for part in source],
        torch.cat(keys),
        [len(part) for part in keys],
    )


class _Segment(NamedTuple):
    start: int
    row: int
    begin: int
    end: int
    prefix: int


def _segments(runs: Sequence[SharedRun], lengths: Sequence[int]) -> Iterator[_Segment]:
    """Yields each segment: its start in the row, its tokens `[begin, end)` of a row of the batch, and the start of the
    prefix that it sees (-1 without one).
    """
    start = 0
    for run in runs:
        prefix = start if run.shared else -1
        if run.shared:
            yield _Segment(start, run.first, 0, run.shared, -1)
            start += run.shared
        for row in range(run.first, run.end):
            if lengths[row]:
                yield _Segment(start, row, run.shared, lengths[row], prefix)
                start += lengths[row] - run.shared


@dataclass(frozen=True)
class PackedBatch:
    """One packed row.

    Attributes:
        target_ids_T: The token that follows inside the sequence; 0 at a sequence's last token and on padding.
        wanted_W: Positions of the row whose next token is trained, ascending; None where every position counts.
        place_N: Position in the row of each real token; None where sequences share nothing: they stand one after the
            other.
    """

    input_ids_T: torch.Tensor
    position_ids_T: torch.Tensor  # position of each token inside its sequence
    target_ids_T: torch.Tensor
    cu_seqlens: torch.Tensor  # borders of the segments, int32 [segments + 1], starting at 0 and ending at T
    max_seqlen: int  # most keys that a token may see: those of the longest sequence
    source_N: torch.Tensor  # flat index into the padded [B, S] batch of each real token of each sequence
    shape: tuple[int, int]  # (B, S) of the padded batch
    work: Work  # work of a pass over the row
    wanted_W: torch.Tensor | None = None
    place_N: torch.Tensor | None = None
    keys: SharedKeys | None = None  # what segments see besides themselves, where sequences share a prefix
    routes: Routes | None = None  # recorded router decisions of each token
    kept: KeptTokens | None = None  # recorded sets that each target was drawn from
    given: GivenTokens | None = None  # tokens to score after each position besides its target
    ends: tuple[int, ...] = ()  # where each sequence ends in the row; all tokens of those before it stand before that

    def unpack(self, values_T: torch.Tensor) -> torch.Tensor:
        """Differentiable scatter of per-token values [T, ...] to [B, S, ...], zero on padding."""
        batch, width = self.shape
        real = values_T[: self.source_N.numel()] if self.place_N is None else values_T[self.place_N]
        flat = values_T.new_zeros((batch * width, *values_T.shape[1:])).index_copy(0, self.source_N, real)
        return flat.view(batch, width, *values_T.shape[1:])


def row_round(packing: SequencePackingConfig, device: torch.device) -> int:
    """Multiple to which the length of a packed row is rounded up: on GPUs, where few distinct lengths fragment memory
    little and matrix products run best on even ones; else 1.
    """
    return packing.sequence_length_round if packing.enabled and device.type == "cuda" else 1


def pack(
    data: Mapping[str, torch.Tensor],
    device: torch.device,
    *,
    multiple: int = 1,
    trained_only: bool = False,
    share: bool = False,
    apart: Sequence[int] = (),
    loss_fn: LossFunction | None = None,
) -> PackedBatch:
    """Packs a right-padded microbatch.

    Args:
        data: `input_ids [B, S]` and `input_lengths [B]`.
        multiple: The row is padded to a multiple of this by a separate segment.
        trained_only: Score only positions whose next token `token_mask [B, S]` and `sample_mask [B]` keep: the output
            projection then skips prompts.
        share: Store a common prefix of neighbours once, as far as what is recorded of its tokens is the same.
        apart: Rows that share nothing with the one before them.
        loss_fn: Loss of the row; one that compares with a teacher has the tokens of `teacher_topk_ids [B, S, k]`
            scored.

    Raises RouterReplayError, SamplingMaskError: recorded routes or sampling masks do not fit the batch.
    """
    ids_BS, lengths_B = data["input_ids"].cpu(), data["input_lengths"].to(torch.long).cpu()
    batch, width = ids_BS.shape
    lengths = lengths_B.tolist()
    cuda = device.type == "cuda"
    single = [SharedRun(row, row + 1, 0) for row in range(batch)]
    runs = _runs(data, ids_BS, lengths, apart, cuda=cuda) if share else single
    row = lay_out(runs, lengths, width)
    shares = any(run.shared for run in runs)
    source_N = (torch.arange(width) < lengths_B[:, None]).reshape(-1).nonzero(as_tuple=True)[0]
    next_BS = torch.zeros_like(ids_BS)
    next_BS[:, :-1] = ids_BS[:, 1:]
    next_BS.masked_fill_(torch.arange(width) + 1 >= lengths_B[:, None], 0)
    padding = -len(row.source_T) % multiple
    extra = torch.zeros(padding, dtype=torch.long)
    own = [*row.lengths, *([padding] if padding else [])]
    seen = [*row.key_lengths, *([padding] if padding else [])]
    wanted = _trained_positions(data, source_N, row.place_N) if trained_only and "token_mask" in data else None
    routes = packed_routes(data, row.source_T, padding)
    kept = packed_masks(data, row.source_T, padding)
    return PackedBatch(
        to_device(torch.cat([ids_BS.reshape(-1)[row.source_T], extra]), device),
        to_device(torch.cat([row.source_T % width, torch.arange(padding)]), device),
        to_device(torch.cat([next_BS.reshape(-1)[row.source_T], extra]), device),
        to_device(_borders(own), device),
        max(seen, default=0),
        to_device(source_N, device),
        (batch, width),
        Work.of(row.lengths, row.key_lengths),
        None if wanted is None else to_device(wanted, device),
        to_device(row.place_N, device) if shares else None,
        SharedKeys(
            to_device(torch.cat([row.key_K, torch.arange(len(row.source_T), len(row.source_T) + padding)]), device),
            to_device(_borders(seen), device),
        )
        if shares
        else None,
        None
        if routes is None
        else Routes(*(to_device(part, device) for part in (routes.experts_TLK, routes.valid_T, routes.read_T))),
        None if kept is None else KeptTokens(to_device(kept.counts_T, device), to_device(kept.ids_M, device)),
        None if loss_fn is None or not compares(loss_fn) else _given(data, row.source_T, padding, device, loss_fn),
        _ends(row.place_N, lengths_B),
    )


def _runs(
    data: Mapping[str, torch.Tensor], ids_BS: torch.Tensor, lengths: list[int], apart: Sequence[int], *, cuda: bool
) -> list[SharedRun]:
    """Rows that share a prefix: nothing from the first token on that was recorded to be drawn from a set, since sets
    differ from sample to sample, and nothing at all with routes, which differ from the first token on.
    """
    if EXPERTS in data:
        return [SharedRun(row, row + 1, 0) for row in range(len(lengths))]
    if COUNTS not in data:
        return shared_runs(ids_BS, lengths, apart, cuda=cuda)
    drawn_BS = data[COUNTS].cpu() > 0
    first_B = torch.where(drawn_BS.any(dim=1), drawn_BS.int().argmax(dim=1), ids_BS.shape[1])
    return shared_runs(ids_BS, torch.minimum(torch.tensor(lengths), first_B).tolist(), apart, cuda=cuda)


def compares(loss_fn: LossFunction) -> bool:
    """Whether the loss compares with the distributions of a teacher."""
    return isinstance(loss_fn, ComparesWithTeacher) and loss_fn.compares_with_teacher


def _given(
    data: Mapping[str, torch.Tensor], source_T: torch.Tensor, padding: int, device: torch.device, loss_fn: LossFunction
) -> GivenTokens:
    ids_BSk = data[TOPK_IDS].cpu()
    ids_Tk = ids_BSk.reshape(-1, ids_BSk.shape[-1])[source_T].long()
    ids_Tk = torch.cat([ids_Tk, ids_Tk.new_zeros((padding, ids_Tk.shape[1]))])
    return GivenTokens(to_device(ids_Tk, device), isinstance(loss_fn, ComparesWithTeacher) and loss_fn.reads_rest)


def _ends(place_N: torch.Tensor, lengths_B: torch.Tensor) -> tuple[int, ...]:
    """The last token of a sequence is its own, and stands last; one without tokens ends where the one before does."""
    places_N = torch.cat([torch.tensor([-1]), place_N])
    return tuple((places_N[lengths_B.cumsum(0)] + 1).tolist())


def _borders(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _trained_positions(data: Mapping[str, torch.Tensor], source_N: torch.Tensor, place_N: torch.Tensor) -> torch.Tensor:
    trained_BS = (data["token_mask"].cpu() != 0) & (data["sample_mask"].cpu() != 0)[:, None]
    before_BS = torch.zeros_like(trained_BS)
    before_BS[:, :-1] = trained_BS[:, 1:]
    wanted = place_N[before_BS.reshape(-1)[source_N]].unique()
    # Every rank must run the output projection, whose backward pass is collective, even when it trains on nothing.
    return wanted if wanted.numel() else torch.zeros(1, dtype=torch.long)


def idle_microbatch() -> dict[str, torch.Tensor]:
    """A row of two tokens, for ranks that take part in collectives without work of their own."""
    return {"input_ids": torch.zeros((1, 2), dtype=torch.long), "input_lengths": torch.tensor([2])}


def wants_logits(loss_fn: LossFunction) -> bool:
    """Whether the loss reads whole logits instead of log-probabilities."""
    return loss_fn.input_type is LossInputType.LOGIT


def microbatch_loss(
    data: Mapping[str, torch.Tensor],
    loss_fn: LossFunction,
    batch: PackedBatch,
    output: TokenScores | LikelyTokens | torch.Tensor,
    *,
    filters: bool,
    device: torch.device,
) -> tuple[torch.Tensor, MicrobatchResult]:
    """The plain-sum loss of one microbatch, with gradient, and its metrics.

    Args:
        loss_fn: Called with both counts 1.
        output: Scores of the row, or its logits [T, V] if the loss wants those.
        filters: Whether the scores before and after generation's filters differ.
    """
    on_device = {
        key: to_device(value, device) if isinstance(value, torch.Tensor) else value for key, value in data.items()
    }
    if isinstance(output, LikelyTokens):
        raise TypeError("a loss takes scores or logits, not the most likely tokens")
    if isinstance(output, torch.Tensor):
        logits_BSV = batch.unpack(output)
        bad_rows_B = non_finite_rows(logits_BSV, on_device)
        loss, metrics = loss_fn(on_device, 1.0, 1.0, logits=logits_BSV)
    else:
        logprobs_BT = batch.unpack(output.logprobs_T)[:, :-1]
        # Over recorded sets no token is ruled out, and every estimate is of the same distribution.
        filters = filters and batch.kept is None
        unfiltered_BT = batch.unpack(output.unfiltered_T)[:, :-1] if filters else None
        bad_rows_B = non_finite_rows(logprobs_BT, on_device)
        given = None if output.given is None else output.given.map(lambda of: batch.unpack(of)[:, :-1])
        # A loss of the user's need not know the argument.
        scored: dict[str, GivenScores] = {} if given is None else {"given": given}
        loss, metrics = loss_fn(
            on_device,
            1.0,
            1.0,
            next_token_logprobs=logprobs_BT,
            next_token_logprobs_unfiltered=unfiltered_BT,
            **scored,
        )
    return loss, MicrobatchResult(
        {name: torch.as_tensor(value).detach() for name, value in metrics.items()}, bad_rows_B, batch.work
    )


def logprob_rows(data: Mapping[str, torch.Tensor], batch: PackedBatch, scores: TokenScores) -> torch.Tensor:
    """[B, S] log-probabilities on the host: of each token given those before it, position 0 and padding 0."""
    next_BS = batch.unpack(scores.logprobs_T).float()
    logprobs_BS = torch.cat([torch.zeros_like(next_BS[:, :1]), next_BS[:, :-1]], dim=1).cpu()
    # A sequence's last token predicts nothing of the sequence; its score would land on the first padding token.
    padding_BS = torch.arange(logprobs_BS.shape[1]) >= data["input_lengths"].cpu()[:, None]
    return logprobs_BS.masked_fill(padding_BS, 0.0)


def likely_rows(batch: PackedBatch, tokens: LikelyTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and token ids [B, S, k] of the most likely tokens after each position, on the host."""
    return batch.unpack(tokens.logprobs_Tk.float()).cpu(), batch.unpack(tokens.ids_Tk.int()).cpu()


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
        local_TW = F.linear(copy_to_ranks(hidden_TD, head.group), head.weight_WD, head.bias_W)
        raw_TV = gather_logits(local_TW, head.group)
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
