"""Turns found rows into a dataset: messages, a processor, a validation split.

Every row goes through one loop, which says file, row and column of those that cannot be read. Invariant: a dataset has
at least one row, and every row of it can be read by its processor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from nemo_rl.config import DatasetConfig
from nemo_rl.data.conversations import Message, RowError, shown_keys
from nemo_rl.data.datasets.data_files import PlacedRow
from nemo_rl.data.interfaces import DataError, Row, TaskDataProcessFnCallable, TaskDataSpec
from nemo_rl.data.processors import multichoice_qa_processor, processor_of, used_messages

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

_ROWS_PER_CHUNK = 4096
# Pictures are decoded when a batch is read.
_ROWS_PER_BATCH = 64
_SHOWN_ERRORS = 5
# So many rows with a key are rendered at the start with and without it.
_EXAMPLES = 4
_CHECKED_ROWS = 512


class RawDataset:
    """Rows of one task. A subclass sets `dataset` and `task_name`, and may set `val_dataset` and `preprocessor`.

    Attributes:
        dataset: rows with `messages` and `task_name`; a Hugging Face dataset, or anything with a length and rows by
            index.
        handed_on: examples of rows whose messages carry what the chat template has to show, by key.
    """

    dataset: Any
    val_dataset: object = None  # rows kept for validation, None without
    task_name: str  # the name of the task in batches and metrics
    task_spec: TaskDataSpec  # prompt and system prompt, once `set_task_spec` was called
    processor: TaskDataProcessFnCallable  # turns a row into a prompt, once `set_processor` was called
    preprocessor: Callable[[Row], Row] | None = None  # applied to a row before the processor; None for none
    contents: str = ""  # how many rows there are and a digest of them, by which a resumed run knows them again
    left_out: int = 0  # how many rows the dataset's own rule leaves out, as proofs without an answer
    handed_on: Mapping[str, list[HandedOn]] = {}

    def set_task_spec(self, config: DatasetConfig) -> None:
        """Reads the prompt files of the dataset's entry; call `set_processor` first."""
        self.task_spec = TaskDataSpec(
            task_name=self.task_name,
            prompt_file=config.prompt_file,
            system_prompt_file=config.system_prompt_file,
            prompt_stands_before=getattr(self, "processor", None) is multichoice_qa_processor,
        )

    def set_processor(self, config: DatasetConfig) -> None:
        """Looks up the processor of the dataset's entry."""
        self.processor = processor_of(config)

    def split_train_validation(self, size: float, seed: int) -> None:
        """Moves rows from `dataset` to `val_dataset`. `size`: a share of the rows when below 1, otherwise how many; 0
        moves none. Raises DataError: nothing would be left to train on, or no row would be moved.
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


@dataclass(frozen=True)
class HandedOn:
    """A row whose messages carry more than role and content: its place, and the inputs of the chat template."""

    place: str
    messages: list[Message]
    tools: list[dict[str, object]] | None


@dataclass
class ReadRows:
    """The rows of a dataset, as they are built. `used`: the messages that a chat template is given, of a row that was
    made; raises RowError for a row that the processor cannot read. None checks nothing.
    """

    key: str  # dotted key of the dataset, for messages
    source: str  # where its rows are, for messages
    task_name: str  # the task of every row
    used: Callable[[Row], list[Message]] | None = None
    left_out: int = 0  # how many rows a format's own rule leaves out
    handed_on: dict[str, list[HandedOn]] = field(default_factory=dict)  # see `RawDataset`

    def read(self, rows: Iterable[PlacedRow], make: Callable[[Row], dict[str, object] | None]) -> tuple[Dataset, str]:
        """The rows as a dataset, and what their contents are known by.

        Args:
            rows: rows as found, each with its place.
            make: `messages` and perhaps `tools`, or what else the processor reads; None leaves the row out.

        Raises DataError: there is no row, or some cannot be read; names file, row and column of the first ones.
        """
        from datasets import Dataset

        chunks, made = _Chunks(), 0
        # The first row of each reason, and how many more there are.
        errors: dict[str, tuple[str, int]] = {}
        total = 0
        for place, row in rows:
            total += 1
            try:
                one = self._made(place, row, make)
            except RowError as error:
                _count(errors, str(error), place)
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                reason = f"not of the format that is expected ({type(error).__name__}: {error})"
                _count(errors, f"{reason}; the row has {', '.join(map(str, row))}", place)
            else:
                made += one is not None
                self.left_out += one is None
                if one is not None and not errors:
                    chunks.add(one)
        if errors:
            raise DataError(_refused(self.key, errors, total))
        if not made:
            raise DataError(f"{self.key}: {self.source} {'has no usable row' if total else 'is empty: it has no row'}")
        return Dataset(chunks.table(), fingerprint=chunks.digest()), f"{made} rows, digest {chunks.digest()}"

    def _made(self, place: str, row: Row, make: Callable[[Row], dict[str, object] | None]) -> dict[str, object] | None:
        made = make(row)
        if made is None:
            return None
        if self.used is not None:
            remember(self.handed_on, place, self.used(made), made)
        return {**packed(made), "task_name": self.task_name}


def _count(errors: dict[str, tuple[str, int]], reason: str, place: str) -> None:
    first, rows = errors.get(reason, (place, 0))
    errors[reason] = (first, rows + 1)


def _refused(key: str, errors: Mapping[str, tuple[str, int]], total: int) -> str:
    refused = sum(rows for _, rows in errors.values())
    lines = [
        f"  {place}: {reason}" + (f" (and {rows - 1} more such rows)" if rows > 1 else "")
        for reason, (place, rows) in list(errors.items())[:_SHOWN_ERRORS]
    ]
    if len(errors) > _SHOWN_ERRORS:
        lines.append(f"  and {len(errors) - _SHOWN_ERRORS} more reasons")
    if refused < total and any("there is no column" in line for line in lines):
        lines.append("The data mixes rows of different columns; keep one kind of row per dataset")
    return "\n".join([f"{key}: {refused} of {total} rows cannot be read (rows count from 1):", *lines])


def remember(handed_on: dict[str, list[HandedOn]], place: str, messages: list[Message], row: Row) -> None:
    """Adds a row to the examples of what its messages carry beyond role and content, where few are known."""
    tools = json.loads(row["tools"]) if row.get("tools") else None
    for key in [*shown_keys(messages), *(["tools"] if tools else [])]:
        examples = handed_on.setdefault(key, [])
        if len(examples) < _EXAMPLES:
            examples.append(HandedOn(place, messages, tools))


class _Chunks:
    """Rows as an arrow table, built piece by piece."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=12)
        self._waiting: list[dict[str, object]] = []
        self._tables: list[pa.Table] = []

    def add(self, row: dict[str, object]) -> None:
        self._hash.update(orjson.dumps(row))
        self._waiting.append(row)
        if len(self._waiting) == _ROWS_PER_CHUNK:
            self._flush()

    def digest(self) -> str:
        return self._hash.hexdigest()

    def table(self) -> pa.Table:
        import pyarrow as pa

        self._flush()
        return pa.concat_tables(self._tables, promote_options="permissive")

    def _flush(self) -> None:
        import pyarrow as pa

        if self._waiting:
            columns = dict.fromkeys(column for row in self._waiting for column in row)
            self._tables.append(pa.table({name: [row.get(name) for row in self._waiting] for name in columns}))
            self._waiting = []


def packed(row: Row) -> dict[str, object]:
    """A row as tables take it: what messages carry beyond role and content lies in `more`, as JSON."""
    if "messages" not in row:
        return dict(row)
    more = [
        {key: value for key, value in message.items() if key not in ("role", "content")} for message in row["messages"]
    ]
    texts = [{"role": message["role"], "content": message["content"]} for message in row["messages"]]
    return {**row, "messages": texts, **({"more": json.dumps(more)} if any(more) else {})}


def evenly_spread(rows: int) -> Sequence[int]:
    """Places, from 0, of some rows that lie evenly among `rows`; of all where these are few."""
    return range(rows) if rows <= _CHECKED_ROWS else [number * rows // _CHECKED_ROWS for number in range(_CHECKED_ROWS)]


def check_rows(dataset: RawDataset, key: str) -> None:
    """Sets `contents` and `handed_on` of a generated or a user's dataset, from all rows, or from some that lie evenly
    where each is made when it is asked for. Raises DataError: the processor cannot read one of them.
    """
    from datasets import Dataset

    rows, found = len(dataset.dataset), dataset.dataset
    read = used_messages(dataset.processor) if dataset.preprocessor is None else None
    places = range(rows) if isinstance(found, Dataset) else evenly_spread(rows)
    digest, handed_on = hashlib.blake2b(digest_size=12), dict[str, list[HandedOn]]()
    checked_rows: Iterable[Row] = _rows_of(found) if isinstance(found, Dataset) else map(found.__getitem__, places)
    for place, row in zip(places, checked_rows, strict=True):
        digest.update(json.dumps(row, default=lambda value: type(value).__name__).encode())
        where = f"{key}: row {place + 1} (from 1) of {dataset.task_name}"
        try:
            if read is not None:
                remember(handed_on, where, read(row), row)
        except RowError as error:
            raise DataError(f"{where}: {error}") from error
    dataset.contents, dataset.handed_on = f"{rows} rows, digest {digest.hexdigest()}", handed_on


def _rows_of(dataset: Dataset) -> Iterator[dict[str, object]]:
    """Yields rows in batches: `datasets` converts single rows far more slowly."""
    batches: Iterator[Any] = dataset.iter(_ROWS_PER_BATCH)
    for batch in batches:
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    """One question and its answer as messages."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
