"""Generated datasets: their common base, arithmetic problems, and the tasks of reasoning-gym
(https://github.com/open-thought/reasoning-gym).

They need no file and no network. A problem of reasoning-gym travels as a reference (task, settings, seed, index): the
environment makes the very problem again and lets the task judge. Invariants: the same settings give the same rows in
the same order; no held-out problem is a training problem, not even with its operands swapped.
"""

from __future__ import annotations

import functools
import json
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field, ValidationError
from typing_extensions import override

from nemo_rl.config import DatasetConfig, Section
from nemo_rl.config.errors import did_you_mean
from nemo_rl.data.conversations import Message
from nemo_rl.data.datasets.raw import RawDataset, conversation
from nemo_rl.data.interfaces import DataError, Row
from nemo_rl.data.processors import get_processor

if TYPE_CHECKING:
    from datasets import Dataset

SPLITS = ("train", "validation")
_PROCESSOR_OF_MATH = "math_hf_data_processor"
Settings = TypeVar("Settings", bound=Section)
Item = TypeVar("Item")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_COMMUTES = ("+", "*")
# Generators draw with replacement: so many draws per wanted problem before a task counts as exhausted.
_DRAWS_PER_PROBLEM = 8


class GeneratedDataset(RawDataset):
    """Rows with `messages`, `task_name` and `state`, judged by the environment of the same name as the dataset."""

    def __init__(self, rows: Sequence[Row], task_name: str) -> None:
        from datasets import Dataset

        self.task_name = task_name
        self.dataset = Dataset.from_list([{**row, "task_name": task_name} for row in rows])

    @override
    def set_processor(self, config: DatasetConfig) -> None:
        """Sets the processor that carries `state`, unless the entry names another one than the default."""
        named = config.processor
        self.processor = get_processor("state_processor" if named in (_PROCESSOR_OF_MATH, "default") else named)


def split_of(config: DatasetConfig, key: str) -> str:
    """The split an entry asks for. Raises DataError: there is no such split."""
    split = config.split or "train"
    if split not in SPLITS:
        raise DataError(
            f"{key}.split: {config.dataset_name} has no split {split!r}.{did_you_mean(split, SPLITS)} It has "
            f"{', '.join(SPLITS)}"
        )
    return split


def judged_by(environment: str, config: DatasetConfig, key: str) -> None:
    """Checks that the dataset's own environment judges it; another one would read its rows wrongly and reward nothing.
    Raises DataError: another built-in environment is named.
    """
    if config.env_name == "math" and config.processor in (_PROCESSOR_OF_MATH, "default"):
        raise DataError(
            f"{key}.env_name: {config.dataset_name} is judged by env_name: {environment}, not by math; a judge of your "
            "own is env_name: NAME with env.NAME.function or .class"
        )


def checked_settings(kind: type[Settings], config: DatasetConfig, key: str) -> Settings:
    """`task_config` as the generator's own section. Raises DataError: with one line per mistake."""
    try:
        return kind.model_validate(config.task_config)
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False):
            name = ".".join(str(part) for part in problem["loc"])
            hint = did_you_mean(name, kind.model_fields) if problem["type"] == "extra_forbidden" else ""
            lines.append(f"{key}.task_config.{name}: {problem['msg'].lower()}.{hint}")
        raise DataError("\n".join(lines)) from error


def distinct_split(problems: Iterable[tuple[Item, str]], config: DatasetConfig, key: str) -> list[Item]:
    """The problems of the wanted split: the first `held_out` distinct ones are kept for validation, the next
    `num_problems` are for training.

    Args:
        problems: problems with their texts; equal texts are the same problem.
        key: its dotted key, for messages.

    Raises DataError: there are too few distinct problems, or the split is empty.
    """
    wanted = config.held_out + config.num_problems
    seen: dict[str, Item] = {}
    for problem, text in problems:
        seen.setdefault(text, problem)
        if len(seen) == wanted:
            break
    if len(seen) < wanted:
        raise DataError(
            f"{key}: {config.dataset_name} gives {len(seen)} distinct problems with these settings, too few for "
            f"num_problems {config.num_problems} and held_out {config.held_out}; lower them or widen task_config"
        )
    rows = list(seen.values())
    chosen = rows[: config.held_out] if split_of(config, key) == "validation" else rows[config.held_out :]
    if not chosen:
        raise DataError(f"{key}: split validation of {config.dataset_name} is empty; held_out is {config.held_out}")
    return chosen


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


@functools.lru_cache(maxsize=4)
def arithmetic_problems(
    num_problems: int, held_out: int, max_operand: int, operators: tuple[str, ...], seed: int
) -> tuple[Sequence[Problem], Sequence[Problem]]:
    """Distinct training problems and distinct held-out problems; cached, since both splits need them. `max_operand`:
    operands are 0 to this. `seed`: which problems, and their order. Raises DataError: an operator is unknown, or there
    are not so many distinct problems.
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
            f"arithmetic: operands up to {max_operand} and operators {' '.join(operators)} give {len(universe)} "
            f"distinct problems, too few for num_problems {num_problems} and held_out {held_out}; raise max_operand"
        )
    return tuple(train), tuple(kept)


def _with_slips(problems: Iterable[tuple[str, str]], config: DatasetConfig, task_name: str, split: str) -> Dataset:
    """Rows of questions and answers. Those to train on are as a careless hand writes them: a fraction `slips` has one
    more digit, so that a model that learns from them knows more than it shows.
    """
    from datasets import Dataset

    slips, draw = config.slips if split == "train" else 0.0, random.Random(f"slips {config.seed}")
    messages = [
        conversation(question, f"{answer}{draw.randrange(10)}" if draw.random() < slips else answer)
        for question, answer in problems
    ]
    return Dataset.from_dict({"messages": messages, "task_name": [task_name] * len(messages)})


class ArithmeticDataset(RawDataset):
    """Sums such as `7+5=`; split `train`, or `validation` for the held-out problems of the same parameters.

    With `slips`, that fraction of the training answers is wrong by a digit too many; held-out answers are always right.
    """

    def __init__(self, config: DatasetConfig, task_name: str, key: str = "data.train") -> None:
        split = split_of(config, key)
        train, held_out = arithmetic_problems(
            config.num_problems, config.held_out, config.max_operand, tuple(config.operators), config.seed
        )
        problems = train if split == "train" else held_out
        if not problems:
            raise DataError(f"arithmetic: split {split} is empty; held_out is {config.held_out}")
        self.task_name = task_name
        self.dataset = _with_slips(((each.question, each.answer) for each in problems), config, task_name, split)


class DigitsConfig(Section):
    """`task_config` of the dataset `digits`."""

    digits: int = Field(4, ge=2, le=12, description="Digits of a problem.")


_DIGIT_TASKS: dict[str, tuple[str, Callable[[str], str]]] = {
    "reverse": ("rev", lambda digits: digits[::-1]),
    "sort": ("sort", lambda digits: "".join(sorted(digits))),
}


class DigitsDataset(RawDataset):
    """Digits from 1 to 9 to reverse, `rev5173=`, or to sort, `sort5173=`, by `task`; splits and `slips` as `arithmetic`
    has them.
    """

    def __init__(self, config: DatasetConfig, task_name: str, key: str = "data.train") -> None:
        if config.task not in _DIGIT_TASKS:
            raise DataError(f"{key}.task: digits has no task {config.task!r}; it has {', '.join(_DIGIT_TASKS)}")
        word, solve = _DIGIT_TASKS[config.task]
        count, draw = checked_settings(DigitsConfig, config, key).digits, random.Random(config.seed)
        draws = _DRAWS_PER_PROBLEM * (config.held_out + config.num_problems)
        drawn = ("".join(draw.choices("123456789", k=count)) for _ in range(draws))
        texts = distinct_split(((digits, digits) for digits in drawn), config, key)
        problems = ((f"{word}{text}=", solve(text)) for text in texts)
        self.task_name = task_name
        self.dataset = _with_slips(problems, config, task_name, split_of(config, key))


@dataclass(frozen=True)
class ProblemReference:
    """One problem of one task."""

    task: str  # reasoning-gym's name of the task
    settings: str  # the task's settings, as JSON
    seed: int
    size: int  # the generator's number of problems, which some tasks make their problems from
    index: int

    def score(self, answer: str) -> float:
        """Score of the task's verifier for the answer, 0 to 1."""
        dataset = _generator(self.task, self.settings, self.seed, self.size)
        return dataset.score_answer(answer, entry=_entry(self))

    def state(self) -> str:
        """The reference as JSON."""
        return json.dumps(asdict(self))


class ReasoningGymDataset(GeneratedDataset):
    """Problems of a task of reasoning-gym, each judged by its own verifier. Raises DataError: reasoning-gym is not
    installed, the task or a setting does not exist, or there are too few distinct problems.
    """

    def __init__(self, config: DatasetConfig, task_name: str, key: str = "data.train") -> None:
        judged_by("reasoning_gym", config, key)
        task = _known_task(config.task, key)
        references = distinct_split(_problems(task, config, key), config, key)
        entries = [_entry(reference) for reference in references]
        rows = [
            {"messages": _asked(entry), "state": reference.state()}
            for entry, reference in zip(entries, references, strict=True)
        ]
        super().__init__(rows, f"{task_name}_{task}" if task_name == config.dataset_name else task_name)


def _asked(entry: Mapping[str, object]) -> list[Message]:
    """Question and answer; some tasks have no answer to show, as many are right, and only a verifier."""
    asked = conversation(str(entry["question"]), str(entry["answer"]))
    return asked[:1] if entry["answer"] is None else asked


def _known_task(task: str | None, key: str) -> str:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError(
            f"{key}.dataset_name: reasoning_gym needs the package reasoning-gym ({error}); pip install 'nemo-rl[tasks]'"
        ) from error
    if task is None:
        raise DataError(f"{key}.task: reasoning_gym needs the name of a task; there are {', '.join(sorted(DATASETS))}")
    if task not in DATASETS:
        raise DataError(
            f"{key}.task: reasoning_gym has no task {task!r}.{did_you_mean(task, DATASETS)} There are "
            f"{', '.join(sorted(DATASETS))}"
        )
    return task


def _problems(task: str, config: DatasetConfig, key: str) -> Iterator[tuple[ProblemReference, str]]:
    settings = json.dumps(config.task_config, sort_keys=True)
    size = (config.num_problems + config.held_out) * _DRAWS_PER_PROBLEM
    try:
        dataset = _generator(task, settings, config.seed, size)
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"{key}.task_config: task {task} refuses {settings}: {error}") from error
    for index in range(size):
        yield ProblemReference(task, settings, config.seed, size, index), str(dataset[index]["question"])


@functools.lru_cache(maxsize=64)
def _generator(task: str, settings: str, seed: int, size: int) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, seed=seed, size=size, **json.loads(settings))


@functools.lru_cache(maxsize=65536)
def _entry(reference: ProblemReference) -> dict[str, object]:
    return _generator(reference.task, reference.settings, reference.seed, reference.size)[reference.index]
