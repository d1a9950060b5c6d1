"""The division of GPUs: it adds up, keeps its bounds, follows the claims, and rounds to whole ranks within the
budget.
"""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.time_sharing.planning.apportionment import Claimant, fill, whole_ranks


@st.composite
def divisions(draw: st.DrawFn) -> tuple[int, list[Claimant]]:
    claimants = []
    for number in range(draw(st.integers(1, 8))):
        rank, guaranteed, above = draw(st.sampled_from((1, 2, 4))), draw(st.integers(0, 3)), draw(st.integers(0, 20))
        claimants.append(
            Claimant(f"p{number}", draw(st.floats(0.01, 1000)), guaranteed * rank, (guaranteed + above) * rank, rank)
        )
    return draw(st.integers(1, 100)), claimants


@given(divisions())
def test_shares_add_up_to_the_budget_or_to_all_caps(division: tuple[int, list[Claimant]]) -> None:
    budget, claimants = division
    shares = fill(budget, claimants)
    wanted = min(budget, sum(c.maximum for c in claimants))
    assert math.isclose(sum(shares.values()), wanted, rel_tol=1e-6, abs_tol=1e-6)


@given(divisions())
def test_shares_keep_their_bounds_and_follow_the_claims_between_them(division: tuple[int, list[Claimant]]) -> None:
    budget, claimants = division
    shares = fill(budget, claimants)
    if sum(c.minimum for c in claimants) <= budget:
        assert all(c.minimum - 1e-6 <= shares[c.name] <= c.maximum + 1e-6 for c in claimants)
        levels = [shares[c.name] / c.claim for c in claimants if c.minimum + 1e-6 < shares[c.name] < c.maximum - 1e-6]
        assert not levels or math.isclose(min(levels), max(levels), rel_tol=1e-6)


@given(divisions())
def test_whole_ranks_stay_within_budget_and_one_rank_of_the_share(division: tuple[int, list[Claimant]]) -> None:
    budget, claimants = division
    shares = fill(budget, claimants)
    ranks = whole_ranks(budget, claimants, shares)
    assert sum(ranks[c.name] * c.rank_gpus for c in claimants) <= budget
    assert all(abs(ranks[c.name] - shares[c.name] / c.rank_gpus) < 1 + 1e-6 for c in claimants)


def test_a_tie_goes_to_the_earlier_claimant() -> None:
    claimants = [Claimant("a", 1.0, 0.0, 3.0, 1), Claimant("b", 1.0, 0.0, 3.0, 1)]
    assert whole_ranks(3, claimants, fill(3, claimants)) == {"a": 2, "b": 1}
