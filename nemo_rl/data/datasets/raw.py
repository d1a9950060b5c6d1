"""Rows as they are found, and what a dataset makes of them: messages, a processor, a validation split.

Rows are read from JSONL, parquet, arrow and CSV files, directories saved by `save_to_disk`, and the Hugging Face hub.
Decides how a path is read and what is said when it cannot be; what the columns mean is the single datasets' business.
Invariant: what is read has at least one row.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nemo_rl.config import DatasetConfig
from nemo_rl.config.errors import did_you_mean
from nemo_rl.data.interfaces import DataError, TaskDataProcessFnCallable, TaskDataSpec
from nemo_rl.data.processors import get_processor

if TYPE_CHECKING:
    from datasets import Dataset

_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}


def read_rows(
    location: str,
    *,
    split: str | None = None,
    subset: str | None = None,
    cache_dir: str | None = None,
    key: str = "data",
) -> Dataset:
    """The rows at a location.

    Args:
        location: a file, a directory, or an id on the Hugging Face hub.
        split: split to read; None takes `train`, or the only one there is.
        subset: configuration of a hub dataset.
        cache_dir: where downloads go.
        key: dotted key of the dataset, for messages.

    Raises:
        DataError: nothing is there, it cannot be read, has no such split, or is empty.
    """
    path = Path(location).expanduser()
    if path.is_file():
        rows = _from_file(path, key)
    elif path.is_dir():
        rows = _from_directory(path, split, key)
    elif _looks_like_a_path(location):
        raise DataError(f"{key}: there is nothing at {path.absolute()}")
    else:
        rows = _from_hub(location, subset, split, cache_dir, key)
    if len(rows) == 0:
        raise DataError(f"{key}: {location} is empty")
    return rows


def require_column(rows: Dataset, column: str, key: str) -> None:
    """Raises DataError, with the nearest name, when `rows` has no such column."""
    if column not in rows.column_names:
        raise DataError(
            f"{key}: there is no column {column!r}.{did_you_mean(column, rows.column_names)} It has "
            f"{', '.join(rows.column_names)}"
        )


def require_values(rows: Dataset, column: str, key: str) -> None:
    """Raises DataError when some rows have no value in a column, as happens when rows of different kinds lie in one
    file.
    """
    values = rows.data.column(column)
    if not values.null_count:
        return
    empty = [index for index, missing in enumerate(values.is_null().to_pylist()) if missing]
    shown = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
    raise DataError(
        f"{key}: {len(empty)} of {len(rows)} rows have nothing in column {column!r} (rows {shown}, from 0); "
        "the data mixes rows of different columns "
        f"({', '.join(rows.column_names)}). Keep one kind of row per dataset"
    )


def _looks_like_a_path(location: str) -> bool:
    return location.startswith((".", "/", "~")) or Path(location).suffix in _FORMATS or location.count("/") > 1


def _from_file(path: Path, key: str) -> Dataset:
    import datasets

    kind = _FORMATS.get(path.suffix)
    if kind is None:
        raise DataError(f"{key}: {path} is none of {', '.join(_FORMATS)}")
    if path.stat().st_size == 0:
        raise DataError(f"{key}: {path} is empty")
    try:
        return datasets.load_dataset(kind, data_files=str(path), split="train")
    except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:
        raise DataError(f"{key}: {path} cannot be read as {kind}: {_root_cause(error)}") from error


def _from_directory(path: Path, split: str | None, key: str) -> Dataset:
    import datasets

    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(str(path))
    except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:
        raise DataError(f"{key}: the directory {path} cannot be read as a dataset: {_root_cause(error)}") from error
    if isinstance(loaded, datasets.Dataset):
        return loaded
    splits = [str(name) for name in loaded]
    wanted = split or ("train" if "train" in splits or len(splits) != 1 else splits[0])
    if wanted not in splits:
        raise DataError(
            f"{key}.split: {path} has no split {wanted!r}.{did_you_mean(wanted, splits)} It has {', '.join(splits)}"
        )
    return loaded[wanted]


def _from_hub(name: str, subset: str | None, split: str | None, cache_dir: str | None, key: str) -> Dataset:
    import datasets

    try:
        return datasets.load_dataset(name, subset, split=split or "train", cache_dir=cache_dir)
    except (datasets.exceptions.DatasetNotFoundError, FileNotFoundError, ConnectionError) as error:
        raise DataError(
            f"{key}: {name} is neither a path here nor a dataset that can be reached on the Hugging Face "
            f"hub: {_root_cause(error)}"
        ) from error
    except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:
        raise DataError(
            f"{key}: {name} (subset {subset}, split {split or 'train'}) cannot be read: {_root_cause(error)}"
        ) from error


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


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
