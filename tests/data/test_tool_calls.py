"""Arguments of tool calls: JSON once, whether a row has them as text or as objects, and whatever the template reads."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config import DataConfig
from nemo_rl.data.interfaces import DataError
from nemo_rl.data.llm_message_utils import get_formatted_message_log
from nemo_rl.data.loader import sft_collate_fn
from nemo_rl.data.setup import TaskDatasets, load_datasets

TEMPLATES = {path.stem: path.read_text() for path in (Path(__file__).parent / "templates").glob("*.jinja")}
TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
END = "{% endfor %}<|im_end|>\n{% endfor %}"
READS = {
    "chatml_default_system": TEMPLATES["chatml_default_system"],
    "llama31_tools": TEMPLATES["llama31_tools"],
    "objects alone": f"{TURN}{{% for k in c.function.arguments.items() %}}<{{{{ k | join('>') }}}}{{% endfor %}}{END}",
    "text alone": f"{TURN}{{{{ '```json\\n' + c.function.arguments }}}}{END}",
    "either": f"{TURN}{{% set a = c.function.arguments %}}{{{{ a if a is string else a | tojson }}}}{END}",
    "as it is": f"{TURN}{{{{ c.function.arguments }}}}{END}",
}
ARGUMENTS: list[dict[str, Any]] = [{"city": "Oslo"}, {"a": 1, "of": [1.5, None, True]}, {"said": 'a "quoted" é'}, {}]


def talk(arguments: object, *, older: bool = False) -> list[dict[str, Any]]:
    function = {"name": "add", "arguments": arguments}
    call = {"function_call": function} if older else {"tool_calls": [{"type": "function", "function": function}]}
    return [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "", **call},
        {"role": "tool", "content": "9"},
        {"role": "assistant", "content": "It is 9."},
    ]


def rendered(messages: list[dict[str, Any]], template: str, tokenizer: Any) -> str:
    using = copy.copy(tokenizer)
    using.chat_template = template
    return "".join(one["content"] for one in get_formatted_message_log(messages, using, None, False, False))


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_are_shown_as_json_once_however_a_row_has_them(
    reads: str, arguments: dict[str, Any], tokenizer: Any
) -> None:
    text = json.dumps(arguments, ensure_ascii=False)
    shown = rendered(talk(text), READS[reads], tokenizer)
    assert shown == rendered(talk(arguments), READS[reads], tokenizer)
    if reads == "objects alone":
        assert all(f"<{key}>{value}" in shown for key, value in arguments.items())
    else:
        assert text in shown


@pytest.mark.parametrize("empty", ["", " ", "{}"])
def test_a_call_without_arguments_is_an_empty_object(empty: str, tokenizer: Any) -> None:
    assert '"arguments": {}}' in rendered(talk(empty), READS["chatml_default_system"], tokenizer)


def test_openais_older_calls_are_read_the_same_way(tokenizer: Any) -> None:
    template = "{% for m in messages %}{{ m.content }}{{ m.function_call | tojson if m.function_call }}{% endfor %}"
    assert '"arguments": {"a": 1}}' in rendered(talk('{"a": 1}', older=True), template, tokenizer)


@pytest.mark.parametrize("broken", ['{"a": 1', "Oslo", "[1]", "'a'"])
def test_arguments_that_are_no_object_are_refused_where_they_would_be_quoted(broken: str, tokenizer: Any) -> None:
    assert broken in rendered(talk(broken), READS["text alone"], tokenizer)
    with pytest.raises(DataError, match="message 2: the arguments of a tool call are .* no JSON object"):
        rendered(talk(broken), READS["chatml_default_system"], tokenizer)


def datasets(tokenizer: Any, path: Path, row: dict[str, Any]) -> TaskDatasets:
    path.write_text(json.dumps(row) + "\n")
    entry = {"dataset_name": "ResponseDataset", "data_path": str(path), "processor": "sft_processor"}
    return load_datasets(tokenizer, DataConfig.model_validate({"train": entry}))


def loaded(tokenizer: Any, path: Path, row: dict[str, Any]) -> Any:
    return datasets(tokenizer, path, row).train[0]


@pytest.mark.parametrize("as_text", [False, True])
def test_rows_of_openais_format_train_calls_that_can_be_parsed(
    as_text: bool, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", READS["chatml_default_system"])
    messages = talk('{"city": "Oslo"}')
    if as_text:
        messages[1]["tool_calls"] = json.dumps(messages[1]["tool_calls"])
    datum = loaded(tokenizer, tmp_path / "a.jsonl", {"messages": messages})
    batch = sft_collate_fn([datum], tokenizer.pad_token_id)
    trained = tokenizer.decode(batch["input_ids"][0][batch["token_mask"][0].bool()])
    assert json.loads(trained.partition("<tool_call>\n")[2].partition("\n</tool_call>")[0]) == {
        "name": "add",
        "arguments": {"city": "Oslo"},
    }


@pytest.mark.parametrize("calls", ["add(1)", {"name": "add"}, ["add"], "[1]"])
def test_calls_that_are_no_list_of_calls_are_refused(calls: object, tokenizer: Any, tmp_path: Path) -> None:
    messages = talk("{}")
    messages[1]["tool_calls"] = calls
    with pytest.raises(DataError, match=r"row 1: .*message 2: its tool_calls holds .* expected a list"):
        loaded(tokenizer, tmp_path / "a.jsonl", {"messages": messages})


@pytest.mark.parametrize(
    ("arguments", "reads", "said"),
    [
        ('{"a": 1}', "chatml_default_system", True),
        ('{"a": 1}', "objects alone", True),
        ('{"a": 1}', "either", False),
        ({"a": 1}, "chatml_default_system", False),
    ],
)
def test_a_start_says_where_arguments_are_rendered_otherwise_than_in_nemo_rl(
    arguments: object, reads: str, said: bool, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", READS[reads])
    notes = datasets(tokenizer, tmp_path / "a.jsonl", {"messages": talk(arguments)}).notes
    assert [note.partition(":")[0] for note in notes if "as JSON text" in note] == ["data.train"] * said
