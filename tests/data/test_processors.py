"""Processors: what each makes of its rows, and what a prompt that is too long becomes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_rl.data import processors
from nemo_rl.data.datasets.raw import conversation
from nemo_rl.data.interfaces import DataError, TaskDataSpec
from nemo_rl.data.processors import get_processor, register_processor, state_processor

SPEC = TaskDataSpec("task")
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "math_hf_data_processor": ({"messages": conversation("1+1", "2")}, "1+1"),
    "default": ({"messages": conversation("1+1", "2")}, "1+1"),
    "math_data_processor": ({"problem": "1+1", "expected_answer": 2}, "1+1"),
    "multichoice_qa_processor": (
        {"question": "Which?", "options": {"A": "this", "B": "that", "C": None}, "answer": "2"},
        "Question: Which?\nOptions:\nA) this\nB) that",
    ),
    "helpsteer3_data_processor": ({"messages": [*conversation("hi", "hello"), *conversation("1+1", "2")]}, "1+1"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_becomes_a_prompt_and_an_expected_answer(name: str, tokenizer: Any) -> None:
    row, question = ROWS[name]
    datum = get_processor(name)({**row, "task_name": "task"}, SPEC, tokenizer, 500, 7)
    assert datum["message_log"][-1]["content"] == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    assert datum["extra_env_info"] == {"ground_truth": "2"}
    assert datum["length"] == sum(len(message["token_ids"]) for message in datum["message_log"])
    assert (datum["loss_multiplier"], datum["idx"], datum.get("task_name")) == (1.0, 7, "task")


@pytest.mark.parametrize("limit", [1, 3, 6, 20])
@pytest.mark.parametrize("name", ROWS)
def test_a_prompt_that_is_too_long_is_cut_to_four_tokens_and_trains_nothing(
    name: str, limit: int, tokenizer: Any
) -> None:
    datum = get_processor(name)(ROWS[name][0], SPEC, tokenizer, limit, 0)
    assert 0 < datum["length"] <= min(4, limit) and datum["loss_multiplier"] == 0.0
    assert datum["length"] == sum(len(message["token_ids"]) for message in datum["message_log"])


def test_a_prompt_at_the_limit_is_kept(tokenizer: Any) -> None:
    whole = get_processor("default")(ROWS["default"][0], SPEC, tokenizer, 500, 0)
    assert get_processor("default")(ROWS["default"][0], SPEC, tokenizer, whole["length"], 0)["loss_multiplier"] == 1.0
    assert (
        get_processor("default")(ROWS["default"][0], SPEC, tokenizer, whole["length"] - 1, 0)["loss_multiplier"] == 0.0
    )


def test_sft_takes_the_whole_conversation(tokenizer: Any) -> None:
    datum = get_processor("sft_processor")({"messages": conversation("1+1", "2")}, SPEC, tokenizer, 500, 0)
    assert [message["role"] for message in datum["message_log"]] == ["user", "assistant"]
    text = tokenizer.decode(torch.cat([message["token_ids"] for message in datum["message_log"]]))
    assert text == "<bos><|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<eos>"


def test_rows_that_do_not_fit_a_processor_are_told_apart(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"no column 'problem'\. Did you mean 'problems'\? It has problems"):
        get_processor("math_data_processor")({"problems": "x"}, SPEC, tokenizer, 10, 0)
    with pytest.raises(DataError, match=r"needs a user and an assistant message at its end, .* and has 1 \(user\)"):
        get_processor("default")({"messages": conversation("a", "b")[:1]}, SPEC, tokenizer, 10, 0)
    with pytest.raises(DataError, match="a user and an assistant message at its end"):
        get_processor("helpsteer3_data_processor")({"messages": conversation("a", "b")[:1]}, SPEC, tokenizer, 10, 0)


def test_users_processors_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "PROCESSORS", dict(processors.PROCESSORS))

    def mine(datum_dict: Any, task_data_spec: Any, tokenizer: Any, max_seq_length: int, idx: int) -> Any:
        return {}

    register_processor("mine_for_this_test", mine)
    assert get_processor("mine_for_this_test") is mine
    with pytest.raises(DataError, match="there is a processor 'default' already"):
        register_processor("default", mine)


def test_a_row_with_a_state_is_asked_its_last_question_and_keeps_its_answer_out(tokenizer: Any) -> None:
    asked = [*conversation("hi", "hello"), *conversation("1+1", "2")]
    for messages, known in ((asked, {"ground_truth": "2"}), (asked[:3], {})):
        datum = state_processor({"messages": messages, "state": '{"moves": 0}'}, SPEC, tokenizer, 500, 0)
        assert [message["role"] for message in datum["message_log"]] == ["user", "assistant", "user"]
        assert "1+1" in datum["message_log"][-1]["content"] and datum["extra_env_info"] == known | {"moves": 0}
