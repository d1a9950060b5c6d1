"""Text of others on a terminal, which must not steer it, and in pages, where it must not run; tables in Markdown."""

from __future__ import annotations

import html
import json
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

_KEPT = "\n\t"
_TURNS_DIRECTION = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def filled_page(template: Path, title: str, data: object = None) -> str:
    """An HTML template with `__TITLE__`, plain text, and `__DATA__`, plain values that become JSON in a script."""
    # "</script>" in a text would end the script early.
    filling = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = template.read_text(encoding="utf-8").replace("__TITLE__", html.escape(title))
    return page.replace("__DATA__", filling)


def printable(text: str) -> str:
    """The text with control characters, and those that turn the direction of reading, spelt out; line ends and tabs
    stay.

    >>> printable("red: \\x1b[31m")
    'red: \\\\x1b[31m'
    """
    shown = (c if _is_harmless(c) else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown)


def _is_harmless(character: str) -> bool:
    # Cc: control characters. Cs: halves of characters, which no terminal can be sent.
    return character in _KEPT or (
        unicodedata.category(character) not in ("Cc", "Cs") and character not in _TURNS_DIRECTION
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table, and an empty one."""
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return [*lines, ""]
