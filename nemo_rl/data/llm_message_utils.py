"""Message logs: tokenizing a conversation and cutting it into messages, masking what the loss sees, and flattening logs
into padded columns.

B is conversations, S tokens of the longest one. Invariant: the token ids of a formatted log, joined, are the ids of the
whole rendered conversation cut at message borders.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate, pairwise
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from nemo_rl.data.conversations import TemplateMessage, readable_calls
from nemo_rl.data.interfaces import DataError, LLMMessageLogType, Message, TaskDataSpec
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# (messages, whether to open an assistant's message at the end) -> text
Render = Callable[[Sequence[TemplateMessage], bool], str]
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
    messages: Sequence[TemplateMessage],
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


def _whole(render: Render, messages: Sequence[TemplateMessage], add_generation_prompt: bool) -> str:
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


def _bounds(message: TemplateMessage) -> tuple[int, int] | None:
    """Bounds of the content without surrounding white space; None if it is empty."""
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        return None
    return len(content) - len(content.lstrip()), len(content.rstrip())


def _says_something(message: TemplateMessage) -> bool:
    """Whether a message has more than thinking, which templates leave out of earlier turns."""
    content = message.get("content")
    return isinstance(content, str) and bool(_THINKING.sub("", content).strip())


def _contents(
    render: Render, messages: Sequence[TemplateMessage], add_generation_prompt: bool, text: str
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

    def put(self, messages: Sequence[TemplateMessage], cuts: Mapping[int, tuple[int, int]]) -> list[dict[str, object]]:
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
    messages: Sequence[TemplateMessage],
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
    messages: Sequence[TemplateMessage],
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
    render: Render, messages: Sequence[TemplateMessage], add_generation_prompt: bool, index: int, text: str, start: int
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


def _opening(render: Render, messages: Sequence[TemplateMessage]) -> str:
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


def _not_found(messages: Sequence[TemplateMessage], index: int, name: str) -> str:
    message = messages[index]
    turn = sum(1 for before in messages[: index + 1] if before["role"] == "user")
    content = str(message["content"])
    shown = content if len(content) <= 60 else f"{content[:57]}..."
    return (
        f"{name} does not show message {index + 1} of {len(messages)} (role {message['role']}, turn {max(turn, 1)}: "
        f"{shown!r}) once and in one piece, so tokens cannot be assigned to messages; use a template that "
        "shows it, mark what is trained with {% generation %} ... {% endgeneration %}, or take the message out"
    )


_RENDER_S = 60.0
_ending_templates: set[str] = set()
"""Templates that have rendered a conversation in this process."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def get_keys_from_message_log(message_log: LLMMessageLogType, keys: Sequence[str]) -> LLMMessageLogType:
    """The log with only the given keys of each message."""
    return [{key: message[key] for key in keys if key in message} for message in message_log]


def add_loss_mask_to_message_log(
    batch_message_log: Sequence[LLMMessageLogType],
    roles_to_train_on: Sequence[str] = ("assistant",),
    only_unmask_final: bool = False,
) -> None:
    """Sets `token_loss_mask` (int64 [length], 1 where the loss sees the token) on every message, in place.

    Args:
        batch_message_log: logs whose messages have `token_ids`.
        roles_to_train_on: roles whose tokens are trained.
        only_unmask_final: train the last message only, if its role is among them.
    """
    for message_log in batch_message_log:
        for index, message in enumerate(message_log):
            trained = message["role"] in roles_to_train_on and (not only_unmask_final or index == len(message_log) - 1)
            message["token_loss_mask"] = torch.full_like(message["token_ids"], int(trained))
            if "trained_tokens" in message:
                message["token_loss_mask"] *= message["trained_tokens"]


def get_first_index_that_differs(str1: str, str2: str) -> int:
    """The first place at which two texts differ; the length of the shorter one where it begins the other."""
    pairs = zip(str1, str2, strict=False)
    return next((place for place, (left, right) in enumerate(pairs) if left != right), min(len(str1), len(str2)))


def message_log_to_flat_messages(message_log: LLMMessageLogType) -> dict[str, Any]:
    """One entry per key: tensors joined along the tokens, anything else as a list with one item per message.

    A tensor that some messages lack (`generation_logprobs` of a prompt) is zero over their tokens, so that tensors stay
    aligned with `token_ids`; without `token_ids`, over the length of their first tensor.
    """
    keys = dict.fromkeys(key for message in message_log for key in message)
    flat: dict[str, object] = {}
    for key in keys:
        example = next(message[key] for message in message_log if key in message)
        if isinstance(example, torch.Tensor):
            flat[key] = torch.cat(
                [
                    message[key]
                    if key in message
                    else torch.zeros((_length(message), *example.shape[1:]), dtype=example.dtype)
                    for message in message_log
                ]
            )
        else:
            flat[key] = [message[key] for message in message_log if key in message]
    return flat


def batched_message_log_to_flat_message(
    message_logs: Sequence[LLMMessageLogType],
    pad_value_dict: Mapping[str, float] | None = None,
    make_sequence_length_divisible_by: int = 1,
) -> tuple[BatchedDataDict, torch.Tensor]:
    """Flattens each log and pads all of them on the right to one length.

    Args:
        message_logs: B logs whose messages have `token_ids`, or tensors of another name.
        pad_value_dict: padding per tensor key, 0 where absent.
        make_sequence_length_divisible_by: S is rounded up to a multiple of this.

    Returns columns (tensors [B, S], lists of B), and the lengths before padding (int32 [B]).
    """
    flats = [message_log_to_flat_messages(message_log) for message_log in message_logs]
    lengths = torch.tensor([_length(flat) for flat in flats], dtype=torch.int32)
    longest = int(lengths.max()) if flats else 0
    width = -(-longest // make_sequence_length_divisible_by) * make_sequence_length_divisible_by
    columns: BatchedDataDict = BatchedDataDict()
    for key in dict.fromkeys(key for flat in flats for key in flat):
        example = next(flat[key] for flat in flats if key in flat)
        if isinstance(example, torch.Tensor):
            padding = (pad_value_dict or {}).get(key, 0)
            columns[key] = torch.stack([_padded(flat.get(key), example, width, padding) for flat in flats])
        else:
            columns[key] = [flat.get(key, []) for flat in flats]
    return columns, lengths


def get_formatted_message_log(
    message_log: Sequence[Mapping[str, object]],
    tokenizer: PreTrainedTokenizerBase,
    task_data_spec: TaskDataSpec | None = None,
    add_bos_token: bool = True,
    add_eos_token: bool = True,
    add_generation_prompt: bool = False,
    tools: Sequence[Mapping[str, object]] | None = None,
    stop_texts: Sequence[str] = (),
) -> LLMMessageLogType:
    """Renders a conversation once through the chat template, tokenizes it, and cuts it into messages.

    Args:
        message_log: messages with `role` and `content`.
        task_data_spec: its prompt is put around a user message (see `prompted`), its system prompt before everything.
        add_bos_token: begin with the tokenizer's first token, if the template does not.
        add_eos_token: end with the tokenizer's last token, if the conversation does not end with one of `stop_texts`.
        add_generation_prompt: end with the template's opening of an assistant message; in a conversation that ends with
            one, the opening of every assistant message counts to the message before, and so is not trained.
        tools: JSON schemas of the tools, for the chat template.
        stop_texts: tokens that end an assistant's turn, besides the tokenizer's last one.

    Returns messages with `role`, `content` (as rendered) and `token_ids` (int64); where the template marks with `{%
    generation %}` what is trained, assistant messages also have `trained_tokens` (bool). Raises DataError: the
    tokenizer has no chat template, or the template rejects the conversation or does not show a message once and whole.
    """
    messages = prompted(message_log, task_data_spec)
    opens = add_generation_prompt and messages[-1]["role"] != "assistant"
    messages = readable_calls(messages, lambda some: render_chat(tokenizer, some, opens, tools))
    stop_texts = tuple(dict.fromkeys([*stop_texts, *([tokenizer.eos_token] if tokenizer.eos_token else [])]))
    marks = _GENERATION.search(str(tokenizer.chat_template)) is not None
    aligned = align(
        lambda some, opened: render_chat(tokenizer, some, opened, tools),
        messages,
        add_generation_prompt=opens,
        stop_texts=stop_texts,
        strict=not marks,
        name=f"the chat template of {tokenizer.name_or_path}",
    )
    whole, ends, answers = aligned.text, list(aligned.ends), list(aligned.answers)
    if add_generation_prompt and not opens:
        # What opens an assistant's message goes to the message before, as a prompt of a rollout ends with it.
        ends = [*answers[1:], ends[-1]] if len(ends) > 1 else ends
    first = tokenizer.bos_token if add_bos_token and tokenizer.bos_token else ""
    first = "" if whole.startswith(first) else first
    last = tokenizer.eos_token if add_eos_token and not whole.rstrip().endswith(stop_texts) else ""
    ends = [len(first) + end for end in ends]
    ends[-1] += len(last or "")
    ids, token_ends = _tokens(tokenizer, f"{first}{whole}{last or ''}", ends)
    trained = None
    if marks and not opens:
        before = bisect_right(token_ends, len(first)) if first else 0
        trained = _marked_tokens(tokenizer, messages, tools, ids[before:])
        trained = [False] * before + trained + [True] * (len(ids) - before - len(trained))
    elif add_generation_prompt and not opens:
        # Openings that no message of another role stands before, to take them.
        begins = [len(first) + answer for answer in answers]
        turns = [0, *(len(first) + end for end in aligned.ends[:-1])]
        openings = [span for span in zip(turns, begins, strict=True) if span[0] < span[1]]
        trained = [not any(begin < end <= answer for begin, answer in openings) for end in token_ends]
    borders = [0, *(bisect_right(token_ends, end) for end in ends[:-1]), len(ids)]
    formatted: LLMMessageLogType = []
    text, begin = f"{first}{whole}{last or ''}", 0
    for message, (low, high), end in zip(messages, pairwise(borders), ends, strict=True):
        formatted.append(
            {"role": message["role"], "content": text[begin:end], "token_ids": torch.tensor(ids[low:high]).long()}
        )
        if trained is not None and message["role"] == "assistant" and not all(trained[low:high]):
            formatted[-1]["trained_tokens"] = torch.tensor(trained[low:high], dtype=torch.bool)
        begin = end
    return formatted


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str, ends: Sequence[int]) -> tuple[list[int], list[int]]:
    """Token ids of the whole text, and where each token ends in it; a token over a border ends behind it."""
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], list(accumulate((end for _, end in encoded["offset_mapping"]), max))
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    token_ends = [len(text)] * len(ids)
    for end in reversed(ends[:-1]):
        part = tokenizer(text[:end], add_special_tokens=False)["input_ids"]
        same = next((at for at, (left, right) in enumerate(zip(part, ids, strict=False)) if left != right), len(part))
        token_ends[:same] = [end] * min(same, len(ids))
    return ids, token_ends


def _marked_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]] | None,
    ids: Sequence[int],
) -> list[bool]:
    """Which tokens the template marks as the model's."""
    if not tokenizer.is_fast:
        raise DataError(
            f"the chat template of {tokenizer.name_or_path} marks what is trained, which only a fast tokenizer can "
            "find in its tokens; install the tokenizers package's version of it, or take the marks out of the template"
        )
    render: Callable[..., Any] = tokenizer.apply_chat_template
    encoded = render(
        list(messages),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **({} if tools is None else {"tools": list(tools)}),
    )
    found = [bool(one) for one in encoded["assistant_masks"]]
    if list(ids[: len(found)]) != list(encoded["input_ids"]):
        raise DataError(
            f"the chat template of {tokenizer.name_or_path} marks what is trained, and its tokens change with the "
            "tokenizer's first or last token around them; set data.add_bos and data.add_eos to false"
        )
    return found


def prompted(message_log: Sequence[Mapping[str, object]], spec: TaskDataSpec | None) -> list[dict[str, object]]:
    """The messages with the task's prompt, and its system prompt in front. The prompt goes around the question that is
    asked: the last user message of a prompt, and the first of a whole conversation, as in NeMo-RL.
    """
    messages = [dict(message) for message in message_log]
    if spec is not None and spec.prompt is not None:
        users = [message for message in messages if message["role"] == "user"]
        if users:
            asked = users[0] if messages[-1]["role"] == "assistant" else users[-1]
            asked["content"] = spec.ask(str(asked["content"]))
    if spec is not None and spec.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": spec.system_prompt})
    return messages


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, object]],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, object]] | None = None,
    variables: Mapping[str, object] | None = None,
) -> str:
    """The conversation, and the tools it may use, as text. `variables`: further ones of the template. Raises
    DataError: the tokenizer has no chat template, or the template rejects the conversation.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path} has no chat template; set policy.tokenizer.chat_template to one, "
            "to a .jinja file, or to null for plain concatenation"
        )
    from jinja2 import TemplateError

    # Its type has no place for what templates of users take.
    apply: Callable[..., object] = tokenizer.apply_chat_template

    def render() -> str:
        return str(
            apply(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                add_special_tokens=False,
                **({} if tools is None else {"tools": list(tools)}),
                **(variables or {}),
            )
        )

    try:
        return _rendered(render, str((variables or {}).get("chat_template", tokenizer.chat_template)))
    except TimeoutError as error:
        raise DataError(
            f"the chat template of {tokenizer.name_or_path} has not rendered a conversation of {len(messages)} "
            f"messages within {_RENDER_S:g} s; it may never end: set policy.tokenizer.chat_template to another"
        ) from error
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise DataError(
            f"the chat template of {tokenizer.name_or_path} rejects a conversation with the roles {roles}: {error}"
        ) from error


def _rendered(render: Callable[[], str], template: str) -> str:
    """The text; the first time that a template is used in this process, within a deadline. Raises TimeoutError: it was
    not rendered in time.
    """
    if template in _ending_templates:
        return render()
    outcome: Future[str] = Future()

    def run() -> None:
        try:
            outcome.set_result(render())
        except BaseException as error:  # noqa: BLE001 - it is raised where the text is waited for
            outcome.set_exception(error)

    # A daemon: nothing stops a template, and it must not keep the process from ending.
    Thread(target=run, name="chat-template", daemon=True).start()
    text = outcome.result(_RENDER_S)
    _ending_templates.add(template)
    return text


def _length(message: Message) -> int:
    """Tokens of a message, or of a flat log."""
    tensors = (value for value in message.values() if isinstance(value, torch.Tensor) and value.ndim)
    tokens = message.get("token_ids", next(tensors, None))
    return 0 if tokens is None else len(tokens)


def _padded(values: torch.Tensor | None, example: torch.Tensor, width: int, padding: float) -> torch.Tensor:
    row = torch.full((width, *example.shape[1:]), padding, dtype=example.dtype)
    if values is not None:
        row[: len(values)] = values
    return row
