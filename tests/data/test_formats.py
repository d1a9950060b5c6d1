"""Every format that data come in, read for GRPO, SFT and evaluation, as training and as validation data.

`formats/<name>` holds rows as they are published (parquet as JSON lines, from which the file is made here), one file
whose last row must be refused, and `expected.json`: what is asked, what is the answer, what is trained, and what the
refusal says.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from nemo_rl.algorithms.evaluation import load_problems
from nemo_rl.algorithms.startup import check_prompt_lengths
from nemo_rl.config import DataConfig, EvalMasterConfig
from nemo_rl.data.conversations import as_messages
from nemo_rl.data.datasets import load_response_dataset
from nemo_rl.data.interfaces import DataError
from nemo_rl.data.loader import sft_collate
from nemo_rl.data.processors import math_hf_data_processor
from nemo_rl.data.setup import load_datasets

FORMATS = Path(__file__).parent / "formats"
NAMES = sorted(path.name for path in FORMATS.iterdir())
# What is published as parquet, and what is not of a recognised format.
PARQUET = ("dapo_messages", "prompt_completion")
ENTRIES: dict[str, dict[str, Any]] = {
    "dapo_messages": {"dataset_name": "DAPOMath17K"},
    "dapo_text": {"dataset_name": "DAPOMath17K"},
    "helpsteer3": {"dataset_name": "HelpSteer3"},
    "gsm8k": {"dataset_name": "gsm8k"},
    "named_columns": {"input_key": "question", "output_key": "response"},
}


@pytest.fixture
def published(tmp_path: Path) -> Any:
    """The directory of a format, in a path with a bracket, and its entry in `data`."""

    def copied(name: str, processor: str) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path / "copy[1]"
        shutil.copytree(FORMATS / name, folder, ignore=shutil.ignore_patterns("expected.json"))
        if name in PARQUET:
            for file in folder.iterdir():
                rows = [json.loads(line) for line in file.read_text().splitlines()]
                pq.write_table(pa.Table.from_pylist(rows), file.with_suffix(".parquet"))
                file.unlink()
        refused = next(folder.glob("refused*"))
        refused.rename(tmp_path / refused.name)
        entry = {"dataset_name": "ResponseDataset", "prompt_file": None, "processor": processor}
        return tmp_path / refused.name, {**entry, **ENTRIES.get(name, {}), "data_path": str(folder)}

    return copied


def prompts(purpose: str, part: str, entry: dict[str, Any], tokenizer: Any) -> Any:
    """The prompts, or conversations, of one cell of the table."""
    rows = {"split": part} if Path(entry["data_path"]).is_dir() else {}
    if purpose == "evaluation":
        config = EvalMasterConfig.model_validate({"data": {**entry, **rows}})
        return load_problems(config, tokenizer, print).dataset
    small = {"dataset_name": "arithmetic", "num_problems": 2, "held_out": 1, "prompt_file": None}
    other = {**small, "processor": entry["processor"]}
    train, validation = ({**entry, **rows}, other) if part == "train" else (other, {**entry, **rows})
    data = load_datasets(tokenizer, DataConfig.model_validate({"train": train, "validation": validation}))
    return data.train if part == "train" else data.validation


def shown(datum: Any, tokenizer: Any) -> dict[str, Any]:
    text = "".join(tokenizer.decode(message["token_ids"]) for message in datum["message_log"])
    if datum["extra_env_info"] is not None:
        return {"prompt": text, "answer": datum["extra_env_info"]["ground_truth"]}
    batch = sft_collate(tokenizer.pad_token_id)([datum])
    tokens = zip(batch["input_ids"][0].tolist(), batch["token_mask"][0].tolist(), strict=True)
    runs = [
        tokenizer.decode([token for token, _ in run]) for masked, run in groupby(tokens, lambda at: at[1]) if masked
    ]
    # How much of a turn's marks is trained is the business of the tests of masks.
    marks = r"<\|im_start\|>assistant\n|<\|im_end\|>|<eos>"
    return {"text": text, "trained": [re.sub(marks, "", run).strip() for run in runs]}


PURPOSES = {"grpo": "default", "evaluation": "default", "sft": "sft_processor"}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["train", "validation"])
@pytest.mark.parametrize("purpose", PURPOSES)
@pytest.mark.parametrize("name", NAMES)
def test_every_format_reads_the_right_text(name: str, purpose: str, part: str, published: Any, tokenizer: Any) -> None:
    _, entry = published(name, PURPOSES[purpose])
    dataset = prompts(purpose, part, entry, tokenizer)
    expected = json.loads((FORMATS / name / "expected.json").read_text())
    read = [shown(dataset[index], tokenizer) for index in range(len(dataset))]
    assert read == expected["sft" if purpose == "sft" else "asked"][part]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["train", "validation"])
@pytest.mark.parametrize("purpose", PURPOSES)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_that_cannot_be_read_is_named(name: str, purpose: str, part: str, published: Any, tokenizer: Any) -> None:
    refused, entry = published(name, PURPOSES[purpose])
    expected = json.loads((FORMATS / name / "expected.json").read_text())["refused"]
    with pytest.raises(DataError) as error:
        prompts(purpose, part, {**entry, "data_path": str(refused)}, tokenizer)
    said = str(error.value)
    key = "data" if purpose == "evaluation" else f"data.{part}"
    assert f"{key}: 1 of " in said and f"{refused.name}, row {expected['row']}: {expected['says']}" in said


def rows(path: Path, content: str | bytes | list[dict[str, Any]]) -> dict[str, Any]:
    """An entry of `data` that names a file with this content."""
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return {"dataset_name": "ResponseDataset", "data_path": str(path), "prompt_file": None}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


FILES: list[tuple[str, str | bytes, str]] = [
    (
        "a.jsonl",
        b'{"input": "1", "output": "2"}\n{"input": "caf\xe9", "output": "2"}\n',
        r"a.jsonl, line 2 .* not UTF-8",
    ),
    ("a.csv", "input,output\ncaf\xe9,2\n".encode("latin-1"), r"a.csv, line 2 .* not UTF-8 text, at byte 3"),
    ("a.json", '{"input": "1"}'.encode("utf-16"), "the file is UTF-16, and must be UTF-8"),
    ("a.jsonl", '{"input": "1", "output": "2"}\n{"input": \n', r"line 2 \(from 1\): .* expected one object"),
    ("a.jsonl", '{"input": "1", "output": "2"}\n[1]\n', r"line 2 \(from 1\) holds a list of 1: .* expected an object"),
    ("a.json", '{\n"rows": []\n}', "it is one object with rows; expected a list of objects"),
    ("a.json", "[]", r"data.train: .*a.json is empty"),
    ("a.csv", "input,output\n1,2,3\n", "line 2 .* has 3 cells and the first line names 2"),
    ("a.csv", "input;output\n1;2\n", "columns must be separated by ','"),
    ("a.csv", "input,input\n1,2\n", "the column 'input' is there 2 times"),
    ("a.parquet", "input,output\n", r"a.parquet cannot be read as parquet"),
    ("a.csv", 'input,output\n"a" b,2\n', r"line 2 \(from 1\): .* quotes within a quoted cell are doubled"),
    ("a.csv", 'input,output\n"a,1\nb,2\n', r"line 2 \(from 1\): unexpected end of data"),
    ("a.csv", "input,output\n1,2\n".encode("utf-16-le"), "the file is UTF-16"),
    ("a.jsonl", '{"input": "1"}'.encode("utf-32"), "the file is UTF-32"),
    ("a.jsonl", gzip.compress(b"{}", mtime=0), "the file is packed; unpack it with `gunzip`"),
    ("a.jsonl.gz", gzip.compress(b"{}", mtime=0), "is none of .jsonl, .* unpack it first"),
    (
        "a.jsonl",
        '{"input": "1", "output": "2", "output": "3"}\n',
        r"line 1 \(from 1\): the key 'output' is there twice",
    ),
    ("a.jsonl", '{"input": "1", "output": "2",}\n', r"line 1 \(from 1\): "),
]


@pytest.mark.parametrize(("name", "content", "says"), FILES)
def test_a_file_that_cannot_be_read_is_named_with_the_line(
    name: str, content: str | bytes, says: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=says):
        load_response_dataset(rows(tmp_path / name, content))


ROWS: list[tuple[dict[str, Any], str]] = [
    (
        {"input": "q", "output": {"value": "7"}},
        "column 'output' holds an object with value; expected one text or number",
    ),
    ({"input": "q", "output": "\ud83d"}, "half of a UTF-16 pair cannot be encoded"),
    ({"input": [{"content": "q"}], "output": "7"}, "column 'input' holds an object with content"),
    ({"input": "[{'role': 'user', 'content': 'q'}]", "output": "7"}, "not an object or a list that was written out"),
    ({"input": "q", "output": "7", "images": ["a.png"]}, "column 'images' holds media"),
    ({"input": "q", "output": "7", "tools": "add"}, "column 'tools' holds the text 'add'; expected a list"),
    ({"input": "q", "output": "7", "chat_template_kwargs": {"a": 1}}, "set policy.tokenizer.chat_template_kwargs"),
    ({"input": "q", "output": "7", "functions": [{"name": "add"}]}, "column 'functions' is OpenAI's older form"),
    ({"messages": [user("q"), assistant(None, refusal="No.")]}, "message 2: its content holds nothing"),
    *(
        ({"prompt": "q", "completion": "7", "label": label}, "marks the completion as unwanted")
        for label in (False, 0, 0.0, "False", "false", "0")
    ),
    *(
        ({**asked, name: value}, f"column '{name}' belongs to the question, and only '{next(iter(asked))}' would be")
        for asked in (
            {"question": "q", "answer": "7"},
            {"problem": "q", "answer": "7"},
            {"prompt": "q", "response": "7"},
        )
        for name, value in (("context", "Paris is large."), ("passage", {"text": ["x"]}), ("choices", ["x", "y"]))
    ),
    ({"question": "q", "answer": "A", "options": {"A": "x", "B": "y"}}, "column 'options' belongs to the question"),
    ({"input": "q", "output": "7", "context": "c"}, "column 'context' belongs to the question, and only 'input' would"),
    ({"input": "q", "output": "so it is $\\boxed{}$"}, r"the expected answer holds .* expected something in its last"),
    ({"messages": [user("q"), assistant("7"), user("and?")]}, r"at its end, .* has 3 \(user, assistant, user\)"),
    ({"messages": [{"role": "system", "content": "s"}, assistant("7")]}, r"has 2 \(system, assistant\)"),
    ({"messages": ["q", "7"]}, "message 1 holds the text 'q'; expected an object with role and content"),
    ({"messages": [{"content": "q"}, assistant("7")]}, "message 1 has neither 'role' nor 'from'; it has content"),
    (
        {"messages": [user([{"type": "image_url", "image_url": "x"}]), assistant("7")]},
        "a part of type 'image_url'",
    ),
    ({"messages": [user("q", images=["x"]), assistant("7")]}, "message 1 carries 'images'"),
    ({"messages": [user(""), assistant("7")]}, "the last question of `messages` holds the text ''"),
    ({"system": "A", "messages": [{"role": "system", "content": "B"}, user("q"), assistant("7")]}, "differ; leave one"),
    ({"messages": [user("q", **{"from": "gpt"}), assistant("7")]}, "message 1 has 'role' and 'from', which differ"),
    ({"prompt": "q", "reward_model": "7"}, "column 'reward_model' holds .*7; expected an object such as"),
    ({"instruction": "q", "output": "7", "history": [["a"]]}, "column 'history' .* expected pairs"),
]


@pytest.mark.parametrize(("row", "says"), ROWS)
def test_a_row_whose_meaning_would_be_lost_is_refused(row: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"data.train: 1 of 1 rows cannot be read .*\n.*a.jsonl, row 1: .*{says}"):
        load_response_dataset(rows(tmp_path / "a.jsonl", [row]))


PUBLISHED: list[tuple[str, list[dict[str, Any]], str]] = [
    ("squad", [{"context": "c", "question": "q", "answers": {"text": []}}], "row 1: column 'answers' holds"),
    ("mmlu", [{"question": "q", "choices": ["a", "b"], "answer": 5}], "row 1: the question has 2 choices"),
    ("mmlu_pro", [{"question": "q", "options": "ab", "answer": "A"}], "row 1: column 'options' holds the text 'ab'"),
    ("DeepScaler", [{"problem": "q", "answer": None}], "row 1: column 'answer' holds nothing"),
    ("NuminaMath-1.5", [{"problem": "q", "answer": "proof"}], "has no usable row"),
    ("open_assistant", [{"message_id": "1", "parent_id": "0", "role": "assistant", "text": "a"}], "0, which is in no"),
    ("tulu3_sft_mixture", [{"messages": [user("q"), {"role": "assistant"}]}], "row 1: .* message 2 has neither"),
]


@pytest.mark.parametrize(("name", "content", "says"), PUBLISHED)
def test_rows_of_a_published_dataset_that_do_not_fit_are_named(
    name: str, content: list[dict[str, Any]], says: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=says):
        load_response_dataset({**rows(tmp_path / "a.jsonl", content), "dataset_name": name})


@pytest.mark.parametrize(
    ("gold", "expected"),
    [
        (["7"], "7"),
        ({"ground_truth": "7", "style": "rule"}, "7"),
        ([{"type": "text", "text": "sev"}, {"type": "text", "text": "en"}], "seven"),
        ("6 + 1 = 7.\n#### 7", "7"),
        ("#### $1,234.50", "$1,234.50"),
        ("Half.\n#### 1/2", "1/2"),
        ("A root.\n#### \\frac{1}{2}", "\\frac{1}{2}"),
        # What pandas writes for 7 where a column has gaps.
        (7.0, "7"),
        ("-12.0", "-12"),
        ("7.50", "7.50"),
        ("1.10.0", "1.10.0"),
        # Answers that are no mathematics: a heading, a comment of code, a version.
        ("# Guide\n\ntext\n\n#### See also", "# Guide\n\ntext\n\n#### See also"),
        ("def f():\n    return 1\n#### end of module", "def f():\n    return 1\n#### end of module"),
        ("# Changes\n#### 1.2.3", "# Changes\n#### 1.2.3"),
        ("x = 1 #### 2 lines", "x = 1 #### 2 lines"),
        ("####", "####"),
        ("It is $\\boxed{\\frac{1}{2}}$ then.", "\\frac{1}{2}"),
        ("\\boxed{7}", "\\boxed{7}"),
        ("a #1 b", "a #1 b"),
    ],
)
def test_a_gold_is_converted_by_a_stated_rule_alone(gold: Any, expected: str, tokenizer: Any, tmp_path: Path) -> None:
    dataset = load_response_dataset(rows(tmp_path / "a.jsonl", [{"input": "q", "output": gold}]))
    datum = math_hf_data_processor(dataset.dataset[0], dataset.task_spec, tokenizer, 999, 0)
    assert datum["extra_env_info"] == {"ground_truth": expected}


@pytest.mark.parametrize("answer", ["# Changes\n\n#### 2024", "\\newcommand{\\boxed}{x}\n\\boxed{7} is seven", "7"])
def test_a_judge_that_compares_texts_is_given_the_whole_answer(answer: str, tokenizer: Any, tmp_path: Path) -> None:
    entry = {**rows(tmp_path / "a.jsonl", [{"input": "q", "output": answer}]), "env_name": "code_jaccard"}
    datum = load_datasets(tokenizer, DataConfig.model_validate({"train": entry})).train[0]
    assert datum["extra_env_info"] == {"ground_truth": answer}


CARRIED: list[tuple[str, dict[str, Any]]] = [
    ("tool_calls", {"messages": [user("q"), assistant(None, tool_calls=[{"id": "1"}]), user("r"), assistant("7")]}),
    ("reasoning_content", {"messages": [user("q"), assistant("a", reasoning_content="so"), user("r"), assistant("7")]}),
    ("name", {"messages": [user("q", name="Ann"), assistant("7")]}),
    ("refusal", {"messages": [user("q"), assistant("a", refusal="Declined"), user("r"), assistant("7")]}),
    ("tools", {"input": "q", "output": "7", "tools": [{"name": "add"}]}),
]


@pytest.mark.parametrize(("key", "row"), CARRIED)
def test_what_messages_carry_is_shown_by_the_template_or_refused(
    key: str, row: dict[str, Any], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = rows(tmp_path / "a.jsonl", [{key: None, **row}, row])
    config = DataConfig.model_validate({"train": entry})
    with pytest.raises(DataError, match=rf"a.jsonl, row 1: carries '{key}', which the chat template .* does not show"):
        load_datasets(tokenizer, config)
    source = (
        "{{ tools | tojson }}" if key == "tools" else f"{{% for m in messages %}}{{{{ m['{key}'] }}}}{{% endfor %}}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", source + tokenizer.chat_template)
    text = "".join(message["content"] for message in load_datasets(tokenizer, config).train[1]["message_log"])
    assert next(word for word in ("'id': '1'", "so", "Ann", "Declined", '"add"') if word in text)


@pytest.mark.parametrize(("key", "no", "yes"), [("weight", 0, 1), ("train", False, True), ("loss_mask", 0.0, 1.0)])
def test_an_answer_that_is_not_to_be_trained_is_masked(
    key: str, no: object, yes: object, tokenizer: Any, tmp_path: Path
) -> None:
    talk = [user("q"), assistant("a", **{key: no}), user("r"), assistant("7", **{key: yes})]
    entry = {**rows(tmp_path / "a.jsonl", [{"messages": talk}]), "processor": "sft_processor"}
    datum = load_datasets(tokenizer, DataConfig.model_validate({"train": entry})).train[0]
    assert shown(datum, tokenizer)["trained"] == ["7"]


@pytest.mark.parametrize(
    ("marks", "says"),
    [
        ({"weight": 0.5}, "message 2 has weight=0.5; an answer is trained or not"),
        ({"mask": True}, "message 2 has 'mask', which means opposite things"),
        ({"train": False}, "no answer of the conversation is to be trained"),
    ],
)
def test_marks_that_sft_cannot_honour_are_refused_by_it_alone(marks: Any, says: str, tmp_path: Path) -> None:
    entry = rows(tmp_path / "a.jsonl", [{"messages": [user("q"), assistant("7", **marks)]}])
    assert len(load_response_dataset(entry).dataset) == 1
    with pytest.raises(DataError, match=says):
        load_response_dataset({**entry, "processor": "sft_processor"})


def test_contents_are_known_by_their_rows_and_not_by_path_or_time(tmp_path: Path) -> None:
    def contents(output: str) -> str:
        entry = rows(tmp_path / "a.jsonl", [{"input": "q", "output": output}])
        os.utime(tmp_path / "a.jsonl", (0, 0))
        return load_response_dataset(entry).contents

    assert contents("1") == contents("1") and contents("1") != contents("2")
    assert contents("1").startswith("1 rows, digest ")


@pytest.mark.parametrize("part", ["train", "validation"])
def test_data_whose_every_prompt_is_too_long_is_refused_wherever_it_is_used(
    part: str, tokenizer: Any, tmp_path: Path
) -> None:
    short, long = rows(tmp_path / "a.jsonl", [{"input": "q", "output": "7"}]), [{"input": "q" * 999, "output": "7"}]
    data = {"train": short, "validation": short, part: rows(tmp_path / "b.jsonl", long), "max_input_seq_length": 100}
    loaded = load_datasets(tokenizer, DataConfig.model_validate(data))
    by_task = loaded.train_by_task if part == "train" else loaded.validation_by_task
    with pytest.raises(DataError, match=rf"data.{part} \(ResponseDataset\): 1 of 1 prompts are longer than"):
        check_prompt_lengths(f"data.{part}", by_task, 100, print)
    evaluation = EvalMasterConfig.model_validate({"data": {**data[part], "max_input_seq_length": 100}})
    with pytest.raises(DataError, match=r"data \(ResponseDataset\): 1 of 1 prompts .* nothing would be measured"):
        load_problems(evaluation, tokenizer, print)


def test_rows_are_taken_out_of_training_alone(tokenizer: Any, tmp_path: Path) -> None:
    entry = rows(tmp_path / "a.jsonl", [{"input": str(n), "output": "7"} for n in range(4)])
    cut = {**entry, "split_validation_size": 1}
    with pytest.raises(DataError, match=r"data.validation.split_validation_size=1 takes rows out of training"):
        load_datasets(tokenizer, DataConfig.model_validate({"train": entry, "validation": cut}))
    with pytest.raises(DataError, match=r"data.split_validation_size=1 takes rows out of training"):
        load_problems(EvalMasterConfig.model_validate({"data": cut}), tokenizer, print)


@pytest.mark.parametrize("answer", ["completion", "response"])
@pytest.mark.parametrize("as_text", [False, True])
def test_earlier_turns_beside_a_prompt_are_part_of_the_conversation(
    answer: str, as_text: bool, tokenizer: Any, tmp_path: Path
) -> None:
    history = [["1+1", "2"], ["and 2+2", "4"]]
    row = {"prompt": "and 3+3", answer: "6", "history": json.dumps(history) if as_text else history}
    datum = load_datasets(tokenizer, DataConfig.model_validate({"train": rows(tmp_path / "a.jsonl", [row])})).train[0]
    said = [(one["role"], one["content"].partition("\n")[2].partition("<|im_end|>")[0]) for one in datum["message_log"]]
    assert [text for _, text in said] == ["1+1", "2", "and 2+2", "4", "and 3+3"]


@pytest.mark.parametrize("named", [{"input_key": "question", "output_key": "answer"}])
def test_columns_that_are_named_leave_the_others_out(named: dict[str, str], tokenizer: Any, tmp_path: Path) -> None:
    entry = rows(tmp_path / "a.jsonl", [{"question": "q", "answer": "7", "context": "not asked"}])
    datum = load_datasets(tokenizer, DataConfig.model_validate({"train": {**entry, **named}})).train[0]
    assert "not asked" not in datum["message_log"][0]["content"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_row_of_nemo_gym_keeps_its_numbers(kind: str, tokenizer: Any, tmp_path: Path) -> None:
    asked = {"input": "q", "temperature": 0.5, "max_output_tokens": 100}
    row = {"responses_create_params": asked, "expected": 7, "limits": [1, 2], "strict": True, "name": "7"}
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps(row) + "\n")
    entry = {"dataset_name": "NemoGymDataset", "data_path": str(path)}
    datum = load_datasets(tokenizer, DataConfig.model_validate({"train": entry})).train[0]
    assert datum["extra_env_info"] == {"nemo_gym_row": row}


def test_tool_calls_without_text_keep_their_arguments_alone(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(arguments: dict[str, Any]) -> dict[str, Any]:
        asked = assistant(None, tool_calls=[{"function": {"name": "f", "arguments": arguments}}])
        return {"messages": [user("q"), asked, {"role": "tool", "content": "1", "tool_call_id": "x"}, assistant("7")]}

    talks = [call({"a": 1}), call({"b": "two"})]
    pq.write_table(pa.Table.from_pylist(talks), tmp_path / "a.parquet")
    (tmp_path / "their_talks.py").write_text(
        "from datasets import Dataset\nfrom nemo_rl.data.datasets import RawDataset\n"
        "class Talks(RawDataset):\n    def __init__(self, data_path, **_):\n"
        "        self.task_name, rows = 'talks', Dataset.from_parquet(data_path)\n"
        "        self.dataset = rows.add_column('task_name', ['talks'] * len(rows))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    calls = "{% for m in messages %}{{ m['tool_calls'] | tojson if 'tool_calls' in m }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", calls + tokenizer.chat_template)
    for entry in (
        rows(tmp_path / "a.jsonl", talks),
        {"data_path": str(tmp_path / "a.parquet"), "dataset_name": "ResponseDataset", "prompt_file": None},
        {"data_path": str(tmp_path / "a.parquet"), "dataset_name": "their_talks.Talks", "prompt_file": None},
    ):
        log = load_datasets(tokenizer, DataConfig.model_validate({"train": entry})).train[0]["message_log"]
        assert '"arguments": {"a": 1}' in "".join(message["content"] for message in log)


def test_rows_of_a_users_class_are_looked_at_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_lists.py").write_text(
        "from nemo_rl.data.datasets import RawDataset\n"
        "class Lists(RawDataset):\n    def __init__(self, answers, **_):\n        self.task_name = 'lists'\n"
        "        say = lambda role, text: {'role': role, 'content': text}\n"
        "        self.dataset = [{'messages': [say('user', 'q'), say('assistant', a)]} for a in answers]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = {"dataset_name": "their_lists.Lists", "prompt_file": None}
    known = [load_response_dataset({**entry, "answers": answers}).contents for answers in (["1"], ["1"], ["2"])]
    assert known[0] == known[1] != known[2]
    with pytest.raises(DataError, match=r"data.train: row 2 \(from 1\) of lists: `messages`, message 2: its content"):
        load_response_dataset({**entry, "answers": ["1", ["3", "4"]]})


def test_a_directory_is_read_by_the_split_of_its_dataset(tmp_path: Path) -> None:
    for folder in ("a[1]", "b[1]"):
        (tmp_path / folder).mkdir()
    for split in ("train", "test"):
        rows(tmp_path / "a[1]" / f"{split}.jsonl", [{"problem": split, "answer": "7"}])
    parts = {split: Dataset.from_list([{"problem": split, "answer": "7"}]) for split in ("train", "test")}
    DatasetDict(parts).save_to_disk(str(tmp_path / "b[1]"))

    def first(folder: str, **entry: Any) -> str:
        entry = {"data_path": str(tmp_path / folder), "prompt_file": None, **entry}
        return load_response_dataset(entry).dataset[0]["messages"][0]["content"]

    for folder in ("a[1]", "b[1]"):
        assert first(folder, dataset_name="math500") == "test" == first(folder, dataset_name="DeepScaler", split="test")
        assert first(folder, dataset_name="DeepScaler") == "train"
    rows(tmp_path / "a[1]" / "train.csv", "problem,answer\nq,7\n")
    with pytest.raises(DataError, match=r"files of several kinds \(train.csv, train.jsonl\)"):
        first("a[1]", dataset_name="DeepScaler")


def test_the_last_question_is_put_into_the_prompt_of_the_task(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Solve {}!")
    (tmp_path / "system.txt").write_text("Be kind.")
    talk = [user("1+1"), assistant("2"), user("2+2"), assistant("4")]
    entry = {**rows(tmp_path / "a.jsonl", [{"messages": talk}]), "prompt_file": str(tmp_path / "prompt.txt")}
    log = load_datasets(tokenizer, DataConfig.model_validate({"train": entry})).train[0]["message_log"]
    text = "".join(message["content"] for message in log)
    assert "user\n1+1<" in text and "user\nSolve 2+2!<" in text
    entry = {**rows(tmp_path / "a.jsonl", [{"system": "Be brief.", "messages": talk}]), "prompt_file": None}
    with pytest.raises(DataError, match="row 1: has a system message, and system_prompt_file sets another one"):
        load_response_dataset({**entry, "system_prompt_file": str(tmp_path / "system.txt")})


def test_the_name_of_a_tool_need_not_be_shown(tokenizer: Any, tmp_path: Path) -> None:
    talk = [user("q"), assistant("a"), {"role": "tool", "name": "add", "content": "1"}, assistant("7")]
    config = DataConfig.model_validate({"train": rows(tmp_path / "a.jsonl", [{"messages": talk}])})
    assert len(load_datasets(tokenizer, config).train) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"input": "q", "output": "7"}\r\n\r\n'),
        ("a.json", '[\n{"input": "q", "output": "7"}\n]'),
        ("a.csv", "input,output\r\nq,7\r\n"),
        ("a.tsv", "input\toutput\nq\t7\n"),
    ],
)
def test_a_byte_order_mark_and_line_ends_are_no_text(name: str, content: str, tmp_path: Path) -> None:
    entry = rows(tmp_path / name, b"\xef\xbb\xbf" + content.encode())
    [row] = load_response_dataset(entry).dataset
    assert [message["content"] for message in row["messages"]] == ["q", "7"]


@pytest.mark.parametrize(
    ("written", "role"),
    [("developer", "system"), ("Human", "user"), ("prompter", "user"), ("model", "assistant"), ("observation", "tool")],
)
def test_roles_have_one_name_whatever_a_format_calls_them(written: str, role: str) -> None:
    [message] = as_messages([{"from": written, "value": "x"}], "column 'conversations'")
    assert message == {"role": role, "content": "x"}


@pytest.mark.parametrize(("score", "preferred"), [(-3, "first"), (0, "first"), (1, "second")])
def test_a_preference_of_zero_takes_the_first_response(score: int, preferred: str, tmp_path: Path) -> None:
    responses = {"response1": "first", "response2": "second", "overall_preference": score}
    entry = rows(tmp_path / "a.jsonl", [{"context": [user("q")], **responses}])
    assert load_response_dataset(entry).dataset[0]["messages"][-1]["content"] == preferred
