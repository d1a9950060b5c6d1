"""Message logs: formatting, masks, flattening, and the tokenizer's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.config import TokenizerConfig
from nemo_rl.data.interfaces import DataError, TaskDataSpec
from nemo_rl.data.llm_message_utils import (
    add_loss_mask_to_message_log,
    batched_message_log_to_flat_message,
    get_formatted_message_log,
    get_keys_from_message_log,
    message_log_to_flat_messages,
)
from nemo_rl.data.loader import rl_collate_fn, sft_collate
from nemo_rl.data.tokenizer import get_tokenizer

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1=?"},
    {"role": "assistant", "content": "2"},
]


def message(role: str, tokens: list[int], **more: Any) -> dict[str, Any]:
    return {"role": role, "content": f"{role} says", "token_ids": torch.tensor(tokens), **more}


def test_formatted_messages_joined_are_the_whole_conversation(tokenizer: Any) -> None:
    log = get_formatted_message_log(CONVERSATION, tokenizer, add_bos_token=False, add_eos_token=False)
    whole = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert "".join(message["content"] for message in log) == whole
    assert (
        torch.cat([message["token_ids"] for message in log]).tolist()
        == tokenizer(whole, add_special_tokens=False)["input_ids"]
    )
    assert [message["role"] for message in log] == ["system", "user", "assistant"]


def test_prompt_and_system_prompt_of_the_task_are_put_in(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Solve {} in {{braces}}.")
    (tmp_path / "system.txt").write_text("You {reckon}.")
    spec = TaskDataSpec("t", str(tmp_path / "prompt.txt"), str(tmp_path / "system.txt"))
    log = get_formatted_message_log([{"role": "user", "content": "{1}+1"}], tokenizer, spec, False, False, True)
    assert log[0]["content"] == "<|im_start|>system\nYou {reckon}.<|im_end|>\n"
    assert log[1]["content"] == "<|im_start|>user\nSolve {1}+1 in {braces}.<|im_end|>\n<|im_start|>assistant\n"


def test_a_prompt_is_put_around_the_first_question_of_a_conversation_and_the_last_of_a_prompt(
    tokenizer: Any, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("Solve {}.")
    spec = TaskDataSpec("t", str(tmp_path / "prompt.txt"))
    talk = [message(role, [1]) | {"content": role[0]} for role in ("user", "assistant") * 2]
    for messages, asked in ((talk, [True, False]), (talk[:3], [False, True])):
        log = get_formatted_message_log(messages, tokenizer, spec, False, False, messages is not talk)
        assert ["Solve u." in one["content"] for one in log if one["role"] == "user"] == asked


def test_first_and_last_tokens_are_added_once(tokenizer: Any) -> None:
    log = get_formatted_message_log(CONVERSATION, tokenizer)
    assert log[0]["token_ids"][0] == tokenizer.bos_token_id and log[-1]["token_ids"][-1] == tokenizer.eos_token_id
    assert (torch.cat([message["token_ids"] for message in log]) == tokenizer.eos_token_id).sum() == 1


def test_a_template_that_rejects_the_roles_is_named(tokenizer: Any) -> None:
    import copy

    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{{ raise_exception('no system here') }}"
    with pytest.raises(DataError, match="rejects a conversation with the roles system: no system here"):
        get_formatted_message_log(CONVERSATION, strict)
    strict.chat_template = None
    with pytest.raises(DataError, match="has no chat template; set policy.tokenizer.chat_template"):
        get_formatted_message_log(CONVERSATION, strict)


def test_loss_masks_cover_the_trained_roles() -> None:
    log = [message("user", [1, 2]), message("assistant", [3]), message("user", [4]), message("assistant", [5, 6])]
    add_loss_mask_to_message_log([log])
    assert message_log_to_flat_messages(log)["token_loss_mask"].tolist() == [0, 0, 1, 0, 1, 1]
    add_loss_mask_to_message_log([log], only_unmask_final=True)
    assert message_log_to_flat_messages(log)["token_loss_mask"].tolist() == [0, 0, 0, 0, 1, 1]
    assert [list(one) for one in get_keys_from_message_log(log, ["role", "absent"])] == [["role"]] * 4


def test_logprobs_that_only_some_messages_have_stay_aligned_with_the_tokens() -> None:
    log = [
        message("user", [1, 2]),
        message("assistant", [3], generation_logprobs=torch.tensor([-0.5])),
        message("user", [4]),
    ]
    flat = message_log_to_flat_messages(log)
    assert flat["generation_logprobs"].tolist() == [0.0, 0.0, -0.5, 0.0]
    assert flat["role"] == ["user", "assistant", "user"]


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=7), min_size=1, max_size=5), st.integers(1, 8))
def test_rows_are_padded_on_the_right_to_one_divisible_width(rows: list[list[int]], multiple: int) -> None:
    columns, lengths = batched_message_log_to_flat_message(
        [[message("user", row)] for row in rows], {"token_ids": 77}, multiple
    )
    width = columns["token_ids"].shape[1]
    assert width % multiple == 0 and 0 <= width - max(map(len, rows)) < multiple
    assert lengths.dtype == torch.int32 and lengths.tolist() == [len(row) for row in rows]
    for row, padded in zip(rows, columns["token_ids"].tolist(), strict=True):
        assert padded == row + [77] * (width - len(row))


def test_rl_batches_keep_rows_together() -> None:
    data = [
        {
            "message_log": [message("user", [1] * n)],
            "length": n,
            "extra_env_info": {"n": n},
            "loss_multiplier": 1.0,
            "idx": n,
            "task_name": "t",
        }
        for n in (3, 5)
    ]
    batch = rl_collate_fn(data)  # type: ignore[arg-type]
    assert batch["length"].tolist() == [3, 5] and batch["batch_max_length"].tolist() == [5, 5]
    assert (
        batch["idx"] == [3, 5]
        and batch["extra_env_info"] == [{"n": 3}, {"n": 5}]
        and batch["stop_strings"] == [None, None]
    )
    assert batch.size == 2 and batch["loss_multiplier"].dtype == torch.float32


def test_sft_batches_train_the_answer_only() -> None:
    data = [
        {
            "message_log": [message("user", [1, 2]), message("assistant", [3])],
            "length": 3,
            "extra_env_info": None,
            "loss_multiplier": 1.0,
            "idx": 0,
        },
        {"message_log": [message("user", [4])], "length": 1, "extra_env_info": None, "loss_multiplier": 0.0, "idx": 1},
    ]
    batch = sft_collate(pad_token_id=9, make_sequence_length_divisible_by=4)(data)  # type: ignore[arg-type]
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9], [4, 9, 9, 9]]
    assert batch["token_mask"].tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]
    assert batch["sample_mask"].tolist() == [1.0, 0.0] and batch["input_lengths"].tolist() == [3, 1]


def test_sft_may_train_the_last_answer_only() -> None:
    log = [message("user", [1]), message("assistant", [2]), message("user", [3]), message("assistant", [4, 5])]
    data = [{"message_log": log, "length": 5, "extra_env_info": None, "loss_multiplier": 1.0, "idx": 0}]
    assert sft_collate(9)(data)["token_mask"].tolist() == [[0, 1, 0, 1, 1]]  # type: ignore[arg-type]
    assert sft_collate(9, only_unmask_final=True)(data)["token_mask"].tolist() == [[0, 0, 0, 1, 1]]  # type: ignore[arg-type]


def test_tokenizer_settings(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "tok")
    (tmp_path / "mine.jinja").write_text("FILE{{ messages[0]['content'] }}")

    def rendered(**settings: Any) -> str:
        loaded = get_tokenizer(TokenizerConfig(name=str(tmp_path / "tok"), **settings))
        return str(
            loaded.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True)
        )

    assert get_tokenizer({"name": str(tmp_path / "tok"), "chat_template": None}).pad_token is not None
    assert rendered() == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(chat_template_kwargs={"enable_thinking": False}).endswith("assistant\n<no>")
    for wrong in ({"enable_thinkin": False}, {"reasoning_effort": "low"}, {"enable_thinking": False, "x": 1}):
        with pytest.raises(DataError, match=f"chat_template_kwargs.{list(wrong)[-1]}: the chat template .* reads no"):
            rendered(chat_template_kwargs=wrong)
    defaulted = "{% if depth is not defined %}{% set depth = 1 %}{% endif %}{{ depth }}"
    assert rendered(chat_template=defaulted, chat_template_kwargs={"depth": 3}) == "3"
    assert rendered(chat_template=None) == "x"
    assert rendered(chat_template=str(tmp_path / "mine.jinja")) == "FILEx"
    assert rendered(chat_template="literal {{ messages[0]['content'] }}") == "literal x"


def test_a_missing_padding_token_becomes_the_end_of_sequence(tokenizer: Any, tmp_path: Path) -> None:
    import copy

    bare = copy.deepcopy(tokenizer)
    bare.pad_token = None
    bare.save_pretrained(tmp_path)
    assert get_tokenizer(TokenizerConfig(name=str(tmp_path))).pad_token == "<eos>"


def test_a_missing_tokenizer_or_template_is_named(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"policy.tokenizer.name .*nowhere: cannot be loaded"):
        get_tokenizer(TokenizerConfig(name=str(tmp_path / "nowhere")))
    tokenizer.save_pretrained(tmp_path / "tok")
    with pytest.raises(DataError, match=r"policy.tokenizer.chat_template gone.jinja: there is no such file"):
        get_tokenizer(TokenizerConfig(name=str(tmp_path / "tok"), chat_template="gone.jinja"))


def test_the_fast_backend_gives_the_same_tokens_and_leaves_transformers_as_it_was(tiny_model: Path) -> None:
    usual = get_tokenizer(TokenizerConfig(name=str(tiny_model)))
    fast = get_tokenizer(TokenizerConfig(name=str(tiny_model), use_fastokens=True))
    text = "12+7=19, naïve <|im_end|> 日本"
    assert fast(text)["input_ids"] == usual(text)["input_ids"]
    assert fast.decode(usual(text)["input_ids"]) == text
    assert "fastokens" in type(fast._tokenizer).__module__
    assert "fastokens" not in type(get_tokenizer(TokenizerConfig(name=str(tiny_model)))._tokenizer).__module__
