"""Estimators against counting every choice of k answers."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.algorithms.estimators import consensus_at_k, majority_at_k, pass_at_k, solved_at_k

drawn = st.lists(st.sampled_from(["4", "5", "7", "11", None]), min_size=1, max_size=7)


def vote(answers: tuple[str | None, ...]) -> float:
    counts = Counter(answers)
    leaders = [answer for answer, count in counts.items() if count == max(counts.values())]
    return leaders.count("4") / len(leaders)


@given(drawn, st.data())
def test_majority_is_the_mean_vote_over_all_choices(answers: list[str | None], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    chosen = list(combinations(answers, k))
    want = sum(vote(choice) for choice in chosen) / len(chosen)
    assert majority_at_k(answers, [answer == "4" for answer in answers], k) == pytest.approx(want)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_solved_and_pass_are_the_share_of_choices_with_a_right_answer(right: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(right)))
    chosen = list(combinations(right, k))
    want = pytest.approx(sum(any(choice) for choice in chosen) / len(chosen))
    assert solved_at_k(sum(right), len(right), k) == want
    assert pass_at_k([float(one) for one in right], k) == want


def test_several_texts_may_be_right() -> None:
    assert majority_at_k(["1/2", "0.5", "3"], [True, True, False], 1) == pytest.approx(2 / 3)


@pytest.mark.parametrize(("right", "n", "k"), [(0, 1, 2), (2, 1, 1), (0, 1, 0)])
def test_impossible_counts_are_refused(right: int, n: int, k: int) -> None:
    with pytest.raises(ValueError, match="solved@"):
        solved_at_k(right, n, k)


def test_consensus_needs_k_answers() -> None:
    with pytest.raises(ValueError, match="cons@3 needs at least 3 answers"):
        consensus_at_k(["1"], [1.0], 3)
    with pytest.raises(ValueError, match="majority@3 needs at least 3 answers"):
        majority_at_k(["1"], [True], 3)
    with pytest.raises(ValueError, match="pass@3 needs at least 3 answers"):
        pass_at_k([1.0], 3)


@given(
    st.lists(st.tuples(st.sampled_from(["4", "5", None]), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=7),
    st.data(),
)
def test_consensus_takes_the_first_of_equally_common_answers(
    drawn: list[tuple[str | None, float]], data: st.DataObject
) -> None:
    answers, rewards = [answer for answer, _ in drawn], [reward for _, reward in drawn]
    k = data.draw(st.integers(1, len(drawn)))
    right = [rewards[answers.index(Counter(choice).most_common(1)[0][0])] == 1.0 for choice in combinations(answers, k)]
    assert consensus_at_k(answers, rewards, k) == pytest.approx(sum(right) / len(right))


@pytest.mark.parametrize(
    ("rewards", "k", "value"),
    [
        # The sum of the rewards is the number of right answers, and a part of one is a factor of the product.
        ([0.5, 0.5], 1, 0.5),
        ([0.5, 0.0], 1, 1 - (1 - 1 / 2.5)),
        ([0.5], 1, 1.0),
        ([0.25] * 4, 2, 1 - (1 - 2 / 4)),
        ([0.75, 0.75, 0.0, 0.0], 2, 1 - (1 - 2 / 3.5) * (1 - 2 / 4.5)),
        ([1.0, 0.9], 2, 1.0),
        ([0.0, 0.0], 2, 0.0),
    ],
)
def test_pass_counts_the_sum_of_rewards(rewards: list[float], k: int, value: float) -> None:
    assert pass_at_k(rewards, k) == pytest.approx(value)
    assert solved_at_k(sum(reward >= 1 for reward in rewards), len(rewards), k) <= pass_at_k(rewards, k)


def test_a_consensus_of_many_answers_is_counted_in_time() -> None:
    answers = [str(number % 9) for number in range(64)]
    assert 0 < consensus_at_k(answers, [float(answer == "3") for answer in answers], 32) < 1


def test_a_score_of_parts_says_what_is_right() -> None:
    from nemo_rl.algorithms.evaluation import about_parts

    line = about_parts("pass@1", [[0.1], [1.0], [0.0], [0.1]], 1)
    assert line is not None and "2 answers earned another than 0 or 1" in line and line.endswith("is 0.2500")
    assert about_parts("pass@1", [[1.0], [0.0]], 1) is None
    assert about_parts("solved@1", [[0.1], [1.0]], 1) is None
