"""Base of every configuration section: a pydantic model that refuses unknown keys, and marks on its keys.

The marks: `NotYet` (known, but not built: any value that switches it on is refused by its dotted name),
`DefaultFrom` (the default is another key's value) and `AbsentIsDefault`. This file knows no key and no other section.
Invariant: a default lives in the schema and nowhere else; removing a `NotYet` is all that honouring a key takes here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, ClassVar, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from nemo_rl.config.errors import NotBuilt

_Mark = TypeVar("_Mark")
# Every text holds the empty string: as a stop string or a bad word it would end or forbid every response.
NonEmptyStrings = list[Annotated[str, Field(min_length=1)]]


@dataclass(frozen=True)
class NotYet:
    """Marks a key that is known but not built yet; removing the annotation is what makes it honoured.

    Args:
        why: the missing part, as the end of the sentence "not built yet: ...".
        values: the refused values. Empty: every value but the default; for a section, switching it on (`enabled`), or
            any difference from its defaults.
        instead: the remedy; empty: to leave the key at its default.
        regardless: whether it counts also where a section around it is not enabled.
        unless: a key of the same section that switches it off by null, false or 0; of lists of one length, entry by
            entry.
    """

    why: str
    values: tuple[object, ...] = ()
    instead: str = ""
    regardless: bool = False
    unless: str = ""


@dataclass(frozen=True)
class DefaultFrom:
    """Marks a key whose default is an interpolation over other keys, e.g. `${policy.max_total_sequence_length}`.

    The literal default beside it is what the interpolation gives when every key has its default; it serves sections
    built on their own.
    """

    interpolation: str


@dataclass(frozen=True)
class AbsentIsDefault:
    """Marks a key for which null says something else than absence, so that deleting it (`~key`) brings its default."""


_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+")


def _kinds(annotation: object) -> Iterator[object]:
    """The types that an annotation is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from _kinds(part)


class Section(BaseModel):
    """One mapping of the configuration: attributes are the YAML keys, unknown keys are refused, assignments are
    checked. What a key means is its field's description where both fit on a line, and else the docstring below it.

    Items are readable as `section["key"]` too, as code written for NeMo-RL reads them.
    """

    without: ClassVar[frozenset[str]] = frozenset()
    """Keys of a parent class that have no meaning here; refused by a rule, and shown nowhere."""
    follows: ClassVar[dict[str, str]] = {}
    """What defaults that follow other keys begin with, and with what here."""

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        coerce_numbers_to_str=True,
        protected_namespaces=(),
        populate_by_name=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_have_no_leading_zero(cls, value: object, info: ValidationInfo) -> object:
        """pydantic reads the text `012` as 12, and NeMo-RL's YAML as 10."""
        if isinstance(value, str) and _LEADING_ZERO.fullmatch(value) and info.field_name is not None:
            kinds = set(_kinds(cls.model_fields[info.field_name].annotation))
            if kinds & {int, float} and str not in kinds:
                raise ValueError("a number with a leading zero is octal in YAML 1.1; write it without")
        return value

    @classmethod
    def read(cls, given: Self | Mapping[str, object]) -> Self:
        """The section itself, or one made of a plain mapping, as scripts written for NeMo-RL hold them. Raises
        pydantic.ValidationError: a key is unknown or a value wrong.
        """
        return given if isinstance(given, cls) else cls.model_validate(dict(given))

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise KeyError(key)
        return getattr(self, self._attribute(key))

    def __setitem__(self, key: str, value: object) -> None:
        if key not in self:
            raise KeyError(key)
        setattr(self, self._attribute(key), value)

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def keys(self) -> list[str]:
        """The YAML keys of this section, in the schema's order."""
        names = [field.alias or name for name, field in type(self).model_fields.items()]
        return names + list(self.model_extra or {})

    def items(self) -> Iterator[tuple[str, object]]:
        """Pairs of YAML key and value, in the schema's order."""
        return ((key, self[key]) for key in self.keys())

    def to_dict(self) -> dict[str, object]:
        """The section as plain containers under its YAML keys."""
        return self.model_dump(mode="python", by_alias=True)

    @classmethod
    def _attribute(cls, key: str) -> str:
        for name, field in cls.model_fields.items():
            if field.alias == key:
                return name
        return key


def section_type(field: FieldInfo) -> type[Section] | None:
    """The section class a field holds, through `X | None`; None for plain values."""
    union = get_origin(field.annotation) in (Union, UnionType)
    candidates = get_args(field.annotation) if union else (field.annotation,)
    return next((kind for kind in candidates if isinstance(kind, type) and issubclass(kind, Section)), None)


def admits_null(field: FieldInfo) -> bool:
    """Whether null is a value of the field."""
    return type(None) in get_args(field.annotation)


def annotation_of(field: FieldInfo, kind: type[_Mark]) -> _Mark | None:
    """The `NotYet` or `DefaultFrom` of a field, if it has one."""
    return next((mark for mark in field.metadata if isinstance(mark, kind)), None)


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


def section_at(schema: type[Section], key: Sequence[str]) -> type[Section] | None:
    """The section class at a dotted key, list indices left out; None where there is none."""
    section: type[Section] | None = schema
    for part in key:
        field = field_of(section, part) if section is not None and not part.isdigit() else None
        section = section if part.isdigit() else section_within(field) if field is not None else None
    return section


def holds_container(field: FieldInfo, *kinds: type) -> bool:
    """Whether a field takes a free mapping or a list; with `kinds`, one of these."""
    candidates = (field.annotation, *get_args(field.annotation))
    return any((get_origin(candidate) or candidate) in (kinds or (dict, list)) for candidate in candidates)


def refusals(section: Section) -> Iterator[NotBuilt]:
    """One line per key that is set to a value which is not built yet."""
    return (refusal for refusal, asked_for in _refusals(section) if asked_for)


def idle_refusals(section: Section) -> Iterator[NotBuilt]:
    """The same of keys in sections that are not enabled, where they ask for nothing."""
    return (refusal for refusal, asked_for in _refusals(section) if not asked_for)


def _refusals(section: Section, prefix: str = "", *, asked_for: bool = True) -> Iterator[tuple[NotBuilt, bool]]:
    for name, field, mark in _marked_fields(type(section)):
        value = getattr(section, name)
        key = f"{prefix}{field.alias or name}"
        if mark is not None:
            found = _refused(key, value, field.get_default(call_default_factory=True), mark)
            on = not mark.unless or _switched_on(value, getattr(section, mark.unless), mark)
            yield from ((refusal, (asked_for and on) or mark.regardless) for refusal in found)
        elif isinstance(value, Section):
            enabled = "enabled" not in value or bool(value["enabled"])
            yield from _refusals(value, f"{key}.", asked_for=asked_for and enabled)


@functools.cache
def _marked_fields(schema: type[Section]) -> list[tuple[str, FieldInfo, NotYet | None]]:
    return [(name, field, annotation_of(field, NotYet)) for name, field in schema.model_fields.items()]


def not_built(key: str, value: object, part: str, instead: str) -> NotBuilt:
    """The refusal of one value."""
    scalar = isinstance(value, (str, int, float))
    shown = str(value).lower() if isinstance(value, bool) else repr(value) if scalar else "its value"
    return NotBuilt(key, part, f"{key}: {shown} is not built yet: {part}; {instead}")


def _entries(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else [value]


def _switched_on(value: object, switch: object, mark: NotYet) -> bool:
    values, switches = _entries(value), _entries(switch)
    if len(values) != len(switches):
        return any(switches)
    return any(on and (not mark.values or entry in mark.values) for entry, on in zip(values, switches, strict=True))


def _refused(key: str, value: object, default: object, mark: NotYet) -> Iterator[NotBuilt]:
    if mark.values:
        if any(entry in mark.values for entry in _entries(value)):
            yield not_built(key, value, mark.why, mark.instead or "choose another value")
    elif isinstance(value, Section) and "enabled" in value:
        if value["enabled"]:
            yield not_built(f"{key}.enabled", True, mark.why, mark.instead or "leave it false")
    elif isinstance(value, Section) and isinstance(default, Section):
        for name, inner in value.items():
            yield from _refused(f"{key}.{name}", inner, default[name], mark)
    elif value != default:
        stay = "null" if default is None else str(default).lower() if isinstance(default, bool) else repr(default)
        yield not_built(key, value, mark.why, mark.instead or f"leave it at {stay}")
