"""Whether a chat template shows what a conversation carries beyond the text of its messages, or that text itself.

A template that has no place for tools or for their calls renders a conversation as if it had none. One test for all
ways into a template, of rows and of requests: the text must change where the part is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nemo_rl.data.interfaces import DataError
from nemo_rl.data.tool_calls import readable_calls

Message = Mapping[str, object]
Tools = Sequence[Mapping[str, object]] | None
# (messages, tools) -> text. Raises DataError: the template rejects them.
Render = Callable[[Sequence[Message], Tools], str]
# Another text for every message of a role: what a template shows changes with it.
_OTHER = "\U000f0000"


def shows(key: str, messages: Sequence[Message], tools: Tools, render: Render) -> bool:
    """Whether the text of a conversation changes without what `key` names.

    Args:
        key: A key of messages, `tools`, or `content of ROLE`.

    Raises DataError: the template rejects the conversation as it is.
    """
    messages = readable_calls(messages, lambda some: render(some, tools))
    whole = render(messages, tools)
    role = key.removeprefix("content of ")
    if role != key:
        without = [{**message, "content": _OTHER} if message["role"] == role else message for message in messages]
    else:
        without = [{name: value for name, value in message.items() if name != key} for message in messages]
    try:
        return whole != render(without, None if key == "tools" else tools)
    except (DataError, TypeError):
        return True
