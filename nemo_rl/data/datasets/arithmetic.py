"""Arithmetic problems made from nothing: `12+7=` with the answer `19`, distinct, seeded, and with a hold-out that
training never sees.

Decides which problems there are; needs no file and no network. Invariant: the same parameters give the same problems in
the same order, and no held-out problem is a training problem, not even with its operands swapped.
"""

from __future__ import annotations

import operator
import random
from dataclasses import dataclass

from nemo_rl.config import DatasetConfig
from nemo_rl.data.datasets.generated import split_of
from nemo_rl.data.datasets.raw import RawDataset, conversation
from nemo_rl.data.errors import DataError

_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_COMMUTES = ("+", "*")


@dataclass(frozen=True)
class Problem:
    """One problem; the answer is a whole number, negative where the subtraction is."""

    left: int
    sign: str
    right: int

    @property
    def question(self) -> str:
        """The text of the problem."""
        return f"{self.left}{self.sign}{self.right}="

    @property
    def answer(self) -> str:
        """The expected answer."""
        return str(_OPERATORS[self.sign](self.left, self.right))

    @property
    def mirrored(self) -> Problem:
        """The same sum or product with its operands swapped; itself where the order matters."""
        return Problem(self.right, self.sign, self.left) if self.sign in _COMMUTES else self


def arithmetic_problems(
    num_problems: int, held_out: int, max_operand: int, operators: tuple[str, ...], seed: int
) -> tuple[list[Problem], list[Problem]]:
    """Distinct training problems and distinct held-out problems.

    Args:
        num_problems: training problems.
        held_out: held-out problems.
        max_operand: operands are 0 to this.
        operators: among + - *.
        seed: which problems, and their order.

    Raises:
        DataError: an operator is unknown, or there are not so many distinct problems.
    """
    for sign in operators:
        if sign not in _OPERATORS:
            raise DataError(f"operators: {sign!r} is not one of {', '.join(_OPERATORS)}")
    universe = [
        Problem(a, sign, b)
        for sign in dict.fromkeys(operators)
        for a in range(max_operand + 1)
        for b in range(max_operand + 1)
    ]
    random.Random(seed).shuffle(universe)
    kept = universe[:held_out]
    taken = {*kept, *(problem.mirrored for problem in kept)}
    train = [problem for problem in universe[held_out:] if problem not in taken][:num_problems]
    if len(kept) < held_out or len(train) < num_problems:
        raise DataError(
            f"arithmetic: operands up to {max_operand} and operators {' '.join(operators)} give "
            f"{len(universe)} distinct problems, "
            f"too few for num_problems {num_problems} and held_out {held_out}; raise max_operand"
        )
    return train, kept


class _Slips:
    """Answers as a careless hand writes them: some with one more digit. A model that learns from them knows more than
    it shows.
    """

    def __init__(self, fraction: float, seed: int) -> None:
        self._fraction = fraction
        self._random = random.Random(f"slips {seed}")

    def written(self, answer: str) -> str:
        return f"{answer}{self._random.randrange(10)}" if self._random.random() < self._fraction else answer


class ArithmeticDataset(RawDataset):
    """`dataset_name: arithmetic`; split `train`, or `validation` for the held-out problems of the same parameters.

    With `slips`, that fraction of the training answers is wrong by a digit too many; held-out answers are always right.
    """

    def __init__(self, config: DatasetConfig, task_name: str, key: str = "data.train") -> None:
        from datasets import Dataset

        split = split_of(config, key)
        train, held_out = arithmetic_problems(
            config.num_problems, config.held_out, config.max_operand, tuple(config.operators), config.seed
        )
        problems = train if split == "train" else held_out
        slips = _Slips(config.slips if split == "train" else 0.0, config.seed)
        if not problems:
            raise DataError(f"arithmetic: split {split} is empty; held_out is {config.held_out}")
        self.task_name = task_name
        self.dataset = Dataset.from_dict(
            {
                "messages": [conversation(problem.question, slips.written(problem.answer)) for problem in problems],
                "task_name": [task_name] * len(problems),
            }
        )
