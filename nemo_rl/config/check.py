"""Which recipes run here: each file's verdict with its reasons, and a folder's summary by reason.

Reads files and says what `validate` finds; starts nothing and needs no GPU. Invariant: a file that runs here loads in a
run as it was checked.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from nemo_rl.config.errors import ConfigError, NotBuilt, Problem
from nemo_rl.config.evaluation import EvalMasterConfig
from nemo_rl.config.layers import merge, read_layers, with_sources
from nemo_rl.config.load import kind_of_file
from nemo_rl.config.master import MasterConfig, SFTMasterConfig
from nemo_rl.config.validate import examine

# `${oc.env:NAME}` without a default: a value that only the machine of the run has.
_ENVIRONMENT = re.compile(r"\$\{oc\.env:(\w+)\}")


class Verdict(IntEnum):
    """What becomes of a recipe here; also the exit code of the command that checks it."""

    RUNS = 0
    WAITS = 1
    REFUSED = 2

    @property
    def words(self) -> str:
        """The verdict as it is printed."""
        return ("runs here", "would run once its parts are built", "refused")[self]


@dataclass(frozen=True)
class Checked:
    """A file and what was found.

    Attributes:
        file: its path.
        problems: what keeps it from running.
        notes: what is read differently than it is written.
        environment: variables that it needs and that are not set here.
    """

    file: Path
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    environment: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """The worst of its problems."""
        if not self.problems:
            return Verdict.RUNS
        return Verdict.WAITS if all(isinstance(problem, NotBuilt) for problem in self.problems) else Verdict.REFUSED


def recipe_files(paths: Iterable[Path]) -> list[Path]:
    """Files as they are given, and of folders every YAML file below, in order.

    Raises:
        ConfigError: there is nothing at a path, or no YAML file in a folder.
    """
    found: list[Path] = []
    for path in paths:
        below = [path] if path.is_file() else sorted([*path.rglob("*.yaml"), *path.rglob("*.yml")])
        if not below:
            raise ConfigError([f"{path}: no such file, or a folder without YAML files"])
        found += below
    return found


def check_file(file: Path) -> Checked:
    """Reads a recipe with its parents and checks it, with every variable of the environment taken as set."""
    try:
        layers = read_layers(file)
        merged = merge(layers)
        kind: type[MasterConfig | SFTMasterConfig | EvalMasterConfig] = kind_of_file(file)
        unset = sorted({name for name in _variables(merged) if name not in os.environ})
        examined = examine(_with_variables(merged, unset), kind)
    except ConfigError as error:
        return Checked(file, list(error.problems))
    return Checked(file, with_sources(examined.problems, layers, str(file)), examined.notes, unset)


def lines_about(checked: Checked) -> Iterator[str]:
    """What is printed about one file."""
    yield f"{checked.file}: {checked.verdict.words}"
    if checked.environment:
        yield f"  needs {', '.join(checked.environment)} in the environment"
    yield from (f"  note: {note}" for note in checked.notes)
    yield from (f"  - {problem}" for problem in checked.problems)


def summary(checked: Sequence[Checked]) -> Iterator[str]:
    """How many files run, wait and are refused, and a table of reasons with the files that each keeps from running."""
    verdicts = Counter(recipe.verdict for recipe in checked)
    yield ""
    yield f"{len(checked)} files: " + ", ".join(f"{verdicts[verdict]} {verdict.words}" for verdict in Verdict)
    reasons: dict[str, set[Path]] = {}
    alone: Counter[str] = Counter()
    for recipe in checked:
        own = {_reason(problem) for problem in recipe.problems}
        for reason in own:
            reasons.setdefault(reason, set()).add(recipe.file)
        alone.update(own if len(own) == 1 else ())
    if not reasons:
        return
    rows = sorted(reasons, key=lambda reason: (-len(reasons[reason]), reason))
    width = max(len("reason"), *map(len, rows))
    yield ""
    yield f"{'reason':<{width}}  files  for this alone"
    yield from (f"{reason:<{width}}  {len(reasons[reason]):>5}  {alone[reason]:>14}" for reason in rows)


def _reason(problem: Problem) -> str:
    if isinstance(problem, NotBuilt):
        return f"not built: {problem.part}"
    key, colon, said = problem.partition(":")
    if "another framework" in said:
        return "mistake: a configuration of another framework"
    if "unknown key" in said:
        return f"mistake: unknown key {key}"
    # A rule begins with its key, other lines with words.
    first = key.split(" ")[0]
    return f"mistake: {first if '.' in first or not colon else key}"


def _variables(node: object) -> Iterator[str]:
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for child in children:
        yield from _variables(child)
    if isinstance(node, str):
        yield from _ENVIRONMENT.findall(node)


def _with_variables(node: object, names: Sequence[str]) -> Any:
    """The values with a placeholder for every variable that is not set here."""
    if isinstance(node, dict):
        return {key: _with_variables(value, names) for key, value in node.items()}
    if isinstance(node, list):
        return [_with_variables(item, names) for item in node]
    if isinstance(node, str):
        return _ENVIRONMENT.sub(lambda found: f"/{found[1]}" if found[1] in names else found[0], node)
    return node
