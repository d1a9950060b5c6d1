"""Checks recipes without a run: each file's verdict with its reasons, and a folder's summary by reason.

Reads files and says what `validate` finds, and what a start would find about the model's family and about prompt files;
of a file that is named alone also what a start would find of optimizer, functions, model, tokenizer and data. Starts
nothing and needs no GPU. Invariant: a file that runs here loads in a run as it was checked.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from nemo_rl.config.data import DatasetConfig, prompt_places
from nemo_rl.config.dotted import import_dotted
from nemo_rl.config.errors import ConfigError, NotBuilt, Problem
from nemo_rl.config.evaluation import EvalMasterConfig
from nemo_rl.config.foreign import MEGATRON_LACKS
from nemo_rl.config.layers import with_sources
from nemo_rl.config.load import kind_of_file, load_layers
from nemo_rl.config.master import (
    CompleteConfig,
    DistillationMasterConfig,
    MasterConfig,
    RootConfig,
    SFTMasterConfig,
)
from nemo_rl.config.policy import can_name_a_model
from nemo_rl.config.section import not_built
from nemo_rl.config.validate import examine

# `${oc.env:NAME}` without a default: a value that only the machine of the run has.
_PREFLIGHT = "nemo_rl.algorithms.preflight.mistakes_of"
_NEMO_RL_PROMPTS = "examples/prompts/"
_ENVIRONMENT = re.compile(r"\$\{oc\.env:(\w+)\}")


class RecipeVerdict(IntEnum):
    """Verdict on a recipe; also the exit code of the command that checks it."""

    RUNS = 0
    WAITS = 1
    REFUSED = 2

    @property
    def words(self) -> str:
        """The verdict as it is printed."""
        return ("runs here", "would run once its parts are built", "refused")[self]


@dataclass(frozen=True)
class Checked:
    """A file and its findings.

    Attributes:
        file: its path.
        problems: reasons why it does not run.
        notes: values that are read differently than they are written.
        environment: variables that it needs and that are not set here.
        files: prompts that it names and that are not here.
        models: keys of models whose text can be neither a directory nor an id on the hub.
    """

    file: Path
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    environment: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> RecipeVerdict:
        """The worst of its problems."""
        if not self.problems:
            return RecipeVerdict.RUNS
        waits = all(isinstance(problem, NotBuilt) for problem in self.problems)
        return RecipeVerdict.WAITS if waits else RecipeVerdict.REFUSED


def recipe_files(paths: Iterable[Path]) -> list[Path]:
    """Files as they are given, and of folders every YAML file below, in order. Raises ConfigError: there is nothing at
    a path, or no YAML file in a folder.
    """
    found: list[Path] = []
    for path in paths:
        below = [path] if path.is_file() else sorted([*path.rglob("*.yaml"), *path.rglob("*.yml")])
        if not below:
            raise ConfigError([f"{path}: no such file, or a folder without YAML files"])
        found += below
    return found


def check_file(file: Path, overrides: Sequence[str] = (), *, as_a_start: bool = False) -> Checked:
    """Reads a recipe with its parents and checks it, with every variable of the environment taken as set.

    Args:
        overrides: As on a run's command line.
        as_a_start: Look at model, tokenizer and data, too, where they are on this machine.
    """
    try:
        kind: type[MasterConfig | SFTMasterConfig | EvalMasterConfig] = kind_of_file(file)
        loaded = load_layers(file, overrides, kind)
        layers, merged = loaded.layers, loaded.values
        unset = sorted({name for name in _variables(merged) if name not in os.environ})
        examined = examine(_with_variables(merged, unset), kind)
    except ConfigError as error:
        return Checked(file, list(error.problems))
    problems: list[Problem] = examined.problems
    notes, files, models = [*loaded.notes, *examined.notes], list[str](), list[str]()
    if examined.config is not None:
        models = list(_unknown_models(examined.config))
        problems, files = list(_of_the_model(examined.config)), sorted(_absent_prompts(examined.config, set(unset)))
        if as_a_start:
            missing = [path for path in files if not path.startswith(_NEMO_RL_PROMPTS)]
            problems += [f"data.*.prompt_file: there is no file {path}" for path in missing]
        if as_a_start and not (problems or unset or files or models):
            # The hub's libraries read it when they are imported.
            os.environ["HF_HUB_OFFLINE"] = "1"
            # It needs torch and transformers, which reading a configuration does not.
            mistakes, not_looked_at = import_dotted(_PREFLIGHT, "check")(examined.config)
            problems, notes = list(mistakes), [*notes, *not_looked_at]
    return Checked(file, with_sources(problems, layers, str(file)), notes, unset, files, models)


def _of_the_model(config: CompleteConfig) -> Iterator[Problem]:
    """Parts of the model that the training backend cannot compute, as far as its name or its files here tell."""
    if not isinstance(config, RootConfig) or not config.policy.megatron_cfg.enabled:
        return
    name = config.policy.model_name
    file = Path(name).expanduser() / "config.json"
    kind = None
    if file.is_file():
        try:
            kind = json.loads(file.read_text(encoding="utf-8")).get("model_type")
        except (OSError, ValueError, AttributeError):
            return
    for types, names, part in MEGATRON_LACKS:
        known = kind in types if kind is not None else re.search(names, name.lower()) is not None
        if known:
            instead = "train it with policy.dtensor_cfg.enabled: true and megatron_cfg.enabled: false"
            yield not_built("policy.model_name", name, f"{part} on Megatron-Core", instead)


def _unknown_models(config: CompleteConfig) -> Iterator[str]:
    """Models of a run whose name can be neither a directory nor an id on the hub."""
    named: dict[str, str] = {}
    if isinstance(config, EvalMasterConfig):
        named["generation.model_name"] = config.generation.model_name
    elif isinstance(config, RootConfig):
        named["policy.model_name"] = config.policy.model_name
        if isinstance(config, DistillationMasterConfig) and config.teacher is not None:
            named["teacher.model_name"] = config.teacher.model_name
    for key, name in named.items():
        if not can_name_a_model(name):
            yield f"{key}: {name!r}"


def _absent_prompts(config: CompleteConfig, unset: set[str]) -> Iterator[str]:
    """Prompt files of the data that are not here; those below a variable that is not set may be there."""
    entries: list[DatasetConfig] = []
    if isinstance(config, EvalMasterConfig):
        entries = [config.data]
    elif isinstance(config, RootConfig):
        entries = [*config.data.train, *(config.data.validation or [])]
    for path in {path for entry in entries for path in (entry.prompt_file, entry.system_prompt_file) if path}:
        below = any(path.startswith(f"/{name}") for name in unset)
        if not below and not any(place.is_file() for place in prompt_places(path)):
            yield path


def lines_about(checked: Checked) -> Iterator[str]:
    """Printed lines about one file."""
    yield f"{checked.file}: {checked.verdict.words}{', once a model is named' * bool(checked.models)}"
    if checked.environment:
        yield f"  needs {', '.join(checked.environment)} in the environment"
    for path in checked.files:
        theirs = " (prompts of NeMo-RL's examples are not shipped)" if path.startswith(_NEMO_RL_PROMPTS) else ""
        yield f"  needs the file {path}{theirs}"
    for model in checked.models:
        yield f"  needs a model; this one is unknown: {model} is neither a directory nor an id on the hub"
    yield from (f"  note: {note}" for note in checked.notes)
    yield from (f"  - {problem}" for problem in checked.problems)


def summary(checked: Sequence[Checked]) -> Iterator[str]:
    """How many files run, wait and are refused, and a table of reasons with the files that each keeps from running."""
    verdicts = Counter(recipe.verdict for recipe in checked)
    yield ""
    yield f"{len(checked)} files: " + ", ".join(f"{verdicts[verdict]} {verdict.words}" for verdict in RecipeVerdict)
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
