"""The errors of configuration: one `ConfigError` holds every problem found, each with its dotted key.

Knows no key. Invariant: a message says which key, which value, what is allowed and, for a name, the nearest valid one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class ConfigError(ValueError):
    """The configuration cannot be used; `problems` has one line per mistake."""

    subject = "The configuration"

    def __init__(self, problems: Sequence[str], source: str | None = None) -> None:
        head = self.subject if source is None else f"{self.subject} {source}"
        count = "a mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
        super().__init__(f"{head} has {count}:\n" + "\n".join(f"  - {problem}" for problem in problems))
        self.problems = list(problems)
        self.source = source


class OverridesError(ConfigError):
    """A command-line override cannot be parsed or applied."""

    subject = "The command line"


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that looks most like `name`; None when none does."""
    lowered: dict[str, str] = {}
    for candidate in valid:
        lowered.setdefault(candidate.lower(), candidate)
    match = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.6)
    longer = [candidate for candidate in lowered if len(name) >= 3 and candidate.startswith(name.lower())]
    return lowered[(match or longer)[0]] if match or longer else None


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """` Did you mean x?` with the nearest valid name, else the empty string."""
    match = nearest(name, valid)
    return "" if match is None else f" Did you mean {match!r}?"
