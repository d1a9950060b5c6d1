"""Packs a microbatch into one row of real tokens with sequence borders; and turns the row's scores into loss, metrics
and log-probabilities.

Padded, dynamic and packed microbatches differ only in which sequences share a row; no compute is spent on padding and
every mode computes the same numbers. Neighbours with a common prefix may share it. Invariant: results are scattered to
the tokens' places in the padded batch.

Shapes: B sequences, S padded width, T tokens of the row (padding segment included), V vocabulary, k largest logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from nemo_rl.config import SequencePackingConfig
from nemo_rl.data_plane.schema import TOPK_IDS
from nemo_rl.distributed.devices import to_device
from nemo_rl.loss.interfaces import ComparesWithTeacher, GivenScores, LossFunction, LossInputType
from nemo_rl.models.policy.attention import SharedKeys
from nemo_rl.models.policy.router_replay import EXPERTS, Routes, packed_routes
from nemo_rl.models.policy.sampling_mask import COUNTS, KeptTokens, packed_masks
from nemo_rl.models.policy.scoring import TokenScores
from nemo_rl.models.policy.shared_prompts import Run, lay_out, shared_runs
from nemo_rl.models.policy.topk import GivenTokens, LikelyTokens
from nemo_rl.models.policy.train_step import MicrobatchResult, non_finite_rows
from nemo_rl.utils.flops import Work


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
    work: Work  # what a pass over the row computes
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
    """What the length of a packed row is rounded up to a multiple of: on GPUs, where few lengths make for little
    fragmented memory and matrix products like even ones.
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
        loss_fn: What the row is for; a loss that compares with a teacher has the tokens of `teacher_topk_ids [B, S, k]`
            scored.

    Raises RouterReplayError, SamplingMaskError: recorded routes or sampling masks do not fit the batch.
    """
    ids_BS, lengths_B = data["input_ids"].cpu(), data["input_lengths"].to(torch.long).cpu()
    batch, width = ids_BS.shape
    lengths = lengths_B.tolist()
    cuda = device.type == "cuda"
    runs = _runs(data, ids_BS, lengths, apart, cuda=cuda) if share else [Run(row, row + 1, 0) for row in range(batch)]
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
) -> list[Run]:
    """Rows that share a prefix: nothing from the first token on that was recorded to be drawn from a set, since sets
    differ from sample to sample, and nothing at all with routes, which differ from the first token on.
    """
    if EXPERTS in data:
        return [Run(row, row + 1, 0) for row in range(len(lengths))]
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
