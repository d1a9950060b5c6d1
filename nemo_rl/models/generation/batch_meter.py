"""How many requests an engine runs at once at good speed, measured on the requests that it served.

With n requests at once a token of each takes `a (1 + n / h)` seconds: reading the weights costs the same for all of
them, their own attention comes on top. For the right `h` the time that each request had, counted at that pace, is in
proportion to its tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_SLOWER = 0.25
"""At good speed a token takes so much longer than one of a request that runs alone."""
_FEWEST, _NEWEST = 256, 1024
"""Requests that a figure is of, at least and at most."""
_SHORTEST = 16
"""Tokens that a request must have drawn: those of shorter ones say more of calls than of the engine."""
_TELLS = 1.5
"""The worst candidate must fit so many times worse than the best, or requests ran under too equal conditions."""
_CLOSE = 1.1
"""Candidates fit as well as the best one up to so many times its misfit; the smallest of them counts."""
_CANDIDATES = np.unique(np.geomspace(1, 1024, 41).astype(int))
"""Requests at once at good speed."""

Times = NDArray[np.float64]


@dataclass(slots=True)
class _Load:
    """Requests on one shard: how many run, and for each candidate the time until `at` that one of them had."""

    running: int = 0
    at: float = 0.0
    had_s: Times = field(default_factory=lambda: np.zeros(len(_CANDIDATES)))

    def change(self, now: float, by: int) -> Times:
        self.had_s = self.had_s + (now - self.at) / (1 + _SLOWER * self.running / _CANDIDATES)
        self.at, self.running = now, self.running + by
        return self.had_s


class BatchMeter:
    """Watches the requests of equal engines, on one thread; any thread may ask for the figure.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loads: dict[int, _Load] = {}
        self._seen: deque[Times] = deque(maxlen=_NEWEST)

    def begin(self, shard: int) -> Times:
        """A request goes to a shard. Returns what `end` needs to know of that moment."""
        now = self._clock()
        return self._loads.setdefault(shard, _Load(at=now)).change(now, 1)

    def end(self, shard: int, began: Times, tokens: int) -> None:
        """It ended there with so many new tokens; with a few it says nothing."""
        had_s = self._loads[shard].change(self._clock(), -1) - began
        if tokens >= _SHORTEST and had_s.min() > 0:
            self._seen.append(np.log(had_s / tokens))

    def good_batch(self) -> int | None:
        """Requests at once with which a token takes 1.25 times what it takes alone, from 1 to 1,024; None where too
        little was seen to tell.
        """
        if len(self._seen) < _FEWEST:
            return None
        paces = np.array(list(self._seen))
        # Medians, as a request may have stood still while its engine was refitted.
        misfit = np.median(np.abs(paces - np.median(paces, axis=0)), axis=0)
        if misfit.max() < _TELLS * misfit.min() or misfit.max() == 0:
            return None
        # Engines that are woken in vain cost less than samples that crowd on one of them.
        return int(_CANDIDATES[np.argmax(misfit <= _CLOSE * misfit.min())])
