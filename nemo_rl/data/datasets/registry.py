"""Finds the dataset that an entry of `data.train` or `data.validation` names: in the table of named datasets, in that
of generated ones, or by the dotted path of a user's class.

The table says where a named dataset's rows are, and which columns hold the problem and the answer: one line per dataset
that is a table of questions and answers, a function for each that is not. Every name also reads rows of the same
columns from `data_path`, so that a copy on disk needs no network. Knows no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from nemo_rl.config import DatasetConfig
from nemo_rl.config.data_rules import UNBUILT_DATASETS
from nemo_rl.config.dotted import import_dotted
from nemo_rl.config.errors import did_you_mean
from nemo_rl.data.datasets.generated import ArithmeticDataset, ReasoningGymDataset
from nemo_rl.data.datasets.published import (
    boxed_solutions,
    gpqa,
    helpsteer3,
    mmlu,
    mmlu_pro,
    open_assistant,
    openai_format,
    with_messages,
)
from nemo_rl.data.datasets.raw import (
    Messages,
    RawDataset,
    Row,
    as_messages,
    conversation,
    kept,
    read_rows,
    require_column,
    with_conversations,
)
from nemo_rl.data.datasets.sliding_puzzle import SlidingPuzzleDataset
from nemo_rl.data.interfaces import DataError
from nemo_rl.data.processors import get_processor

if TYPE_CHECKING:
    from datasets import Dataset

Convert = Callable[
    ["Dataset", str, str], "Dataset"
]  # (rows, task name, dotted key) -> rows with messages and task_name
_GENERATED: dict[str, Callable[[DatasetConfig, str, str], RawDataset]] = {
    "arithmetic": ArithmeticDataset,
    "reasoning_gym": ReasoningGymDataset,
    "sliding_puzzle": SlidingPuzzleDataset,
}


@dataclass(frozen=True)
class Source:
    """Where a named dataset is and how its rows read.

    Attributes:
        hub: its id on the Hugging Face hub; None when only `data_path` can say where it is.
        question, answer: columns, for tables of questions and answers.
        split, subset: what is read unless the entry says otherwise; several subsets are joined.
        convert: makes messages of rows that are no such table.
    """

    hub: str | None
    question: str = "problem"
    answer: str = "answer"
    split: str = "train"
    subset: tuple[str | None, ...] = (None,)
    convert: Convert | None = None


def _gsm8k(rows: Dataset, task_name: str, key: str) -> Dataset:
    _require(rows, ("question", "answer"), key)
    # GSM8K ends each solution with `#### answer`, thousands separated by commas.
    return with_conversations(
        rows,
        task_name,
        lambda row: conversation(row["question"], row["answer"].rpartition("####")[2].strip().replace(",", "")),
    )


def _dapo(rows: Dataset, task_name: str, key: str) -> Dataset:
    _require(rows, ("prompt", "reward_model"), key)
    seen: set[str] = set()

    def first_time(row: Row) -> bool:
        # The published table repeats every problem about a hundred times.
        text = row["prompt"][0]["content"]
        new = text not in seen
        seen.add(text)
        return new

    return with_conversations(
        kept(rows, first_time),
        task_name,
        lambda row: conversation(row["prompt"][0]["content"], str(row["reward_model"]["ground_truth"])),
    )


def _squad(rows: Dataset, task_name: str, key: str) -> Dataset:
    _require(rows, ("context", "question", "answers"), key)

    def convert(row: Row) -> Messages:
        return conversation(
            f"{row['context']}\n\nAnswer from the text above: {row['question']}", row["answers"]["text"][0]
        )

    return with_conversations(rows, task_name, convert)


def _numina(rows: Dataset, task_name: str, key: str) -> Dataset:
    _require(rows, ("answer",), key)
    # Proofs and problems without a checkable answer are marked by these words.
    checkable = kept(rows, lambda row: row["answer"] not in (None, "", "proof", "notfound"))
    return as_messages(checkable, "problem", "answer", task_name, key)


def _arrow_text(rows: Dataset, task_name: str, key: str) -> Dataset:
    _require(rows, ("text",), key)
    return with_conversations(rows, task_name, lambda row: [{"role": "assistant", "content": row["text"]}])


def _require(rows: Dataset, columns: tuple[str, ...], key: str) -> None:
    for column in columns:
        require_column(rows, column, key)


_MATH_SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)

SOURCES: dict[str, Source] = {
    "OpenMathInstruct-2": Source("nvidia/OpenMathInstruct-2", answer="expected_answer", split="train_1M"),
    "DeepScaler": Source("agentica-org/DeepScaleR-Preview-Dataset"),
    "DAPOMath17K": Source("BytedTsinghua-SIA/DAPO-Math-17k", convert=_dapo),
    "DAPOMathAIME2024": Source("BytedTsinghua-SIA/AIME-2024", convert=_dapo),
    "AIME2024": Source("HuggingFaceH4/aime_2024"),
    "AIME2025": Source("opencompass/AIME2025", question="question", split="test", subset=("AIME2025-I", "AIME2025-II")),
    "AIME2026": Source("MathArena/aime_2026"),
    "math": Source("EleutherAI/hendrycks_math", split="test", subset=_MATH_SUBJECTS, convert=boxed_solutions),
    "math500": Source("HuggingFaceH4/MATH-500", split="test"),
    "gpqa": Source("Idavidrein/gpqa", subset=("gpqa_main",), convert=gpqa),
    "gpqa_diamond": Source("Idavidrein/gpqa", subset=("gpqa_diamond",), convert=gpqa),
    "gpqa_extended": Source("Idavidrein/gpqa", subset=("gpqa_extended",), convert=gpqa),
    "mmlu": Source("cais/mmlu", split="test", subset=("all",), convert=mmlu),
    "mmlu_pro": Source("TIGER-Lab/MMLU-Pro", split="test", convert=mmlu_pro),
    "gsm8k": Source("openai/gsm8k", subset=("main",), convert=_gsm8k),
    "NuminaMath-1.5": Source("AI-MO/NuminaMath-1.5", convert=_numina),
    "OpenR1-Math-220k": Source("open-r1/OpenR1-Math-220k"),
    "HelpSteer3": Source("nvidia/HelpSteer3", convert=helpsteer3),
    "squad": Source("rajpurkar/squad", convert=_squad),
    "open_assistant": Source("OpenAssistant/oasst1", convert=open_assistant),
    "tulu3_sft_mixture": Source("allenai/tulu-3-sft-mixture", convert=with_messages),
    "openai_format": Source(None, convert=with_messages),
    "arrow_text": Source(None, convert=_arrow_text),
    "ResponseDataset": Source(None, question="input", answer="output"),
}

# Datasets of questions with choices, which have a processor of their own.
MULTIPLE_CHOICE = ("gpqa", "gpqa_diamond", "gpqa_extended", "mmlu", "mmlu_pro")

ALIASES = {
    "aime2024": "AIME2024",
    "aime2025": "AIME2025",
    "gpqa_main": "gpqa",
    "GSM8K": "gsm8k",
    "deepscaler": "DeepScaler",
    "response_dataset": "ResponseDataset",
}


class NamedDataset(RawDataset):
    """A dataset of the table above."""

    def __init__(self, config: DatasetConfig, task_name: str, key: str) -> None:
        self.task_name = task_name
        source = SOURCES[ALIASES.get(config.dataset_name, config.dataset_name)]
        rows = _read(config, source, key)
        self.dataset = self._messages(rows, config, source, key)
        if len(self.dataset) == 0:
            raise DataError(f"{key}: {config.dataset_name} has no usable row")

    @override
    def set_processor(self, config: DatasetConfig) -> None:
        """The processor of the entry; of questions with choices, theirs in place of the default."""
        own = ALIASES.get(config.dataset_name, config.dataset_name) in MULTIPLE_CHOICE
        default = config.processor in ("math_hf_data_processor", "default")
        self.processor = get_processor("multichoice_qa_processor" if own and default else config.processor)

    def _messages(self, rows: Dataset, config: DatasetConfig, source: Source, key: str) -> Dataset:
        if ALIASES.get(config.dataset_name, config.dataset_name) == "openai_format":
            return openai_format(rows, self.task_name, key, config)
        if config.input_key is not None and config.output_key is None and source.convert is with_messages:
            rows = rows.rename_column(config.input_key, "messages") if config.input_key != "messages" else rows
        elif source.convert is None or (config.input_key is not None and config.output_key is not None):
            return as_messages(
                rows, config.input_key or source.question, config.output_key or source.answer, self.task_name, key
            )
        return source.convert(rows, self.task_name, key) if source.convert is not None else rows


def _read(config: DatasetConfig, source: Source, key: str) -> Dataset:
    from datasets import concatenate_datasets

    if config.data_path is not None:
        return read_rows(
            config.data_path,
            split=config.split,
            subset=config.subset,
            cache_dir=config.download_dir,
            key=f"{key}.data_path",
        )
    if source.hub is None:
        raise DataError(f"{key}.data_path: {config.dataset_name} needs to be told where its rows are")
    subsets = (config.subset,) if config.subset is not None else source.subset
    split = config.split or source.split
    parts = [
        read_rows(source.hub, split=split, subset=subset, cache_dir=config.download_dir, key=key) for subset in subsets
    ]
    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)


def load_response_dataset(
    config: DatasetConfig | Mapping[str, object], key: str = "data.train", task_name: str | None = None
) -> RawDataset:
    """Loads a dataset, with its prompt, processor and validation split.

    Args:
        config: the entry, as a section or a plain mapping.
        key: its dotted key, for messages.
        task_name: name of the task; None takes the dataset's.

    Raises:
        DataError: the name, its rows, a column, a prompt file or the processor does not exist, or there is no row.
    """
    config = DatasetConfig.read(config)
    dataset = _load(config, key, task_name or config.dataset_name)
    dataset.set_task_spec(config)
    dataset.set_processor(config)
    dataset.split_train_validation(config.split_validation_size, config.seed)
    if config.repeat > 1:
        dataset.dataset = dataset.dataset.select(list(range(len(dataset.dataset))) * config.repeat)
    return dataset


def _load(config: DatasetConfig, key: str, task_name: str) -> RawDataset:
    name = config.dataset_name
    if "." in name and name not in SOURCES:
        return _users_class(config, key)
    if name in _GENERATED:
        return _GENERATED[name](config, task_name, key)
    if name in UNBUILT_DATASETS:
        raise DataError(f"{key}.dataset_name: {name!r} is not built yet: {UNBUILT_DATASETS[name]}")
    if name not in SOURCES and name not in ALIASES:
        known = [*SOURCES, *ALIASES, *_GENERATED]
        raise DataError(
            f"{key}.dataset_name: there is no dataset {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}; "
            "for your own rows use ResponseDataset with data_path, or the dotted path of a class"
        )
    return NamedDataset(config, task_name, key)


def _users_class(config: DatasetConfig, key: str) -> RawDataset:
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
