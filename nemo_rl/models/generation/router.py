"""Chooses the shard of the next request.

A plain class without clocks or actors: the active set of data-parallel shards with a generation number, and each
shard's outstanding work. Choosing and booking are one step. Invariant: outstanding work is never negative, and only
active shards are chosen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from nemo_rl.config.errors import UserError

RouterPolicy = Literal["least_outstanding_tokens", "round_robin"]


class NoActiveShardError(UserError, RuntimeError):
    """No shard takes requests at present."""


class Router:
    """Books requests on active shards. `shards`: number of data-parallel shards; all are active at first. `policy`:
    `least_outstanding_tokens` or `round_robin`.
    """

    def __init__(self, shards: int, policy: RouterPolicy = "least_outstanding_tokens") -> None:
        if policy not in ("least_outstanding_tokens", "round_robin"):
            raise ValueError(f"policy.generation.router={policy!r}: choose least_outstanding_tokens or round_robin")
        self._policy = policy
        self._outstanding = dict.fromkeys(range(shards), 0)
        self._requests = dict.fromkeys(range(shards), 0)
        self._active = set(range(shards))
        self._closed: set[int] = set()
        self._next = 0
        self.generation = 0

    @property
    def active(self) -> frozenset[int]:
        """Shards that take requests."""
        return frozenset(self._active)

    def outstanding(self, shard: int) -> int:
        """Token budget booked on a shard and not yet finished."""
        return self._outstanding[shard]

    def requests(self, shard: int) -> int:
        """Requests booked on a shard and not yet finished."""
        return self._requests[shard]

    def set_active(self, shards: Iterable[int]) -> int:
        """Replaces the active set, without closed shards; the new generation number. Raises ValueError: a shard does
        not exist.
        """
        wanted = set(shards)
        unknown = wanted - set(self._outstanding)
        if unknown:
            raise ValueError(f"shards {sorted(unknown)} do not exist; there are {len(self._outstanding)}")
        wanted -= self._closed
        if wanted != self._active:
            self._active = wanted
            self.generation += 1
        return self.generation

    def close(self, shards: Iterable[int]) -> int:
        """Shards leave the active set and stay out of it until `reopen`; the new generation number."""
        self._closed |= set(shards)
        return self.set_active(self._active)

    def reopen(self, shards: Iterable[int]) -> None:
        """`set_active` may name these shards again."""
        self._closed -= set(shards)

    def reserve(self, tokens: int) -> int:
        """Chooses an active shard and reserves `tokens` of work on it. Raises NoActiveShardError: the active set is
        empty.
        """
        if not self._active:
            raise NoActiveShardError("no shard is active")
        if self._policy == "round_robin":
            ordered = sorted(self._active)
            shard = next((s for s in ordered if s >= self._next), ordered[0])
            self._next = shard + 1
        else:
            shard = min(self._active, key=lambda s: (self._outstanding[s], self._requests[s], s))
        self._outstanding[shard] += tokens
        self._requests[shard] += 1
        return shard

    def finish(self, shard: int, tokens: int) -> None:
        """Takes finished (or failed) work off a shard. Raises ValueError: more is finished than was booked."""
        if self._requests[shard] < 1 or self._outstanding[shard] < tokens:
            raise ValueError(f"shard {shard}: {tokens} tokens finished, {self._outstanding[shard]} were booked")
        self._outstanding[shard] -= tokens
        self._requests[shard] -= 1
