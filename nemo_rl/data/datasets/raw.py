"""A dataset before tokenization: rows with `messages` and `task_name`, and how they are to be prompted and processed.

This is what a user's dataset class derives from. Knows no tokenizer. Invariant: `dataset` and `val_dataset` share no
row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from nemo_rl.config import DatasetConfig
from nemo_rl.data.interfaces import DataError, TaskDataProcessFnCallable, TaskDataSpec
from nemo_rl.data.processors import get_processor
from nemo_rl.data.sources import require_column, require_values

if TYPE_CHECKING:
    from datasets import Dataset


class RawDataset:
    """Rows of one task. A subclass sets `dataset` and `task_name`, and may set `val_dataset` and `preprocessor`.

    Attributes:
        dataset: rows with `messages` and `task_name`; a Hugging Face dataset, or anything with a length and rows by
            index.
        val_dataset: rows kept for validation, None without.
        task_name: the name of the task in batches and metrics.
        task_spec: prompt and system prompt, once `set_task_spec` was called.
        processor: turns a row into a prompt, once `set_processor` was called.
        preprocessor: applied to a row before the processor; None for none.
    """

    dataset: Any
    val_dataset: object = None
    task_name: str
    task_spec: TaskDataSpec
    processor: TaskDataProcessFnCallable
    preprocessor: object = None

    def set_task_spec(self, config: DatasetConfig) -> None:
        """Reads the prompt files of the dataset's entry."""
        self.task_spec = TaskDataSpec(
            task_name=self.task_name, prompt_file=config.prompt_file, system_prompt_file=config.system_prompt_file
        )

    def set_processor(self, config: DatasetConfig) -> None:
        """Looks up the processor of the dataset's entry."""
        self.processor = get_processor(config.processor)

    def split_train_validation(self, size: float, seed: int) -> None:
        """Moves rows from `dataset` to `val_dataset`.

        Args:
            size: a share of the rows when below 1, otherwise how many; 0 moves none.
            seed: which rows.

        Raises:
            DataError: nothing would be left to train on, or no row would be moved.
        """
        if size == 0:
            return
        rows = len(self.dataset)
        held_out = round(size * rows) if size < 1 else int(size)
        if not 0 < held_out < rows:
            raise DataError(
                f"split_validation_size {size} of {self.task_name}: takes {held_out} of {rows} rows, which "
                "leaves nothing on one side"
            )
        parts = self.dataset.train_test_split(test_size=held_out, seed=seed)
        self.dataset, self.val_dataset = parts["train"], parts["test"]


Messages = list[dict[str, str]]
Row = dict[str, Any]


def with_conversations(rows: Dataset, task_name: str, convert: Callable[[Row], Messages]) -> Dataset:
    """Rows of any columns as rows of `messages` and `task_name`."""

    def converted(row: Row) -> Row:
        return {"messages": convert(row), "task_name": task_name}

    return cast("Dataset", rows.map(converted, remove_columns=rows.column_names))


def kept(rows: Dataset, condition: Callable[[Row], bool]) -> Dataset:
    """The rows for which the condition holds, asked row by row in order."""
    return cast("Dataset", rows.filter(condition, load_from_cache_file=False))


def as_messages(rows: Dataset, question: str, answer: str, task_name: str, key: str) -> Dataset:
    """Rows of two columns as rows of `messages` [user, assistant] and `task_name`.

    Raises:
        DataError: a column is missing.
    """
    require_column(rows, question, f"{key}.input_key")
    require_column(rows, answer, f"{key}.output_key")
    require_values(rows, question, f"{key}.input_key")
    require_values(rows, answer, f"{key}.output_key")
    return with_conversations(rows, task_name, lambda row: conversation(str(row[question]), str(row[answer])))


def conversation(question: str, answer: str) -> Messages:
    """One question and its answer as messages."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
