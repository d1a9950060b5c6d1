"""Positions of a conversation's messages in the text that a chat template renders.

A conversation is rendered once. Templates change what they are given (they trim, drop the thinking of earlier turns,
put the system prompt into a user's turn), so that neither prefixes nor searching the text say which part is whose:
marks are put around each message's content, rendered with it, and taken for true only if the text without them is the
same. Invariant: the parts, joined, are the rendered conversation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nemo_rl.data.interfaces import DataError

Message = Mapping[str, object]
# (messages, whether to open an assistant's message at the end) -> text
Render = Callable[[Sequence[Message], bool], str]
# The first of a private-use plane: no tokenizer, template or text gives it a meaning.
_PLANES = (0xF0000, 0x100000)
_TRIES = 64
_THINKING = re.compile(r".*</think(?:ing)?>", re.DOTALL)


@dataclass(frozen=True)
class Alignment:
    """The parts of a rendered conversation. `answers`: where each message begins that the model would write, behind the
    template's opening of an assistant's message; for other roles, where its part begins.
    """

    text: str
    ends: list[int]  # where the part of each message ends in the text; the last is its length
    answers: list[int]


def align(
    render: Render,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    stop_texts: Sequence[str],
    strict: bool,
    name: str,
) -> Alignment:
    """Renders a conversation and finds its messages.

    Args:
        add_generation_prompt: end with the template's opening of an assistant's message.
        stop_texts: tokens that end an assistant's turn.
        strict: refuse a message that cannot be found; otherwise its part is what lies between its neighbours.

    Raises DataError: the template rejects the conversation, or does not show a message once and whole.
    """
    text = _whole(render, messages, add_generation_prompt)
    spans = _contents(render, messages, add_generation_prompt, text)
    for index, message in enumerate(messages):
        if strict and spans[index] is None and _says_something(message):
            raise DataError(_not_found(messages, index, name))
    placed = _in_order(spans)
    for index, message in enumerate(messages):
        if strict and message["role"] == "assistant" and placed[index] != spans[index]:
            raise DataError(_not_found(messages, index, name))
    ends: list[int] = []
    # What lies between two contents is the same in every turn, and cut in the same place.
    known: dict[tuple[object, object, str], int] = {}
    for index, (message, after) in enumerate(pairwise(messages)):
        following = next((span[0] for span in placed[index + 1 :] if span is not None), len(text))
        span = placed[index]
        least = max(ends[-1] if ends else 0, span[1] if span is not None else 0)
        between = (message["role"], after["role"], text[least:following])
        if span is None or placed[index + 1] is None or between not in known:
            end = _end(render, messages, index, text, placed, least, following)
            if message["role"] == "assistant":
                end = _with_stop(text, end, least, following, stop_texts)
            known[between] = end - least
        ends.append(least + known[between])
    ends.append(len(text))
    return Alignment(text, ends, _answers(render, messages, add_generation_prompt, text, ends, placed))


def _whole(render: Render, messages: Sequence[Message], add_generation_prompt: bool) -> str:
    try:
        return render(messages, add_generation_prompt)
    except DataError as error:
        rejected = error
    # The shortest beginning from which on the template rejects it says which message is wrong.
    for count in range(len(messages) - 1, 0, -1):
        try:
            render(messages[:count], False)
        except DataError as shorter:
            rejected = shorter
        else:
            break
    raise rejected


def _bounds(message: Message) -> tuple[int, int] | None:
    """Bounds of the content without surrounding white space; None if it is empty."""
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        return None
    return len(content) - len(content.lstrip()), len(content.rstrip())


def _says_something(message: Message) -> bool:
    """Whether a message has more than thinking, which templates leave out of earlier turns."""
    content = message.get("content")
    return isinstance(content, str) and bool(_THINKING.sub("", content).strip())


def _contents(
    render: Render, messages: Sequence[Message], add_generation_prompt: bool, text: str
) -> list[tuple[int, int] | None]:
    """Spans of the messages' contents in the text, as far as the template keeps them."""
    bounds = {index: found for index, message in enumerate(messages) if (found := _bounds(message)) is not None}
    marks = _Marks(text, len(messages))

    def rendered(cuts: Mapping[int, tuple[int, int]]) -> str:
        return render(marks.put(messages, cuts), add_generation_prompt)

    spans: list[tuple[int, int] | None] = [None] * len(messages)
    starts = {
        index: _starts(
            str(messages[index]["content"]), begin, end, lambda i=index, e=end: rendered({i: (e, e)}), text, marks
        )
        for index, (begin, end) in bounds.items()
    }
    while cuts := {
        index: (start, bounds[index][1]) for index in starts if (start := next(starts[index], None)) is not None
    }:
        # All at once; one by one only where a mark has made the template do something else.
        marked = rendered(cuts)
        if marks.without(marked) == text:
            found = marks.read(marked, list(cuts))
        else:
            alone = {index: rendered({index: cut}) for index, cut in cuts.items()}
            found = {
                index: span
                for index, one in alone.items()
                if marks.without(one) == text
                for span in marks.read(one, [index]).values()
            }
        for index, span in found.items():
            spans[index] = span
        starts = {index: starts[index] for index in cuts if index not in found}
    return spans


def _starts(content: str, begin: int, end: int, with_end: Callable[[], str], text: str, marks: _Marks) -> Iterator[int]:
    """Possible starts of the part of a content that a template shows, the likeliest and longest first."""
    yield begin
    thinking = [match.end() for match in re.finditer(r"</?think(?:ing)?>\s*", content)]
    yield from (at for at in dict.fromkeys((*thinking[:1], *thinking[-1:])) if begin < at < end)
    without_start = marks.before_end(with_end(), text)
    if without_start is None:
        return
    core = content[begin:end]
    shared = next(
        (n for n in range(min(len(core), len(without_start))) if core[-1 - n] != without_start[-1 - n]),
        min(len(core), len(without_start)),
    )
    yield from (end - kept for kept in range(shared, max(0, shared - _TRIES), -1))


class _Marks:
    """Two characters for each message that occur nowhere in the conversation."""

    def __init__(self, text: str, messages: int) -> None:
        size = 2 * messages
        self._base = next(
            (plane for plane in _PLANES if not any(plane <= ord(char) < plane + size for char in text)), None
        )
        if self._base is None:
            raise DataError(
                "a conversation holds characters of both supplementary private-use planes (U+F0000 and U+100000), with "
                "which messages are found in the rendered text; take them out"
            )
        self._pattern = re.compile(f"[{chr(self._base)}-{chr(self._base + size)}]")

    def _pair(self, index: int) -> tuple[str, str]:
        first = (self._base or 0) + 2 * index
        return chr(first), chr(first + 1)

    def put(self, messages: Sequence[Message], cuts: Mapping[int, tuple[int, int]]) -> list[dict[str, object]]:
        """The messages with marks at both places of each content."""
        marked = [dict(message) for message in messages]
        for index, (start, end) in cuts.items():
            content, (before, after) = str(messages[index]["content"]), self._pair(index)
            marked[index]["content"] = content[:start] + before + content[start:end] + after + content[end:]
        return marked

    def without(self, marked: str) -> str:
        """The text that the marks are in."""
        return self._pattern.sub("", marked)

    def read(self, marked: str, indices: Iterable[int]) -> dict[int, tuple[int, int]]:
        """Spans of the marked parts in the text without marks, of messages that appear once and whole."""
        at: dict[str, list[int]] = {}
        for number, match in enumerate(self._pattern.finditer(marked)):
            at.setdefault(match.group(), []).append(match.start() - number)
        spans = {}
        for index in indices:
            before, after = (at.get(mark, []) for mark in self._pair(index))
            if len(before) == len(after) == 1 and before[0] <= after[0]:
                spans[index] = (before[0], after[0])
        return spans

    def before_end(self, marked: str, text: str) -> str | None:
        """The text before the one mark that is left."""
        found = list(self._pattern.finditer(marked))
        return marked[: found[0].start()] if found and self.without(marked) == text else None

    def behind_end(self, marked: str, index: int) -> str | None:
        """Text behind a message's second mark."""
        after = self._pair(index)[1]
        return self.without(marked.partition(after)[2]) if after in marked else None


def _in_order(spans: Sequence[tuple[int, int] | None]) -> list[tuple[int, int] | None]:
    """The spans without those that a template puts behind a later message."""
    kept: list[tuple[int, int] | None] = []
    least: int | None = None
    for span in reversed(spans):
        in_order = span is not None and (least is None or span[1] <= least)
        kept.append(span if in_order else None)
        least = span[0] if span is not None and (least is None or span[0] < least) else least
    return kept[::-1]


def _end(
    render: Render,
    messages: Sequence[Message],
    index: int,
    text: str,
    placed: Sequence[tuple[int, int] | None],
    least: int,
    most: int,
) -> int:
    """End of a message that is not the last: as far as the rendered conversation up to it agrees with the text."""
    so_far = list(messages[: index + 1])
    try:
        alone = render(so_far, False)
    except DataError:
        return least
    if text.startswith(alone) and least <= len(alone) <= most:
        return len(alone)
    anchor = next((number for number in range(index, -1, -1) if placed[number] is not None), None)
    begin, span = 0, placed[anchor] if anchor is not None else None
    if anchor is not None and span is not None:
        marks, (_, end) = _Marks(text, len(messages)), _bounds(messages[anchor]) or (0, 0)
        begin = span[1]
        alone = marks.behind_end(render(marks.put(so_far, {anchor: (end, end)}), False), anchor) or ""
    return max(least, min(most, begin + _shared(alone, text[begin:most])))


def _with_stop(text: str, end: int, least: int, most: int, stop_texts: Sequence[str]) -> int:
    """The end of an assistant's part with the token behind it that ends the turn, where the template has one only
    between turns.
    """
    if any(stop in text[least:end] for stop in stop_texts):
        return end
    found = next((stop for stop in stop_texts if text.startswith(stop, end) and end + len(stop) <= most), "")
    return end + len(found)


def _answers(
    render: Render,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    text: str,
    ends: Sequence[int],
    placed: Sequence[tuple[int, int] | None],
) -> list[int]:
    begins = [0, *ends[:-1]]
    first = next((index for index, message in enumerate(messages) if message["role"] == "assistant"), None)
    if first is None:
        return begins
    opening = _opening(render, list(messages[:first]) or [{"role": "user", "content": "x"}])
    answers = []
    for index, (message, begin, end, span) in enumerate(zip(messages, begins, ends, placed, strict=True)):
        limit = span[0] if span is not None else end
        at = text.find(opening, begin, limit) if opening else -1
        if message["role"] != "assistant" or (at < 0 and span is None):
            answers.append(begin)
        elif at >= 0:
            answers.append(at + len(opening))
        else:
            answers.append(max(begin, _first_space(render, messages, add_generation_prompt, index, text, limit)))
    return answers


def _first_space(
    render: Render, messages: Sequence[Message], add_generation_prompt: bool, index: int, text: str, start: int
) -> int:
    """Start of a message including the white space in front of its content, which begins at `start`: white space that
    the template keeps belongs to the message.
    """
    space, end = _bounds(messages[index]) or (0, 0)
    if space == 0:
        return start
    marks = _Marks(text, len(messages))
    # A template that trims does not trim behind a mark.
    marked = render(marks.put(messages, {index: (0, end)}), add_generation_prompt)
    found = marks.read(marked, [index]).get(index) if marks.without(marked) == text else None
    return start if found is None else found[0]


def _opening(render: Render, messages: Sequence[Message]) -> str:
    """How the template opens an assistant's message."""
    try:
        closed, opened = render(messages, False), render(messages, True)
    except DataError:
        return ""
    return opened.removeprefix(closed) if opened.startswith(closed) else ""


def _shared(left: str, right: str) -> int:
    """How many characters two continuations have in common; a token such as `<|end|>` is not cut."""
    most = min(len(left), len(right))
    common = next((at for at in range(most) if left[at] != right[at]), most)
    if common < len(left):
        opened = max(right.rfind(char, 0, common) for char in "<[")
        if opened >= 0 and not any(char in right[opened:common] for char in ">]"):
            return opened
    return common


def _not_found(messages: Sequence[Message], index: int, name: str) -> str:
    message = messages[index]
    turn = sum(1 for before in messages[: index + 1] if before["role"] == "user")
    content = str(message["content"])
    shown = content if len(content) <= 60 else f"{content[:57]}..."
    return (
        f"{name} does not show message {index + 1} of {len(messages)} (role {message['role']}, turn {max(turn, 1)}: "
        f"{shown!r}) once and in one piece, so tokens cannot be assigned to messages; use a template that "
        "shows it, mark what is trained with {% generation %} ... {% endgeneration %}, or take the message out"
    )
