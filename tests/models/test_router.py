"""The router chooses active shards only and its ledger balance; seeds follow a request's place in the run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from nemo_rl.models.generation.interfaces import VALIDATION_STEP_OFFSET, request_seed
from nemo_rl.models.generation.vllm.dispatch import NoActiveShardError, Router

SHARDS = 4


class RoutedWork(RuleBasedStateMachine):
    """Ledger, finishes and resizes in any order."""

    bookings = Bundle("bookings")

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(SHARDS)
        self.open: dict[int, list[int]] = {shard: [] for shard in range(SHARDS)}

    @rule(shards=st.sets(st.integers(0, SHARDS - 1)))
    def resize(self, shards: set[int]) -> None:
        before, active = self.router.generation, self.router.active
        assert self.router.set_active(shards) == before + (shards != active)

    @rule(target=bookings, tokens=st.integers(0, 500))
    def book(self, tokens: int) -> tuple[int, int] | None:
        if not self.router.active:
            with pytest.raises(NoActiveShardError):
                self.router.reserve(tokens)
            return None
        shard = self.router.reserve(tokens)
        assert shard in self.router.active
        self.open[shard].append(tokens)
        return shard, tokens

    @rule(booking=consumes(bookings))
    def finish(self, booking: tuple[int, int] | None) -> None:
        if booking is not None:
            self.router.finish(*booking)
            self.open[booking[0]].remove(booking[1])

    @invariant()
    def books_balance(self) -> None:
        for shard, tokens in self.open.items():
            assert self.router.outstanding(shard) == sum(tokens)
            assert self.router.requests(shard) == len(tokens)


TestRoutedWork = RoutedWork.TestCase


def test_work_goes_where_least_is_outstanding() -> None:
    router = Router(3)
    assert [router.reserve(tokens) for tokens in (10, 4, 7, 1)] == [0, 1, 2, 1]


def test_round_robin_skips_what_is_not_active() -> None:
    router = Router(3, "round_robin")
    router.set_active({0, 2})
    assert [router.reserve(1) for _ in range(4)] == [0, 2, 0, 2]


def test_finishing_what_was_not_booked_is_refused() -> None:
    router = Router(1)
    with pytest.raises(ValueError, match="0 were booked"):
        router.finish(0, 1)
    with pytest.raises(ValueError, match=r"shards \[3\] do not exist"):
        router.set_active({0, 3})


@given(st.lists(st.tuples(*[st.integers(0, 50)] * 4), min_size=2, max_size=40, unique=True))
def test_every_request_of_a_run_has_a_seed_of_its_own(places: list[tuple[int, int, int, int]]) -> None:
    seeds = [request_seed(42, *place) for place in places]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seeds == [request_seed(42, *place) for place in places]


def test_validation_shares_no_seed_with_training_and_runs_differ() -> None:
    assert request_seed(42, 0, 0, 0) != request_seed(42, VALIDATION_STEP_OFFSET, 0, 0)
    assert request_seed(42, 0, 0, 0) != request_seed(43, 0, 0, 0)
    # A recorded value: another one would change every run that was ever started with a seed.
    assert request_seed(42, 3, 5, 7, 1) == 192671927
