"""The batch at good speed that is measured on requests, against engines whose speed is known."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.models.generation.vllm.dispatch import BatchMeter, Times


class Served:
    """Requests on shards in which n of them take `alone + each * n` seconds per token of each."""

    def __init__(self, alone: float, each: float, shards: int = 1, noise: Callable[[], float] = lambda: 1.0) -> None:
        self.now = 0.0
        self.meter = BatchMeter(lambda: self.now)
        self._alone, self._each, self._begun = alone, each, 0
        self._drawn, self._noise = [0.0] * shards, noise
        self._running: list[list[tuple[float, int, int, Times]]] = [[] for _ in range(shards)]

    def begin(self, shard: int, tokens: int) -> None:
        self._begun += 1
        request = (self._drawn[shard] + tokens, self._begun, tokens, self.meter.begin(shard))
        heapq.heappush(self._running[shard], request)

    def until_empty(self) -> None:
        while any(self._running):
            left_s, shard = min(
                ((requests[0][0] - self._drawn[shard]) * self._pace(shard), shard)
                for shard, requests in enumerate(self._running)
                if requests
            )
            for other, requests in enumerate(self._running):
                self._drawn[other] += left_s / self._pace(other) if requests else 0.0
            self.now += left_s
            _, _, tokens, began = heapq.heappop(self._running[shard])
            self.meter.end(shard, began, round(tokens * self._noise()))

    def _pace(self, shard: int) -> float:
        return self._alone + self._each * len(self._running[shard])


@pytest.mark.slow
@given(
    alone=st.floats(0.001, 0.1),
    good=st.integers(1, 300),
    shards=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30, deadline=None)
def test_the_batch_that_costs_a_quarter_is_found(alone: float, good: int, shards: int, seed: int) -> None:
    rng = random.Random(seed)
    served = Served(alone, alone / (4 * good), shards)
    for shard in range(shards):
        for _ in range(300):
            served.begin(shard, rng.randint(20, 600))
    served.until_empty()
    assert served.meter.good_batch() == pytest.approx(good, rel=0.2, abs=1.5)


@pytest.mark.parametrize("seed", range(4))
def test_noise_makes_the_batch_smaller_rather_than_larger(seed: int) -> None:
    rng = random.Random(seed)
    served = Served(0.01, 0.01 / (4 * 64), noise=lambda: rng.lognormvariate(0.0, 0.1))
    for _ in range(512):
        served.begin(0, rng.randint(20, 1200))
    served.until_empty()
    found = served.meter.good_batch()
    assert found is not None and 16 <= found <= 76


def test_requests_that_stood_still_for_a_while_change_little() -> None:
    served, rng = Served(0.01, 0.01 / 64), random.Random(1)
    for _ in range(300):
        served.begin(0, rng.randint(20, 600))
    served.until_empty()
    for _ in range(20):
        began = served.meter.begin(0)
        served.now += 1000.0
        served.meter.end(0, began, 100)
    assert served.meter.good_batch() == pytest.approx(16, abs=4)


def test_what_tells_nothing_is_no_figure() -> None:
    few = Served(0.01, 0.001)
    for _ in range(255):
        few.begin(0, 100)
    few.until_empty()
    assert few.meter.good_batch() is None
    equal = Served(0.01, 0.001)
    for _ in range(300):
        equal.begin(0, 100)
    equal.until_empty()
    assert equal.meter.good_batch() is None, "all ran beside equally many"
    free, rng = Served(0.01, 0.0), random.Random(0)
    for _ in range(300):
        free.begin(0, rng.randint(20, 600))
    free.until_empty()
    assert free.meter.good_batch() == 1024, "more requests cost nothing"
    failed = BatchMeter()
    for _ in range(300):
        failed.end(0, failed.begin(0), 15)
    assert failed.good_batch() is None
