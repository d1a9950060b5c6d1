"""Decides which adapters share the next training pass. Pure: the clock is the caller's.

Round-robin by weight: every adapter has a virtual time that grows by its tokens over its weight when it is served, and
the one furthest behind is served first. A pass has a share of the adapters at most, so that the others generate
meanwhile. Invariants: an adapter that is ready is served after each other one was served at most once more than its
share; one that joins or comes back owes and gains nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class Ready:
    """Request of an adapter for a pass. `kind`: only requests of one kind share a pass."""

    adapter: str
    tokens: int
    since: float  # seconds
    kind: Hashable = None


class Turns:
    """The adapters of a job and their waiting requests.

    Args:
        budget: Tokens of a pass; None for any number. One request alone may be larger.
        wait_s: How long a request waits for others.
        share: Adapters of a pass, as a share of all, rounded up; above 0 and at most 1.
    """

    def __init__(self, budget: int | None, wait_s: float, share: float = 1.0) -> None:
        self._budget, self._wait_s, self._share = budget, wait_s, share
        self._weights: dict[str, float] = {}
        self._served: dict[str, float] = {}
        self._ready: dict[str, Ready] = {}

    def join(self, adapter: str, weight: float) -> None:
        """An adapter takes part."""
        self._weights[adapter] = weight
        self._served[adapter] = self._behind()

    def leave(self, adapter: str) -> Ready | None:
        """Removes an adapter; returns its waiting request."""
        self._weights.pop(adapter, None)
        self._served.pop(adapter, None)
        return self._ready.pop(adapter, None)

    def put(self, request: Ready) -> None:
        """An adapter waits. Raises KeyError: it does not take part; ValueError: it waits already."""
        if request.adapter not in self._weights:
            raise KeyError(request.adapter)
        if request.adapter in self._ready:
            raise ValueError(f"adapter {request.adapter} waits for a pass already")
        self._ready[request.adapter] = request
        # Adapters that were away while others were served do not catch up.
        self._served[request.adapter] = max(self._served[request.adapter], self._behind(but=request.adapter))

    def due(self, now: float) -> float | None:
        """Seconds until a pass should begin: 0 if one is due; None where nothing is ready."""
        if not self._ready:
            return None
        tokens = sum(request.tokens for request in self._ready.values())
        of_one_kind = max(Counter(request.kind for request in self._ready.values()).values())
        full = len(self._ready) == len(self._weights) or of_one_kind >= self._most()
        if full or (self._budget is not None and tokens >= self._budget):
            return 0.0
        oldest = min(request.since for request in self._ready.values())
        return max(0.0, oldest + self._wait_s - now)

    def take(self) -> list[Ready]:
        """The requests of the next pass, the adapter furthest behind first; they count as served."""
        order = sorted(self._ready.values(), key=lambda request: (self._served[request.adapter], request.since))
        chosen: list[Ready] = []
        tokens = 0
        for request in order:
            if len(chosen) == self._most():
                break
            if chosen and request.kind != chosen[0].kind:
                continue
            if chosen and self._budget is not None and tokens + request.tokens > self._budget:
                continue
            chosen.append(request)
            tokens += request.tokens
        for request in chosen:
            del self._ready[request.adapter]
            self._served[request.adapter] += request.tokens / self._weights[request.adapter]
        return chosen

    def _most(self) -> int:
        """Adapters of a pass, at most."""
        return max(1, math.ceil(self._share * len(self._weights)))

    def _behind(self, but: str | None = None) -> float:
        """Virtual time of the ready adapter that is furthest behind, or of all where none is ready."""
        ready = [self._served[name] for name in self._ready if name != but]
        others = ready or [served for name, served in self._served.items() if name != but]
        return min(others, default=0.0)
