"""Configuration files as layers: reads them with their parents, merges them, and finds the source of a value.

Interpolations stay as they are until everything is merged. Invariant: layers are ordered from the weakest to the
strongest; merging never changes a layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
    values: dict[str, object]


class _Loader(get_yaml_loader()):  # type: ignore[misc]  # OmegaConf makes a new class at each call
    """OmegaConf's YAML, as NeMo-RL reads it: `no`, `off`, `yes` and `on` are booleans in every section, 1e-6 is a
    number, a key stands once, dates stay text.

    Two spellings of YAML 1.1 stay text, because they are rarely meant as numbers: `1:30` (to base 60) and `017`
    (octal). Keys are always text, so that a section may be named `no`.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, object]] = {
        first: [
            (tag, re.compile(f"(?![^\n]*:)(?:{pattern.pattern})", pattern.flags) if tag == _FLOAT else pattern)
            for tag, pattern in resolvers
            if tag != _INT
        ]
        for first, resolvers in get_yaml_loader().yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        for key, _ in node.value:
            if key.tag == _BOOL:
                key.tag = _TEXT
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    _INT, re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$"), list("-+0123456789")
)
_Parser: Any = yaml.cyaml.CParser if yaml.__with_libyaml__ else object


class _FastLoader(_Parser, _Loader):  # type: ignore[misc]
    """The same with libyaml's parser, which takes a tenth of the time."""

    def __init__(self, text: str) -> None:
        _Parser.__init__(self, text)
        yaml.constructor.SafeConstructor.__init__(self)
        yaml.resolver.Resolver.__init__(self)


def read_yaml(text: str) -> Any:
    """A YAML document as plain containers. Raises yaml.YAMLError: it is none."""
    if yaml.__with_libyaml__ and "\t" not in text:
        # libyaml reads tabs where the other parser refuses them, and refuses what that one reads, as {a:{b:1}}.
        with suppress(yaml.YAMLError):
            return yaml.load(text, Loader=_FastLoader)
    return yaml.load(text, Loader=_Loader)


def read_layers(
    path: str | Path, mistakes: list[ConfigError] | None = None, heirs: tuple[Path, ...] = ()
) -> list[Layer]:
    """Reads the file at `path` with everything it inherits through `defaults`, weakest first. Raises ConfigError: a
    file is missing, is not YAML, gives a key twice, has no mapping at its root, or inherits itself.

    Args:
        path: the file.
        mistakes: collects the errors of files, which are then left out; None raises the first.
        heirs: the files that inherit this one.
    """
    try:
        file = Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError([f"{path}: no such file, and no user of that name has a home directory"]) from error
    layers: list[Layer] = []
    try:
        values = _read_mapping(file, heirs)
        parents = values.pop(PARENTS, None) or []
        for parent in [parents] if isinstance(parents, str) else parents:
            if not isinstance(parent, str):
                raise ConfigError([f"{PARENTS}: {parent!r} is not the path of a file"], source=str(file))
            layers += read_layers(file.parent / parent, mistakes, (*heirs, file.resolve()))
    except ConfigError as error:
        if mistakes is None:
            raise
        mistakes.append(error)
        return []
    return [*layers, Layer(str(file), values)]


def _read_mapping(path: Path, heirs: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in heirs:
        chain = " -> ".join(str(step) for step in (*heirs, path.resolve()))
        raise ConfigError([f"{PARENTS}: the files inherit each other in a circle: {chain}"])
    if not path.is_file():
        inherited = f" (inherited by {heirs[-1]})" if heirs else ""
        raise ConfigError([f"there is no file {path}{inherited}"], source=str(path))
    try:
        values: Any = read_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([why_unreadable(error)], source=str(path)) from error
    if values is not None and not isinstance(values, dict):
        raise ConfigError([f"the root must be a mapping, not a {type(values).__name__}"], source=str(path))
    return {str(key): value for key, value in (values or {}).items()}


def why_unreadable(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """What is wrong with a file that is no YAML, with the line where that is known."""
    twice = re.fullmatch(r"found duplicate key (.*)", getattr(error, "problem", None) or "")
    if isinstance(error, yaml.MarkedYAMLError) and twice and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: the key {twice[1]} is given twice in this mapping; leave one out"
    return f"not readable as YAML: {' '.join(str(error).split())}"


def merge(layers: Sequence[Layer]) -> dict[str, object]:
    """Merges all layers: mappings merge key by key, anything else replaces.

    A mapping with `_override_: true` replaces the mapping below it, which OmegaConf has no word for; a value `???` lets
    the one below show.
    """
    merged: dict[str, object] = {}
    for layer in layers:
        merged = merge_mappings(merged, layer.values)
    return merged


def merge_mappings(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    """Merges `above` over `below`, by the rules of `merge`."""
    merged: dict[str, object] = {} if above.get(REPLACE) is True else dict(below)
    for key, value in above.items():
        if key == REPLACE or (value == MANDATORY and key in merged):
            continue
        under = merged.get(key)
        merged[key] = (
            merge_mappings(under if isinstance(under, Mapping) else {}, value) if isinstance(value, Mapping) else value
        )
    return merged


def source_of(layers: Sequence[Layer], key: Sequence[str]) -> str | None:
    """The source of the strongest layer that sets the dotted key; None when no layer does."""
    return next((layer.source for layer in reversed(layers) if _sets(layer.values, key)), None)


def _sets(values: object, key: Sequence[str]) -> bool:
    if not isinstance(values, Mapping) or not key or values.get(REPLACE) is True:
        return True
    if key[0].isdigit() and key[0] not in values:
        # A single entry may be written without its list.
        return _sets(values, key[1:])
    return key[0] in values and values[key[0]] != MANDATORY and _sets(values[key[0]], key[1:])


_DOTTED_KEY = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)+")


def with_sources(problems: Sequence[Problem], layers: Sequence[Layer], own: str | None) -> list[Problem]:
    """The problems, each with the sources of the keys that it names, other than the file `own`."""
    return [_with_sources(problem, layers, own) for problem in problems]


def _with_sources(problem: Problem, layers: Sequence[Layer], own: str | None) -> Problem:
    keys = dict.fromkeys([str(problem).partition(":")[0], *_DOTTED_KEY.findall(str(problem))])
    sources = ((key, source_of(layers, key.split("."))) for key in keys)
    named = [f"{key} from {source}" for key, source in sources if source not in (None, own)]
    if not named:
        return problem
    line = f"{problem} ({', '.join(named)})"
    return replace(problem, line=line) if isinstance(problem, NotBuilt) else line
