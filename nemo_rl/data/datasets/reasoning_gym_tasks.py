"""Problems of reasoning-gym (https://github.com/open-thought/reasoning-gym), any of its tasks, with its own verifiers.

A problem travels as a reference (task, settings, seed, index): the environment makes the very problem again and lets
the task judge, so that nothing is lost on the way. Invariant: a reference stands for the same problem everywhere.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from nemo_rl.config import DatasetConfig
from nemo_rl.config.errors import did_you_mean
from nemo_rl.data.datasets.generated import GeneratedDataset, distinct_split, judged_by
from nemo_rl.data.datasets.raw import conversation
from nemo_rl.data.errors import DataError

# Generators draw with replacement: so many draws per wanted problem before a task counts as exhausted.
_DRAWS_PER_PROBLEM = 8


@dataclass(frozen=True)
class ProblemReference:
    """One problem of one task.

    Attributes:
        task: reasoning-gym's name of the task.
        settings: the task's settings, as JSON.
        seed: the generator's seed.
        size: the generator's number of problems, which some tasks make their problems from.
        index: which problem.
    """

    task: str
    settings: str
    seed: int
    size: int
    index: int

    def score(self, answer: str) -> float:
        """What the task's verifier gives the answer, 0 to 1."""
        dataset = _generator(self.task, self.settings, self.seed, self.size)
        return dataset.score_answer(answer, entry=_entry(self))

    def state(self) -> str:
        """The reference as JSON."""
        return json.dumps(asdict(self))


class ReasoningGymDataset(GeneratedDataset):
    """`dataset_name: reasoning_gym` with `task` and `task_config`.

    Raises:
        DataError: reasoning-gym is not installed, the task or a setting does not exist, or there are too few distinct
            problems.
    """

    def __init__(self, config: DatasetConfig, task_name: str, key: str = "data.train") -> None:
        judged_by("reasoning_gym", config, key)
        task = _known_task(config.task, key)
        references = distinct_split(_problems(task, config, key), config, key)
        entries = [_entry(reference) for reference in references]
        rows = [
            {"messages": conversation(str(entry["question"]), str(entry["answer"])), "state": reference.state()}
            for entry, reference in zip(entries, references, strict=True)
        ]
        super().__init__(rows, f"{task_name}_{task}" if task_name == config.dataset_name else task_name)


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
