"""Datasets by name, from files and directories; their mistakes; the arithmetic generator; and how several become
one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.config import ConfigError, DataConfig, DatasetConfig
from nemo_rl.data.datasets import RawDataset, load_response_dataset
from nemo_rl.data.datasets.data_files import read_rows
from nemo_rl.data.datasets.generated import arithmetic_problems
from nemo_rl.data.datasets.raw import conversation
from nemo_rl.data.interfaces import DataError, TaskDataSpec, load_prompt
from nemo_rl.data.setup import load_datasets

PLAIN: dict[str, Any] = {"prompt_file": None}


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(**entry: Any) -> RawDataset:
    return load_response_dataset(DatasetConfig(**PLAIN, **entry))


def question_and_answer(dataset: RawDataset, row: int = 0) -> tuple[str, str]:
    messages = dataset.dataset[row]["messages"]
    return messages[0]["content"], messages[1]["content"]


def test_jsonl_with_any_columns(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"q": "1+1", "a": 2, "more": "x"}, {"q": "2+2", "a": 4, "more": "y"}])
    dataset = load(dataset_name="ResponseDataset", data_path=path, input_key="q", output_key="a")
    assert question_and_answer(dataset, 1) == ("2+2", "4")
    assert sorted(dataset.dataset.column_names) == ["messages", "task_name"]


def test_directories_saved_to_disk_and_directories_of_files(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"input": ["a", "b"], "output": ["1", "2"]})
    rows.save_to_disk(str(tmp_path / "one"))
    DatasetDict(train=rows, test=rows.select([1])).save_to_disk(str(tmp_path / "several"))
    (tmp_path / "files").mkdir()
    rows.to_parquet(str(tmp_path / "files/part.parquet"))
    for folder in ("one", "several", "files"):
        assert question_and_answer(load(dataset_name="ResponseDataset", data_path=str(tmp_path / folder))) == ("a", "1")
    assert question_and_answer(
        load(dataset_name="ResponseDataset", data_path=str(tmp_path / "several"), split="test")
    ) == ("b", "2")
    with pytest.raises(
        DataError, match=r"data.train.data_path.split: .*no split 'tets'\. Did you mean 'test'\? It has train, test"
    ):
        load(dataset_name="ResponseDataset", data_path=str(tmp_path / "several"), split="tets")


NAMED = {
    "OpenMathInstruct-2": ({"problem": "p", "expected_answer": "7"}, "p", "7"),
    "DeepScaler": ({"problem": "p", "answer": "7"}, "p", "7"),
    "OpenR1-Math-220k": ({"problem": "p", "answer": "7"}, "p", "7"),
    "AIME2024": ({"problem": "p", "answer": 7}, "p", "7"),
    "AIME2025": ({"question": "p", "answer": "7"}, "p", "7"),
    "AIME2026": ({"problem": "p", "answer": 7}, "p", "7"),
    "gsm8k": ({"question": "p", "answer": "Thus\n#### 1,007"}, "p", "1007"),
    "GSM8K": ({"question": "p", "answer": "Thus #### -7"}, "p", "-7"),
    "DAPOMath17K": ({"prompt": [{"role": "user", "content": "p"}], "reward_model": {"ground_truth": "7"}}, "p", "7"),
    "DAPOMathAIME2024": (
        {"prompt": [{"role": "user", "content": "p"}], "reward_model": {"ground_truth": "7"}},
        "p",
        "7",
    ),
    "NuminaMath-1.5": ({"problem": "p", "answer": "7"}, "p", "7"),
    "squad": (
        {"context": "c", "question": "q", "answers": {"text": ["t"], "answer_start": [0]}},
        "c\n\nAnswer from the text above: q",
        "t",
    ),
    "tulu3_sft_mixture": ({"messages": conversation("p", "7"), "id": "1"}, "p", "7"),
    "openai_format": ({"messages": conversation("p", "7")}, "p", "7"),
}


@pytest.mark.parametrize("name", NAMED)
def test_named_datasets_read_their_published_columns(name: str, tmp_path: Path) -> None:
    row, question, answer = NAMED[name]
    dataset = load(dataset_name=name, data_path=jsonl(tmp_path / "rows.jsonl", [row]))
    assert question_and_answer(dataset) == (question, answer)
    assert dataset.dataset[0]["task_name"] == name


def test_problems_published_many_times_are_taken_once_and_proofs_not_at_all(tmp_path: Path) -> None:
    row = NAMED["DAPOMath17K"][0]
    assert len(load(dataset_name="DAPOMath17K", data_path=jsonl(tmp_path / "a.jsonl", [row, row])).dataset) == 1
    rows = [{"problem": "p", "answer": answer} for answer in ("proof", "7", "notfound")]
    assert len(load(dataset_name="NuminaMath-1.5", data_path=jsonl(tmp_path / "b.jsonl", rows)).dataset) == 1


def test_preferences_and_message_trees_become_conversations(tmp_path: Path) -> None:
    context = [{"role": "user", "content": "hi"}]
    rows = [{"context": context, "response1": "good", "response2": "bad", "overall_preference": -2}]
    rows.append({"context": context, "response1": "bad", "response2": "good", "overall_preference": 1})
    helpsteer = load(
        dataset_name="HelpSteer3", data_path=jsonl(tmp_path / "h.jsonl", rows), processor="helpsteer3_data_processor"
    )
    assert [row["messages"][-1]["content"] for row in helpsteer.dataset] == ["good", "good"]
    tree = [
        ("1", None, "prompter", "q"),
        ("2", "1", "assistant", "a"),
        ("3", "1", "assistant", "b"),
        ("4", "2", "prompter", "q2"),
        ("5", "4", "assistant", "c"),
    ]
    nodes = [dict(zip(("message_id", "parent_id", "role", "text"), node, strict=True)) for node in tree]
    trees = load(dataset_name="open_assistant", data_path=jsonl(tmp_path / "o.jsonl", nodes), processor="sft_processor")
    assert [[message["content"] for message in row["messages"]] for row in trees.dataset] == [
        ["q", "a", "q2", "c"],
        ["q", "b"],
    ]
    Dataset.from_dict({"text": ["raw"]}).save_to_disk(str(tmp_path / "arrow"))
    texts = load(dataset_name="arrow_text", data_path=str(tmp_path / "arrow"), processor="sft_processor").dataset
    assert texts[0]["messages"] == [{"role": "assistant", "content": "raw"}]


def test_openai_format_takes_its_columns_by_name(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"talk": conversation("q", "a"), "rule": "Be brief.", "functions": [{"name": "add"}]},
        {"talk": conversation("q", "a"), "rule": None, "functions": [{"name": "mul"}]},
    ]
    entry = {
        "dataset_name": "openai_format",
        "data_path": jsonl(tmp_path / "rows.jsonl", rows),
        "chat_key": "talk",
        "system_key": "rule",
        "system_prompt": "Be kind.",
        "tool_key": "functions",
        "processor": "sft_processor",
    }
    dataset = load(**entry)
    assert [row["messages"][0]["content"] for row in dataset.dataset] == ["Be brief.", "Be kind."]
    template = "{{ tools[0]['name'] }}{% for m in messages %}|{{ m['content'] }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    datum = dataset.processor(dataset.dataset[1], dataset.task_spec, tokenizer, 99, 0)
    assert "".join(part["content"] for part in datum["message_log"]) == "<bos>mul|Be kind.|q|a<eos>"


def test_entries_may_be_plain_mappings(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"input": "1+1", "output": "2"}])
    dataset = load_response_dataset({"dataset_name": "ResponseDataset", "data_path": path, "prompt_file": None})
    assert question_and_answer(dataset) == ("1+1", "2")


def test_a_conversation_is_opened_and_closed_as_data_says(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"messages": conversation("q", "a")}])
    entry = {"dataset_name": "openai_format", "data_path": path, "processor": "sft_processor", "prompt_file": None}
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for add_eos, end in ((True, tokenizer.eos_token), (False, "a")):
        config = DataConfig(train=[DatasetConfig(**entry)], add_bos=False, add_eos=add_eos)
        log = load_datasets(tokenizer, config).train[0]["message_log"]
        assert log[-1]["content"].endswith(end)


CHOICES: dict[str, tuple[dict[str, Any], str]] = {
    "gpqa": (
        {"Question": "q", "Correct Answer": " yes\n", **{f"Incorrect Answer {n}": f"no {n}" for n in (1, 2, 3)}},
        "yes",
    ),
    "mmlu": ({"question": "q", "choices": ["no 1", "no 2", "yes", "no 3"], "answer": 2, "subject": "logic"}, "yes"),
    "mmlu of pandas": ({"question": "q", "choices": ["no", "yes"], "answer": 1.0, "subject": "logic"}, "yes"),
    "mmlu_pro": ({"question": "q", "options": ["no 1", "yes"], "answer": "B", "category": "law"}, "yes"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_questions_with_choices_become_prompts_with_letters(name: str, tmp_path: Path, tokenizer: Any) -> None:
    row, right = CHOICES[name]
    dataset = load(dataset_name=name.split()[0], data_path=jsonl(tmp_path / "rows.jsonl", [row, row]))
    datum = dataset.processor(dataset.dataset[0], dataset.task_spec, tokenizer, 999, 0)
    assert datum["extra_env_info"] is not None
    letter = datum["extra_env_info"]["ground_truth"]
    assert f"{letter}) {right}\n" in datum["message_log"][0]["content"].replace("<|im_end|>", "\n") + "\n"
    assert "None" not in datum["message_log"][0]["content"]
    assert dataset.dataset[0] == dataset.dataset[1]


def test_the_right_choice_of_gpqa_is_not_always_the_first(tmp_path: Path) -> None:
    rows = [{**CHOICES["gpqa"][0], "Question": f"question {n}"} for n in range(40)]
    dataset = load(dataset_name="gpqa_diamond", data_path=jsonl(tmp_path / "rows.jsonl", rows))
    letters = [row["answer"] for row in dataset.dataset]
    assert set(letters) == set("ABCD")
    assert all(row["options"][row["answer"]] == "yes" for row in dataset.dataset)


def test_the_answer_of_a_solution_is_its_last_box(tmp_path: Path) -> None:
    rows = [
        {"problem": "p", "solution": "first \\boxed{1}, so \\boxed{\\frac{1}{2}}."},
        {"problem": "a proof", "solution": "nothing to box"},
    ]
    dataset = load(dataset_name="math", data_path=jsonl(tmp_path / "rows.jsonl", rows))
    assert [question_and_answer(dataset, row) for row in range(len(dataset.dataset))] == [("p", "\\frac{1}{2}")]


PROMPTS = sorted((Path(__file__).parents[2] / "examples/prompts").iterdir())


@pytest.mark.parametrize("path", PROMPTS, ids=lambda path: path.name)
def test_a_prompt_file_has_one_place_for_the_problem_or_is_a_system_prompt(path: Path) -> None:
    if path.name == "think_then_answer.txt":
        assert "<answer>" in str(TaskDataSpec(system_prompt_file=str(path)).system_prompt)
    else:
        assert str(TaskDataSpec(prompt_file=str(path)).prompt).format("PROBLEM").count("PROBLEM") == 1


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"dataset_name": "gsm8"}, r"data.train.dataset_name: there is no dataset 'gsm8'\. Did you mean 'gsm8k'\?"),
    ({"dataset_name": "geometry3k"}, r"'geometry3k' is not built yet"),
    ({"dataset_name": "ResponseDataset"}, r"data.train.data_path: ResponseDataset needs the place of its rows"),
    (
        {"dataset_name": "ResponseDataset", "data_path": "./gone.jsonl"},
        r"data.train.data_path: there is nothing at .*gone\.jsonl",
    ),
    (
        {"dataset_name": "ResponseDataset", "data_path": "rows.jsonl", "input_key": "inptu"},
        r"input_key: there is no column 'inptu'\. Did you mean 'input'\?",
    ),
    ({"dataset_name": "gsm8k", "data_path": "rows.jsonl"}, r"there is no column 'question'"),
    ({"dataset_name": "ResponseDataset", "data_path": "empty.jsonl"}, r"data.train.data_path: .*empty\.jsonl is empty"),
    ({"dataset_name": "ResponseDataset", "data_path": "broken.jsonl"}, r"broken\.jsonl cannot be read as json"),
    (
        {"dataset_name": "ResponseDataset", "data_path": "mixed.jsonl"},
        r"1 of 2 rows cannot be read \(rows count from 1\):\n  mixed.jsonl, row 2: there is no column 'input'\. It "
        r"has question, answer\nThe data mixes rows of different columns",
    ),
    ({"dataset_name": "ResponseDataset", "data_path": "rows.txt"}, r"rows\.txt is none of \.jsonl"),
    ({"dataset_name": "arithmetic", "split": "val"}, r"arithmetic has no split 'val'\. Did you mean 'validation'\?"),
    (
        {"dataset_name": "arithmetic", "max_operand": 9},
        r"too few for num_problems 10000 and held_out 512; raise max_operand",
    ),
    ({"dataset_name": "arithmetic", "operators": ["/"]}, r"operators: '/' is not one of"),
    ({"dataset_name": "arithmetic", "split_validation_size": 20_000}, r"takes 20000 of 10000 rows"),
    (
        {"dataset_name": "arithmetic", "processor": "math_hf_data_procesor"},
        r"no processor 'math_hf_data_procesor'\. Did you mean 'math_hf_data_processor'\?",
    ),
    ({"dataset_name": "arithmetic", "processor": "vlm_hf_data_processor"}, r"'vlm_hf_data_processor' is not built yet"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "message"), MISTAKES)
def test_mistakes_in_an_entry_are_named(
    entry: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "rows.jsonl", [{"input": "a", "output": "b"}])
    jsonl(tmp_path / "rows.txt", [{"input": "a"}])
    jsonl(tmp_path / "mixed.jsonl", [{"input": "a", "output": "b"}, {"question": "c", "answer": "d"}])
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text("{not json\n")
    with pytest.raises(DataError, match=message):
        load(**entry)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no place", "has none"),
        ("{} and {}", r"has \{\}, \{\}"),
        ("{problem}", r"has \{problem\}"),
        ("open { brace {}", "literal braces are written twice"),
        ("The answer goes into \\boxed{}.", r"argument of \\boxed"),
        ("Write \\text{0} last", r"argument of \\text"),
        ("\\mathrm{}", r"write \\mathrm\{\{\}\} for its braces"),
    ],
)
def test_a_malformed_prompt_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        load_prompt(str(tmp_path / "prompt.txt"))


def test_what_a_prompt_file_means_to_say_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    for text in ("\\boxed{{}} {}", "in \\LaTeX {}", "{}\n\\boxed{{}}", "\\n{}"):
        path.write_text(text)
        assert load_prompt(str(path)) == text
    path.write_bytes("\ufeffSolve {}".encode())
    assert load_prompt(str(path)) == "Solve {}"
    assert TaskDataSpec("t", None, str(path)).system_prompt == "Solve {}"


def test_a_missing_prompt_file_is_named_and_the_shipped_one_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"prompt_file gone.txt: there is no such file \(looked for .*\)$"):
        load_prompt("gone.txt")
    for theirs in ("cot", "math", "gsm8k", "mmlu_pro"):
        with pytest.raises(DataError, match="prompts of NeMo-RL's examples are not shipped here: copy.*step_by_step"):
            load_prompt(f"examples/prompts/{theirs}.txt")
    for wrong in ("Solve {:d}", "Solve {0:.2f}", "Solve {:,}"):
        (tmp_path / "typed.txt").write_text(wrong)
        with pytest.raises(DataError, match="prompt_file typed.txt: the problem is text"):
            load_prompt("typed.txt")
    assert "\\boxed{}" in str(load_prompt("examples/prompts/step_by_step.txt")).format("x")


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(0, 30),
    st.integers(11, 20),  # 144 problems, of which 30 and their mirror images leave 84
    st.sets(st.sampled_from("+-*"), min_size=1),
    st.integers(0, 5),
)
def test_arithmetic_problems_are_distinct_disjoint_and_right(
    train: int, held_out: int, largest: int, signs: set[str], seed: int
) -> None:
    problems, kept = arithmetic_problems(train, held_out, largest, tuple(sorted(signs)), seed)
    assert (len(problems), len(kept)) == (train, held_out)
    assert len({problem.question for problem in [*problems, *kept]}) == train + held_out
    assert not {problem.mirrored for problem in problems} & set(kept)
    for problem in problems:
        assert int(problem.answer) == eval(problem.question.rstrip("="))
    again = arithmetic_problems.__wrapped__(train, held_out, largest, tuple(sorted(signs)), seed)
    assert again == (problems, kept)


@pytest.mark.slow
def test_the_arithmetic_dataset_has_ten_thousand_problems_and_a_disjoint_hold_out() -> None:
    train, held_out = load(dataset_name="arithmetic"), load(dataset_name="arithmetic", split="validation")
    questions = [{row["messages"][0]["content"] for row in dataset.dataset} for dataset in (train, held_out)]
    assert [len(part) for part in questions] == [10_000, 512] and not questions[0] & questions[1]


@pytest.mark.slow
def test_slips_add_a_digit_to_as_many_training_answers_as_asked_and_to_the_same_every_time() -> None:
    sums: dict[str, Any] = {"dataset_name": "arithmetic", "num_problems": 1_000}
    exact, careless, again = (load(**sums, slips=slips).dataset for slips in (0.0, 0.6, 0.6))
    pairs = [
        (right["messages"][1]["content"], written["messages"][1]["content"])
        for right, written in zip(exact, careless, strict=True)
    ]
    assert all(written[: len(right)] == right for right, written in pairs)
    assert 540 < sum(len(written) == len(right) + 1 for right, written in pairs) < 660
    assert careless["messages"] == again["messages"]
    assert (
        load(**sums, slips=0.6, split="validation").dataset["messages"]
        == load(**sums, split="validation").dataset["messages"]
    )


@pytest.mark.slow
def test_a_validation_split_is_taken_out_of_training() -> None:
    for size, expected in ((0.05, 50), (128, 128)):
        dataset = load(dataset_name="arithmetic", num_problems=1_000, split_validation_size=size, seed=3)
        parts = [{row["messages"][0]["content"] for row in part} for part in (dataset.dataset, dataset.val_dataset)]
        assert len(parts[1]) == expected and not parts[0] & parts[1]


def test_small_validation_sets_are_repeated(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "aime.jsonl", [{"problem": str(n), "answer": n} for n in range(3)])
    dataset = load(dataset_name="AIME2024", data_path=path, repeat=4)
    assert [question_and_answer(dataset, row)[1] for row in range(12)] == ["0", "1", "2"] * 4


def test_a_users_class_gets_every_key_of_its_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_rows.py").write_text(
        "from datasets import Dataset\n"
        "from nemo_rl.data.datasets import RawDataset\n"
        "class Rows(RawDataset):\n"
        "    def __init__(self, colour, **settings):\n"
        "        self.task_name = 'theirs'\n"
        "        messages = [{'role': 'user', 'content': colour}, {'role': 'assistant', 'content': 'x'}]\n"
        "        self.dataset = Dataset.from_list([{'messages': messages, 'task_name': 'theirs'}])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert question_and_answer(load(dataset_name="their_rows.Rows", colour="red")) == ("red", "x")
    with pytest.raises(
        ConfigError, match=r"data.train.dataset_name: the module their_rows has no 'Row'\. Did you mean 'Rows'\?"
    ):
        load(dataset_name="their_rows.Row")
    with pytest.raises(ConfigError, match="cannot be imported"):
        load(dataset_name="no_such_module.Rows")
    sys.modules.pop("their_rows", None)


def test_several_datasets_become_one_and_keep_their_own_processing(tokenizer: Any, tmp_path: Path) -> None:
    small = {"num_problems": 20, "held_out": 4, "prompt_file": None}
    config = DataConfig.model_validate(
        {
            "max_input_seq_length": 512,
            "train": [
                {"dataset_name": "arithmetic", **small, "split_validation_size": 5},
                {"dataset_name": "arithmetic", **small, "operators": ["*"], "env_name": "other"},
            ],
            "validation": {"dataset_name": "arithmetic", **small, "split": "validation", "env_name": "third"},
        }
    )
    data = load_datasets(tokenizer, config)
    assert len(data.train) == 35 and data.validation is not None and len(data.validation) == 9
    assert data.env_of_task == {"arithmetic": "math", "arithmetic_2": "other"}
    assert data.env_of_validation_task == {"arithmetic": "math", "arithmetic_2": "third"}
    assert {data.train[index]["task_name"] for index in range(35)} == {"arithmetic", "arithmetic_2"}
    assert list(data.train_by_task) == ["arithmetic", "arithmetic_2"] and len(data.train_by_task["arithmetic_2"]) == 20
    datum = data.train[0]
    assert datum["message_log"][0]["content"].endswith("=<|im_end|>\n<|im_start|>assistant\n")
    assert datum["extra_env_info"] is not None and datum["extra_env_info"]["ground_truth"].lstrip("-").isdigit()


def test_floats_of_parquet_keep_their_digits_wherever_they_are(tmp_path: Path) -> None:
    half, single = pa.float16(), pa.float32()
    reward = pa.struct([("ground_truth", single), ("style", pa.string())])
    columns = {"a": [1.1], "b": [[0.2]], "c": [{"ground_truth": 7.3, "style": "x"}], "d": [2.5], "e": [3.0]}
    kinds = [single, pa.list_(single), reward, half, single]
    pq.write_table(pa.table(columns, pa.schema(list(zip("abcde", kinds, strict=True)))), tmp_path / "a.parquet")
    ((_, row),) = read_rows(str(tmp_path / "a.parquet"))
    assert row == {"a": "1.1", "b": ["0.2"], "c": {"ground_truth": "7.3", "style": "x"}, "d": "2.5", "e": "3"}
    pq.write_table(pa.table([["q"], ["1"], ["2"]], ["input", "output", "output"]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="b.parquet .* the column 'output' is there 2 times"):
        list(read_rows(str(tmp_path / "b.parquet")))


def test_arrow_files_are_read_as_streams_and_as_files(tmp_path: Path) -> None:
    table = pa.table({"input": ["q"], "output": pa.array([0.1], pa.float32())})
    for number, opened in enumerate((pa.ipc.new_stream, pa.ipc.new_file)):
        path = tmp_path / f"{number}.arrow"
        with opened(str(path), table.schema) as writer:
            writer.write_table(table)
        entry = {"dataset_name": "ResponseDataset", "data_path": str(path), "prompt_file": None}
        assert [row["messages"][1]["content"] for row in load_response_dataset(entry).dataset] == ["0.1"]
