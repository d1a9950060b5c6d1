"""Fills a raw configuration with the schema's defaults, as interpolations where a default follows another key, and
resolves them, with the arithmetic that files may use: add, mul, div and max.

This is the only place where an omitted key gets its value. Knows the shape of schemas, not their keys. Invariant: a
value that was given, null included where null is allowed, is never changed; completing twice changes nothing.
"""

from __future__ import annotations

import functools
import math
import operator
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic.fields import FieldInfo

from nemo_rl.config.errors import ConfigError
from nemo_rl.config.foreign import adapt
from nemo_rl.config.section import (
    DefaultFrom,
    NotYet,
    Section,
    admits_null,
    annotation_of,
    holds_container,
    section_type,
)

Number = int | float
# `${a.b}`, or relative to the place of the text `${..a.b}`, and the beginning of `${mul:...`.
_NAMED = re.compile(r"\$\{(\.*)([A-Za-z_][\w-]*(?:\.[\w-]+)*)\}")
_ARITHMETIC = re.compile(r"\$\{(?:add|mul|div|max|not):")


def _add(*values: Number) -> Number:
    return sum(values)


def _mul(*values: Number) -> Number:
    return math.prod(values)


def _div(left: Number, right: Number) -> Number:
    quotient = left / right
    whole = isinstance(left, int) and isinstance(right, int) and left % right == 0
    return left // right if whole else quotient


_RESOLVERS: dict[str, Callable[..., Number]] = {"add": _add, "mul": _mul, "div": _div, "max": max, "not": operator.not_}


def register_omegaconf_resolvers() -> None:
    """Makes `${add:a,b}`, `${mul:a,b}`, `${div:a,b}`, `${max:a,b}` and `${not:a}` known to OmegaConf; a quotient that
    is whole is an int.
    """
    for name, function in _RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, function)


def complete(raw: Mapping[str, object], root: type[Section]) -> dict[str, object]:
    """A copy of `raw` under present names, with every omitted key filled in and every interpolation resolved. Raises
    ConfigError: an interpolation names a key that does not exist, or goes round in circles.
    """
    return resolve(with_defaults(adapt(raw, root).values, root))


def with_defaults(raw: Mapping[str, object], root: type[Section]) -> dict[str, object]:
    """A copy of `raw` with every omitted key of `root` filled in; interpolations stay as they are."""
    return _fill(raw, root, _defaults_of(root), {})


@functools.cache
def _defaults_of(schema: type[Section]) -> Section:
    # Only read: `plain` and `complete` copy what they take from it.
    return schema.model_construct()


def resolve(raw: Mapping[str, object]) -> dict[str, object]:
    """A copy of `raw` whose interpolations are replaced by their values. Raises ConfigError: an interpolation names a
    key that does not exist, or goes round in circles.
    """
    register_omegaconf_resolvers()
    try:
        return _resolved(raw)
    except (OmegaConfBaseException, RecursionError) as error:
        where = getattr(error, "full_key", None) or "the configuration"
        raise ConfigError([f"{where}: {str(error).splitlines()[0]}"]) from error


def _resolved(raw: Mapping[str, object]) -> dict[str, object]:
    """Values resolved by OmegaConf. Few values follow others, and OmegaConf takes a tenth of a second for all of them,
    so it gets only those that hold an interpolation or are named by one.
    """
    named: list[list[str]] = []
    for place, text in _texts(raw):
        if "${" not in text:
            continue
        # A composed name, and resolvers that look up keys themselves, may mean any key.
        if "${" in _NAMED.sub("", _ARITHMETIC.sub("", text)):
            return _by_omegaconf(raw)
        for dots, name in _NAMED.findall(text):
            if len(dots) > len(place):
                return _by_omegaconf(raw)
            named.append([*(place[: -len(dots)] if dots else ()), *name.split(".")])
    return _joined(raw, _remembered(pickle.dumps(_part(raw, named))))


@functools.lru_cache(maxsize=64)
def _remembered(part: bytes) -> dict[str, object]:
    """Resolves once for all jobs of a pool and adapters of a job that differ in other keys: it takes most of the time
    of reading a configuration. `_joined` copies what it takes from here.
    """
    return _by_omegaconf(pickle.loads(part))


def _by_omegaconf(raw: Mapping[str, object]) -> dict[str, object]:
    resolved = OmegaConf.to_container(OmegaConf.create(dict(raw)), resolve=True)
    return {str(key): value for key, value in resolved.items()} if isinstance(resolved, dict) else {}


def _texts(value: object, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """All texts with the keys that lead to each."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, (*place, str(key)))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _texts(item, (*place, str(number)))


def _part(raw: Mapping[str, object], named: list[list[str]]) -> dict[str, object]:
    """Values that hold an interpolation or are named by one, under their keys; lists whole."""
    kept: dict[str, object] = {}
    for key, value in raw.items():
        below = [name[1:] for name in named if name[0] == str(key)]
        if isinstance(value, Mapping) and [] not in below:
            if (part := _part(value, below)) or below:
                kept[key] = part
        elif below or any("${" in text for _, text in _texts(value)):
            kept[key] = value
    return kept


def _joined(raw: Mapping[str, object], resolved: Mapping[str, object]) -> dict[str, object]:
    joined: dict[str, object] = {}
    for key, value in raw.items():
        found = resolved.get(key, value)
        if isinstance(value, Mapping):
            joined[key] = _joined(value, found) if isinstance(found, Mapping) else found
        else:
            joined[key] = [*value] if isinstance(value, tuple) and found is value else deepcopy(found)
    return joined


def _fill(
    raw: Mapping[str, object], schema: type[Section], default: Section, follows: Mapping[str, str]
) -> dict[str, object]:
    filled = dict(raw)
    follows = {**follows, **schema.follows}
    for name, field in schema.model_fields.items():
        key = field.alias or name
        nested = section_type(field)
        value = raw.get(key)
        if nested is not None and isinstance(value, Mapping):
            filled[key] = _fill(value, nested, _default_section(default, name, nested), follows)
        elif nested is not None and not admits_null(field) and value is None:
            filled[key] = _fill({}, nested, _default_section(default, name, nested), follows)
        elif not field.is_required() and (key not in raw or (value is None and _null_is_default(field))):
            filled[key] = _default_value(default, name, field, follows)
    return filled


def _null_is_default(field: FieldInfo) -> bool:
    # NeMo-RL's recipes write null for "no options" and for switches of parts that they do not use.
    return not admits_null(field) and (holds_container(field) or annotation_of(field, NotYet) is not None)


def _default_section(default: Section, name: str, kind: type[Section]) -> Section:
    value = getattr(default, name)
    return value if isinstance(value, kind) else kind()


def _default_value(default: Section, name: str, field: FieldInfo, follows: Mapping[str, str]) -> object:
    mark = annotation_of(field, DefaultFrom)
    if mark is not None and name not in default.model_fields_set:
        return followed(mark, follows)
    return plain(getattr(default, name))


def followed(mark: DefaultFrom, follows: Mapping[str, str]) -> str:
    """The interpolation of a default in a section whose defaults follow other keys than those of its parent class."""
    text = mark.interpolation
    for parent, own in follows.items():
        text = text.replace(parent, own)
    return text


def plain(value: object) -> Any:
    """`value` with sections turned into mappings of the keys that were set."""
    if isinstance(value, Section):
        return value.model_dump(by_alias=True, exclude_unset=True)
    if isinstance(value, list):
        return [plain(item) for item in value]
    return deepcopy(value) if isinstance(value, dict) else value
