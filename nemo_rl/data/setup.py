"""All data of a run: training and validation prompts, which environment judges which task, and one row as the model
will see it, with the trained text marked.

Reads `data.*` and decides how several datasets become one; environments are known by name only. Invariant: a task name
belongs to one entry, so a row's task decides its prompt, processor and environment.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from torch.utils.data import ConcatDataset

from nemo_rl.config import DataConfig, DatasetConfig
from nemo_rl.data.conversations import CALLS, renders_otherwise, shows
from nemo_rl.data.datasets.raw import HandedOn, RawDataset
from nemo_rl.data.datasets.registry import load_response_dataset
from nemo_rl.data.interfaces import DataError, LLMMessageLogType, TaskDataProcessFnCallable, TaskDataSpec
from nemo_rl.data.llm_message_utils import get_formatted_message_log, render_chat
from nemo_rl.data.processors import AllTaskProcessedDataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.data.model_tokens import StopTokens
    from nemo_rl.data.processors import AllTaskProcessedDataset

OTHER_ARGUMENTS = (
    "arguments of tool calls, which rows have as JSON text, reach the chat template as vLLM's server gives them, and "
    "not as that text as in NeMo-RL (docs/from_nemo_rl.md)"
)


@dataclass(frozen=True)
class TaskDatasets:
    """Prompts of a run. `train_by_task`: training prompts per task, for one loader each. `contents`: what the rows of
    each entry are known by, by its dotted key. `notes`: what a run's start says of rows.
    """

    train: AllTaskProcessedDataset
    validation: AllTaskProcessedDataset | None  # all validation prompts; None without
    env_of_task: dict[str, str]  # environment name per training task
    env_of_validation_task: dict[str, str]  # environment name per validation task
    train_by_task: dict[str, AllTaskProcessedDataset] = field(default_factory=dict)
    validation_by_task: dict[str, AllTaskProcessedDataset] = field(default_factory=dict)
    contents: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def load_datasets(
    tokenizer: PreTrainedTokenizerBase, config: DataConfig, stop_texts: Sequence[str] = ()
) -> TaskDatasets:
    """Loads every dataset of `data.train` and `data.validation`. `config`: `data`. `stop_texts`: tokens that end an
    assistant's turn. Raises DataError: see `load_response_dataset`.
    """
    train = _load(config.train, "data.train")
    held_out = [_Part(part.key, part.entry, part.dataset, part.dataset.val_dataset) for part in train]
    held_out = [part for part in held_out if part.rows is not None]
    named = _load(config.validation or [], "data.validation", [part.dataset.task_name for part in held_out])
    for part in named:
        if part.dataset.val_dataset is not None:
            raise DataError(
                f"{part.key}.split_validation_size={part.entry.split_validation_size} takes rows out of training, and "
                f"all rows of {part.key} are for validation; set it to 0 there (it may come from data.default)"
            )
    validation = [*held_out, *named]
    for part in [*train, *named]:
        part.dataset.processor = with_options(part.dataset.processor, config, stop_texts)
    longest = config.max_input_seq_length or sys.maxsize

    def prompts(*parts: _Part) -> AllTaskProcessedDataset:
        return processed([(part.dataset, part.rows) for part in parts], tokenizer, longest)

    return TaskDatasets(
        train=prompts(*train),
        validation=prompts(*validation) if validation else None,
        env_of_task={part.dataset.task_name: part.entry.env_name for part in train},
        env_of_validation_task={part.dataset.task_name: part.entry.env_name for part in validation},
        train_by_task={part.dataset.task_name: prompts(part) for part in train},
        validation_by_task={part.dataset.task_name: prompts(part) for part in validation},
        contents={part.key: part.dataset.contents for part in [*train, *named]},
        notes=[line for part in [*train, *named] for line in _notes(part, tokenizer)],
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


@dataclass(frozen=True)
class _Part:
    """An entry, its dataset, and those of its rows that are meant."""

    key: str
    entry: DatasetConfig
    dataset: RawDataset
    rows: Any


def _load(entries: Sequence[DatasetConfig], key: str, taken: Sequence[str] = ()) -> list[_Part]:
    names = set(taken)
    loaded: list[_Part] = []
    for index, entry in enumerate(entries):
        name, number = entry.dataset_name, 1
        while name in names:
            number += 1
            name = f"{entry.dataset_name}_{number}"
        own_key = key if len(entries) == 1 else f"{key}.{index}"
        dataset = load_response_dataset(entry, own_key, name)
        names.add(dataset.task_name)
        loaded.append(_Part(own_key, entry, dataset, dataset.dataset))
    return loaded


def processed(
    parts: Sequence[tuple[RawDataset, Any]], tokenizer: PreTrainedTokenizerBase, max_seq_length: int
) -> AllTaskProcessedDataset:
    """Rows of one or several datasets as prompts, each by its own task's processor. `parts`: datasets, each with those
    of its rows that are meant. Raises DataError: messages carry something that the chat template does not show.
    """
    for dataset, _ in parts:
        check_handed_on(dataset, tokenizer)
    processors = {dataset.task_name: (dataset.task_spec, dataset.processor) for dataset, _ in parts}
    preprocessors = {
        dataset.task_name: dataset.preprocessor for dataset, _ in parts if dataset.preprocessor is not None
    }
    rows = parts[0][1] if len(parts) == 1 else ConcatDataset([part for _, part in parts])
    left_out = sum(dataset.left_out for dataset, _ in parts)
    return AllTaskProcessedDataset(rows, tokenizer, TaskDataSpec(), processors, max_seq_length, preprocessors, left_out)


def check_handed_on(dataset: RawDataset, tokenizer: PreTrainedTokenizerBase) -> None:
    """Whether the chat template shows what messages carry beyond role and content, and tools. Raises DataError: it
    renders rows that carry them as if they did not.
    """
    for key, examples in dataset.handed_on.items():
        if not any(_is_shown(key, example, tokenizer) for example in examples):
            raise DataError(
                f"{examples[0].place}: carries {key!r}, which the chat template of {tokenizer.name_or_path} does not "
                "show: it would be lost without a trace. Set policy.tokenizer.chat_template to a template that shows "
                "it, or remove it from the data"
            )


def _notes(part: _Part, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Rows of an entry that are rendered otherwise than in NeMo-RL."""
    for key, examples in part.dataset.handed_on.items():
        for example in examples:
            if key in CALLS and renders_otherwise(
                example.messages, lambda some, tools=example.tools: render_chat(tokenizer, some, False, tools)
            ):
                yield f"{part.key}: {OTHER_ARGUMENTS} ({example.place})"
                return


def _is_shown(key: str, example: HandedOn, tokenizer: PreTrainedTokenizerBase) -> bool:
    if key in ("reasoning_content", "thinking") and key in str(tokenizer.chat_template):
        # Templates leave out the reasoning of earlier turns, as their models were trained.
        return True
    try:
        return shows(
            key, example.messages, example.tools, lambda some, tools: render_chat(tokenizer, some, False, tools)
        )
    except (DataError, TypeError) as error:
        raise DataError(f"{example.place}: {error}") from error


# Puts `token_loss_mask` on every message of a log.
Mask = Callable[[LLMMessageLogType], None]
OPEN, CLOSE = "⟦", "⟧"
_HEAD, _TAIL, _GOLD = 800, 400, 120
_ROWS_TRIED = 16


def example(dataset: AllTaskProcessedDataset, mask: Mask | None) -> str:
    """A row as it is rendered.

    Args:
        dataset: processed rows, at least one.
        mask: marks what is trained of a conversation; None for prompts, whose responses are trained.

    Returns text in which `OPEN` and `CLOSE` are around what is trained.
    """
    rows = range(min(len(dataset), _ROWS_TRIED))
    row = next((number for number in rows if dataset[number]["loss_multiplier"]), 0)
    datum = dataset[row]
    log = [dict(message) for message in datum["message_log"]]
    if mask is not None:
        mask(log)
    text = _marked(log, dataset.tokenizer)
    said = f"row {row + 1} as it is rendered, trained text in {OPEN} {CLOSE}:\n{_shortened(text)}"
    if mask is None:
        said += f"{OPEN}response{CLOSE}"
        gold = (datum.get("extra_env_info") or {}).get("ground_truth")
        said += "" if gold is None else f"\njudged by: {str(gold)[:_GOLD]}"
    return said


def unstopped_turn(tokenizer: PreTrainedTokenizerBase, stops: StopTokens) -> str | None:
    """A line for the person where the chat template ends an assistant's turn with what does not end a response."""
    conversation = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    try:
        log = get_formatted_message_log(
            conversation,
            tokenizer,
            add_bos_token=False,
            add_eos_token=False,
            add_generation_prompt=True,
            stop_texts=stops.texts,
        )
    except DataError:
        return None
    end = log[-1]["content"].rpartition("y")[2].strip()
    if not end or not stops.ids or end.startswith(stops.texts):
        return None
    return (
        f"the chat template ends an assistant's turn with {end!r}, which is none of the stop tokens: a model that "
        "learned this template would not stop; policy.generation.stop_token_ids names further ones"
    )


def _marked(log: LLMMessageLogType, tokenizer: PreTrainedTokenizerBase) -> str:
    tokens: list[tuple[int, bool]] = []
    for message in log:
        ids = message["token_ids"].tolist()
        trained = message["token_loss_mask"].tolist() if "token_loss_mask" in message else [0] * len(ids)
        tokens += [(token, bool(one)) for token, one in zip(ids, trained, strict=True)]
    decode: Callable[..., object] = tokenizer.decode
    parts = [
        (is_trained, str(decode([token for token, _ in run], skip_special_tokens=False)))
        for is_trained, run in groupby(tokens, key=lambda pair: pair[1])
    ]
    return "".join(f"{OPEN}{text}{CLOSE}" if is_trained else text for is_trained, text in parts)


def _shortened(text: str) -> str:
    left = len(text) - _HEAD - _TAIL
    return text if left <= 0 else f"{text[:_HEAD]} [... {left} characters ...] {text[-_TAIL:]}"
