"""Groups rows with a common prefix, so that a microbatch computes it once.

Works on group numbers and token counts. Which tokens are shared is decided later from the tokens themselves
(`models/policy/shared_prompts.py`), so a wrong number here costs memory or time only. Invariants: every row is in one
bundle, a bundle's rows are of one group, and no bundle of several rows is above the cap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WORTHWHILE = 16
"""Tokens below which a prefix is not worth a segment of its own."""
WORTHWHILE_ON_CPU = 4
"""Likewise on a CPU, where a pass takes as long as its tokens; bundles of rows are not planned for less."""


@dataclass(frozen=True)
class SharedPrefixes:
    """What rows have in common."""

    group_of_row: Sequence[int]  # rows of one number begin with the same tokens
    tokens_of_row: Sequence[int]  # how many tokens a row shares with its group


@dataclass(frozen=True)
class Bundle:
    """Rows that go into the same microbatch, and the tokens that they take there."""

    rows: list[int]
    tokens: int


def bundles(
    rows: Sequence[int],
    lengths: Sequence[int],
    prefixes: SharedPrefixes,
    *,
    max_tokens: int,
    pad_multiple: int,
    at_least: int = 1,
) -> list[Bundle]:
    """Cuts rows into bundles, as few as the cap allows.

    Args:
        lengths: Tokens of every row there is.
        max_tokens: Most tokens of a bundle.
        pad_multiple: Prefixes and what follows them count as rounded up to a multiple of this.
        at_least: Bundles that are wanted; there are fewer only where every row has its own.

    Returns bundles in the order of their groups' first rows.
    """

    def bundle(members: list[int]) -> Bundle:
        return Bundle(members, _tokens(members, lengths, prefixes, pad_multiple))

    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(prefixes.group_of_row[row], []).append(row)
    found: list[Bundle] = []
    for members in groups.values():
        open_bundle = bundle(members[:1])
        for row in members[1:]:
            grown = bundle([*open_bundle.rows, row])
            if grown.tokens > max_tokens:
                found.append(open_bundle)
                grown = bundle([row])
            open_bundle = grown
        found.append(open_bundle)
    while len(found) < at_least and (at := _largest(found)) is not None:
        half = len(found[at].rows) // 2
        found[at : at + 1] = [bundle(found[at].rows[:half]), bundle(found[at].rows[half:])]
    return found


def _tokens(members: Sequence[int], lengths: Sequence[int], prefixes: SharedPrefixes, multiple: int) -> int:
    # A prefix's last token stays with each row: what follows it differs.
    prefix = min(prefixes.tokens_of_row[row] for row in members) - 1 if len(members) > 1 else 0
    prefix = prefix if prefix >= WORTHWHILE else 0
    parts = [prefix, *(lengths[row] - prefix for row in members)]
    return sum(math.ceil(part / multiple) * multiple for part in parts)


def _largest(found: Sequence[Bundle]) -> int | None:
    several = [index for index, one in enumerate(found) if len(one.rows) > 1]
    return max(several, key=lambda index: found[index].tokens, default=None)
