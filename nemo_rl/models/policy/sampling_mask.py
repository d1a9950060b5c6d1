"""Replay of sampling masks: the vocabulary ids that a token was drawn from, as the generating engine recorded them.

The softmax of a token with a recorded set runs over that set, instead of over what the training engine's own logits
would keep. A token without one is normalised over the whole vocabulary. Invariant: a sampled token is in its own set.

Shapes: B rows, S tokens of a padded row, T places of a packed row or of some of them, M recorded ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from nemo_rl.data_plane.schema import SAMPLING_MASK_FIELDS

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


def has_masks(data: Mapping[str, object]) -> bool:
    """Whether a batch has recorded sets."""
    return COUNTS in data or IDS in data


def packed_masks(data: Mapping[str, torch.Tensor], source_T: torch.Tensor, padding: int) -> KeptTokens | None:
    """The sets of a packed row's targets on the host; None for a batch without.

    Args:
        source_T: Flat index into the padded [B, S] batch of the token at each place; its target is the next token.
        padding: Places after them that hold none.

    Raises SamplingMaskError: one of the two columns is missing, they do not fit each other or the batch, or a set does
    not contain the sampled token.
    """
    if not has_masks(data):
        return None
    if COUNTS not in data or IDS not in data:
        raise SamplingMaskError(f"a batch with sampling masks needs both columns {COUNTS} and {IDS}")
    counts_BS, ids_BS = data[COUNTS].cpu().long(), data["input_ids"].cpu()
    if counts_BS.shape != ids_BS.shape or (counts_BS.numel() and int(counts_BS.min()) < 0):
        raise SamplingMaskError(
            f"{COUNTS} {list(counts_BS.shape)}: expected counts of at least 0, {list(ids_BS.shape)} as input_ids"
        )
    ids_M = _flat_ids(data[IDS], counts_BS)
    _require_sampled_tokens(counts_BS, ids_M, ids_BS)
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
            f"row {row}, position {position}: the recorded set of {int(counts_BS[row, position])} ids does not contain "
            f"the sampled token {int(ids_BS[row, position])} ({len(missing)} such tokens): the mask belongs to another "
            "token or engine"
        )
