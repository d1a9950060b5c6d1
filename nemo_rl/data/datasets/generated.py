"""What datasets that are generated, not read, have in common: two disjoint splits, their own processor, and settings
that are checked.

Knows no task. Invariant: the same settings give the same rows in the same order, and no held-out problem is a training
problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from typing_extensions import override

from nemo_rl.config import DatasetConfig, Section
from nemo_rl.config.errors import did_you_mean
from nemo_rl.data.datasets.raw import RawDataset
from nemo_rl.data.errors import DataError
from nemo_rl.data.processors import get_processor

SPLITS = ("train", "validation")
_PROCESSOR_OF_MATH = "math_hf_data_processor"

Settings = TypeVar("Settings", bound=Section)
Problem = TypeVar("Problem")


class GeneratedDataset(RawDataset):
    """Rows with `messages`, `task_name` and `state`, judged by the environment of the same name as the dataset."""

    def __init__(self, rows: Sequence[dict[str, Any]], task_name: str) -> None:
        from datasets import Dataset

        self.task_name = task_name
        self.dataset = Dataset.from_list([{**row, "task_name": task_name} for row in rows])

    @override
    def set_processor(self, config: DatasetConfig) -> None:
        """The processor that carries `state`, unless the entry names another one than the default."""
        named = config.processor
        self.processor = get_processor("state_processor" if named in (_PROCESSOR_OF_MATH, "default") else named)


def split_of(config: DatasetConfig, key: str) -> str:
    """The split an entry asks for.

    Raises:
        DataError: there is no such split.
    """
    split = config.split or "train"
    if split not in SPLITS:
        raise DataError(
            f"{key}.split: {config.dataset_name} has no split {split!r}.{did_you_mean(split, SPLITS)} It has "
            f"{', '.join(SPLITS)}"
        )
    return split


def judged_by(environment: str, config: DatasetConfig, key: str) -> None:
    """Checks that the dataset's own environment judges it; another one would read its rows wrongly and reward nothing.

    Raises:
        DataError: another built-in environment is named.
    """
    if config.env_name == "math" and config.processor in (_PROCESSOR_OF_MATH, "default"):
        raise DataError(f"{key}.env_name: {config.dataset_name} is judged by env_name: {environment}, not by math")


def checked_settings(kind: type[Settings], config: DatasetConfig, key: str) -> Settings:
    """`task_config` as the generator's own section.

    Raises:
        DataError: with one line per mistake.
    """
    try:
        return kind.model_validate(config.task_config)
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False):
            name = ".".join(str(part) for part in problem["loc"])
            hint = did_you_mean(name, kind.model_fields) if problem["type"] == "extra_forbidden" else ""
            lines.append(f"{key}.task_config.{name}: {problem['msg'].lower()}.{hint}")
        raise DataError("\n".join(lines)) from error


def distinct_split(problems: Iterable[tuple[Problem, str]], config: DatasetConfig, key: str) -> list[Problem]:
    """The problems of the wanted split: the first `held_out` distinct ones are kept for validation, the next
    `num_problems` are for training.

    Args:
        problems: problems with their texts; equal texts are the same problem.
        config: the entry.
        key: its dotted key, for messages.

    Raises:
        DataError: there are too few distinct problems, or the split is empty.
    """
    wanted = config.held_out + config.num_problems
    seen: dict[str, Problem] = {}
    for problem, text in problems:
        seen.setdefault(text, problem)
        if len(seen) == wanted:
            break
    if len(seen) < wanted:
        raise DataError(
            f"{key}: {config.dataset_name} gives {len(seen)} distinct problems with these settings, too few "
            f"for num_problems {config.num_problems} and "
            f"held_out {config.held_out}; lower them or widen task_config"
        )
    rows = list(seen.values())
    chosen = rows[: config.held_out] if split_of(config, key) == "validation" else rows[config.held_out :]
    if not chosen:
        raise DataError(f"{key}: split validation of {config.dataset_name} is empty; held_out is {config.held_out}")
    return chosen
