"""Comments, docstrings, messages and pages leave out words that make an engineer stumble."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORDS = re.compile(r"\b(whoever('s)?|nobody('s)?|anew|told|bites|in one breath|doors|last words)\b", re.IGNORECASE)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Comments and strings of a module with their lines."""
    with tokenize.open(path) as file:
        source = file.read()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from enumerate(token.string.splitlines(), token.start[0])


def test_words_are_found_in_comments_and_strings_and_not_in_names(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""Asks\nwhoever can."""\ntold = f"by {1} nobody"  # made anew\nnobody = told\n')
    assert [number for number, line in prose(module) if WORDS.search(line)] == [2, 3, 3]


def test_the_package_is_written_in_plain_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "nemo_rl").rglob("*.py"))
        for number, line in prose(path)
        if WORDS.search(line)
    ]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_written_in_plain_words(page: Path) -> None:
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    found = [f"{number}: {line}" for number, line in lines if WORDS.search(line)]
    assert found == [], "\n".join(found)
