"""Processors: functions that turn one row of a dataset into one prompt, by name; and the dataset that calls them when a
loader asks for a prompt.

Invariants: a prompt longer than the limit is cut to at most 4 tokens and has loss multiplier 0, so that it costs
nothing and trains nothing; prompt i is a function of row i.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nemo_rl.config import DatasetConfig
from nemo_rl.config.dotted import import_dotted
from nemo_rl.config.errors import ConfigError, did_you_mean
from nemo_rl.config.foreign import UNBUILT
from nemo_rl.data.conversations import (
    Message,
    RowError,
    as_messages,
    as_text,
    asked_and_answered,
    cell,
    check_trained,
    expected_answer,
    filled_text,
    is_untrained,
    without_filling,
)
from nemo_rl.data.interfaces import (
    DataError,
    DatumSpec,
    LLMMessageLogType,
    Row,
    TaskDataProcessFnCallable,
    TaskDataSpec,
)
from nemo_rl.data.llm_message_utils import get_formatted_message_log, prompted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CUT_TO = 4
# Messages, and the environment's metadata.
Prompt = tuple[list[Message], dict[str, object]]
TaskProcessors = Mapping[str, tuple[TaskDataSpec, TaskDataProcessFnCallable]]


def _prompt_of(read: Callable[[Row], Prompt]) -> TaskDataProcessFnCallable:
    """The processor that makes a prompt of the messages that `read` finds in a row, and of what the environment is to
    know.
    """

    def processor(
        datum_dict: Row,
        task_data_spec: TaskDataSpec,
        tokenizer: PreTrainedTokenizerBase,
        max_seq_length: int,
        idx: int,
    ) -> DatumSpec:
        messages, info = read(datum_dict)
        _one_system_message(messages, task_data_spec)
        # A template says how a prompt begins, and the response ends it.
        log = get_formatted_message_log(messages, tokenizer, task_data_spec, False, False, True, _tools(datum_dict))
        for message, asked in zip(log, prompted(messages, task_data_spec), strict=True):
            # What an agent sends, which applies no template.
            message["text"] = asked["content"]
        return _datum(log, info, datum_dict, max_seq_length, idx)

    processor.__name__, processor.__qualname__, processor.__doc__ = read.__name__, read.__qualname__, read.__doc__
    _USED[processor] = lambda row: read(row)[0]
    return processor


_USED: dict[TaskDataProcessFnCallable, Callable[[Row], list[Message]]] = {}


def used_messages(processor: TaskDataProcessFnCallable) -> Callable[[Row], list[Message]] | None:
    """Function that finds the messages of a row that a processor gives to the chat template, and raises RowError for a
    row that the processor cannot read; None for a user's processor.
    """
    return _USED.get(processor)


def trains_whole(processor: TaskDataProcessFnCallable) -> bool:
    """Whether the assistant's messages are trained as they are, and not judged by."""
    return processor is sft_processor


@_prompt_of
def math_hf_data_processor(row: Row) -> Prompt:
    """A row with `messages` that end with the problem and the expected answer; the answer goes to the environment as
    `ground_truth`, what stands before it is the prompt.
    """
    prompt, answer = asked_and_answered(conversation_of(row))
    return prompt, {"ground_truth": expected_answer(answer)}


@_prompt_of
def math_data_processor(row: Row) -> Prompt:
    """A row with `problem` and `expected_answer`, or with `messages` as `math_hf_data_processor` takes it."""
    if "problem" not in row and "messages" in row:
        prompt, answer = asked_and_answered(conversation_of(row))
        return prompt, {"ground_truth": expected_answer(answer)}
    problem = filled_text(cell(row, "problem"), "column 'problem'")
    answer = filled_text(cell(row, "expected_answer"), "column 'expected_answer'")
    return _user(problem), {"ground_truth": expected_answer(answer)}


@_prompt_of
def multichoice_qa_processor(row: Row) -> Prompt:
    """A row with `question`, `options` (letter to text) and `answer` (a letter). A prompt without `{}` stands before
    the question.
    """
    question, options = filled_text(cell(row, "question"), "column 'question'"), cell(row, "options")
    lines = [
        f"Question: {question}",
        "Options:",
        *(f"{letter}) {as_text(text, f'option {letter}')}" for letter, text in options.items() if text is not None),
    ]
    info: dict[str, object] = {"ground_truth": filled_text(cell(row, "answer"), "column 'answer'")}
    if "subject" in row:
        info["subject"] = str(row["subject"])
    return _user("\n".join(lines)), info


@_prompt_of
def helpsteer3_data_processor(row: Row) -> Prompt:
    """A row with `messages` whose last one is the wanted response; the conversation before it is the prompt."""
    prompt, answer = asked_and_answered(conversation_of(row))
    return prompt, {"ground_truth": answer}


@_prompt_of
def state_processor(row: Row) -> Prompt:
    """A row with `messages`, of which those up to the last question are the prompt, and `state`: JSON that its
    environment is given back as metadata, with an answer after that question as `ground_truth`.
    """
    messages = conversation_of(row)
    last = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=-1)
    if last < 0:
        raise RowError("`messages` has no question of a user")
    answers = [message["content"] for message in messages[last + 1 :] if message["role"] == "assistant"]
    known = {"ground_truth": answers[-1]} if answers else {}
    return messages[: last + 1], known | json.loads(cell(row, "state"))


def sft_processor(
    datum_dict: Mapping[str, object],
    task_data_spec: TaskDataSpec,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    idx: int,
    add_bos: bool = True,
    add_eos: bool = True,
    add_generation_prompt: bool = False,
    stop_texts: Sequence[str] = (),
) -> DatumSpec:
    """A row with `messages`, and perhaps `tools` (JSON) for the chat template; the whole conversation is tokenized, to
    be trained on.
    """
    messages = _trained(datum_dict)
    _one_system_message(messages, task_data_spec)
    log = get_formatted_message_log(
        messages,
        tokenizer,
        task_data_spec,
        add_bos,
        add_eos,
        add_generation_prompt,
        tools=_tools(datum_dict),
        stop_texts=stop_texts,
    )
    # A system prompt of the task may stand before them.
    for message, formatted in zip(reversed(messages), reversed(log), strict=False):
        if is_untrained(message):
            formatted["trained_tokens"] = torch.zeros(len(formatted["token_ids"]), dtype=torch.bool)
    return _datum(log, None, datum_dict, max_seq_length, idx)


def _trained(row: Row) -> list[Message]:
    messages = conversation_of(row)
    check_trained(messages)
    return messages


_USED[sft_processor] = _trained


def conversation_of(row: Row) -> list[Message]:
    """The messages of a row, with what each one carries beyond role and content. Raises RowError: the row has none, or
    one cannot be read.
    """
    value = cell(row, "messages")
    if not row.get("more"):
        return as_messages(without_filling(value), "`messages`")
    more = json.loads(row["more"])
    return [{**message, **kept} for message, kept in zip(as_messages(value, "`messages`"), more, strict=True)]


def _one_system_message(messages: list[Message], spec: TaskDataSpec) -> None:
    if spec.system_prompt is not None and any(message["role"] == "system" for message in messages):
        raise RowError("has a system message, and system_prompt_file sets another one; leave one of them")


def _tools(row: Row) -> list[dict[str, object]] | None:
    return json.loads(row["tools"]) if row.get("tools") else None


PROCESSORS: dict[str, TaskDataProcessFnCallable] = {
    "default": math_hf_data_processor,
    "math_data_processor": math_data_processor,
    "math_hf_data_processor": math_hf_data_processor,
    "multichoice_qa_processor": multichoice_qa_processor,
    "helpsteer3_data_processor": helpsteer3_data_processor,
    "state_processor": state_processor,
    "nemo_gym_data_processor": state_processor,
    "sft_processor": sft_processor,
    "kd_data_processor": sft_processor,
}


def register_processor(processor_name: str, processor_function: TaskDataProcessFnCallable) -> None:
    """Makes a processor known under a name, for `data.*.processor`. Raises DataError: another function has that name
    already.
    """
    known = PROCESSORS.get(processor_name)
    if known is not None and known is not processor_function:
        raise DataError(
            f"there is a processor {processor_name!r} already: "
            f"{known.__module__}.{getattr(known, '__qualname__', known)}"
        )
    PROCESSORS[processor_name] = processor_function


def get_processor(name: str) -> TaskDataProcessFnCallable:
    """The processor of a name, or of a dotted path such as `package.module.function`. Raises DataError: there is none;
    ConfigError: the path cannot be imported, or names no function.
    """
    if "." in name:
        found = import_dotted(name, "data.*.processor")
        if not callable(found):
            raise ConfigError([f"data.*.processor: {name} is no function"])
        return found
    if name in UNBUILT["processors"]:
        raise DataError(f"data.*.processor {name!r} is not built yet: {UNBUILT['processors'][name]}")
    if name not in PROCESSORS:
        known = ", ".join(sorted(PROCESSORS))
        raise DataError(
            f"data.*.processor: there is no processor {name!r}.{did_you_mean(name, PROCESSORS)} Known: "
            f"{known}; one of your own is named by its dotted path"
        )
    return PROCESSORS[name]


def processor_of(config: DatasetConfig) -> TaskDataProcessFnCallable:
    """The processor of a dataset's entry. Where a judge compares whole texts, the answer stays whole: what a solution
    of mathematics ends with is a heading or a comment in it. For errors see `get_processor`.
    """
    found = get_processor(config.processor)
    whole = found is math_hf_data_processor and config.env_name in _COMPARE_TEXTS
    return helpsteer3_data_processor if whole else found


# Environments whose reward is how much of the expected text a response repeats.
_COMPARE_TEXTS = ("code_jaccard",)


def _user(content: str) -> list[Message]:
    return [{"role": "user", "content": content}]


def _datum(
    log: LLMMessageLogType, info: dict[str, object] | None, row: Mapping[str, object], max_seq_length: int, idx: int
) -> DatumSpec:
    length, loss_multiplier = sum(len(message["token_ids"]) for message in log), 1.0
    if length > max_seq_length:
        loss_multiplier = 0.0
        each = max(1, min(_CUT_TO, max_seq_length) // len(log))
        columns = ("token_ids", "trained_tokens")
        log = [
            {**message, **{name: message[name][:each] for name in columns if name in message}}
            for message in log[: min(_CUT_TO, max_seq_length)]
        ]
        length = sum(len(message["token_ids"]) for message in log)
    return DatumSpec(
        message_log=log,
        length=length,
        extra_env_info=info,
        loss_multiplier=loss_multiplier,
        idx=idx,
        task_name=str(row.get("task_name")),
        stop_strings=None,
    )


class AllTaskProcessedDataset:
    """Prompts by index.

    Args:
        dataset: rows with `task_name`; has a length and gives row i at `[i]`.
        default_task_data_spec: how a task is prompted when there is one processor for all.
        task_data_processors: prompt and processor per task, or one processor.
        task_data_preprocessors: applied to a row of a task before its processor.
        max_seq_length: longest prompt in tokens; None for no limit.
        left_out: how many rows their format's own rule left out, for the person.
    """

    def __init__(
        self,
        dataset: Any,
        tokenizer: PreTrainedTokenizerBase,
        default_task_data_spec: TaskDataSpec,
        task_data_processors: TaskProcessors | TaskDataProcessFnCallable,
        max_seq_length: int | None = None,
        task_data_preprocessors: Mapping[str, Callable[[Row], Row]] | None = None,
        left_out: int = 0,
    ) -> None:
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.default_task_data_spec = default_task_data_spec
        self.task_data_processors = task_data_processors
        self.max_seq_length = sys.maxsize if max_seq_length is None else max_seq_length
        self.task_data_preprocessors = dict(task_data_preprocessors or {})
        self.left_out = left_out
        # Rows of the model's embedding, where the tokenizer has more tokens than these.
        self.vocabulary: int | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> DatumSpec:
        row = self.dataset[idx]
        task = str(row.get("task_name"))
        preprocessor = self.task_data_preprocessors.get(task)
        if preprocessor is not None:
            row = preprocessor(row)
        spec, processor = self._processor_of(task)
        try:
            datum = processor(row, spec, self.tokenizer, self.max_seq_length, idx)
        except DataError as error:
            raise DataError(f"row {idx + 1} (from 1) of {task}: {error}") from error
        datum.setdefault("task_name", task)
        if "message_log" in datum and not any(len(message["token_ids"]) for message in datum["message_log"]):
            raise DataError(
                f"row {idx + 1} (from 1) of {task}: has not one token: its messages are empty, or the chat template or "
                f"the tokenizer of {self.tokenizer.name_or_path} makes nothing of them"
            )
        if self.vocabulary is not None:
            self._check_tokens(datum, self.vocabulary)
        return datum

    def prompt_file_of(self, task: str) -> str | None:
        """The file whose text stands around each question of a task, if any."""
        return self._processor_of(task)[0].prompt_file

    def _check_tokens(self, datum: DatumSpec, vocabulary: int) -> None:
        highest = max(int(message["token_ids"].max()) for message in datum["message_log"] if len(message["token_ids"]))
        if highest >= vocabulary:
            raise DataError(
                f"row {datum['idx'] + 1} of {datum.get('task_name')}: spells {self.tokenizer.decode([highest])!r} "
                f"(token {highest}), for which the model's embedding of {vocabulary} rows has none; remove it"
            )

    def _processor_of(self, task: str) -> tuple[TaskDataSpec, TaskDataProcessFnCallable]:
        if callable(self.task_data_processors):
            return self.default_task_data_spec, self.task_data_processors
        if task not in self.task_data_processors:
            raise DataError(f"a row has task_name {task!r}, but the tasks are {', '.join(self.task_data_processors)}")
        return self.task_data_processors[task]
