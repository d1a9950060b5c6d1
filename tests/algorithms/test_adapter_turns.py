"""Which adapters share a training pass: budgets, deadlines, weights, and that none starves."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.utils.adapter_turns import Ready, Turns


def _turns(budget: int | None, wait_s: float, share: float = 1.0, **weights: float) -> Turns:
    turns = Turns(budget, wait_s, share)
    for name, weight in weights.items():
        turns.join(name, weight)
    return turns


def _order(turns: Turns, passes: int = 6) -> list[str]:
    """Who has passes of one adapter each, where each is ready again at once."""
    order = []
    for _ in range(passes):
        (request,) = turns.take()
        order.append(request.adapter)
        turns.put(Ready(request.adapter, request.tokens, 0.0))
    return order


def test_a_pass_begins_when_all_are_ready_or_the_oldest_has_waited_or_the_budget_is_reached() -> None:
    turns = _turns(100, 2.0, a=1, b=1, c=1)
    assert turns.due(0.0) is None
    turns.put(Ready("a", 30, 10.0))
    assert turns.due(10.5) == 1.5 and turns.due(12.5) == 0.0
    turns.put(Ready("b", 70, 10.6))
    assert turns.due(10.6) == 0.0
    assert [request.adapter for request in turns.take()] == ["a", "b"]
    turns.put(Ready("c", 5, 11.0))
    assert turns.due(11.0) == 2.0
    turns.leave("a")
    turns.leave("b")
    assert turns.due(11.0) == 0.0


def test_a_request_larger_than_the_budget_has_a_pass_of_its_own() -> None:
    turns = _turns(10, 0.0, a=1, b=1)
    turns.put(Ready("a", 50, 0.0))
    turns.put(Ready("b", 2, 0.1))
    assert [request.adapter for request in turns.take()] == ["a"]
    assert [request.adapter for request in turns.take()] == ["b"]


def test_requests_of_another_kind_wait_for_the_next_pass() -> None:
    turns = _turns(None, 0.0, a=1, b=1, c=1)
    for name, kind in (("a", "train"), ("b", "scores"), ("c", "train")):
        turns.put(Ready(name, 1, 0.0, kind))
    assert [request.adapter for request in turns.take()] == ["a", "c"]
    assert [request.adapter for request in turns.take()] == ["b"]


def test_a_pass_has_its_share_of_the_adapters_and_waits_for_no_more() -> None:
    turns = _turns(None, 9.0, 0.5, a=1, b=1, c=1)
    turns.put(Ready("a", 1, 0.0, "train"))
    turns.put(Ready("b", 1, 0.1, "scores"))
    assert turns.due(0.1) == pytest.approx(8.9), "two of three may share a pass, and these two cannot"
    turns.put(Ready("c", 1, 0.2, "train"))
    assert turns.due(0.2) == 0.0
    assert [request.adapter for request in turns.take()] == ["a", "c"]
    turns.put(Ready("a", 1, 0.3, "scores"))
    turns.put(Ready("c", 1, 0.3, "scores"))
    assert [request.adapter for request in turns.take()] == ["b", "a"], "the third generates meanwhile"
    turns.leave("a")
    turns.leave("b")
    assert turns.due(0.3) == 0.0, "one alone waits for nobody"


def test_two_adapters_alternate_between_training_and_generating() -> None:
    turns = _turns(None, 0.5, 0.5, a=1, b=1)
    turns.put(Ready("a", 7, 0.0))
    turns.put(Ready("b", 7, 0.0))
    assert _order(turns) == ["a", "b"] * 3


def test_an_adapter_waits_for_one_thing_at_a_time_and_only_while_it_takes_part() -> None:
    turns = _turns(None, 0.0, a=1)
    turns.put(Ready("a", 1, 0.0))
    with pytest.raises(ValueError, match="waits for a pass already"):
        turns.put(Ready("a", 1, 0.0))
    with pytest.raises(KeyError):
        turns.put(Ready("b", 1, 0.0))
    assert turns.leave("a") == Ready("a", 1, 0.0) and turns.leave("a") is None


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=6),
    seed=st.integers(0, 1000),
    budget=st.integers(8, 40),
    share=st.sampled_from([0.1, 0.5, 1.0]),
)
def test_adapters_that_are_always_ready_share_by_weight_and_none_starves(
    weights: list[float], seed: int, budget: int, share: float
) -> None:
    draw = random.Random(seed)
    names = [f"adapter{number}" for number in range(len(weights))]
    turns = _turns(budget, 0.0, share, **dict(zip(names, weights, strict=True)))
    served = dict.fromkeys(names, 0)
    for name in names:
        turns.put(Ready(name, draw.randint(1, 8), 0.0))
    for now in range(600):
        taken = turns.take()
        assert taken and sum(request.tokens for request in taken) <= max(budget, taken[0].tokens)
        for request in taken:
            served[request.adapter] += request.tokens
            turns.put(Ready(request.adapter, draw.randint(1, 8), float(now)))
    # The adapter with the least weight is behind by no more than what passes left over for the others.
    shares = {name: served[name] / weight for name, weight in zip(names, weights, strict=True)}
    least = min(shares.values())
    heaviest = max(names, key=lambda name: weights[names.index(name)])
    assert least > 0 and shares[heaviest] <= least * 1.1 + 80


def test_an_adapter_that_was_away_does_not_catch_up() -> None:
    turns = _turns(1, 0.0, a=1, b=1)
    for _ in range(50):
        turns.put(Ready("a", 1, 0.0))
        turns.take()
    turns.put(Ready("a", 1, 0.0))
    turns.put(Ready("b", 1, 0.0))
    order = _order(turns)
    assert order.count("a") == 3 and order.count("b") == 3
