"""Cells and messages of a row as text: one rule for each kind of value, and a refusal for every other.

Rules: a number keeps the spelling of its file; a list of one element is that element; text parts are joined; an object
with `ground_truth` is that value. Invariants: roles decide, never positions; a key of a message that is not read here
is kept.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from nemo_rl.config.errors import did_you_mean
from nemo_rl.data.interfaces import DataError, Message, Row

_PLAIN_ROLES = ("system", "user", "assistant", "tool")
_ROLES = {
    **{name: name for name in _PLAIN_ROLES},
    "developer": "system",
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("function", "observation", "function_response", "tool_response", "ipython"), "tool"),
}
_TEXT_PARTS = ("text", "input_text", "output_text")
MEDIA = ("image", "images", "image_url", "audio", "audios", "video", "videos")
# Whether a message is trained; the values that mean yes say nothing.
_TRAINED = ("weight", "train", "trainable", "loss", "loss_mask")
_YES = (1, True, "1", "1.0", "true")
_NO = (0, False, "0", "0.0", "false")
# Keys that say something which the text of a conversation must show.
_SHOWN = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", "name", "refusal")
# GSM8K's mark, with a number or a formula behind it; the same signs before words are a heading or a comment.
_NUMBER = r"[-+]?[$€£]?[-+]?\.?\d[\d,]*(?:\.\d*)?(?:/\d+)?[ \t]*\\?%?"
_FORMULA = r"\$?[-+]?\d*\\(?:[dt]?frac|sqrt)\b[^\n]*"
_MARKED_ANSWER = re.compile(rf"(?:^|\s)####[ \t]*({_NUMBER}|{_FORMULA})\s*$")
_THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")
_MESSAGES_AS_PYTHON = re.compile(r"^\[\s*\{\s*'(role|content|from|value)'")
_OBJECT_WITH_GOLD = re.compile(r"""^\{.*['"]ground_truth['"]\s*:""", re.DOTALL)


class RowError(DataError):
    """A row cannot be read; what reads the rows adds the file and the number."""


class Written(str):
    """A number as its file spells it."""

    __slots__ = ()


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return made


# NaN and Infinity are no values.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=Written, parse_float=Written, parse_constant=lambda _: None
)


def decode_json(text: str) -> object:
    """JSON whose numbers keep their spelling. Raises ValueError: it is no JSON."""
    return _DECODER.decode(text)


def refusal(what: str, found: object, expected: str) -> RowError:
    """Error about a cell's or message's content, with the expected one."""
    return RowError(f"{what} holds {shown(found)}; expected {expected}")


def shown(value: object) -> str:
    """A value in a few words."""
    if is_empty(value) and not isinstance(value, str):
        return "nothing"
    if isinstance(value, Mapping):
        return f"an object with {', '.join(map(str, value)) or 'no key'}"
    if isinstance(value, str):
        kind, text = ("the number", str(value)) if isinstance(value, Written) else ("the text", repr(value))
    else:
        kind, text = f"a list of {len(value)}:" if isinstance(value, list) else type(value).__name__, repr(value)
    return f"{kind} {text[:80]}{'...' if len(text) > 80 else ''}"


def is_empty(value: object) -> bool:
    """Whether a cell says nothing: null, NaN, and empty texts, lists and objects."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or (isinstance(value, (str, Sequence, Mapping)) and not isinstance(value, bytes) and not value)


def cell(row: Row, column: str, key: str = "") -> Any:
    """The value in a column. `key`: the key that names the column, for the message. Raises RowError: the row has no
    such column.
    """
    if column not in row:
        raise RowError(
            f"{key + ': ' if key else ''}there is no column {column!r}.{did_you_mean(column, row)} It has "
            f"{', '.join(map(str, row))}"
        )
    return row[column]


def as_text(value: object, what: str) -> str:
    """A value as the text that is trained on or judged by. `value`: of a cell or a message. `what`: where it
    is, such as `column 'answer'`. Raises RowError: it is no text, by none of the rules.
    """
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise refusal(what, value, "text; half of a UTF-16 pair cannot be encoded") from None
        if value[:1] in ("[", "{") and (_OBJECT_WITH_GOLD.match(value) or _MESSAGES_AS_PYTHON.match(value)):
            raise refusal(what, value, "text, not an object or a list that was written out as text")
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, Decimal)) or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    if isinstance(value, Mapping) and value.get("type", "text") in _TEXT_PARTS and isinstance(value.get("text"), str):
        return as_text(value["text"], what)
    if isinstance(value, Mapping) and "ground_truth" in value:
        return as_text(value["ground_truth"], f"{what}.ground_truth")
    if isinstance(value, (list, tuple)):
        if len(value) == 1:
            return as_text(value[0], what)
        if value and all(isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS for part in value):
            return "".join(as_text(part, what) for part in value)
    parts = value if isinstance(value, (list, tuple)) else [value]
    other = [
        part["type"] for part in parts if isinstance(part, Mapping) and part.get("type", "text") not in _TEXT_PARTS
    ]
    if other:
        raise RowError(f"{what} has a part of type {other[0]!r}; only text can be read, such as 'How many?'")
    raise refusal(what, value, "one text or number, such as '7'")


def filled_text(value: object, what: str) -> str:
    """A text with something in it. Raises RowError: it is empty, or no text."""
    text = as_text(value, what)
    if not text.strip():
        raise refusal(what, value, "a text that is not empty, such as '7'")
    return text


def as_whole(text: str) -> str:
    """A whole number without the `.0` that pandas writes where a column has gaps; any other text as it is."""
    return text.removesuffix(".0") if re.fullmatch(r"\s*-?\d+\.0", text) else text


def expected_answer(text: str) -> str:
    """The answer that a solution ends with: the number or formula behind GSM8K's `####`, or the last `\\boxed{}` of a
    text around it; any other text is the answer itself, a whole number without `.0`. Raises RowError: the box is empty.
    """
    text = as_whole(text)
    marked = _MARKED_ANSWER.search(text)
    if marked is not None:
        answer = marked[1].strip().removesuffix(".")
        return answer.replace(",", "") if _THOUSANDS.fullmatch(answer) else answer
    boxed = last_boxed(text)
    if boxed is not None and not boxed.strip():
        raise refusal("the expected answer", text, "something in its last \\boxed{}")
    return boxed if boxed is not None and len(text.strip()) > len(boxed) + len("$\\boxed{}$") else text


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


def plain(value: object) -> Any:
    """A value whose numbers are numbers again, for JSON."""
    if isinstance(value, Written):
        return json.loads(value)
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def without_filling(value: object) -> object:
    """Nested objects without nulls: arrow gives every object of a column the keys of all."""
    if isinstance(value, dict):
        return {key: without_filling(inner) for key, inner in value.items() if inner is not None}
    return [without_filling(inner) for inner in value] if isinstance(value, list) else value


def from_json(value: object, what: str) -> object:
    """A cell that holds a list or an object, be it written out as JSON. Raises RowError: it is text and no JSON."""
    if not isinstance(value, str):
        return value
    try:
        return decode_json(value)
    except ValueError:
        raise refusal(what, value, "a list or an object, or one written out as JSON") from None


def is_conversation(value: object) -> bool:
    """Whether a cell holds a list of messages, be it written out as JSON."""
    if isinstance(value, str) and not isinstance(value, Written) and value.lstrip().startswith("[{"):
        try:
            value = decode_json(value)
        except ValueError:
            return False
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(isinstance(part, Mapping) and ("role" in part or "from" in part) for part in value)


def as_messages(value: object, what: str) -> list[Message]:
    """A list of messages, with the role and content of OpenAI's format, from that or ShareGPT's. Returns messages with
    `role`, `content` (text) and whatever else each one carries. Raises RowError: it is no list of messages, or one of
    them cannot be read.
    """
    value = from_json(value, what)
    if not isinstance(value, (list, tuple)) or not value:
        raise refusal(what, value, "a list of messages, such as [{'role': 'user', 'content': '1+1=?'}]")
    return [_message(message, f"{what}, message {number}") for number, message in enumerate(value, start=1)]


def _message(raw: object, what: str) -> Message:
    if not isinstance(raw, Mapping):
        raise refusal(what, raw, "an object with role and content, such as {'role': 'user', 'content': '1+1=?'}")
    if len(raw) == 2 and raw.get("role") in _PLAIN_ROLES and isinstance(raw.get("content"), str):
        return {"role": raw["role"], "content": as_text(raw["content"], what)}
    role, content = _either(raw, "role", "from", what), _either(raw, "content", "value", what)
    name = _ROLES.get(str(role).lower())
    if name is None:
        raise refusal(f"{what}: its role", role, f"one of {', '.join(_ROLES)}")
    more = {key: plain(value) for key, value in raw.items() if key not in ("role", "content", "from", "value")}
    more = {key: value for key, value in more.items() if not is_empty(value)}
    media = next((key for key in MEDIA if key in more), None)
    if media is not None:
        raise RowError(f"{what} carries {media!r}; only text can be read")
    for key in _TRAINED:
        if more.get(key) in _YES:
            del more[key]
    if "tool_calls" in more:
        more["tool_calls"] = _tool_calls(more["tool_calls"], f"{what}: its tool_calls")
    if is_empty(content) and (more.keys() & {"tool_calls", "function_call"} or isinstance(content, str)):
        content = ""
    return {"role": name, "content": as_text(content, f"{what}: its content"), **more}


def _tool_calls(calls: object, what: str) -> list[object]:
    calls = plain(from_json(calls, what))
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise refusal(what, calls, "a list of calls, such as [{'function': {'name': 'add', 'arguments': {'a': 1}}}]")
    return calls


def _either(raw: Mapping[str, object], name: str, other: str, what: str) -> object:
    both = [raw[key] for key in (name, other) if raw.get(key) is not None]
    if len(both) == 2 and both[0] != both[1]:
        raise RowError(f"{what} has {name!r} and {other!r}, which differ; keep one")
    calls = raw.keys() & {"tool_calls", "function_call"}
    if not both and name not in raw and other not in raw and not (name == "content" and calls):
        raise RowError(f"{what} has neither {name!r} nor {other!r}; it has {', '.join(map(str, raw)) or 'no key'}")
    return both[0] if both else None


def asked_and_answered(messages: Sequence[Message]) -> tuple[list[Message], str]:
    """The conversation up to the last question, and the text of the answer that is expected. Raises RowError: it does
    not end with a question and its answer.
    """
    *prompt, answer = messages
    if not prompt or answer["role"] != "assistant" or prompt[-1]["role"] not in ("user", "tool"):
        roles = ", ".join(str(message["role"]) for message in messages)
        raise RowError(
            "`messages` needs a user and an assistant message at its end, the question and the expected answer, and "
            f"has {len(messages)} ({roles})"
        )
    filled_text(prompt[-1]["content"], "the last question of `messages`")
    return prompt, filled_text(answer["content"], "the expected answer, the last of `messages`,")


def check_trained(messages: Sequence[Message]) -> None:
    """Whether a conversation can be trained on. Raises RowError: it ends without an answer, or says what is to be
    trained in a way that is not built.
    """
    last = messages[-1]
    if last["role"] != "assistant":
        raise RowError(
            f"the last message is of role {last['role']}; SFT trains on answers, so the last must be the assistant's"
        )
    if "tool_calls" not in last and "function_call" not in last:
        filled_text(last["content"], "the last of `messages`")
    for number, message in enumerate(messages, start=1):
        if "mask" in message:
            raise RowError(f"message {number} has 'mask', which means opposite things; say it with 'weight': 0 or 1")
        key = next((key for key in _TRAINED if key in message and message[key] not in _NO), None)
        if key is not None and message["role"] == "assistant":
            raise RowError(
                f"message {number} has {key}={message[key]}; an answer is trained or not, so expected 1 or 0 (true or "
                "false)"
            )
    if all(is_untrained(message) for message in messages if message["role"] == "assistant"):
        raise RowError("no answer of the conversation is to be trained; leave such rows")


def is_untrained(message: Message) -> bool:
    """Whether a message says that it is not to be trained, as with `weight` 0 or `train` false."""
    return any(key in message for key in _TRAINED)


def shown_keys(messages: Sequence[Message]) -> list[str]:
    """Keys of messages that a chat template has to show, or what they say is lost."""
    return [
        key
        for key in _SHOWN
        if any(key in message and (key != "name" or message["role"] != "tool") for message in messages)
    ]


TemplateMessage = Mapping[str, object]
Tools = Sequence[Mapping[str, object]] | None
# (messages, tools) -> text. Raises DataError: the template rejects them.
Render = Callable[[Sequence[TemplateMessage], Tools], str]
# Another text for every message of a role: if the template shows it, the rendered text changes.
_OTHER = "\U000f0000"


def readable_calls(
    messages: Sequence[TemplateMessage], render: Callable[[Sequence[TemplateMessage]], str]
) -> Sequence[TemplateMessage] | list[dict[str, object]]:
    """The messages with the arguments of their tool calls as objects, which is what vLLM's server gives to templates;
    as text where the template cannot read objects, or writes them in Python's spelling. `render`: the conversation
    through the chat template.

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


def renders_otherwise(messages: Sequence[TemplateMessage], render: Callable[[Sequence[TemplateMessage]], str]) -> bool:
    """Whether the template's text of messages is another one as `readable_calls` gives them than as they are. Arguments
    and errors as there.
    """
    readable = readable_calls(messages, render)
    try:
        return readable is not messages and render(messages) != render(readable)
    except DataError:
        return True


def _functions(message: TemplateMessage) -> Iterator[Mapping[str, object]]:
    """Functions that a message calls, in OpenAI's form or with name and arguments side by side."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, Sequence) and not isinstance(calls, str) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            yield function
    older = message.get("function_call")
    if isinstance(older, Mapping):
        yield older


def _arguments(messages: Sequence[TemplateMessage]) -> Iterator[tuple[int, object]]:
    """The arguments of each call, with the number of its message, from 1."""
    for number, message in enumerate(messages, start=1):
        for function in _functions(message):
            if isinstance(function.get("arguments"), (str, Mapping)):
                yield number, function["arguments"]


def _with_arguments(messages: Sequence[TemplateMessage], change: Callable[[object], object]) -> list[dict[str, object]]:
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


def shows(key: str, messages: Sequence[TemplateMessage], tools: Tools, render: Render) -> bool:
    """Whether the text of a conversation changes without what `key` names. `key`: a key of messages, `tools`, or
    `content of ROLE`. Raises DataError: the template rejects the conversation as it is.
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
