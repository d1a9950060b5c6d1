"""What the start of a run shows of its data."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.algorithms.startup import check_prompt_lengths
from nemo_rl.config import DatasetConfig, SFTMasterConfig
from nemo_rl.data.interfaces import TaskDataSpec
from nemo_rl.data.llm_message_utils import add_loss_mask_to_message_log
from nemo_rl.data.model_tokens import StopTokens
from nemo_rl.data.processors import AllTaskProcessedDataset, get_processor
from nemo_rl.data.setup import example, load_datasets, unstopped_turn

ANSWER = {"role": "assistant", "content": "2"}
ASKED = {"role": "user", "content": "1+1=?"}


def dataset(tokenizer: Any, processor: str, *conversations: list[dict[str, str]], limit: int = 999) -> Any:
    rows = [{"messages": messages, "task_name": "sums"} for messages in conversations]
    return AllTaskProcessedDataset(rows, tokenizer, TaskDataSpec("sums"), get_processor(processor), limit)


def mask(log: Any) -> None:
    add_loss_mask_to_message_log([log])


def test_a_conversation_is_shown_with_its_trained_text_marked(tokenizer: Any) -> None:
    shown = example(dataset(tokenizer, "sft_processor", [ASKED, ANSWER, ASKED, ANSWER]), mask)
    turn = "<|im_start|>user\n1+1=?<|im_end|>\n⟦<|im_start|>assistant\n2<|im_end|>\n"
    assert shown.startswith("row 1 as it is rendered") and f"<bos>{turn}⟧{turn}<eos>⟧" in shown


def test_a_prompt_is_shown_with_what_judges_its_response(tokenizer: Any) -> None:
    shown = example(dataset(tokenizer, "math_hf_data_processor", [ASKED, ANSWER]), None)
    assert shown.endswith("1+1=?<|im_end|>\n<|im_start|>assistant\n⟦response⟧\njudged by: 2")


def test_rows_and_those_that_are_cut_are_counted_and_a_whole_one_is_shown(tokenizer: Any) -> None:
    long = {"role": "user", "content": "1" * 200}
    rows = dataset(tokenizer, "math_hf_data_processor", [long, ANSWER], [ASKED, ANSWER], limit=100)
    said: list[str] = []
    check_prompt_lengths("data.train", {"sums": rows}, 100, said.append)
    assert "data.train (sums): 2 rows; 1 of 2 prompts are longer than data.max_input_seq_length=100" in said[0]
    assert "row 2 as it is rendered" in said[0] and "1+1=?" in said[0]
    rows.left_out = 3
    check_prompt_lengths("data.validation", {"sums": rows}, None, said.append)
    assert "data.validation (sums): 2 rows, 3 more left out by its format; none is cut" in said[1]
    assert not any("prompt_file" in line for line in said)


def test_a_prompt_file_around_questions_is_named(tokenizer: Any) -> None:
    rows = dataset(tokenizer, "math_hf_data_processor", [ASKED, ANSWER])
    rows.default_task_data_spec = TaskDataSpec("sums", DatasetConfig(dataset_name="any").prompt_file)
    said: list[str] = []
    check_prompt_lengths("data.train", {"sums": rows}, 999, said.append)
    assert "each question is put into examples/prompts/step_by_step.txt (data.train.prompt_file; null asks" in said[0]
    assert "Reason step by step" in said[0]


@pytest.mark.parametrize("default", [{}, {"system_prompt_file": None}, {"env_name": "mine"}])
def test_fine_tuning_takes_conversations_as_they_are(default: dict[str, Any], tokenizer: Any, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Say {} to $x$"}, {"role": "assistant", "content": "It is {}."}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    entry = {"dataset_name": "ResponseDataset", "data_path": str(tmp_path / "rows.jsonl")}
    config = SFTMasterConfig(data={"train": entry, "default": default})  # type: ignore[arg-type]
    shown = example(load_datasets(tokenizer, config.data).train, mask)
    assert "<|im_start|>user\nSay {} to $x$<|im_end|>\n⟦<|im_start|>assistant\nIt is {}.<|im_end|>" in shown


def test_long_texts_are_shown_from_both_ends(tokenizer: Any) -> None:
    shown = example(
        dataset(tokenizer, "sft_processor", [{"role": "user", "content": "7" * 5000}, ANSWER], limit=9999), mask
    )
    assert len(shown) < 1500 and "characters ...]" in shown and "2<|im_end|>" in shown


@pytest.mark.parametrize(
    ("template", "stops", "says"),
    [
        (None, ("<eos>",), "'<|im_end|>', which is none of the stop tokens"),
        (None, ("<eos>", "<|im_end|>"), None),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ("<eos>",), None),
        ("{% for m in messages %}{{ m.role + ': ' + m.content }}</turn>{% endfor %}", ("<eos>",), "'</turn>'"),
        ("{{ raise_exception('no') }}", ("<eos>",), None),
        (None, (), None),
    ],
)
def test_a_turn_that_ends_with_no_stop_token_is_said(
    template: str | None, stops: tuple[str, ...], says: str | None, tokenizer: Any
) -> None:
    using = copy.copy(tokenizer)
    using.chat_template = template or using.chat_template
    ids = tuple(tokenizer.convert_tokens_to_ids(stop) for stop in stops)
    line = unstopped_turn(using, StopTokens(ids, dict(zip(ids, stops, strict=True))))
    assert (line is None) == (says is None) and (says or "") in (line or "")
