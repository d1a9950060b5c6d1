"""Unbiased estimates of pass@k and cons@k from n >= k answers per problem.

Both are means over all choices of k answers out of the n that were drawn, computed exactly by counting. Pure; knows
answers as text and right or wrong. Invariant: the value depends on how often each answer was given, not on its order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb


def pass_at_k(right: int, drawn: int, k: int) -> float:
    """Chance that at least one of k answers is right (Chen et al. 2021, https://arxiv.org/abs/2107.03374, equation 1).

    Args:
        right: right answers among those drawn.
        drawn: answers drawn, n.
        k: answers looked at.

    Raises:
        ValueError: k exceeds n, or more answers are right than were drawn.

    >>> pass_at_k(1, 4, 2)
    0.5
    """
    if not 0 < k <= drawn or not 0 <= right <= drawn:
        raise ValueError(
            f"pass@{k} needs at least {k} answers of which at most all are right; there are {drawn} with {right} right"
        )
    return 1.0 - comb(drawn - right, k) / comb(drawn, k)


def consensus_at_k(answers: Sequence[str | None], right: Sequence[bool], k: int) -> float:
    """Chance that the commonest of k answers is right (self-consistency, https://arxiv.org/abs/2203.11171).

    Answers that could not be read (None) count as one wrong answer. A tie counts by the share of right answers among
    the commonest. Two texts are the same vote when they are equal; an answer is right when every answer with its text
    was judged right.

    Args:
        answers: what was read from each of n responses.
        right: whether each response was judged right.
        k: answers that vote.

    Raises:
        ValueError: k exceeds n, or the lengths differ.

    >>> consensus_at_k(["4", "4", "5"], [True, True, False], 3)
    1.0
    """
    if len(answers) != len(right) or not 0 < k <= len(answers):
        raise ValueError(
            f"cons@{k} needs at least {k} answers, each judged; there are {len(answers)} with {len(right)} verdicts"
        )
    counts = Counter(answers)
    judged_wrong = {answer for answer, is_right in zip(answers, right, strict=True) if not is_right}
    winners = [answer for answer in counts if answer is not None and answer not in judged_wrong]
    favourable = sum(_wins(counts, winner, k) for winner in winners)
    return favourable / comb(len(answers), k)


def _wins(counts: Counter[str | None], winner: str, k: int) -> float:
    """Choices of k answers in which `winner` is the commonest; one in which it shares that place with t others counts 1
    / (t + 1).
    """
    others = [count for answer, count in counts.items() if answer != winner]
    total = 0.0
    for votes in range(1, min(counts[winner], k) + 1):
        ways = _ways_to_stay_behind(others, k - votes, votes)
        total += comb(counts[winner], votes) * sum(number / (ties + 1) for ties, number in enumerate(ways))
    return total


def _ways_to_stay_behind(others: Sequence[int], left: int, most: int) -> list[int]:
    """Ways to take `left` answers of the others with at most `most` of each, by how many of them reach `most`."""
    # ways[taken][ties]
    ways = [[0] * (len(others) + 1) for _ in range(left + 1)]
    ways[0][0] = 1
    for count in others:
        following = [[0] * (len(others) + 1) for _ in range(left + 1)]
        for taken, by_ties in enumerate(ways):
            for ties, number in enumerate(by_ties):
                if not number:
                    continue
                for more in range(min(count, most, left - taken) + 1):
                    following[taken + more][ties + (more == most)] += number * comb(count, more)
        ways = following
    return ways[left]
