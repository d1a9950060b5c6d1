"""Digits to reverse and to sort: right answers, distinct splits, slips in training alone."""

from __future__ import annotations

import pytest

from nemo_rl.config.data import DatasetConfig
from nemo_rl.data.datasets.generated import DigitsDataset
from nemo_rl.data.interfaces import DataError


def _rows(**keys: object) -> dict[str, str]:
    config = DatasetConfig.model_validate({"dataset_name": "digits", "num_problems": 300, "held_out": 50, **keys})
    rows = [row["messages"] for row in DigitsDataset(config, "digits").dataset]
    return {question["content"]: answer["content"] for question, answer in rows}


@pytest.mark.parametrize(("task", "word"), [("reverse", "rev"), ("sort", "sort")])
def test_held_out_digits_are_solved_and_never_trained(task: str, word: str) -> None:
    train, held_out = (_rows(task=task, split=split, slips=0.5) for split in ("train", "validation"))
    assert len(train) == 300 and len(held_out) == 50 and not train.keys() & held_out.keys()
    for question, answer in held_out.items():
        digits = question.removeprefix(word).removesuffix("=")
        assert len(digits) == 4 and "0" not in digits
        assert answer == (digits[::-1] if task == "reverse" else "".join(sorted(digits)))
    assert 80 < sum(len(answer) == 5 for answer in train.values()) < 220


def test_what_digits_cannot_give_is_refused_by_its_key() -> None:
    for keys, said in (
        ({"task": "add"}, "data.train.task: digits has no task 'add'; it has reverse, sort"),
        ({"task": "sort", "task_config": {"digit": 3}}, "data.train.task_config.digit"),
        ({"task": "sort", "task_config": {"digits": 2}}, "gives 81 distinct problems"),
    ):
        with pytest.raises(DataError, match=said):
            _rows(**keys)
