"""Datasets whose rows are conversations rather than questions and answers.

Each function makes `messages` and `task_name` of published columns. Knows no tokenizer. Invariant: roles are system,
user and assistant.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from nemo_rl.config import DatasetConfig
from nemo_rl.data.datasets.raw import Messages, Row, with_conversations
from nemo_rl.data.errors import DataError
from nemo_rl.data.sources import require_column

if TYPE_CHECKING:
    from datasets import Dataset


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
