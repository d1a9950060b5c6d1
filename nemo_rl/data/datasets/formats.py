"""Formats of rows: how each is recognised, and the conversation that its columns make.

One row of the table per format; `docs/recipes.md` shows the same table. Columns that mean the same in every format
(system message, tools, media) are read in one place. Invariant: a column that changes what a conversation says is used
or refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nemo_rl.config import DatasetConfig
from nemo_rl.data.conversations import (
    MEDIA,
    Message,
    Row,
    RowError,
    as_messages,
    as_text,
    cell,
    filled_text,
    from_json,
    is_conversation,
    is_empty,
    plain,
    refusal,
)
from nemo_rl.data.interfaces import DataError

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
# What a question is about, or is to choose from.
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
    formats = "; ".join(", ".join(known.columns) for known in FORMATS)
    raise DataError(
        f"{key}: no known format has the columns {', '.join(map(str, columns))}. Name those of the problem and the "
        f"answer with input_key and output_key; formats are recognised by the columns {formats}"
    )


def completed(row: Row, messages: list[Message], config: DatasetConfig) -> dict[str, object]:
    """A conversation with what its row says beside it: the system message, and tools as JSON, because rows differ in
    their arguments.

    Args:
        messages: what its format made of it.

    Raises RowError: a column contradicts the messages, or cannot be honoured.
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
