"""Streaming answers: the text of tokens as they arrive, and the answers that a client puts together from chunks.

Pure: no vLLM, no HTTP. Invariants: the pieces of a text joined are the text of all tokens; no piece shows a part of a
stop string that may still be cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from nemo_rl.data.interfaces import Message

_UNFINISHED = "\ufffd"


class TextStream:
    """The text of a response, piece by piece. `decode`: text of tokens. `stops`: strings that end the response."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._token_ids: list[int] = []
        # The text of a token depends on those before it: tokens from `_from` to `_shown` are context.
        self._from = self._shown = 0
        self._held = ""
        self._sent = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """Appends tokens and returns the text that can be shown now."""
        self._token_ids += token_ids
        before = self._decode(self._token_ids[self._from : self._shown])
        now = self._decode(self._token_ids[self._from :])
        # Half of a character decodes to a replacement character, so its text is not known yet.
        if now.endswith(_UNFINISHED) or len(now) <= len(before):
            return ""
        self._from, self._shown = self._shown, len(self._token_ids)
        text = self._held + now[len(before) :]
        shown = len(text) - _may_begin(text, self._stops)
        self._held = text[shown:]
        self._sent += shown
        return text[:shown]

    def end(self, whole: str) -> str:
        """The part of the whole text that was not shown yet."""
        return whole[self._sent :]


def _may_begin(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of a text that a stop string begins with, or that is one and what follows it."""
    whole = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    ends = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
    return max([len(text) - whole, *ends])


class StreamedAnswers:
    """The messages of a stream's choices, put together from its chunks. `count`: choices that there will be."""

    def __init__(self, count: int) -> None:
        self.messages: list[Message] = [{} for _ in range(count)]
        self._open = set(range(count))

    def add(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Takes a chunk; its choices that end with it."""
        ended: list[dict[str, object]] = []
        for choice in chunk.get("choices") or ():
            _merge(self.messages[choice["index"]], choice.get("delta") or {})
            if choice.get("finish_reason") is not None:
                self._open.discard(choice["index"])
                ended.append(choice)
        return ended

    @property
    def complete(self) -> bool:
        """Whether all choices have ended."""
        return not self._open


def _merge(message: Message, delta: Mapping[str, Any]) -> None:
    for name, value in delta.items():
        if value is None:
            continue
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for call in value:
                while len(calls) <= call["index"]:
                    calls.append({"function": {"arguments": ""}})
                known, function = calls[call["index"]], call.get("function") or {}
                known |= {key: call[key] for key in ("id", "type") if call.get(key)}
                if function.get("name"):
                    known["function"]["name"] = function["name"]
                known["function"]["arguments"] += function.get("arguments") or ""
        elif isinstance(value, str) and name != "role":
            message[name] = message.get(name, "") + value
        else:
            message[name] = value


def chunk_of(event: str) -> dict[str, object] | None:
    """The JSON of an event of a stream; None for its end."""
    data = event.removeprefix("data:").strip()
    return None if data == "[DONE]" else orjson.loads(data)


def may_end(event: str) -> bool:
    """Whether a choice may end with an event of a stream; cheaper than to read it."""
    return '"finish_reason":"' in event.replace(" ", "")


def event_of(chunk: Mapping[str, object]) -> str:
    """A chunk as an event of a stream."""
    return f"data: {orjson.dumps(chunk).decode()}\n\n"


def events_of(answer: Mapping[str, Any], *, include_usage: bool) -> Iterator[str]:
    """A whole chat answer as the events of a stream: the role, the content, and the end of each choice.

    Args:
        answer: As it would be sent whole.
        include_usage: Whether a last chunk says how many tokens there were.
    """
    common = {name: answer.get(name) for name in ("id", "created", "model", "system_fingerprint")}
    common["object"] = "chat.completion.chunk"

    def event(choices: list[dict[str, object]], **more: object) -> str:
        return event_of({**common, "choices": choices, **more})

    prompt = {"prompt_token_ids": answer.get("prompt_token_ids")}
    for choice in answer["choices"]:
        index, message = choice["index"], choice["message"]
        yield event(
            [{"index": index, "delta": {"role": message["role"], "content": ""}, "finish_reason": None}], **prompt
        )
        delta = {name: value for name, value in message.items() if name != "role" and value not in (None, [])}
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(delta["tool_calls"])]
        said = {name: choice.get(name) for name in ("logprobs", "token_ids")}
        yield event([{"index": index, "delta": delta, "finish_reason": None, **said}])
    for choice in answer["choices"]:
        ended = {name: value for name, value in choice.items() if name not in ("message", "logprobs", "token_ids")}
        yield event([{**ended, "delta": {}}])
    if include_usage:
        yield event([], usage=answer.get("usage"))
    yield "data: [DONE]\n\n"
