"""Published datasets that are no tables of questions and answers: conversations, multiple choice, boxed solutions.

Each function makes rows with `messages`, or for `multichoice_qa_processor` (`question`, `options` by letter, `answer`),
of the published columns. Knows no tokenizer. Invariants: roles are system, user and assistant; the same rows give the
same letters, in every process.
"""

from __future__ import annotations

import hashlib
import json
import random
import string
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from nemo_rl.config import DatasetConfig
from nemo_rl.data.datasets.raw import Messages, Row, conversation, kept, require_column, with_conversations
from nemo_rl.data.interfaces import DataError

if TYPE_CHECKING:
    from datasets import Dataset

_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def with_messages(rows: Dataset, task_name: str, key: str) -> Dataset:
    """Rows that have `messages` already."""
    require_column(rows, "messages", key)
    return with_conversations(rows, task_name, lambda row: _plain(row["messages"]))


def openai_format(rows: Dataset, task_name: str, key: str, config: DatasetConfig) -> Dataset:
    """Rows in OpenAI's format: a conversation in column `chat_key`, perhaps a system message in `system_key` and tools
    in `tool_key`, which reach the chat template as `tools` (kept as JSON, because rows differ in their arguments).
    """
    chat = config.input_key or config.chat_key
    columns = {"chat_key": chat, "system_key": config.system_key, "tool_key": config.tool_key}
    for name, column in columns.items():
        if column is not None:
            require_column(rows, column, f"{key}.{name}")

    def convert(row: Row) -> Row:
        if any(message.get("tool_calls") for message in row[chat]):
            raise DataError(f"{key}: a message has tool_calls, which are not trained on; keep rows of plain answers")
        messages = _plain(row[chat])
        system = (row[config.system_key] if config.system_key is not None else None) or config.system_prompt
        if system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        made: Row = {"messages": messages, "task_name": task_name}
        if config.tool_key is not None:
            tools = row[config.tool_key]
            made["tools"] = tools if isinstance(tools, str) else json.dumps(tools)
        return made

    return cast("Dataset", rows.map(convert, remove_columns=rows.column_names))


def helpsteer3(rows: Dataset, task_name: str, key: str) -> Dataset:
    """HelpSteer3's preferences: the conversation, then the response that was preferred (a negative score prefers the
    first).
    """
    for column in ("context", "response1", "response2", "overall_preference"):
        require_column(rows, column, key)

    def convert(row: Row) -> Messages:
        preferred = row["response1"] if row["overall_preference"] <= 0 else row["response2"]
        return [*_plain(row["context"]), {"role": "assistant", "content": preferred}]

    return with_conversations(rows, task_name, convert)


def open_assistant(rows: Dataset, task_name: str, key: str) -> Dataset:
    """Open Assistant's message trees: one conversation per path from a root to its last assistant message."""
    from datasets import Dataset as HuggingFaceDataset

    for column in ("message_id", "parent_id", "role", "text"):
        require_column(rows, column, key)
    children: dict[str | None, list[Row]] = defaultdict(list)
    for row in rows.to_list():
        children[row["parent_id"]].append(row)
    conversations = [path for root in children[None] for path in _paths(root, children)]
    return HuggingFaceDataset.from_dict({"messages": conversations, "task_name": [task_name] * len(conversations)})


def _plain(messages: Sequence[Mapping[str, str]]) -> Messages:
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _paths(root: Row, children: dict[str | None, list[Row]]) -> Iterator[Messages]:
    waiting: list[tuple[Row, Messages]] = [(root, [])]
    while waiting:
        node, before = waiting.pop()
        role = "assistant" if node["role"] == "assistant" else "user"
        path = [*before, {"role": role, "content": node["text"]}]
        replies = children[node["message_id"]]
        waiting += [(reply, path) for reply in reversed(replies)]
        if role == "assistant" and not any(
            grandchild for reply in replies for grandchild in children[reply["message_id"]]
        ):
            yield path


def gpqa(rows: Dataset, task_name: str, key: str) -> Dataset:
    """GPQA (https://arxiv.org/abs/2311.12022): the right answer stands first in the table, so that every question's
    choices are shuffled, by the question itself.
    """

    def convert(row: Row) -> Row:
        right = str(row["Correct Answer"]).strip()
        choices = [right, *(str(row[column]).strip() for column in _WRONG)]
        seed = hashlib.sha256(str(row["Question"]).encode()).digest()
        random.Random(seed).shuffle(choices)
        return _question(row["Question"], choices, choices.index(right), task_name, str(row.get("Subdomain") or ""))

    return _converted(rows, ("Question", "Correct Answer", *_WRONG), key, convert)


def mmlu(rows: Dataset, task_name: str, key: str) -> Dataset:
    """MMLU (https://arxiv.org/abs/2009.03300): four choices, and the index of the right one."""

    def convert(row: Row) -> Row:
        return _question(row["question"], row["choices"], int(row["answer"]), task_name, str(row.get("subject") or ""))

    return _converted(rows, ("question", "choices", "answer"), key, convert)


def mmlu_pro(rows: Dataset, task_name: str, key: str) -> Dataset:
    """MMLU-Pro (https://arxiv.org/abs/2406.01574): up to ten choices, and the letter of the right one."""

    def convert(row: Row) -> Row:
        right = string.ascii_uppercase.index(str(row["answer"]).strip())
        return _question(row["question"], row["options"], right, task_name, str(row.get("category") or ""))

    return _converted(rows, ("question", "options", "answer"), key, convert)


def boxed_solutions(rows: Dataset, task_name: str, key: str) -> Dataset:
    """Problems whose `solution` ends with its answer in `\\boxed{}`, as in MATH (https://arxiv.org/abs/2103.03874)."""
    for column in ("problem", "solution"):
        require_column(rows, column, key)
    answered = kept(rows, lambda row: last_boxed(row["solution"]) is not None)
    return with_conversations(
        answered, task_name, lambda row: conversation(row["problem"], last_boxed(row["solution"]) or "")
    )


def last_boxed(solution: str) -> str | None:
    """What stands in the last `\\boxed{..}`, with braces inside it; None without one."""
    start = solution.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for place in range(start + len("\\boxed"), len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[place], 0)
        if depth == 0:
            return solution[start + len("\\boxed{") : place]
    return None


def _question(question: str, choices: Sequence[str], right: int, task_name: str, subject: str) -> Row:
    letters = string.ascii_uppercase
    if not 0 <= right < len(choices) <= len(letters):
        raise DataError(
            f"{task_name}: a question has {len(choices)} choices, and number {right} is to be the right one"
        )
    # Every row has the same letters, as tables need; a letter without a choice is None and is not shown.
    options = {letter: choices[place] if place < len(choices) else None for place, letter in enumerate(letters[:10])}
    return {
        "question": question,
        "options": options,
        "answer": letters[right],
        "subject": subject,
        "task_name": task_name,
    }


def _converted(rows: Dataset, columns: Sequence[str], key: str, convert: Callable[[Row], Row]) -> Dataset:
    for column in columns:
        require_column(rows, column, key)
    return cast("Dataset", rows.map(convert, remove_columns=rows.column_names))
