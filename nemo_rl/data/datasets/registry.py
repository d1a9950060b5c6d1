"""Finds the dataset that an entry of `data.train` or `data.validation` names: in the table of named datasets, in that
of generated ones, or by the dotted path of a user's class.

The table says where a named dataset's rows are, and which columns hold the problem and the answer: one line per dataset
that is a table of questions and answers, a function for each that is not. Every name also reads rows of the same
columns from `data_path`, so that a copy on disk needs no network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from typing_extensions import override

from nemo_rl.config import DatasetConfig
from nemo_rl.config.dotted import import_dotted
from nemo_rl.config.errors import did_you_mean
from nemo_rl.config.foreign import UNBUILT
from nemo_rl.data.conversations import Message, Row, as_messages, cell
from nemo_rl.data.datasets import published
from nemo_rl.data.datasets.data_files import (
    PlacedRow,
    completed,
    dapo,
    helpsteer,
    looks_like_a_path,
    question_and_answer,
    read_rows,
    recognised,
)
from nemo_rl.data.datasets.generated import ArithmeticDataset, DigitsDataset, ReasoningGymDataset
from nemo_rl.data.datasets.raw import RawDataset, ReadRows, check_rows
from nemo_rl.data.datasets.sliding_puzzle import SlidingPuzzleDataset
from nemo_rl.data.interfaces import DataError
from nemo_rl.data.processors import processor_of, trains_whole, used_messages

Conversation = list[Message] | None
GENERATED: dict[str, Callable[[DatasetConfig, str, str], RawDataset]] = {
    "arithmetic": ArithmeticDataset,
    "digits": DigitsDataset,
    "reasoning_gym": ReasoningGymDataset,
    "sliding_puzzle": SlidingPuzzleDataset,
}


@dataclass(frozen=True)
class Source:
    """Location and columns of a named dataset.

    Attributes:
        question, answer: columns, for tables of questions and answers.
        split, subset: read unless the entry says otherwise; several subsets are joined.
        convert: makes the conversation of a row that is of no such table; None leaves the row out.
        rows: makes what `processor` reads, of a row that is no conversation.
        gather: makes rows of conversations of rows of messages.
    """

    hub: str | None  # its id on the Hugging Face hub; None when only `data_path` can say where it is
    question: str = "problem"
    answer: str = "answer"
    split: str = "train"
    subset: tuple[str | None, ...] = (None,)
    convert: Callable[[Row], Conversation] | None = None
    rows: Callable[[Row], dict[str, object]] | None = None
    processor: str = "math_hf_data_processor"  # in place of the default one
    solved: bool = False  # whether the answer is a solution that ends with it, of which SFT trains all
    gather: Callable[[Iterable[PlacedRow]], Iterator[PlacedRow]] | None = None
    distinct: bool = False  # whether a problem is published many times and taken once


def _conversations(row: Row) -> Conversation:
    """`messages`, as OpenAI has them."""
    return as_messages(cell(row, "messages"), "column 'messages'")


_MATH_SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)

_CHOICES = "multichoice_qa_processor"
SOURCES: dict[str, Source] = {
    "OpenMathInstruct-2": Source("nvidia/OpenMathInstruct-2", answer="expected_answer", split="train_1M"),
    "DeepScaler": Source("agentica-org/DeepScaleR-Preview-Dataset"),
    "DAPOMath17K": Source("BytedTsinghua-SIA/DAPO-Math-17k", convert=dapo, distinct=True),
    "DAPOMathAIME2024": Source("BytedTsinghua-SIA/AIME-2024", convert=dapo, distinct=True),
    "AIME2024": Source("HuggingFaceH4/aime_2024"),
    "AIME2025": Source("opencompass/AIME2025", question="question", split="test", subset=("AIME2025-I", "AIME2025-II")),
    "AIME2026": Source("MathArena/aime_2026"),
    "math": Source(
        "EleutherAI/hendrycks_math",
        answer="solution",
        split="test",
        subset=_MATH_SUBJECTS,
        convert=published.boxed_solution,
        solved=True,
    ),
    "math500": Source("HuggingFaceH4/MATH-500", split="test"),
    "gpqa": Source("Idavidrein/gpqa", subset=("gpqa_main",), rows=published.gpqa, processor=_CHOICES),
    "gpqa_diamond": Source("Idavidrein/gpqa", subset=("gpqa_diamond",), rows=published.gpqa, processor=_CHOICES),
    "gpqa_extended": Source("Idavidrein/gpqa", subset=("gpqa_extended",), rows=published.gpqa, processor=_CHOICES),
    "mmlu": Source("cais/mmlu", split="test", subset=("all",), rows=published.mmlu, processor=_CHOICES),
    "mmlu_pro": Source("TIGER-Lab/MMLU-Pro", split="test", rows=published.mmlu_pro, processor=_CHOICES),
    "gsm8k": Source("openai/gsm8k", question="question", subset=("main",), convert=published.gsm8k, solved=True),
    "NuminaMath-1.5": Source("AI-MO/NuminaMath-1.5", convert=published.numina),
    "OpenR1-Math-220k": Source("open-r1/OpenR1-Math-220k"),
    "HelpSteer3": Source("nvidia/HelpSteer3", convert=helpsteer),
    "squad": Source("rajpurkar/squad", convert=published.squad),
    "open_assistant": Source("OpenAssistant/oasst1", gather=published.open_assistant, convert=_conversations),
    "tulu3_sft_mixture": Source("allenai/tulu-3-sft-mixture", convert=_conversations),
    "openai_format": Source(None, convert=_conversations),
    "arrow_text": Source(None, convert=published.arrow_text),
    "NemoGymDataset": Source(None, rows=published.nemo_gym, processor="nemo_gym_data_processor"),
    "ResponseDataset": Source(None, question="input", answer="output"),
}

ALIASES = {
    "aime2024": "AIME2024",
    "aime2025": "AIME2025",
    "gpqa_main": "gpqa",
    "GSM8K": "gsm8k",
    "deepscaler": "DeepScaler",
    "response_dataset": "ResponseDataset",
    "local": "ResponseDataset",
}


class NamedDataset(RawDataset):
    """A dataset of the table above."""

    def __init__(self, config: DatasetConfig, task_name: str, key: str) -> None:
        self.task_name = task_name
        self._name = ALIASES.get(config.dataset_name, config.dataset_name)
        self._source = source = SOURCES[self._name]
        self.set_processor(config)
        rows = _read(config, source, key)
        if source.gather is not None:
            rows = source.gather(rows)
        reading = ReadRows(key, config.data_path or config.dataset_name, task_name, used_messages(self.processor))
        if source.rows is not None:
            unread = ("input_key", "output_key", "system_key", "system_prompt", "tool_key")
            named = next((name for name in unread if config[name] is not None), None)
            if named is not None:
                raise DataError(f"{key}.{named}: {self._name} is read by its published columns; leave it")
            self.dataset, self.contents = reading.read(rows, source.rows)
        else:
            first = next(rows, None)
            convert = self._conversation(config, first[1] if first is not None else {}, key)
            seen: set[str] = set()

            def make(row: Row) -> dict[str, object] | None:
                messages = convert(row)
                if messages is None or (source.distinct and _seen(messages, seen)):
                    return None
                return completed(row, messages, config)

            self.dataset, self.contents = reading.read(chain([first] if first is not None else [], rows), make)
        self.handed_on, self.left_out = reading.handed_on, reading.left_out

    @override
    def set_processor(self, config: DatasetConfig) -> None:
        """The processor of the entry; of rows that are no conversation, theirs in place of the default."""
        default = config.processor in ("math_hf_data_processor", "default")
        named = {"processor": self._source.processor} if default else {}
        self.processor = processor_of(config.model_copy(update=named))

    def _conversation(self, config: DatasetConfig, first: Row, key: str) -> Callable[[Row], Conversation]:
        """How rows become conversations, from what the entry says and, for ResponseDataset, the columns of the first
        row.
        """
        source, named = self._source, (config.input_key, config.output_key)
        chat = config.chat_key != DatasetConfig.model_fields["chat_key"].default
        if self._name == "openai_format" or (self._name == "ResponseDataset" and chat):
            column = config.input_key or config.chat_key
            return lambda row: as_messages(cell(row, column, "chat_key"), f"column {column!r}")
        if named == (None, None) and self._name == "ResponseDataset" and first:
            return recognised(first, key).convert
        by_table = source.convert is None or (source.solved and trains_whole(self.processor))
        if all(named) or by_table:
            question, answer = config.input_key or source.question, config.output_key or source.answer
            return lambda row: question_and_answer(row, question, answer, "input_key", "output_key")
        if config.output_key is None and source.convert is _conversations and config.input_key is not None:
            column = config.input_key
            return lambda row: as_messages(cell(row, column, "input_key"), f"column {column!r}")
        if any(named):
            raise DataError(
                f"{key}: input_key and output_key name a column each, and {self._name} is given only one of them; give "
                "both, or none to read its published columns"
            )
        return source.convert or _conversations


def _seen(messages: list[Message], seen: set[str]) -> bool:
    text = "\0".join(message["content"] for message in messages if message["role"] != "assistant")
    again = text in seen
    seen.add(text)
    return again


def _read(config: DatasetConfig, source: Source, key: str) -> Iterator[PlacedRow]:
    if config.data_path is not None:
        return read_rows(
            config.data_path,
            split=config.split,
            usual_split=source.split,
            subset=config.subset,
            cache_dir=config.download_dir,
            file_format=config.file_format,
            key=f"{key}.data_path",
        )
    if source.hub is None:
        raise DataError(f"{key}.data_path: {config.dataset_name} needs the place of its rows")
    subsets = (config.subset,) if config.subset is not None else source.subset
    split = config.split or source.split
    parts = [
        read_rows(source.hub, split=split, subset=subset, cache_dir=config.download_dir, key=key) for subset in subsets
    ]
    return chain.from_iterable(parts)


def load_response_dataset(
    config: DatasetConfig | Mapping[str, object], key: str = "data.train", task_name: str | None = None
) -> RawDataset:
    """Loads a dataset, with its prompt, processor and validation split.

    Args:
        config: the entry, as a section or a plain mapping.
        key: its dotted key, for messages.
        task_name: name of the task; None takes the dataset's.

    Raises DataError: the name, its rows, a column, a prompt file or the processor does not exist, or there is no row.
    """
    config = DatasetConfig.read(config)
    dataset = _load(config, key, task_name or config.dataset_name)
    dataset.set_processor(config)
    dataset.set_task_spec(config)
    if not dataset.contents:
        check_rows(dataset, key)
    if config.max_samples and config.max_samples < len(dataset.dataset):
        dataset.dataset = dataset.dataset.select(range(config.max_samples))
        dataset.contents += f", the first {config.max_samples}"
    dataset.split_train_validation(config.split_validation_size, config.seed)
    if config.repeat > 1:
        dataset.dataset = dataset.dataset.select(list(range(len(dataset.dataset))) * config.repeat)
    return dataset


def _load(config: DatasetConfig, key: str, task_name: str) -> RawDataset:
    name = config.dataset_name
    if "." in name and name not in SOURCES:
        return _users_class(config, key)
    if name in GENERATED:
        return GENERATED[name](config, task_name, key)
    if name in UNBUILT["datasets"]:
        raise DataError(f"{key}.dataset_name: {name!r} is not built yet: {UNBUILT['datasets'][name]}")
    if name not in SOURCES and name not in ALIASES:
        known = [*SOURCES, *ALIASES, *GENERATED]
        raise DataError(
            f"{key}.dataset_name: there is no dataset {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}; "
            "for your own rows use ResponseDataset with data_path, or the dotted path of a class"
        )
    return NamedDataset(config, task_name, key)


def reads_files(config: DatasetConfig) -> bool:
    """Whether the rows of an entry are made or read on this machine, so that neither hub nor web is asked."""
    name, path = config.dataset_name, config.data_path
    if path is not None:
        return not path.startswith(("https://", "http://")) and (
            Path(path).expanduser().exists() or looks_like_a_path(path)
        )
    source = SOURCES.get(ALIASES.get(name, name))
    return source is None or source.hub is None


def _users_class(config: DatasetConfig, key: str) -> RawDataset:
    if looks_like_a_path(config.dataset_name):
        raise DataError(
            f"{key}.dataset_name: {config.dataset_name} is a path; files of rows are read with {key}.dataset_name="
            f"ResponseDataset and {key}.data_path={config.dataset_name}"
        )
    factory = import_dotted(config.dataset_name, f"{key}.dataset_name")
    settings: dict[str, object] = config.to_dict()
    dataset = factory(**settings)
    for attribute in ("dataset", "task_name"):
        if not hasattr(dataset, attribute):
            raise DataError(
                f"{key}.dataset_name: {config.dataset_name} must set `{attribute}`; see "
                "nemo_rl.data.datasets.RawDataset"
            )
    if len(dataset.dataset) == 0:
        raise DataError(f"{key}: {config.dataset_name} is empty")
    return dataset
