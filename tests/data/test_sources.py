"""Where rows come from, and how many are taken: files by their format, files on the web, the first rows."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from nemo_rl.config import DatasetConfig
from nemo_rl.data.datasets import load_response_dataset
from nemo_rl.data.interfaces import DataError

TEXTS = {
    "csv": 'Question,Answer\n"1, 1?",2\n2?,3\n3?,4\n',
    "tsv": "Question\tAnswer\n1, 1?\t2\n2?\t3\n3?\t4\n",
    "json": json.dumps([{"Question": q, "Answer": a} for q, a in (("1, 1?", 2), ("2?", 3), ("3?", 4))]),
}


def answers(**entry: object) -> list[tuple[str, str]]:
    """Question and answer of every row."""
    columns = {"dataset_name": "local", "prompt_file": None, "input_key": "Question", "output_key": "Answer"}
    rows = load_response_dataset(DatasetConfig.model_validate(columns | entry)).dataset
    return [(row["messages"][0]["content"], row["messages"][1]["content"]) for row in rows]


@pytest.mark.parametrize("kind", list(TEXTS))
def test_a_file_is_read_as_the_format_that_the_entry_names(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.data"
    file.write_text(TEXTS[kind])
    expected = [("1, 1?", "2"), ("2?", "3"), ("3?", "4")]
    assert answers(data_path=str(file), file_format=kind, split="test") == expected
    assert answers(data_path=str(file), file_format=kind, max_samples=2) == expected[:2]
    assert answers(data_path=str(file), file_format=kind, max_samples=9) == expected
    with pytest.raises(DataError, match="rows.data is none of .*name it in file_format"):
        answers(data_path=str(file))
    with pytest.raises(DataError, match="is a directory"):
        answers(data_path=str(tmp_path), file_format=kind)


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ("Choose.\nEnd with {letter}.", "Choose.\nEnd with {letter}.\n\n"),
        ("Use \\boxed{}: {{}}", None),
        ("{}\nChoose {{A}}.", ""),
        (None, ""),
    ],
)
def test_a_question_with_choices_follows_its_prompt(prompt: str | None, shown: str | None, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"question": "Which?", "choices": ["a", "b", "c", "d"], "answer": 1, "subject": "x"}) + "\n"
    )
    file = tmp_path / "prompt.txt"
    file.write_text(prompt or "")
    entry = {"dataset_name": "mmlu", "data_path": str(tmp_path / "rows.jsonl")}
    config = DatasetConfig(**entry, prompt_file=str(file) if prompt is not None else None)
    if shown is None:
        with pytest.raises(DataError, match="argument of"):
            load_response_dataset(config)
        return
    asked = load_response_dataset(config).task_spec.ask("Question: Which?")
    assert asked.startswith(f"{shown}Question: Which?")
    assert asked.endswith(("Which?", "Which?\nChoose {A}."))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """The address of a server of `tmp_path`."""
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_file_on_the_web_is_read(site: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(TEXTS["csv"])
    (tmp_path / "rows").write_text(TEXTS["json"])
    cache = {"download_dir": str(tmp_path / "cache")}
    assert answers(data_path=f"{site}/rows.csv?raw=1", split="test", **cache)[0] == ("1, 1?", "2")
    assert answers(data_path=f"{site}/rows", file_format="json", **cache)[2] == ("3?", "4")
    with pytest.raises(DataError, match=r"/missing.csv cannot be downloaded"):
        answers(data_path=f"{site}/missing.csv", **cache)
