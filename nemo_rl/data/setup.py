"""All data of a run: training and validation prompts, and which environment judges which task.

Reads `data.*` and decides how several datasets become one; environments are known by name only. Invariant: a task name
belongs to one entry, so a row's task decides its prompt, processor and environment.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils.data import ConcatDataset

from nemo_rl.config import DataConfig, DatasetConfig
from nemo_rl.data.datasets.raw import RawDataset
from nemo_rl.data.datasets.registry import load_response_dataset
from nemo_rl.data.interfaces import TaskDataProcessFnCallable, TaskDataSpec
from nemo_rl.data.processors import AllTaskProcessedDataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TaskDatasets:
    """Prompts of a run.

    Attributes:
        train: all training prompts.
        validation: all validation prompts; None without.
        env_of_task: environment name per training task.
        env_of_validation_task: environment name per validation task.
        train_by_task: training prompts per task, for one loader each.
    """

    train: AllTaskProcessedDataset
    validation: AllTaskProcessedDataset | None
    env_of_task: dict[str, str]
    env_of_validation_task: dict[str, str]
    train_by_task: dict[str, AllTaskProcessedDataset] = field(default_factory=dict)


def load_datasets(
    tokenizer: PreTrainedTokenizerBase, config: DataConfig, stop_texts: Sequence[str] = ()
) -> TaskDatasets:
    """Loads every dataset of `data.train` and `data.validation`.

    Args:
        tokenizer: a Hugging Face tokenizer.
        config: `data`.
        stop_texts: tokens that end an assistant's turn.

    Raises:
        DataError: see `load_response_dataset`.
    """
    train = _load(config.train, "data.train")
    held_out = [(entry, dataset, dataset.val_dataset) for entry, dataset in train if dataset.val_dataset is not None]
    validation = held_out + [
        (entry, dataset, dataset.dataset)
        for entry, dataset in _load(config.validation or [], "data.validation", held_out)
    ]
    rows = [(dataset, dataset.dataset) for _, dataset in train]
    held_out_rows = [(dataset, part) for _, dataset, part in validation]
    for dataset, _ in [*rows, *held_out_rows]:
        dataset.processor = with_options(dataset.processor, config, stop_texts)
    longest = config.max_input_seq_length or sys.maxsize
    return TaskDatasets(
        train=processed(rows, tokenizer, longest),
        validation=processed(held_out_rows, tokenizer, longest) if validation else None,
        env_of_task={dataset.task_name: entry.env_name for entry, dataset in train},
        env_of_validation_task={dataset.task_name: entry.env_name for entry, dataset, _ in validation},
        train_by_task={one[0].task_name: processed([one], tokenizer, longest) for one in rows},
    )


def with_options(
    processor: TaskDataProcessFnCallable, config: DataConfig, stop_texts: Sequence[str] = ()
) -> TaskDataProcessFnCallable:
    """A processor with those of `data.add_bos`, `add_eos`, `add_generation_prompt` and `stop_texts` bound that it
    takes.
    """
    if isinstance(processor, functools.partial):
        return processor
    options = {name: config[name] for name in _PROCESSOR_OPTIONS} | {"stop_texts": tuple(stop_texts)}
    taken = {name: options[name] for name in options if name in inspect.signature(processor).parameters}
    return functools.partial(processor, **taken) if taken else processor


_PROCESSOR_OPTIONS = ("add_bos", "add_eos", "add_generation_prompt")
_Entry = tuple[DatasetConfig, RawDataset, object]


def _load(
    entries: Sequence[DatasetConfig], key: str, before: Sequence[_Entry] = ()
) -> list[tuple[DatasetConfig, RawDataset]]:
    taken = {dataset.task_name for _, dataset, _ in before}
    loaded: list[tuple[DatasetConfig, RawDataset]] = []
    for index, entry in enumerate(entries):
        name, number = entry.dataset_name, 1
        while name in taken:
            number += 1
            name = f"{entry.dataset_name}_{number}"
        dataset = load_response_dataset(entry, key if len(entries) == 1 else f"{key}.{index}", name)
        taken.add(dataset.task_name)
        loaded.append((entry, dataset))
    return loaded


def processed(
    parts: Sequence[tuple[RawDataset, Any]], tokenizer: PreTrainedTokenizerBase, max_seq_length: int
) -> AllTaskProcessedDataset:
    """Rows of one or several datasets as prompts, each by its own task's processor.

    Args:
        parts: datasets, each with those of its rows that are meant.
        tokenizer: a Hugging Face tokenizer.
        max_seq_length: longest prompt in tokens.
    """
    processors = {dataset.task_name: (dataset.task_spec, dataset.processor) for dataset, _ in parts}
    preprocessors = {
        dataset.task_name: dataset.preprocessor for dataset, _ in parts if dataset.preprocessor is not None
    }
    rows = parts[0][1] if len(parts) == 1 else ConcatDataset([part for _, part in parts])
    return AllTaskProcessedDataset(rows, tokenizer, TaskDataSpec(), processors, max_seq_length, preprocessors)
