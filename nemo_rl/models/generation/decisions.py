"""Decisions of generation besides tokens, which training replays: the experts of every token, and the tokens that
filters left to draw from.

Pure values and how pieces of them join. Invariants: a position has the routes of the computation that its next token
was drawn with, however often it is computed again; what is not known is marked and 0.

Shapes: S positions, L layers with experts, K experts of a token, R sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def route_dtype(experts: int) -> np.dtype[Any]:
    """The narrowest type of routes that torch can index with: uint8 up to 256 experts, else int16."""
    return np.dtype(np.uint8 if experts <= 256 else np.int16)


@dataclass(frozen=True, eq=False)
class TokenRoutes:
    """Experts of the positions `[start, start + S)` of a sequence."""

    start: int
    experts: Array  # [S, L, K]; 0 where unknown
    valid: NDArray[np.bool_]  # [S], whether they are known

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.start + len(self.valid)

    def until(self, end: int) -> TokenRoutes:
        """The same without positions from `end` on."""
        count = max(0, end - self.start)
        return replace(self, experts=self.experts[:count], valid=self.valid[:count])


@dataclass(frozen=True, eq=False)
class SamplingMasks:
    """Of which tokens each of R sampled tokens was drawn."""

    counts: NDArray[np.int32]  # [R]; 0 where nothing was cut off
    ids: NDArray[np.int32]  # [sum of counts], ascending in each position

    @staticmethod
    def of(kept: Sequence[Array | None]) -> SamplingMasks:
        """From the ids of each position; None where nothing was cut off."""
        some = [ids for ids in kept if ids is not None]
        return SamplingMasks(
            np.array([0 if ids is None else len(ids) for ids in kept], dtype=np.int32),
            np.concatenate(some).astype(np.int32) if some else np.zeros(0, np.int32),
        )

    def first(self, count: int) -> SamplingMasks:
        """Masks of the first `count` tokens."""
        counts = self.counts[:count]
        return SamplingMasks(counts, self.ids[: int(counts.sum())])

    def then(self, later: SamplingMasks) -> SamplingMasks:
        """These, and those of the tokens that follow."""
        return SamplingMasks(np.concatenate([self.counts, later.counts]), np.concatenate([self.ids, later.ids]))


NO_MASKS = SamplingMasks(np.zeros(0, np.int32), np.zeros(0, np.int32))


class RouteRecord:
    """Routes of one sequence as they become known, from position 0 on."""

    def __init__(self) -> None:
        self._experts: Array | None = None
        self._valid: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._end = 0

    def known_until(self, start: int = 0) -> int:
        """The first position from `start` on whose routes are not known."""
        unknown = np.flatnonzero(~self._valid[start : self._end])
        return start + int(unknown[0]) if len(unknown) else max(start, self._end)

    def add(self, routes: TokenRoutes) -> None:
        """Takes the routes of positions that were not known. Raises ValueError: they are of another number of layers or
        of experts per token than those before.
        """
        if not len(routes.valid):
            return
        held = self._held(routes)
        span = slice(routes.start, routes.end)
        new = routes.valid & ~self._valid[span]
        held[span][new] = routes.experts[new]
        self._valid[span] |= new
        self._end = max(self._end, routes.end)

    def correct(self, position: int, routes: TokenRoutes) -> None:
        """Takes the routes of a position also where others were known: its next token was drawn once more."""
        at = position - routes.start
        if self._experts is not None and routes.valid[at]:
            self._experts[position] = routes.experts[at]

    def _held(self, routes: TokenRoutes) -> Array:
        """The array, large enough for further routes."""
        shape = routes.experts.shape[1:]
        held = self._experts if self._experts is not None else np.zeros((0, *shape), routes.experts.dtype)
        if held.shape[1:] != shape:
            raise ValueError(
                f"positions {routes.start} to {routes.end} have routes of {shape[0]} layers x {shape[1]} experts, the "
                f"positions before {held.shape[1]} x {held.shape[2]}"
            )
        if len(held) < routes.end:
            room = max(routes.end, 2 * len(held), 16) - len(held)
            held = np.concatenate([held, np.zeros((room, *shape), held.dtype)])
            self._valid = np.concatenate([self._valid, np.zeros(room, np.bool_)])
        self._experts = held
        return held

    def since(self, start: int, end: int | None = None) -> TokenRoutes | None:
        """The routes of the positions from `start` on, up to the last one that was added, or to `end`, unknown where
        they were not. None before anything was added.
        """
        if self._experts is None:
            return None
        end = self._end if end is None else end
        missing = max(0, end - len(self._valid))
        experts, valid = self._experts[start:end], self._valid[start:end]
        if missing:
            experts = np.concatenate([experts, np.zeros((missing, *experts.shape[1:]), experts.dtype)])
            valid = np.concatenate([valid, np.zeros(missing, np.bool_)])
        return TokenRoutes(start, experts.copy(), valid.copy())
