"""Datasets of multiple-choice questions and of solutions that end in a box, as evaluations use them.

Each function makes rows for `multichoice_qa_processor` (`question`, `options` by letter, `answer`), or messages. Knows
no tokenizer. Invariant: the same rows give the same letters, in every process.
"""

from __future__ import annotations

import hashlib
import random
import string
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from nemo_rl.data.datasets.raw import Row, conversation, kept, with_conversations
from nemo_rl.data.errors import DataError
from nemo_rl.data.sources import require_column

if TYPE_CHECKING:
    from datasets import Dataset

_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


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
