"""The schema as data: every dotted key with its type, default, status and meaning.

Docs, messages and the command line read keys from here. Knows pydantic's fields, no configuration. Invariant: a key has one entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from nemo_rl.config.defaults import admits_null, annotation_of, plain, section_type
from nemo_rl.config.section import DefaultFrom, NotYet, Section


@dataclass(frozen=True)
class KeyInfo:
    """One key of the schema. `default` is a value, or an interpolation; `not_yet` says what is missing, None when the key is honoured."""

    name: str
    kind: str
    default: Any
    meaning: str
    not_yet: str | None
    section: type[Section] | None
    field: FieldInfo

    @property
    def has_value(self) -> bool:
        """Whether the key holds a value of its own, and not only further keys."""
        return self.section is None or self.kind.startswith("list")


def keys_of(schema: type[Section], prefix: str = "", inherited: str | None = None, default: Section | None = None) -> Iterator[KeyInfo]:
    """Every key below `schema` in order, each section before its keys; a section that is not built yet makes its keys so."""
    instance = schema.model_construct() if default is None else default
    for name, field in schema.model_fields.items():
        mark = annotation_of(field, NotYet)
        nested = section_within(field)
        not_yet = inherited or (_missing(mark) if mark else None)
        follows = annotation_of(field, DefaultFrom)
        value = getattr(instance, name, None)
        shown = follows.interpolation if follows and name not in instance.model_fields_set else plain(value)
        key = f"{prefix}{field.alias or name}"
        yield KeyInfo(key, kind_of(field.annotation), shown, field.description or "", not_yet, nested, field)
        if nested is not None:
            yield from keys_of(nested, f"{key}.", not_yet, value if isinstance(value, nested) else None)


def find_key(schema: type[Section], key: Sequence[str]) -> KeyInfo | None:
    """The entry of a dotted key, with list indices left out; None when the schema has no such key."""
    name = ".".join(_without_indices(key))
    return next((entry for entry in keys_of(schema) if entry.name == name), None)


def is_known(schema: type[Section], key: Sequence[str]) -> bool:
    """Whether `key` may be written: the schema has it, or it lies in a free mapping that the schema has."""
    section: type[Section] | None = schema
    names = _without_indices(key)
    for depth, part in enumerate(names):
        field = field_of(section, part) if section is not None else None
        if field is None:
            return section is not None and depth > 0 and section.model_config.get("extra") == "allow" and depth + 1 < len(names)
        section = section_within(field)
        if section is None and depth + 1 < len(names):
            return _is_mapping(field)
    return True


def names_in(schema: type[Section], key: Sequence[str]) -> list[str]:
    """The names that are valid in the section which would hold `key`."""
    section: type[Section] | None = schema
    for part in _without_indices(key)[:-1]:
        field = field_of(section, part) if section is not None else None
        section = section_within(field) if field is not None else None
    return [] if section is None else [field.alias or name for name, field in section.model_fields.items()]


def _without_indices(key: Sequence[str]) -> list[str]:
    return [part for part in key if not part.isdigit()]


def section_within(field: FieldInfo) -> type[Section] | None:
    """The section class a field holds, alone or as the entries of a list."""
    nested = section_type(field)
    if nested is not None:
        return nested
    for candidate in (field.annotation, *get_args(field.annotation)):
        inner = get_args(candidate)[0] if get_origin(candidate) is Annotated else candidate
        entries = get_args(inner) if get_origin(inner) is list else ()
        if entries and isinstance(entries[0], type) and issubclass(entries[0], Section):
            return entries[0]
    return None


def field_of(schema: type[Section], key: str) -> FieldInfo | None:
    """The field behind one YAML key of a section."""
    return next((field for name, field in schema.model_fields.items() if (field.alias or name) == key), None)


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
    if annotation is Any:
        return "anything"
    return {str: "text", int: "int", float: "float", bool: "bool"}.get(annotation, str(annotation))


def _is_mapping(field: FieldInfo) -> bool:
    candidates = (field.annotation, *get_args(field.annotation))
    return any(get_origin(candidate) is dict for candidate in candidates)


def _missing(mark: NotYet) -> str:
    only = ", ".join(str(value) for value in mark.values)
    return f"{only}: {mark.why}" if only else mark.why


def null_where_allowed(schema: type[Section], key: Sequence[str]) -> bool:
    """Whether the key may be null; a deleted key becomes null then, and its default otherwise."""
    entry = find_key(schema, key)
    return entry is not None and admits_null(entry.field)
