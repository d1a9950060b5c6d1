"""Rows of data files with their places, and their formats: recognition, and the conversation made of their columns.

Rows are in JSON, CSV, parquet and arrow files, directories of them and of `save_to_disk`, and on the Hugging Face hub.
Files are read here and not through a cache, so that a file that changed is read as it is now. One row of the table per
format; `docs/recipes.md` shows the same table. Columns that mean the same in every format (system message, tools,
media) are read in one place. Invariants: text is UTF-8; numbers of text files keep their spelling; rows count from 1; a
column that changes what a conversation says is used or refused.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from nemo_rl.config import DatasetConfig
from nemo_rl.config.errors import did_you_mean
from nemo_rl.data.conversations import (
    MEDIA,
    Message,
    Row,
    RowError,
    Written,
    as_messages,
    as_text,
    cell,
    decode_json,
    filled_text,
    from_json,
    is_conversation,
    is_empty,
    plain,
    refusal,
    shown,
    without_filling,
)
from nemo_rl.data.interfaces import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

# A row, and where it is.
PlacedRow = tuple[str, Row]
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_NO_ROWS = ("dataset_infos.json", "dataset_info.json", "state.json", "dataset_dict.json")
_ROWS_AT_ONCE = 1000
# First bytes of files that are no UTF-8 text.
_OTHER_TEXT = {
    b"\xff\xfe\0\0": "the file is UTF-32, and must be UTF-8; convert it with `iconv -f UTF-32 -t UTF-8`",
    b"\xff\xfe": "the file is UTF-16, and must be UTF-8; convert it with `iconv -f UTF-16 -t UTF-8`",
    b"\xfe\xff": "the file is UTF-16, and must be UTF-8; convert it with `iconv -f UTF-16 -t UTF-8`",
    b"\x1f\x8b": "the file is packed; unpack it with `gunzip`",
    b"\x28\xb5\x2f\xfd": "the file is packed; unpack it with `unzstd`",
    b"PK\x03\x04": "the file is packed; unpack it with `unzip`",
}


def read_rows(
    location: str,
    *,
    split: str | None = None,
    usual_split: str = "train",
    subset: str | None = None,
    cache_dir: str | None = None,
    file_format: str | None = None,
    key: str = "data",
) -> Iterator[PlacedRow]:
    """The rows at a location.

    Args:
        location: a file, its address on the web, a directory, or an id on the Hugging Face hub.
        split: split to read; None takes the usual one, `train`, or the only one there is.
        usual_split: split that the dataset is read from where none is asked for.
        subset: configuration of a hub dataset.
        file_format: format of the file, such as `csv`; None goes by its name.
        key: dotted key of the dataset, for messages.

    Raises DataError: nothing is there, it cannot be read, or has no such split. Of a file's content it is raised by the
    iterator.
    """
    path, kind = Path(location).expanduser(), f".{file_format}" if file_format is not None else None
    if location.startswith(("https://", "http://")):
        # A cached download has no name to go by.
        kind, path = kind or Path(urlsplit(location).path).suffix.lower(), _downloaded(location, cache_dir, key)
        return _from_file(path, key, kind, named=location)
    if path.is_file():
        # NeMo-RL's recipes that say file_format name the part that the file is in split.
        _no_parts(path, split if kind is None else None, subset, key)
        return _from_file(path, key, kind)
    if path.is_dir():
        if kind is not None:
            raise DataError(f"{key}: {path} is a directory, whose files say by name what they hold; leave file_format")
        return _from_directory(path, split, usual_split, subset, key)
    if looks_like_a_path(location):
        raise DataError(f"{key}: there is nothing at {path.absolute()}")
    return _from_hub(location, subset, split or usual_split, cache_dir, key)


def _no_parts(path: Path, split: str | None, subset: str | None, key: str) -> None:
    asked = [f"split {split!r}"] * (split not in (None, "train")) + [f"subset {subset!r}"] * (subset is not None)
    if asked:
        raise DataError(f"{key}: {path} is one file, which has no {asked[0]}; name the file of that part, or leave it")


def looks_like_a_path(location: str) -> bool:
    """Whether a location is meant as a place on this machine, also where nothing is there."""
    return location.startswith((".", "/", "~")) or Path(location).suffix in _READERS or location.count("/") > 1


def _downloaded(address: str, cache_dir: str | None, key: str) -> Path:
    from datasets import DownloadConfig
    from datasets.utils.file_utils import cached_path

    try:
        return Path(cached_path(address, DownloadConfig(cache_dir=cache_dir)))
    except (OSError, ValueError) as error:
        raise DataError(f"{key}: {address} cannot be downloaded: {_root_cause(error)}") from error


def _from_file(path: Path, key: str, kind: str | None = None, named: str | None = None) -> Iterator[PlacedRow]:
    """The rows of a file that holds `kind`, by default what its name ends with; messages call it `named`."""
    kind, named = kind or path.suffix.lower(), named or str(path)
    reader = _READERS.get(kind)
    if reader is None:
        packed = "; unpack it first" if kind in (".gz", ".zst", ".zip", ".bz2", ".xz") else ""
        raise DataError(f"{key}: {named} is none of {', '.join(_READERS)}{packed or '; name it in file_format'}")
    if path.stat().st_size == 0:
        raise DataError(f"{key}: {named} is empty")
    if kind in (".json", ".jsonl", ".csv", ".tsv"):
        with path.open("rb") as file:
            begin = file.read(4)
        found = next((kind for mark, kind in _OTHER_TEXT.items() if begin.startswith(mark)), None)
        if found is None and b"\0" in begin:
            found = _OTHER_TEXT[b"\xff\xfe"]
        if found is not None:
            raise DataError(f"{key}: {named}, {found}")
    return _guarded(path, reader, key, kind, named)


def _guarded(
    path: Path, reader: Callable[[Path], Iterator[Row]], key: str, kind: str, named: str
) -> Iterator[PlacedRow]:
    try:
        for number, row in enumerate(reader(path), start=1):
            yield f"{named}, row {number}", row
    except _Unreadable as error:
        raise DataError(f"{key}: {named} cannot be read as {kind[1:]}: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{key}: {named}, {_bad_line(path)}") from error


class _Unreadable(Exception):
    """A file cannot be read; the message says why."""


def _bad_line(path: Path) -> str:
    """The first line of a file that is not UTF-8."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                around = line[max(0, error.start - 20) : error.start + 5]
                return (
                    f"line {number} (from 1): not UTF-8 text, at byte {error.start} of the line ({around!r}); if it is "
                    "Latin-1, convert it with `iconv -f LATIN1 -t UTF-8`"
                )
    return "not UTF-8 text"


def _decoded(text: str, line: int | None) -> Any:
    try:
        return decode_json(text.strip())
    except ValueError as error:
        place = f"line {line} (from 1): " if line is not None else ""
        raise _Unreadable(f"{place}{error}; expected one object, such as {{'input': '1+1', 'output': 2}}") from error


def _json_lines(path: Path) -> Iterator[Row]:
    """One object per line, or a file that is one list of objects."""
    first = True
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            if not text:
                continue
            if first and (text.startswith("[") or text == "{"):
                yield from _json_list(path)
                return
            first = False
            yield _object(_decoded(text, number), f"line {number} (from 1)")


def _json_list(path: Path) -> Iterator[Row]:
    whole = _decoded(path.read_text(encoding="utf-8-sig"), None)
    if isinstance(whole, dict):
        raise _Unreadable(
            f"it is one object with {', '.join(map(str, whole))}; expected a list of objects, or one object per line"
        )
    for number, row in enumerate(whole, start=1):
        yield _object(row, f"row {number} (from 1)")


def _object(row: object, place: str) -> Row:
    if not isinstance(row, dict):
        raise _Unreadable(f"{place} holds {shown(row)}; expected an object, such as {{'input': '1+1', 'output': 2}}")
    return row


def _separated(path: Path, delimiter: str = ",") -> Iterator[Row]:
    """A table whose first line names the columns; every cell is text."""
    limit = csv.field_size_limit(sys.maxsize)
    line = 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            # Strict: text behind a closing quote would lose the quote.
            rows = csv.reader(file, delimiter=delimiter, strict=True)
            names = next(rows, [])
            line = rows.line_num + 1
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise _Unreadable(f"the column {twice!r} is there {names.count(twice)} times")
            if len(names) == 1 and re.search(r"[;\t|]", names[0]):
                raise _Unreadable(f"the first line is {names[0]!r}; columns must be separated by {delimiter!r}")
            for cells in rows:
                line = rows.line_num + 1
                if not cells:
                    continue
                if len(cells) != len(names):
                    raise _Unreadable(
                        f"line {rows.line_num} (from 1) has {len(cells)} cells and the first line names {len(names)} "
                        f"columns ({', '.join(names)}); cells with {delimiter!r} or line breaks need quotes"
                    )
                yield dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise _Unreadable(f"line {line} (from 1): {error}; quotes within a quoted cell are doubled") from error
    finally:
        csv.field_size_limit(limit)


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield from _rows_of(file.iter_batches(batch_size=_ROWS_AT_ONCE))
    except (pa.ArrowException, OSError) as error:
        raise _Unreadable(_root_cause(error)) from error


def _arrow(path: Path) -> Iterator[Row]:
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as file:
            try:
                yield from _rows_of(pa.ipc.open_stream(file))
            except pa.ArrowInvalid:
                file.seek(0)
                reader = pa.ipc.open_file(file)
                yield from _rows_of(reader.get_batch(number) for number in range(reader.num_record_batches))
    except (pa.ArrowException, OSError) as error:
        raise _Unreadable(_root_cause(error)) from error


def _rows_of(tables: Iterable[pa.RecordBatch | pa.Table]) -> Iterator[Row]:
    for table in tables:
        names = table.schema.names
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise _Unreadable(f"the column {twice!r} is there {names.count(twice)} times")
        short = {field.name: field.type for field in table.schema if _has_short_floats(field.type)}
        for row in table.to_pylist():
            yield {
                column: without_filling(_as_spelled(value, short[column]) if column in short else value)
                for column, value in row.items()
            }


def _parts_of(kind: pa.DataType) -> list[pa.Field]:
    return [kind.field(index) for index in range(kind.num_fields)]


def _has_short_floats(kind: pa.DataType) -> bool:
    import pyarrow as pa

    short = pa.types.is_float16(kind) or pa.types.is_float32(kind)
    return short or any(_has_short_floats(part.type) for part in _parts_of(kind))


def _as_spelled(value: Any, kind: pa.DataType) -> object:
    """A value whose floats of less than 64 bits are text: as Python's they would end in digits of no file."""
    import numpy as np
    import pyarrow as pa

    if value is None:
        return None
    if pa.types.is_float16(kind) or pa.types.is_float32(kind):
        number = (np.float16 if pa.types.is_float16(kind) else np.float32)(value)
        return Written(str(number).removesuffix(".0")) if np.isfinite(number) else None
    if isinstance(value, dict):
        return {part.name: _as_spelled(value.get(part.name), part.type) for part in _parts_of(kind)}
    if isinstance(value, list) and kind.num_fields == 1:
        return [_as_spelled(one, kind.field(0).type) for one in value]
    return value


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".json": _json_lines,
    ".parquet": _parquet,
    ".csv": _separated,
    ".tsv": partial(_separated, delimiter="\t"),
    ".arrow": _arrow,
}


def _from_directory(path: Path, split: str | None, usual: str, subset: str | None, key: str) -> Iterator[PlacedRow]:
    saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
    card = path / "README.md"
    if saved or (card.is_file() and re.search(r"^configs:", card.read_text("utf-8", "replace"), re.MULTILINE)):
        return _from_saved(path, split, usual, subset, key, saved=saved)
    if subset is not None:
        raise DataError(f"{key}: {path} has no subsets, and {subset!r} is asked for; name its directory as data_path")
    by_split: dict[str, list[Path]] = {}
    for file in sorted(path.rglob("*")):
        inside = file.relative_to(path)
        if file.suffix.lower() in _READERS and file.name not in _NO_ROWS and not str(inside).startswith("."):
            by_split.setdefault(_split_of(inside), []).append(file)
    if not by_split:
        raise DataError(f"{key}: the directory {path} has no file of {', '.join(_READERS)}")
    files = by_split[_wanted(list(by_split), split, usual, path, key)]
    if len({file.suffix.lower() for file in files}) > 1:
        names = ", ".join(file.name for file in files[:5])
        raise DataError(f"{key}: the directory {path} has files of several kinds ({names}); name one as data_path")
    return (row for file in files for row in _from_file(file, key))


def _split_of(file: Path) -> str:
    words = re.split(r"[^a-z]+", str(file).lower())
    return next((split for split, names in _SPLIT_WORDS.items() if set(names) & set(words)), "train")


def _wanted(splits: list[str], split: str | None, usual: str, path: Path, key: str) -> str:
    there = next((name for name in (usual, "train") if name in splits), splits[0] if len(splits) == 1 else "train")
    wanted = split or there
    if wanted not in splits:
        raise DataError(
            f"{key}.split: {path} has no split {wanted!r}.{did_you_mean(wanted, splits)} It has {', '.join(splits)}"
        )
    return wanted


def _from_saved(
    path: Path, split: str | None, usual: str, subset: str | None, key: str, *, saved: bool
) -> Iterator[PlacedRow]:
    import datasets

    try:
        loaded: Any = datasets.load_from_disk(str(path)) if saved else _prepared(path, subset)
    except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:
        raise DataError(f"{key}: the directory {path} cannot be read as a dataset: {_root_cause(error)}") from error
    if isinstance(loaded, datasets.Dataset):
        _no_parts(path, split, subset, key)
        return _placed(loaded, str(path))
    return _placed(loaded[_wanted([str(name) for name in loaded], split, usual, path, key)], str(path))


def _prepared(path: Path, subset: str | None) -> object:
    import datasets

    # A dataset prepared by an earlier run is not reused: its key is the files' times, not their contents.
    return datasets.load_dataset(str(path), subset, download_mode="reuse_cache_if_exists")


def _from_hub(name: str, subset: str | None, split: str, cache_dir: str | None, key: str) -> Iterator[PlacedRow]:
    import datasets

    try:
        return _placed(datasets.load_dataset(name, subset, split=split, cache_dir=cache_dir), name)
    except (datasets.exceptions.DatasetNotFoundError, FileNotFoundError, ConnectionError) as error:
        raise DataError(
            f"{key}: {name} is neither a path here nor a dataset that can be reached on the Hugging Face "
            f"hub: {_root_cause(error)}"
        ) from error
    except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:
        raise DataError(
            f"{key}: {name} (subset {subset}, split {split}) cannot be read: {_root_cause(error)}"
        ) from error


def _placed(dataset: Dataset, name: str) -> Iterator[PlacedRow]:
    tables = dataset.with_format("arrow").iter(_ROWS_AT_ONCE)
    return ((f"{name}, row {number}", row) for number, row in enumerate(_rows_of(tables), start=1))


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


Convert = Callable[[Row], list[Message]]
_SYSTEM = ("system", "system_prompt")


@dataclass(frozen=True)
class Format:
    """One way in which rows are published."""

    name: str  # for messages and the page
    columns: tuple[str, ...]  # rows that have all of these are of this format, if of none before it
    convert: Convert


def question_and_answer(
    row: Row, question: str, answer: str, question_key: str = "", answer_key: str = ""
) -> list[Message]:
    """The conversation of two cells, each a text or a list of messages. `question_key, answer_key`: the keys that name
    them, for messages. Raises RowError: a column is missing, or holds neither.
    """
    asked, answered = cell(row, question, question_key), cell(row, answer, answer_key)
    return [
        *_part(asked, f"column {question!r}", "user"),
        *_part(answered, f"column {answer!r}", "assistant"),
    ]


def _part(value: object, what: str, role: str) -> list[Message]:
    if not is_conversation(value):
        return [{"role": role, "content": filled_text(value, what)}]
    messages = as_messages(value, what)
    if messages[-1]["role"] != role:
        raise RowError(f"{what}: its last message is the {messages[-1]['role']}'s; expected the {role}'s")
    return messages


def dapo(row: Row) -> list[Message]:
    """DAPO's problem in `prompt`, as text or as messages, and the verified answer in `reward_model`."""
    reward = from_json(cell(row, "reward_model"), "column 'reward_model'")
    if not isinstance(reward, Mapping) or "ground_truth" not in reward:
        raise refusal("column 'reward_model'", reward, "an object such as {'ground_truth': '7'}")
    return question_and_answer({**row, "reward_model": reward["ground_truth"]}, "prompt", "reward_model")


def helpsteer(row: Row) -> list[Message]:
    """HelpSteer3's conversation in `context`, and of `response1` and `response2` the preferred one; a negative
    `overall_preference` prefers the first.
    """
    score = cell(row, "overall_preference")
    try:
        number = float(score)
    except (TypeError, ValueError):
        raise refusal("column 'overall_preference'", score, "a number from -3 to 3") from None
    return question_and_answer(row, "context", "response1" if number <= 0 else "response2")


def _preference(row: Row) -> list[Message]:
    chosen = cell(row, "chosen")
    if is_conversation(chosen):
        messages = _part(chosen, "column 'chosen'", "assistant")
        if any(message["role"] == "user" for message in messages):
            return messages
    if "prompt" not in row:
        raise refusal("column 'chosen'", chosen, "a list of messages, or a text beside a column 'prompt'")
    return question_and_answer(row, "prompt", "chosen")


def _alpaca(row: Row) -> list[Message]:
    answer = next(name for name in ("output", "response") if name in row)
    question = filled_text(cell(row, "instruction"), "column 'instruction'")
    name = next((name for name in ("input", "context") if not is_empty(row.get(name))), None)
    more = as_text(row[name], f"column {name!r}") if name is not None else ""
    if more.strip():
        question += "\n\n" + more
    return [
        *_earlier(row.get("history")),
        *question_and_answer({"instruction": question, answer: row[answer]}, "instruction", answer),
    ]


def _earlier(history: object) -> list[Message]:
    """Earlier turns in `history`: pairs of a question and its answer."""
    if is_empty(history):
        return []
    what, pairs = "column 'history'", from_json(history, "column 'history'")
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise refusal(what, pairs, "pairs of a question and its answer, such as [['1+1', '2']]")
    return [
        {"role": role, "content": as_text(text, what)}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _completion(answer: str) -> Convert:
    def convert(row: Row) -> list[Message]:
        if str(plain(row.get("label"))).strip().lower() in _UNWANTED:
            raise RowError("column 'label' marks the completion as unwanted, and it would be trained; leave such rows")
        return _whole_question(row, "prompt", answer)

    return convert


# CSV has texts, of Python's spelling where pandas wrote them.
_UNWANTED = ("false", "0", "0.0")
# Columns with the subject of a question, or its choices.
_ASIDE = ("context", "passage", "choices", "options")


def _whole_question(row: Row, question: str, answer: str) -> list[Message]:
    """The conversation of two cells, behind earlier turns in `history`. Raises RowError: the question has a part of its
    own column, which would not be asked.
    """
    aside = next((name for name in _ASIDE if not is_empty(row.get(name))), None)
    if aside is not None:
        raise RowError(
            f"column {aside!r} belongs to the question, and only {question!r} would be asked; write it into the "
            f"question, or name the columns with input_key and output_key to leave it out"
        )
    return [*_earlier(row.get("history")), *question_and_answer(row, question, answer)]


def _table(question: str, answer: str) -> Format:
    return Format(f"{question} and {answer}", (question, answer), lambda row: _whole_question(row, question, answer))


def _messages(column: str) -> Convert:
    return lambda row: as_messages(cell(row, column), f"column {column!r}")


FORMATS = (
    Format("OpenAI messages", ("messages",), _messages("messages")),
    Format("ShareGPT", ("conversations",), _messages("conversations")),
    Format("ShareGPT", ("conversation",), _messages("conversation")),
    Format("HelpSteer3", ("context", "response1", "response2", "overall_preference"), helpsteer),
    Format("preferences", ("chosen", "rejected"), _preference),
    Format("DAPO", ("prompt", "reward_model"), dapo),
    Format("Alpaca", ("instruction", "output"), _alpaca),
    Format("Alpaca", ("instruction", "response"), _alpaca),
    Format("prompt and completion", ("prompt", "completion"), _completion("completion")),
    Format("prompt and response", ("prompt", "response"), _completion("response")),
    _table("input", "output"),
    _table("question", "answer"),
    _table("problem", "expected_answer"),
    _table("problem", "answer"),
)


def recognised(columns: Mapping[str, object], key: str) -> Format:
    """The format of a row. `key`: dotted key of the dataset, for messages. Raises DataError: it is of none."""
    for known in FORMATS:
        if all(column in columns for column in known.columns):
            return known
    for name, value in columns.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            raise DataError(f"{key}: the rows are inside the column {name!r}; make its list the whole file")
    formats = "; ".join(", ".join(known.columns) for known in FORMATS)
    raise DataError(
        f"{key}: no known format has the columns {', '.join(map(str, columns))}. Name those of the problem and the "
        f"answer with input_key and output_key; formats are recognised by the columns {formats}"
    )


def completed(row: Row, messages: list[Message], config: DatasetConfig) -> dict[str, object]:
    """A conversation with what its row says beside it: the system message, and tools as JSON, because rows differ in
    their arguments. `messages`: made by its format. Raises RowError: a column contradicts the messages, or cannot be
    honoured.
    """
    made: dict[str, object] = {"messages": _with_system(row, messages, config)}
    column = config.tool_key or "tools"
    tools = cell(row, column, "tool_key") if config.tool_key is not None else row.get(column)
    if not is_empty(tools):
        read = plain(from_json(tools, f"column {column!r}"))
        if not isinstance(read, list) or not all(isinstance(tool, dict) for tool in read):
            raise refusal(f"column {column!r}", tools, "a list of tools, such as [{'type': 'function', ...}]")
        if read:
            made["tools"] = json.dumps(read)
    if config.tool_key != "functions" and not is_empty(row.get("functions")):
        raise RowError(
            "column 'functions' is OpenAI's older form of tools, which no chat template reads; write it as 'tools', a "
            "list of {'type': 'function', 'function': ...}"
        )
    for name in MEDIA:
        if not is_empty(row.get(name)):
            raise RowError(f"column {name!r} holds media, and only text can be read; leave the column or such rows")
    if not is_empty(row.get("chat_template_kwargs")):
        raise RowError(
            "column 'chat_template_kwargs' is not read row by row; set policy.tokenizer.chat_template_kwargs, for all "
            "rows, and leave the column"
        )
    return made


def _with_system(row: Row, messages: list[Message], config: DatasetConfig) -> list[Message]:
    if config.system_key is not None:
        column: str | None = config.system_key
        text = cell(row, config.system_key, "system_key")
    else:
        column = next((name for name in _SYSTEM if isinstance(row.get(name), str)), None)
        text = row[column] if column is not None else None
    own = next((message for message in messages if message["role"] == "system"), None)
    if config.system_prompt_file is not None and (own is not None or not is_empty(text)):
        raise RowError("has a system message, and system_prompt_file sets another one; leave one of them")
    if own is not None:
        if not is_empty(text) and as_text(text, f"column {column!r}").strip() != own["content"].strip():
            raise RowError(f"column {column!r} and the system message among the messages differ; leave one of them")
        return messages
    text = config.system_prompt if is_empty(text) else as_text(text, f"column {column!r}")
    return [{"role": "system", "content": text}, *messages] if text else messages
