"""Conversations through the chat templates of twenty model families: rendered once, cut and masked right."""

from __future__ import annotations

import copy
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nemo_rl.data.interfaces import DataError, LLMMessageLogType
from nemo_rl.data.llm_message_utils import add_loss_mask_to_message_log, get_formatted_message_log, render_chat
from nemo_rl.data.loader import sft_collate
from nemo_rl.data.tokenizer import PASSTHROUGH_TEMPLATE

TEMPLATES = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
# The token that ends a turn, and what some models write before what they say.
STOPS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|end|>",
)
STOP = "(" + "|".join(map(re.escape, (*STOPS, "<eos>"))) + ")"
BEFORE = r"\s*(<think>\s*</think>\s*|<\|channel\|>final<\|message\|>)?"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
WITH_TOOLS = ("chatml_default_system", "llama31_tools")
SYSTEM = {"role": "system", "content": "Be brief."}
Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def merging() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens reach over the borders of messages."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [f"user\nWhat is {n}?\nassistant\n{n}. USER: {n} ASSISTANT: {n} [INST] {n} [/INST] {n}" for n in range(99)]
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        extra_special_tokens=specials[3:],
    )


def with_template(tokenizer: Any, template: str) -> Any:
    changed = copy.copy(tokenizer)
    changed.chat_template = template
    return changed


def turns(count: int, system: bool = True) -> Messages:
    said: Messages = [dict(SYSTEM)] if system else []
    for number in range(count):
        said += [
            {"role": "user", "content": f"What is {number}?"},
            {"role": "assistant", "content": f"answer {number}."},
        ]
    return said


def formatted(messages: Messages, tokenizer: Any, *, opens: bool = False, **more: Any) -> LLMMessageLogType:
    ends = {"add_bos_token": False, "add_eos_token": False} | more
    log = get_formatted_message_log(messages, tokenizer, add_generation_prompt=opens, stop_texts=STOPS, **ends)
    add_loss_mask_to_message_log([log])
    return log


def trained(log: LLMMessageLogType, tokenizer: Any) -> list[str]:
    return [
        tokenizer.decode(message["token_ids"][message["token_loss_mask"].bool()])
        for message in log
        if message["role"] == "assistant"
    ]


def check_whole(log: LLMMessageLogType, messages: Messages, tokenizer: Any, opened: bool = False) -> None:
    text = render_chat(tokenizer, messages, opened)
    assert "".join(message["content"] for message in log) == text
    ids = torch.cat([message["token_ids"] for message in log]).tolist()
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [message["role"] for message in log] == [message["role"] for message in messages]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(("count", "system"), [(1, False), (1, True), (3, False), (3, True)])
def test_exactly_what_the_assistant_says_is_trained(
    name: str, count: int, system: bool, tokenizer: Any, merging: Any
) -> None:
    using, messages = with_template(tokenizer, TEMPLATES[name]), turns(count, system)
    log = formatted(messages, using, opens=True)
    check_whole(log, messages, using)
    said = trained(log, using)
    assert len(said) == count
    for number, text in enumerate(said):
        assert re.fullmatch(rf"{BEFORE}answer {number}\.\s*{STOP}?\s*(<eos>)?", text), (name, text)
    whole = trained(formatted(messages, using), using)
    for number, (text, turn) in enumerate(zip(said, whole, strict=True)):
        assert turn.endswith(text.lstrip()) and f"What is {number}" not in turn, (name, turn)

    # A token over a border belongs to the message in which it ends.
    using = with_template(merging, TEMPLATES[name])
    log = formatted(messages, using, opens=True)
    check_whole(log, messages, using)
    answers = (one for one in log if one["role"] == "assistant")
    for number, (text, message) in enumerate(zip(said, answers, strict=True)):
        tokens = message["token_ids"][message["token_loss_mask"].bool()]
        assert using.decode(tokens).count(f"answer {number}") == 1
        assert using.decode(tokens[1:]).strip() in text


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - {"generation_marks"}))
@pytest.mark.parametrize("opens", [False, True])
def test_tokenizers_that_mark_spaces_are_cut_and_masked_right(name: str, opens: bool, spaced: Any) -> None:
    using, messages = with_template(spaced, TEMPLATES[name]), turns(3)
    messages[2]["content"] = "answer 0, a café."
    log = formatted(messages, using, opens=opens)
    check_whole(log, messages, using)
    for number, text in enumerate(trained(log, using)):
        assert text.count(f"answer {number}") == 1 and "What is" not in text and "brief" not in text, (name, text)
        if opens:
            said = r"0, a café" if number == 0 else number
            assert re.fullmatch(rf"{BEFORE}answer {said}\.\s*{STOP}?\s*(<eos>)?\s*", text), (name, text)


def test_a_tokenizer_without_offsets_cannot_read_marks_and_says_so(spaced: Any) -> None:
    using = with_template(spaced, TEMPLATES["generation_marks"])
    if using.is_fast:
        assert [text.strip() for text in trained(formatted(turns(2), using), using)] == [
            f"answer {number}.<|im_end|>" for number in range(2)
        ]
    else:
        with pytest.raises(DataError, match="which only a fast tokenizer can find"):
            formatted(turns(2), using)


# Those whose end of turn is a token at the end of a conversation alone, or no token at all.
UNENDED = {"glm", "harmony"}


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - UNENDED))
def test_every_turn_is_trained_to_its_end(name: str, tokenizer: Any) -> None:
    using = with_template(tokenizer, TEMPLATES[name])
    for text in trained(formatted(turns(3), using, opens=True, add_eos_token=True), using):
        assert re.search(rf"{STOP}\s*(<eos>)?$", text), (name, text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_end_with_what_opens_the_answer(name: str, tokenizer: Any) -> None:
    using, messages = with_template(tokenizer, TEMPLATES[name]), turns(2)[:-1]
    log = get_formatted_message_log(messages, using, None, False, False, True)
    check_whole(log, messages, using, opened=True)
    assert "trained_tokens" not in {key for message in log for key in message}


@pytest.mark.parametrize("name", ["thinking", "thinking_dropped", "chatml", "gemma", "vicuna", "generation_marks"])
def test_thinking_is_trained_once_and_where_the_template_shows_it(name: str, tokenizer: Any) -> None:
    using, messages = with_template(tokenizer, TEMPLATES[name]), turns(3)
    for number, message in enumerate(messages[2::2]):
        message["content"] = f"<think>\nhidden {number}\n</think>\n\n{message['content']}"
    log = formatted(messages, using, opens=True)
    check_whole(log, messages, using)
    said = trained(log, using)
    for number, text in enumerate(said):
        assert text.count(f"answer {number}.") == 1
        shown = {"thinking": number == 2, "thinking_dropped": False}.get(name, True)
        assert text.count(f"<think>\nhidden {number}\n</think>") == int(shown)
    others = "".join(message["content"] for message in log if message["role"] != "assistant")
    assert "answer" not in others and "hidden" not in others


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}


@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("content", ["", None, "Let me see."])
def test_calls_of_tools_are_trained_and_their_results_are_not(name: str, content: str | None, tokenizer: Any) -> None:
    using = with_template(tokenizer, TEMPLATES[name])
    if name == "llama31_tools" and content:
        content = ""  # it shows either the call or the content
    call = {**CALL, "content": content if content is not None or name == "llama31_tools" else ""}
    messages = [*turns(1), {"role": "user", "content": "add"}, call, {"role": "tool", "content": "result 9"}]
    messages.append({"role": "assistant", "content": "It is 9."})
    said = trained(formatted(messages, using, opens=True, tools=TOOLS), using)
    assert len(said) == 3 and '"name": "add"' in said[1] and "result" not in "".join(said)
    assert re.fullmatch(rf"It is 9\.{STOP}\s*", said[2]) and re.search(rf"{STOP}\s*$", said[1])


words = st.text(st.sampled_from("a2 \n<>|:user.assistant"), min_size=1, max_size=12).filter(str.strip)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(TEMPLATES)), st.lists(st.tuples(words, words), min_size=1, max_size=3), st.booleans())
def test_no_content_is_trained_twice_or_lost(
    tokenizer: Any, name: str, said: list[tuple[str, str]], opens: bool
) -> None:
    using = with_template(tokenizer, TEMPLATES[name])
    messages: Messages = []
    for asked, answered in said:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    log = formatted(messages, using, opens=opens)
    check_whole(log, messages, using)
    for text, (_, answered) in zip(trained(log, using), said, strict=True):
        tail = re.sub(rf"({STOP}|\s)*$", "", text)
        assert tail.endswith(answered.strip())
        if opens:
            assert re.sub(rf"^{BEFORE}", "", tail).lstrip() == answered.strip()


def test_a_conversation_that_begins_with_the_assistant_leaves_its_opening_untrained(tokenizer: Any) -> None:
    using = with_template(tokenizer, TEMPLATES["chatml"])
    messages = [{"role": "assistant", "content": "Hello!"}, *turns(1, system=False)]
    assert trained(formatted(messages, using, opens=True), using)[0] == "Hello!<|im_end|>\n"
    assert trained(formatted(messages, using), using)[0] == "<|im_start|>assistant\nHello!<|im_end|>\n"


@pytest.mark.parametrize("name", ["chatml", "vicuna", "llama3", "generation_marks"])
def test_answers_that_follow_each_other_leave_their_openings_untrained(name: str, tokenizer: Any) -> None:
    using = with_template(tokenizer, TEMPLATES[name])
    messages = [*turns(1), {"role": "assistant", "content": "again."}, *turns(1, system=False)]
    log = formatted(messages, using, opens=True)
    check_whole(log, messages, using)
    for text, said in zip(trained(log, using), ("answer 0.", "again.", "answer 0."), strict=True):
        assert re.fullmatch(rf"\s*{re.escape(said)}{STOP}\s*", text)


def test_a_turn_of_thinking_alone_is_no_reason_to_refuse_the_row(tokenizer: Any) -> None:
    using, messages = with_template(tokenizer, TEMPLATES["thinking"]), turns(2)
    messages[2]["content"] = "<think>\nhm\n</think>"
    log = formatted(messages, using, opens=True)
    check_whole(log, messages, using)
    assert trained(log, using)[1].endswith("answer 1.<|im_end|>\n")


DROPS = {
    "system": "{% for m in messages if m['role'] != 'system' %}{{ m['role'] + ': ' + m['content'] }}\n{% endfor %}",
    "user": "{% for m in messages if m['role'] != 'user' %}{{ m['content'] }}\n{% endfor %}",
    "assistant": "{% for m in messages %}{{ m['content'] if m['role'] != 'assistant' else m['content'] | upper }}"
    "{{ m['content'] if m['role'] == 'assistant' }}{% endfor %}",
}


@pytest.mark.parametrize("role", DROPS)
def test_a_template_that_does_not_show_a_message_once_is_refused(role: str, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=rf"does not show message \d of 5 \(role {role}, turn 1: '.*'\) once"):
        formatted(turns(2), with_template(tokenizer, DROPS[role]))
    with pytest.raises(DataError, match=r"message 4 of 5 \(role user, turn 2"):
        formatted(
            turns(2),
            with_template(tokenizer, "{% for m in messages[:3] + messages[4:] %}{{ m.content }}\n{% endfor %}"),
        )


def test_private_characters_of_a_text_are_kept(tokenizer: Any) -> None:
    using, messages = with_template(tokenizer, TEMPLATES["chatml"]), turns(2)
    messages[2]["content"] = "\U000f0000\U000f0001 \ue000"
    log = formatted(messages, using, opens=True)
    check_whole(log, messages, using)
    assert trained(log, using)[0] == "\U000f0000\U000f0001 \ue000<|im_end|>\n"
    messages[4]["content"] = "\U00100000"
    with pytest.raises(DataError, match="both supplementary private-use planes"):
        formatted(messages, using)


def test_the_plain_template_trains_the_contents(tokenizer: Any) -> None:
    using = with_template(tokenizer, PASSTHROUGH_TEMPLATE)
    assert trained(formatted(turns(2), using, add_eos_token=True), using) == ["answer 0.", "answer 1.<eos>"]


UNOPENED = {
    "contents alone": PASSTHROUGH_TEMPLATE,
    "names": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "lines": "{% for m in messages %}{{ m.content }}\n{% endfor %}",
}


@pytest.mark.parametrize("name", UNOPENED)
@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("space", [" ", "\n\n", "\t "])
def test_white_space_that_an_answer_begins_with_is_trained(name: str, opens: bool, space: str, tokenizer: Any) -> None:
    """Also where no opening of an assistant's turn says where the answer begins."""
    using = with_template(tokenizer, UNOPENED[name])
    messages = turns(3)
    for message in messages[2::2]:
        message["content"] = space + message["content"]
    log = formatted(messages, using, opens=opens)
    check_whole(log, messages, using)
    for number, text in enumerate(trained(log, using)):
        assert f"{space}answer {number}." in text
        if opens:
            assert text.startswith(space)


def test_white_space_that_a_template_trims_or_has_itself_is_not_the_answers(tokenizer: Any) -> None:
    using = with_template(tokenizer, "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}")
    messages = turns(1)
    messages[-1]["content"] = " " + messages[-1]["content"]
    assert trained(formatted(messages, using, opens=True), using) == ["answer 0.\n"]


def test_the_last_turn_alone_may_be_trained(tokenizer: Any) -> None:
    for name in ("chatml", "generation_marks"):
        using = with_template(tokenizer, TEMPLATES[name])
        log = get_formatted_message_log(turns(2), using, None, False, False, True)
        datum = {"message_log": log, "length": 1, "extra_env_info": None, "loss_multiplier": 1.0, "idx": 0}
        batch = sft_collate(0, only_unmask_final=True)([datum])  # type: ignore[arg-type]
        text = using.decode(batch["input_ids"][0][batch["token_mask"][0].bool()])
        assert text.strip() == "answer 1.<|im_end|>"


def test_an_end_of_turn_that_ends_the_conversation_gets_no_other_behind_it(tokenizer: Any) -> None:
    using = with_template(tokenizer, TEMPLATES["gemma"])
    ends = get_formatted_message_log(turns(1), using, add_bos_token=False, stop_texts=["<end_of_turn>"])
    assert ends[-1]["content"].endswith("answer 0.<end_of_turn>\n")
    other = get_formatted_message_log(turns(1), using, add_bos_token=False)
    assert other[-1]["content"].endswith("<end_of_turn>\n<eos>")


def test_a_template_that_never_ends_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jinja's sandbox bounds a range, and not ranges in ranges."""
    monkeypatch.setattr("nemo_rl.data.llm_message_utils._RENDER_S", 0.5)
    over = threading.Event()
    environment = ImmutableSandboxedEnvironment()
    environment.globals["over"] = over.is_set
    begin, end = "{% for a in range(90000) %}", "{% endfor %}"
    # The test itself must end.
    endless = environment.from_string(begin * 3 + "{% if over() %}{{ 1 / 0 }}{% endif %}" + end * 3)
    tokenizer: Any = SimpleNamespace(
        chat_template="of the test",
        name_or_path="somebody/model",
        apply_chat_template=lambda messages, **_: endless.render(messages=messages),
    )
    try:
        with pytest.raises(
            DataError, match=r"somebody/model has not rendered a conversation of 1 messages within 0\.5 s"
        ):
            render_chat(tokenizer, [{"role": "user", "content": "a"}], True)
    finally:
        over.set()
