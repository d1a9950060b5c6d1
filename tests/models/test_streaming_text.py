"""Streaming answers: the pieces of a text are the text, and a client puts chunks together as the endpoint does."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.models.generation.endpoint.streamed_answers import StreamedAnswers, TextStream, chunk_of, event_of


def decode(token_ids: list[int]) -> str:
    """A tokenizer of bytes."""
    return bytes(token_ids).decode(errors="replace")


@given(st.text("aé#€x", max_size=12), st.lists(st.integers(1, 4), min_size=1, max_size=40))
def test_the_pieces_of_a_text_are_the_text_and_show_no_part_of_a_stop_string(text: str, sizes: list[int]) -> None:
    ids, stops, place = list(text.encode()), ("#x", "€"), 0
    stream = TextStream(decode, stops)
    # The engine ends a response at the first stop string, which the answer does not show.
    cut = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    whole, shown = text[:cut], ""
    for size in sizes:
        shown += stream.add(ids[place : place + size])
        place += size
        assert whole.startswith(shown)
    assert shown + stream.end(whole) == whole


def test_what_cannot_be_a_stop_string_is_shown_at_once() -> None:
    stream = TextStream(decode, ("##",))
    pieces = [stream.add(list(piece.encode())) for piece in ("ab", "c#", "d", "#")]
    assert pieces == ["ab", "c", "#d", ""]
    assert stream.end("abc#d#") == "#"


def test_chunks_become_the_messages_of_their_choices() -> None:
    answers = StreamedAnswers(2)

    def add(index: int, delta: dict[str, object], reason: str | None = None) -> list[int]:
        chunk = chunk_of(event_of({"choices": [{"index": index, "delta": delta, "finish_reason": reason}]}))
        assert chunk is not None
        return [choice["index"] for choice in answers.add(chunk)]

    call = {"index": 0, "id": "x", "type": "function", "function": {"name": "add", "arguments": ""}}
    assert add(0, {"role": "assistant", "content": ""}) == add(1, {"role": "assistant", "content": ""}) == []
    assert add(0, {"content": "he"}) == add(1, {"reasoning": "hm", "tool_calls": [call]}) == []
    for part in ('{"a":', " 1}"):
        add(1, {"tool_calls": [{"index": 0, "function": {"arguments": part}}]})
    assert add(1, {}, "tool_calls") == [1] and not answers.complete
    assert add(0, {"content": "y"}, "stop") == [0] and answers.complete
    assert answers.messages[0] == {"role": "assistant", "content": "hey"}
    (made,) = answers.messages[1]["tool_calls"]
    assert (made["id"], made["function"]["name"], json.loads(made["function"]["arguments"])) == ("x", "add", {"a": 1})
    assert answers.messages[1]["reasoning"] == "hm" and chunk_of("data: [DONE]\n\n") is None
