"""Tokenizers that cannot be used are refused where they are loaded, before anything else starts."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from nemo_rl.data.interfaces import DataError, TaskDataSpec
from nemo_rl.data.processors import AllTaskProcessedDataset
from nemo_rl.data.tokenizer import get_tokenizer


# Of some, transformers makes a tokenizer without a vocabulary; of others it makes none.
@pytest.mark.parametrize("model_type", ["qwen3", "gemma2", "gpt2", "gpt_neox", "llama", "mistral"])
@pytest.mark.parametrize("template", ["default", None])
def test_a_model_directory_without_tokenizer_files_is_refused(
    model_type: str, template: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(DataError, match=r"the directory holds no tokenizer \(none of tokenizer.json.*save_pretrained"):
        get_tokenizer({"name": str(tmp_path), "chat_template": template})


def tokenizer_of(vocabulary: list[str], folder: Path) -> Path:
    words = models.WordLevel({token: number for number, token in enumerate(["<unk>", "<eos>", *vocabulary])}, "<unk>")
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    ).save_pretrained(folder)
    return folder


def test_a_tokenizer_that_knows_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"to no token that it knows.*are its files those of another model"):
        get_tokenizer({"name": str(tokenizer_of([], tmp_path))})


def test_a_tokenizer_without_an_end_of_sequence_is_refused(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "The answer is 7.": 1}, "<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"neither a padding nor an end-of-sequence token.*tokenizer_config.json says"):
        get_tokenizer({"name": str(tmp_path)})


def test_a_row_that_becomes_no_token_is_named(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "2"}], "task_name": "sums"}
        for text in ("1+1", "hidden")
    ]
    shy = copy.copy(tokenizer)
    shy.chat_template = "{% for message in messages if message.content != 'hidden' %}{{ message.content }}{% endfor %}"
    dataset = AllTaskProcessedDataset(rows, shy, TaskDataSpec(), lone_question, 100)
    assert dataset[0]["length"] == 3
    with pytest.raises(DataError, match=r"row 2 \(from 1\) of sums: has not one token: its messages are empty, or the"):
        dataset[1]


def lone_question(row: Any, spec: Any, tokenizer: Any, longest: int, number: int) -> Any:
    """A user's processor, which does not check what its template shows."""
    text = tokenizer.apply_chat_template(row["messages"][:1], tokenize=False)
    ids = torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64)
    log = [{"role": "user", "content": text, "token_ids": ids}]
    return {"message_log": log, "length": len(ids), "extra_env_info": {}, "loss_multiplier": 1.0, "idx": number}
