"""Between a scenario file and its schema: reads the YAML, and says in plain words what pydantic found wrong.

Knows no key. What YAML would pass over in silence is refused here: a key that is given twice, text in another encoding.
Every message says where (the path of the key), what was given and what is allowed.
"""

from __future__ import annotations

import re
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from nemo_rl.config.errors import UserError, did_you_mean

PAGE = "docs/time_sharing_scenarios.md"


class ScenarioError(UserError, ValueError):
    """A scenario file cannot be used; each line of the message is one mistake with the path of its key."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, and reads 1e3 as the number that it is in YAML 1.2."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice, first in line {seen[key.value]}", key.start_mark
                )
            seen[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_mapping(path: Path) -> dict[object, object]:
    """The mapping in a YAML file. Raises ScenarioError for a file that cannot be read, is not UTF-8, not YAML, or holds
    something else.
    """
    try:
        given = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        twice = "is given twice" in str(error.problem)
        raise ScenarioError(f"{path}: {'mistake' if twice else 'is not YAML'}{place}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ScenarioError(f"{path}: is not YAML: {error}") from error
    if given is None:
        raise ScenarioError(f"{path}: is empty; a scenario has at least `jobs`, see {PAGE} and examples/time_sharing")
    if not isinstance(given, dict):
        raise ScenarioError(f"{path}: a scenario is a mapping of keys, this is a {type(given).__name__}; see {PAGE}")
    return given


def in_words(error: ValidationError, schema: type[BaseModel], places: Sequence[str]) -> list[str]:
    """One line per mistake. `places` says where in the file each entry of `jobs` was written; what several jobs of a
    fleet share is said once.
    """
    lines: dict[tuple[str, str], str] = {}
    for mistake in error.errors(include_url=False):
        loc = mistake["loc"]
        path = ".".join(str(part) for part in loc)
        if len(loc) > 1 and loc[0] == "jobs" and isinstance(loc[1], int) and loc[1] < len(places):
            path = ".".join([places[loc[1]], *map(str, loc[2:])])
        lines.setdefault((path, mistake["type"]), f"{path}: {_words(mistake, schema)}")
    return list(lines.values())


_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_KINDS = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping of keys",
    "invalid_key": "must be text, as every key is",
}


def _words(mistake: ErrorDetails, schema: type[BaseModel]) -> str:
    kind, loc = mistake["type"], mistake["loc"]
    if kind == "extra_forbidden":
        valid = list(_model_at(schema, loc[:-1]).model_fields)
        return f"unknown key.{did_you_mean(str(loc[-1]), valid)} Valid here: {', '.join(valid)}"
    if kind == "missing":
        return "is required, and not given"
    if kind in ("model_type", "model_attributes_type"):
        return f"must be a mapping of keys ({', '.join(_model_at(schema, loc).model_fields)}){_given(mistake['input'])}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        bound = mistake.get("ctx", {})[name]
        return f"must be {words} {bound:g}{_given(mistake['input'])}"
    return _KINDS.get(kind, mistake["msg"]) + _given(mistake["input"])


def _given(value: object) -> str:
    shown = (
        {None: "null", True: "true", False: "false"}.get(value)
        if value is None or isinstance(value, bool)
        else repr(value)
    )
    text = str(shown)
    return f" (given: {text if len(text) <= 80 else text[:77] + '...'})"


def _model_at(schema: type[BaseModel], loc: Sequence[int | str]) -> type[BaseModel]:
    """The model that the keys along `loc` lead to; numbers and free keys are steps into lists and mappings."""
    found: Any = schema
    for part in loc:
        if isinstance(found, type) and issubclass(found, BaseModel):
            found = found.model_fields[str(part)].annotation
            if get_origin(found) in (Union, types.UnionType):
                found = get_args(found)[0]
        else:
            arguments = get_args(found)
            found = arguments[-1] if arguments[-1] is not Ellipsis else arguments[0]
    return found if isinstance(found, type) and issubclass(found, BaseModel) else schema
