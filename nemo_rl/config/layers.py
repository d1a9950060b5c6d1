"""Configuration files as layers: reading them with their parents, merging them, and telling which one a value came
from.

Knows YAML and the merge rules, not the schema. Interpolations stay as they are until everything is merged.
Invariant: layers are ordered from the weakest to the strongest; merging never changes a layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import yaml
from omegaconf._utils import get_yaml_loader

from nemo_rl.config.errors import ConfigError, NotBuilt, Problem

PARENTS = "defaults"
REPLACE = "_override_"
_INT, _FLOAT, _BOOL, _TEXT = (f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "str"))
MANDATORY = "???"


@dataclass(frozen=True)
class Layer:
    """Values and where they were written: a file, or an override."""

    source: str
    values: dict[str, Any]


class _Loader(get_yaml_loader()):  # type: ignore[misc]  # OmegaConf makes this class anew at each call
    """OmegaConf's YAML, as NeMo-RL reads it: `no`, `off`, `yes` and `on` are booleans in every section, 1e-6 is a
    number, a key stands once, dates stay text.

    Two spellings of YAML 1.1 stay text, because they are rarely meant as numbers: `1:30` (to base 60) and `017`
    (octal). Keys are always text, so that a section may be named `no`.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [
            (tag, re.compile(f"(?![^\n]*:)(?:{pattern.pattern})", pattern.flags) if tag == _FLOAT else pattern)
            for tag, pattern in resolvers
            if tag != _INT
        ]
        for first, resolvers in get_yaml_loader().yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        for key, _ in node.value:
            if key.tag == _BOOL:
                key.tag = _TEXT
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    _INT, re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$"), list("-+0123456789")
)


def read_yaml(text: str) -> object:
    """A YAML document as plain containers.

    Raises:
        yaml.YAMLError: it is none.
    """
    return yaml.load(text, Loader=_Loader)


def read_layers(path: str | Path, mistakes: list[ConfigError] | None = None) -> list[Layer]:
    """The file at `path` with everything it inherits through `defaults`, weakest first.

    Args:
        path: the file.
        mistakes: is given the errors of files, which are then left out; None raises the first.

    Raises:
        ConfigError: a file is missing, is not YAML, gives a key twice, has no mapping at its root, or inherits itself.
    """
    return _read(Path(path), (), mistakes)


def merge(layers: Sequence[Layer]) -> dict[str, object]:
    """One mapping from all layers: mappings merge key by key, anything else replaces.

    A mapping with `_override_: true` replaces the mapping below it; a value `???` lets the one below show.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = merge_mappings(merged, layer.values)
    return merged


def merge_mappings(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    """`above` over `below`, by the rules of `merge`."""
    if above.get(REPLACE) is True:
        below = {}
    merged = dict(below)
    for key, value in above.items():
        if key == REPLACE or (value == MANDATORY and key in below):
            continue
        if isinstance(value, Mapping):
            under = merged.get(key)
            merged[key] = merge_mappings(under if isinstance(under, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def source_of(layers: Sequence[Layer], key: Sequence[str]) -> str | None:
    """The source of the strongest layer that says something about the dotted key; None when no layer does."""
    return next((layer.source for layer in reversed(layers) if _speaks_of(layer.values, key)), None)


_DOTTED_KEY = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)+")


def with_sources(problems: Sequence[Problem], layers: Sequence[Layer], own: str | None) -> list[Problem]:
    """The problems, each with the sources of the keys that it names, other than the file `own`."""
    return [_with_sources(problem, layers, own) for problem in problems]


def _with_sources(problem: Problem, layers: Sequence[Layer], own: str | None) -> Problem:
    line = str(problem)
    keys = dict.fromkeys([line.partition(":")[0], *_DOTTED_KEY.findall(line)])
    sources = {key: source_of(layers, key.split(".")) for key in keys}
    named = [f"{key} from {source}" for key, source in sources.items() if source not in (None, own)]
    if not named:
        return problem
    line = f"{line} ({', '.join(named)})"
    return replace(problem, line=line) if isinstance(problem, NotBuilt) else line


def _speaks_of(values: object, key: Sequence[str]) -> bool:
    if not isinstance(values, Mapping):
        return True
    if not key:
        return True
    if values.get(REPLACE) is True:
        return True
    if key[0].isdigit() and key[0] not in values:
        # A single entry may be written without its list.
        return _speaks_of(values, key[1:])
    return key[0] in values and values[key[0]] != MANDATORY and _speaks_of(values[key[0]], key[1:])


def _read(path: Path, readers: tuple[Path, ...], mistakes: list[ConfigError] | None) -> list[Layer]:
    try:
        return _read_one(path.expanduser(), readers, mistakes)
    except ConfigError as error:
        if mistakes is None:
            raise
        mistakes.append(error)
        return []


def _read_one(path: Path, readers: tuple[Path, ...], mistakes: list[ConfigError] | None) -> list[Layer]:
    if path.resolve() in readers:
        chain = " -> ".join(str(step) for step in (*readers, path.resolve()))
        raise ConfigError([f"{PARENTS}: the files inherit each other in a circle: {chain}"])
    values = _read_mapping(path, readers)
    parents = values.pop(PARENTS, [])
    layers: list[Layer] = []
    for parent in [parents] if isinstance(parents, str) else parents or []:
        if not isinstance(parent, str):
            raise ConfigError([f"{PARENTS}: {parent!r} is not the path of a file"], source=str(path))
        layers += _read(path.parent / parent, (*readers, path.resolve()), mistakes)
    return [*layers, Layer(str(path), values)]


def _unreadable(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    twice = re.fullmatch(r"found duplicate key (.*)", getattr(error, "problem", None) or "")
    if isinstance(error, yaml.MarkedYAMLError) and twice and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: the key {twice[1]} is given twice in this mapping; leave one out"
    return f"not readable as YAML: {' '.join(str(error).split())}"


def _read_mapping(path: Path, readers: tuple[Path, ...]) -> dict[str, Any]:
    if not path.is_file():
        inherited = f" (inherited by {readers[-1]})" if readers else ""
        raise ConfigError([f"there is no file {path}{inherited}"], source=str(path))
    try:
        text = path.read_text(encoding="utf-8")
        root = read_yaml(text)
        values: Any = {} if root is None else root
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([_unreadable(error)], source=str(path)) from error
    if not isinstance(values, dict):
        raise ConfigError([f"the root must be a mapping, not a {type(values).__name__}"], source=str(path))
    return {str(key): value for key, value in values.items()}
