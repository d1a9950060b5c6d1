"""The schema as data: every dotted key with its type, default, status and meaning.

Docs, messages and the command line read keys from here. Knows pydantic's fields, no configuration. Invariant: a key has
one entry.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from nemo_rl.config.defaults import followed, plain
from nemo_rl.config.section import (
    AbsentIsDefault,
    DefaultFrom,
    NotYet,
    Section,
    admits_null,
    annotation_of,
    field_of,
    holds_container,
    section_at,
    section_within,
)


@dataclass(frozen=True)
class KeyInfo:
    """One key of the schema. `default` is a value, or an interpolation; `not_yet` says what is missing, None when the
    key is honoured; `holder` is the section that has the key as an `attribute`.
    """

    name: str
    kind: str
    default: object
    not_yet: str | None
    section: type[Section] | None
    field: FieldInfo
    holder: type[Section]
    attribute: str

    @property
    def meaning(self) -> str:
        """What the key does."""
        return meaning_of(self.holder, self.attribute)

    @property
    def has_value(self) -> bool:
        """Whether the key holds a value of its own, and not only further keys."""
        return self.section is None or self.kind.startswith("list")


def keys_of(
    schema: type[Section],
    prefix: str = "",
    inherited: str | None = None,
    default: Section | None = None,
    follows: Mapping[str, str] | None = None,
) -> Iterator[KeyInfo]:
    """Every key below `schema` in order, each section before its keys; a section that is not built yet makes its keys
    so.
    """
    instance = schema.model_construct() if default is None else default
    follows = {**(follows or {}), **schema.follows}
    for name, field in schema.model_fields.items():
        if name in schema.without:
            continue
        mark = annotation_of(field, NotYet)
        nested = section_within(field)
        not_yet = inherited or (_missing(mark) if mark else None)
        source = annotation_of(field, DefaultFrom)
        value = getattr(instance, name, None)
        shown = followed(source, follows) if source and name not in instance.model_fields_set else plain(value)
        key = f"{prefix}{field.alias or name}"
        yield KeyInfo(key, kind_of(field.annotation), shown, not_yet, nested, field, schema, name)
        if nested is not None:
            yield from keys_of(nested, f"{key}.", not_yet, value if isinstance(value, nested) else None, follows)


def meaning_of(schema: type[Section], attribute: str) -> str:
    """What an attribute of a section means: its field's description, or the docstring below it."""
    holder = next(kind for kind in schema.__mro__ if attribute in vars(kind).get("__annotations__", {}))
    written = _docstrings(holder.__module__).get((holder.__name__, attribute), "")
    return schema.model_fields[attribute].description or written


@functools.cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """The docstrings below attributes of a module's classes, by class and attribute, each on one line."""
    found = {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for pair in pairwise(kind.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[kind.name, name] = " ".join(text.split())
    return found


def find_key(schema: type[Section], key: Sequence[str]) -> KeyInfo | None:
    """The entry of a dotted key, with list indices left out; None when the schema has no such key."""
    name = ".".join(_without_indices(key))
    return next((entry for entry in keys_of(schema) if entry.name == name), None)


def free_mapping(schema: type[Section], key: Sequence[str]) -> KeyInfo | None:
    """The entry of the mapping that holds a dotted key and takes any name, such as `policy.optimizer.kwargs` for
    `policy.optimizer.kwargs.lr`; None when no such mapping holds it.
    """
    if not is_known(schema, key):
        return None
    names = _without_indices(key)
    return next((entry for end in range(len(names), 0, -1) if (entry := find_key(schema, names[:end]))), None)


def is_known(schema: type[Section], key: Sequence[str]) -> bool:
    """Whether `key` may be written: the schema has it, or it lies in a free mapping that the schema has."""
    names = _without_indices(key)
    for depth in reversed(range(len(names))):
        section = section_at(schema, names[:depth])
        if section is not None:
            field, inside = field_of(section, names[depth]), depth + 1 < len(names)
            if field is None:
                return depth > 0 and inside and section.model_config.get("extra") == "allow"
            return not inside or holds_container(field, dict)
    return True


def names_in(schema: type[Section], key: Sequence[str]) -> list[str]:
    """The names that are valid in the section which would hold `key`."""
    section = section_at(schema, _without_indices(key)[:-1])
    if section is None:
        return []
    return [field.alias or name for name, field in section.model_fields.items() if name not in section.without]


def _without_indices(key: Sequence[str]) -> list[str]:
    return [part for part in key if not part.isdigit()]


def kind_of(annotation: Any) -> str:
    """A type as a reader of YAML would name it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind_of(arguments[0])
    if origin is Literal:
        return ", ".join("null" if value is None else str(value) for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(kind_of(argument) for argument in arguments)
    if origin is list:
        return f"list of {kind_of(arguments[0])}"
    if origin is dict:
        return "mapping"
    if annotation is NoneType:
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "mapping"
    if annotation is object:
        return "anything"
    return {str: "text", int: "int", float: "float", bool: "bool"}.get(annotation, str(annotation))


def _missing(mark: NotYet) -> str:
    only = ", ".join(str(value) for value in mark.values)
    return f"{only}: {mark.why}" if only else mark.why


def is_null_when_deleted(schema: type[Section], key: Sequence[str]) -> bool:
    """Whether a deleted key becomes null, as NeMo-RL reads it, and not its default."""
    entry = find_key(schema, key)
    return entry is not None and admits_null(entry.field) and annotation_of(entry.field, AbsentIsDefault) is None


def shown(value: object) -> str:
    """A value as YAML would have it on one line."""
    if isinstance(value, float) and value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e9):
        return f"{value:g}"
    return value if isinstance(value, str) and value else json.dumps(value)
