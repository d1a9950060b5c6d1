"""Published datasets that are no format of many: message trees, multiple choice, solutions with their answer inside.

Each function makes one row, with `messages`, or for `multichoice_qa_processor` (`question`, `options` by letter,
`answer`); None leaves a row out. Invariants: roles are system, user, assistant and tool; the same rows give the same
letters, in every process.
"""

from __future__ import annotations

import hashlib
import json
import random
import string
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from nemo_rl.data.conversations import (
    Message,
    Row,
    RowError,
    as_text,
    as_whole,
    cell,
    expected_answer,
    filled_text,
    is_empty,
    last_boxed,
    plain,
    refusal,
)
from nemo_rl.data.datasets.data_files import PlacedRow, question_and_answer
from nemo_rl.data.interfaces import DataError

_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def open_assistant(rows: Iterable[PlacedRow]) -> Iterator[PlacedRow]:
    """Open Assistant's message trees (`message_id`, `parent_id`, `role`, `text`): one conversation per path from a root
    to its last assistant message. Raises DataError: a row lacks a column, or answers a message that is not there.
    """
    children: dict[object, list[PlacedRow]] = defaultdict(list)
    known: set[object] = {None}
    for place, row in rows:
        missing = next((name for name in ("message_id", "role", "text") if is_empty(row.get(name))), None)
        if missing is not None:
            raise DataError(f"{place}: there is nothing in column {missing!r}; it has {', '.join(map(str, row))}")
        known.add(row["message_id"])
        children[row.get("parent_id") or None].append((place, row))
    for parent, replies in children.items():
        if parent not in known:
            raise DataError(f"{replies[0][0]}: column 'parent_id' names the message {parent}, which is in no row")
    for root in children[None]:
        yield from _paths(root, children)


def _paths(root: PlacedRow, children: dict[object, list[PlacedRow]]) -> Iterator[PlacedRow]:
    waiting: list[tuple[PlacedRow, list[Message]]] = [(root, [])]
    while waiting:
        (place, node), before = waiting.pop()
        path = [*before, {"role": node["role"], "content": node["text"]}]
        replies = children[node["message_id"]]
        waiting += [(reply, path) for reply in reversed(replies)]
        if node["role"] == "assistant" and not any(children[reply["message_id"]] for _, reply in replies):
            yield place, {"messages": path}


def gsm8k(row: Row) -> list[Message]:
    """GSM8K (https://arxiv.org/abs/2110.14168): `question`, and a solution in `answer` that ends with `#### 7`."""
    question, answer = question_and_answer(row, "question", "answer")
    return [question, {**answer, "content": expected_answer(answer["content"])}]


def squad(row: Row) -> list[Message]:
    """SQuAD (https://arxiv.org/abs/1606.05250): `context` and `question`; the first of `answers` is the answer."""
    answers = cell(row, "answers")
    spans = answers.get("text") if isinstance(answers, dict) else None
    if not isinstance(spans, list) or not spans:
        raise refusal("column 'answers'", answers, "an object such as {'text': ['Paris']}")
    context, question = as_text(cell(row, "context"), "column 'context'"), cell(row, "question")
    asked = f"{context}\n\nAnswer from the text above: {filled_text(question, 'column ' + repr('question'))}"
    return question_and_answer({"question": asked, "answers": spans[0]}, "question", "answers")


def numina(row: Row) -> list[Message] | None:
    """NuminaMath-1.5: `problem` and `answer`; proofs and problems without a checkable answer are marked by words, and
    left out.
    """
    if cell(row, "answer") in (None, "", "proof", "notfound"):
        return None
    return question_and_answer(row, "problem", "answer")


def arrow_text(row: Row) -> list[Message]:
    """`text` without roles, all of it trained."""
    return [{"role": "assistant", "content": filled_text(cell(row, "text"), "column 'text'")}]


def boxed_solution(row: Row) -> list[Message] | None:
    """MATH (https://arxiv.org/abs/2103.03874): `problem`, and a `solution` that ends with its answer in `\\boxed{}`;
    others are left out.
    """
    question, answer = question_and_answer(row, "problem", "solution")
    boxed = last_boxed(answer["content"])
    return None if boxed is None or not boxed.strip() else [question, {**answer, "content": boxed}]


def gpqa(row: Row) -> dict[str, object]:
    """GPQA (https://arxiv.org/abs/2311.12022): `Question`, `Correct Answer` and `Incorrect Answer 1` to `3`, shuffled
    by the question itself.
    """
    choices = [filled_text(cell(row, column), f"column {column!r}").strip() for column in ("Correct Answer", *_WRONG)]
    right, question = choices[0], filled_text(cell(row, "Question"), "column 'Question'")
    random.Random(hashlib.sha256(question.encode()).digest()).shuffle(choices)
    return _choices(question, choices, choices.index(right), row.get("Subdomain"))


def mmlu(row: Row) -> dict[str, object]:
    """MMLU (https://arxiv.org/abs/2009.03300): `question`, four `choices`; `answer` is the index of the right one."""
    question, choices, answer = _question_with_choices(row, "choices")
    answer = as_whole(answer)
    if not answer.isdecimal():
        raise refusal("column 'answer'", answer, "the index of the right choice, such as 2")
    return _choices(question, choices, int(answer), row.get("subject"))


def mmlu_pro(row: Row) -> dict[str, object]:
    """MMLU-Pro (https://arxiv.org/abs/2406.01574): `question`, up to ten `options`, and in `answer` the letter of the
    right one.
    """
    question, choices, answer = _question_with_choices(row, "options")
    right = string.ascii_uppercase.find(answer)
    if len(answer) != 1 or right < 0:
        raise refusal("column 'answer'", answer, "the letter of the right choice, such as B")
    return _choices(question, choices, right, row.get("category"))


def nemo_gym(row: Row) -> dict[str, object]:
    """NeMo-Gym: `responses_create_params`, whose `input` is a text or OpenAI's items of a response, and what the row's
    agent and verifier read beside it.
    """
    params = cell(row, "responses_create_params")
    asked = params.get("input") if isinstance(params, dict) else None
    if is_empty(asked) or not isinstance(asked, (str, list)):
        raise refusal("column 'responses_create_params'", params, "a mapping with an input, a text or a list of items")
    texts = [asked] if isinstance(asked, str) else [_text_of(item) for item in asked]
    # The prompt is for the limit on lengths and for samples; the agent asks by itself.
    text = filled_text("\n".join(text for text in texts if text), "the input of column 'responses_create_params'")
    return {"messages": [{"role": "user", "content": text}], "state": json.dumps({"nemo_gym_row": plain(row)})}


def _text_of(item: object) -> str:
    content = item.get("content") if isinstance(item, dict) else item
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    return " ".join(str(part["text"]) for part in content if isinstance(part, dict) and part.get("text"))


def _question_with_choices(row: Row, column: str) -> tuple[str, list[str], str]:
    question, answer = filled_text(cell(row, "question"), "column 'question'"), cell(row, "answer")
    choices = cell(row, column)
    if not isinstance(choices, list):
        raise refusal(f"column {column!r}", choices, "a list of choices, such as ['yes', 'no']")
    texts = [as_text(choice, f"column {column!r}, choice {number}") for number, choice in enumerate(choices, start=1)]
    return question, texts, as_text(answer, "column 'answer'").strip()


def _choices(question: str, choices: Sequence[str], right: int, subject: object) -> dict[str, object]:
    letters = string.ascii_uppercase[:10]
    if not 0 <= right < len(choices) <= len(letters):
        raise RowError(f"the question has {len(choices)} choices, and number {right} is to be the right one")
    # Every row has the same letters, as tables need; a letter without a choice is None and is not shown.
    options = {letter: choices[place] if place < len(choices) else None for place, letter in enumerate(letters)}
    return {"question": question, "options": options, "answer": letters[right], "subject": str(subject or "")}
