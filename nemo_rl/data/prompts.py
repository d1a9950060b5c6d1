"""Prompt files: text in which the problem takes the place of one `{}`.

Decides where a file is looked for and what makes one usable. Knows no dataset and no tokenizer.
"""

from __future__ import annotations

import string
from pathlib import Path

from nemo_rl.data.errors import DataError

_ROOT = Path(__file__).parents[2]


def load_prompt(path: str | None) -> str | None:
    """The prompt text of a file; None for None.

    Raises:
        DataError: the file is missing, or does not have exactly one place for the problem (`{}`, `{0}`); literal braces
            are written twice.
    """
    text = load_text(path, "prompt_file")
    if text is None:
        return None
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise DataError(f"prompt_file {path}: {error}; literal braces are written twice, as {{{{ and }}}}") from error
    if fields not in ([""], ["0"]):
        found = "none" if not fields else ", ".join(f"{{{name}}}" for name in fields)
        raise DataError(
            f"prompt_file {path}: needs exactly one {{}} where the problem goes, and has {found}; literal "
            "braces are written twice"
        )
    return text


def load_text(path: str | None, key: str) -> str | None:
    """The text of a file, looked for from the working directory and then from the package's checkout; None for None.

    Raises:
        DataError: there is no such file, or it is not text.
    """
    if path is None:
        return None
    candidates = [Path(path).expanduser(), _ROOT / path]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise DataError(
            f"{key} {path}: there is no such file (looked for "
            f"{' and '.join(str(candidate.absolute()) for candidate in candidates)})"
        )
    try:
        return found.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{key} {found}: not UTF-8 text ({error})") from error
