"""pass@k and cons@k against counting every choice of k answers."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.algorithms.evaluation import consensus_at_k, pass_at_k

drawn = st.lists(st.sampled_from(["4", "5", "7", "11", None]), min_size=1, max_size=7)


def vote(answers: tuple[str | None, ...]) -> float:
    counts = Counter(answers)
    leaders = [answer for answer, count in counts.items() if count == max(counts.values())]
    return leaders.count("4") / len(leaders)


@given(drawn, st.data())
def test_consensus_is_the_mean_vote_over_all_choices(answers: list[str | None], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    chosen = list(combinations(answers, k))
    want = sum(vote(choice) for choice in chosen) / len(chosen)
    assert consensus_at_k(answers, [answer == "4" for answer in answers], k) == pytest.approx(want)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_is_the_share_of_choices_with_a_right_answer(right: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(right)))
    chosen = list(combinations(right, k))
    assert pass_at_k(sum(right), len(right), k) == pytest.approx(sum(any(choice) for choice in chosen) / len(chosen))


def test_several_texts_may_be_right() -> None:
    assert consensus_at_k(["1/2", "0.5", "3"], [True, True, False], 1) == pytest.approx(2 / 3)


@pytest.mark.parametrize(("right", "n", "k"), [(0, 1, 2), (2, 1, 1), (0, 1, 0)])
def test_impossible_counts_are_refused(right: int, n: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(right, n, k)


def test_consensus_needs_k_answers() -> None:
    with pytest.raises(ValueError, match="cons@3 needs at least 3 answers"):
        consensus_at_k(["1"], [True], 3)
