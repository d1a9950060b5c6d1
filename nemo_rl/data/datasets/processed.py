"""The dataset that a loader reads: rows of one or several tasks, turned into prompts when they are asked for.

Knows which processor belongs to which task; the processors know the rest. Invariant: row i is a function of i alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nemo_rl.data.errors import DataError
from nemo_rl.data.interfaces import DatumSpec, TaskDataProcessFnCallable, TaskDataSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TaskProcessors = Mapping[str, tuple[TaskDataSpec, TaskDataProcessFnCallable]]


class AllTaskProcessedDataset:
    """Prompts by index.

    Args:
        dataset: rows with `task_name`; has a length and gives row i at `[i]`.
        tokenizer: a Hugging Face tokenizer.
        default_task_data_spec: how a task is prompted when there is one processor for all.
        task_data_processors: prompt and processor per task, or one processor.
        max_seq_length: longest prompt, in tokens.
        task_data_preprocessors: applied to a row of a task before its processor.
    """

    def __init__(
        self,
        dataset: Any,
        tokenizer: PreTrainedTokenizerBase,
        default_task_data_spec: TaskDataSpec,
        task_data_processors: TaskProcessors | TaskDataProcessFnCallable,
        max_seq_length: int,
        task_data_preprocessors: Mapping[str, Any] | None = None,
    ) -> None:
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.default_task_data_spec = default_task_data_spec
        self.task_data_processors = task_data_processors
        self.max_seq_length = max_seq_length
        self.task_data_preprocessors = dict(task_data_preprocessors or {})

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> DatumSpec:
        row = self.dataset[idx]
        task = str(row.get("task_name"))
        preprocessor = self.task_data_preprocessors.get(task)
        if preprocessor is not None:
            row = preprocessor(row)
        spec, processor = self._processor_of(task)
        datum = processor(row, spec, self.tokenizer, self.max_seq_length, idx)
        datum.setdefault("task_name", task)
        return datum

    def _processor_of(self, task: str) -> tuple[TaskDataSpec, TaskDataProcessFnCallable]:
        if callable(self.task_data_processors):
            return self.default_task_data_spec, self.task_data_processors
        if task not in self.task_data_processors:
            raise DataError(f"a row has task_name {task!r}, but the tasks are {', '.join(self.task_data_processors)}")
        return self.task_data_processors[task]
