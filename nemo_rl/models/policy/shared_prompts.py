"""Common prefixes of neighbouring rows in a microbatch, stored once in the packed row.

A prefix is computed once; the rest of each row attends to it and to itself. Prefixes are found in the tokens alone.
Invariants: a token attends to exactly the tokens of its own sequence, at the same positions, so hidden states, scores
and gradients are those of separate rows up to rounding; every token has one place in the row.

Shapes: B sequences, S padded width, T tokens of the row, N tokens of all sequences, K keys of the row's segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from nemo_rl.distributed import batch_sharding


class Run(NamedTuple):
    """Rows `[first, end)` whose first `shared` tokens are stored once; single rows or 0 share none.

    The last common token is not shared, since what it predicts differs from row to row.
    """

    first: int
    end: int
    shared: int


def shared_runs(
    ids_BS: torch.Tensor, lengths: Sequence[int], apart: Sequence[int] = (), *, cuda: bool = False
) -> list[Run]:
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
        Run(first + run.first, first + run.end, run.shared)
        for first, end in pairwise(borders)
        for run in _best_runs(common[first : end - 1])
    ]


def _best_runs(common: np.ndarray) -> list[Run]:
    """The runs of rows that have `common` tokens to share with their next neighbours; one row more than numbers."""
    rows = len(common) + 1
    if rows == 1:
        return [Run(0, 1, 0)]
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
        Run(first, end, int(common[first : end - 1].min()) if end - first > 1 else 0)
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


def lay_out(runs: Sequence[Run], lengths: Sequence[int], width: int) -> SharedRow:
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


def _segments(runs: Sequence[Run], lengths: Sequence[int]) -> Iterator[_Segment]:
    """Where each segment starts in the row, its tokens `[begin, end)` of a row of the batch, and where the prefix that
    it sees starts (-1 without one).
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
