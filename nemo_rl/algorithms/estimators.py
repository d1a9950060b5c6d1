"""What k of n answers to a problem are worth, as the mean over all choices of k: `pass@k` and `cons@k` are NeMo-RL's
numbers, `solved@k` and `majority@k` take a partial reward for wrong and share a tie.

Pure functions of one problem. Where every reward is 0 or 1, `pass@k` and `solved@k` are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb, prod


def pass_at_k(rewards: Sequence[float], k: int) -> float:
    """Chance that at least one of k answers is right (Chen et al. 2021, https://arxiv.org/abs/2107.03374, equation 1),
    with the sum of the rewards as the number of right answers, as NeMo-RL has it. Raises ValueError: k exceeds n.

    Args:
        rewards: of the n answers drawn.
        k: answers looked at.

    >>> pass_at_k([1.0, 0.0, 0.0, 0.0], 2)
    0.5
    """
    drawn, right = len(rewards), float(sum(rewards))
    if not 0 < k <= drawn:
        raise ValueError(f"pass@{k} needs at least {k} answers; there are {drawn}")
    wrong = drawn - right
    if wrong < k:
        return 1.0
    # As many factors as there are right answers, a part of one counting as one.
    factors = (wrong + number for number in range(1, drawn + 1) if wrong + number < drawn + 1)
    return 1.0 - prod(1.0 - k / factor for factor in factors)


def consensus_at_k(answers: Sequence[str | None], rewards: Sequence[float], k: int) -> float:
    """Chance that the commonest of k answers is right, of equally common ones the one that comes first (NeMo-RL's
    `cons@k`; self-consistency, https://arxiv.org/abs/2203.11171).

    An answer that could not be read (None) votes as any other. An answer is right when the first response that gave it
    has a reward of exactly 1. Raises ValueError: k exceeds n, or the lengths differ.

    Args:
        answers: what was read from each of n responses, in their order.
        rewards: of the responses.
        k: answers that vote.

    >>> consensus_at_k(["4", "5"], [1.0, 0.0], 2)
    1.0
    """
    _check_votes("cons", answers, rewards, k)
    places: dict[str | None, list[int]] = {}
    for place, answer in enumerate(answers):
        places.setdefault(answer, []).append(place)
    right = [answer for answer, of_answer in places.items() if rewards[of_answer[0]] == 1.0]
    return sum(_leads(places, answer, k) for answer in right) / comb(len(answers), k)


def _leads(places: dict[str | None, list[int]], winner: str | None, k: int) -> int:
    """Choices of k answers in which `winner` is the commonest, and before the others that are as common."""
    others = [of_answer for answer, of_answer in places.items() if answer != winner]
    own, total = places[winner], 0
    for at, first in enumerate(own):
        # Its first vote is the one at `first`; the others of its votes come later.
        behind = len(own) - at - 1
        for votes in range(1, min(behind + 1, k) + 1):
            ways = [1] + [0] * (k - votes)
            for of_other in others:
                # As many votes are allowed where the first of them comes later.
                late = sum(place > first for place in of_other)
                choices = [comb(len(of_other), number) for number in range(votes)] + [comb(late, votes)]
                ways = [
                    sum(ways[taken - number] * count for number, count in enumerate(choices[: taken + 1]))
                    for taken in range(k - votes + 1)
                ]
            total += comb(behind, votes - 1) * ways[k - votes]
    return total


def _check_votes(name: str, answers: Sequence[object], verdicts: Sequence[object], k: int) -> None:
    if len(answers) != len(verdicts) or not 0 < k <= len(answers):
        raise ValueError(
            f"{name}@{k} needs at least {k} answers, each judged; there are {len(answers)} with {len(verdicts)} "
            "verdicts"
        )


def solved_at_k(right: int, drawn: int, k: int) -> float:
    """Chance that at least one of k answers has the full reward (Chen et al. 2021, https://arxiv.org/abs/2107.03374,
    equation 1). Raises ValueError: k exceeds n, or more answers are right than were drawn.

    Args:
        right: right answers among those drawn.
        drawn: answers drawn, n.
        k: answers looked at.

    >>> solved_at_k(1, 4, 2)
    0.5
    """
    if not 0 < k <= drawn or not 0 <= right <= drawn:
        raise ValueError(
            f"solved@{k} needs at least {k} answers of which at most all are right; there are {drawn} with {right} "
            "right"
        )
    return 1.0 - comb(drawn - right, k) / comb(drawn, k)


def majority_at_k(answers: Sequence[str | None], right: Sequence[bool], k: int) -> float:
    """Chance that the commonest of k answers is right, whatever the order of the responses.

    Answers that could not be read (None) count as one wrong answer. A tie counts by the share of right answers among
    the commonest. Two texts are the same vote when they are equal; an answer is right when every answer with its text
    was judged right. Raises ValueError: k exceeds n, or the lengths differ.

    Args:
        answers: what was read from each of n responses.
        right: whether each response was judged right.
        k: answers that vote.

    >>> majority_at_k(["4", "4", "5"], [True, True, False], 3)
    1.0
    """
    _check_votes("majority", answers, right, k)
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
