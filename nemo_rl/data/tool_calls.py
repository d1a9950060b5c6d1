"""Arguments of tool calls in the form that a chat template reads; and whether a template shows what a conversation
carries beyond the text of its messages, or that text itself.

OpenAI's messages hold arguments as JSON text, Hugging Face's as objects. Templates that write JSON themselves would
quote a text once more, others cannot read an object. A template that has no place for tools or for their calls renders
a conversation as if it had none. One test for all ways into a template, of rows and of requests: the text must change
where the part is left out. Invariant: what is rendered shows the arguments as JSON, once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

from nemo_rl.data.interfaces import DataError

Message = Mapping[str, object]
Tools = Sequence[Mapping[str, object]] | None
# (messages, tools) -> text. Raises DataError: the template rejects them.
Render = Callable[[Sequence[Message], Tools], str]
# Another text for every message of a role: if the template shows it, the rendered text changes.
_OTHER = "\U000f0000"


def readable_calls(
    messages: Sequence[Message], render: Callable[[Sequence[Message]], str]
) -> Sequence[Message] | list[dict[str, object]]:
    """The messages with the arguments of their tool calls as objects, which is what vLLM's server gives to templates;
    as text where the template cannot read objects, or writes them in Python's spelling.

    Args:
        render: The conversation through the chat template.

    Raises DataError: the template rejects both, or would quote arguments that are no JSON object.
    """
    if not any(True for _ in _arguments(messages)):
        return messages
    objects, texts = _with_arguments(messages, _as_object), _with_arguments(messages, _as_text)
    try:
        shown = render(objects)
    except DataError:
        render(texts)
        return texts
    given = [arguments for _, arguments in _arguments(objects)]
    if any(isinstance(one, Mapping) and str(one) != _as_text(one) and str(one) in shown for one in given):
        return texts
    for number, one in _arguments(objects):
        if isinstance(one, str) and (one not in shown or json.dumps(one, ensure_ascii=False) in shown):
            raise DataError(
                f"message {number}: the arguments of a tool call are {one[:80]!r}, which is no JSON object, and the "
                "chat template would quote it; expected an object, or one written out as JSON, such as "
                '\'{"city": "Oslo"}\''
            )
    return objects


def renders_otherwise(messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> bool:
    """Whether the template's text of messages is another one as `readable_calls` gives them than as they are. Arguments
    and errors as there.
    """
    readable = readable_calls(messages, render)
    try:
        return readable is not messages and render(messages) != render(readable)
    except DataError:
        return True


def _functions(message: Message) -> Iterator[Mapping[str, object]]:
    """Functions that a message calls, in OpenAI's form or with name and arguments side by side."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, Sequence) and not isinstance(calls, str) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            yield function
    older = message.get("function_call")
    if isinstance(older, Mapping):
        yield older


def _arguments(messages: Sequence[Message]) -> Iterator[tuple[int, object]]:
    """The arguments of each call, with the number of its message, from 1."""
    for number, message in enumerate(messages, start=1):
        for function in _functions(message):
            if isinstance(function.get("arguments"), (str, Mapping)):
                yield number, function["arguments"]


def _with_arguments(messages: Sequence[Message], change: Callable[[object], object]) -> list[dict[str, object]]:
    return [{key: _changed(value, change) if key in CALLS else value for key, value in m.items()} for m in messages]


CALLS = ("tool_calls", "function_call")


def _changed(value: object, change: Callable[[object], object]) -> object:
    """A call, or a list of calls, with other arguments."""
    if isinstance(value, list):
        return [_changed(one, change) for one in value]
    if not isinstance(value, Mapping):
        return value
    if isinstance(value.get("function"), Mapping):
        return {**value, "function": _changed(value["function"], change)}
    if isinstance(value.get("arguments"), (str, Mapping)):
        return {**value, "arguments": change(value["arguments"])}
    return value


def _as_object(arguments: object) -> object:
    """Text that is a JSON object as that object; a call without arguments may have an empty text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        read = json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return arguments
    return read if isinstance(read, dict) else arguments


def _as_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


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
