"""Fills a raw configuration with the schema's defaults, as interpolations where a default follows another key, and resolves them.

This is the only place where an omitted key gets its value. Knows the shape of schemas, not their keys. Invariant: a value that was given,
null included where null is allowed, is never changed; completing twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic.fields import FieldInfo

from nemo_rl.config.errors import ConfigError
from nemo_rl.config.resolvers import register_omegaconf_resolvers
from nemo_rl.config.section import DefaultFrom, Section

_Mark = TypeVar("_Mark")


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


def complete(raw: Mapping[str, Any], root: type[Section]) -> dict[str, Any]:
    """A copy of `raw` with every omitted key filled in and every interpolation resolved.

    Raises:
        ConfigError: an interpolation names a key that does not exist, or goes round in circles.
    """
    return resolve(with_defaults(raw, root))


def with_defaults(raw: Mapping[str, Any], root: type[Section]) -> dict[str, Any]:
    """A copy of `raw` with every omitted key of `root` filled in; interpolations stay as they are."""
    return _fill(raw, root, root.model_construct())


def resolve(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `raw` whose interpolations are replaced by their values.

    Raises:
        ConfigError: an interpolation names a key that does not exist, or goes round in circles.
    """
    register_omegaconf_resolvers()
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(dict(raw)), resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        where = getattr(error, "full_key", None) or "the configuration"
        raise ConfigError([f"{where}: {str(error).splitlines()[0]}"]) from error
    return {str(key): value for key, value in resolved.items()} if isinstance(resolved, dict) else {}


def _fill(raw: Mapping[str, Any], schema: type[Section], default: Section) -> dict[str, Any]:
    filled = dict(raw)
    for name, field in schema.model_fields.items():
        key = field.alias or name
        nested = section_type(field)
        value = raw.get(key)
        if nested is not None and isinstance(value, Mapping):
            filled[key] = _fill(value, nested, _default_section(default, name, nested))
        elif nested is not None and not admits_null(field) and value is None:
            filled[key] = _fill({}, nested, _default_section(default, name, nested))
        elif key not in raw and not field.is_required():
            filled[key] = _default_value(default, name, field)
    return filled


def _default_section(default: Section, name: str, kind: type[Section]) -> Section:
    value = getattr(default, name)
    return value if isinstance(value, kind) else kind()


def _default_value(default: Section, name: str, field: FieldInfo) -> Any:
    follows = annotation_of(field, DefaultFrom)
    if follows is not None and name not in default.model_fields_set:
        return follows.interpolation
    return plain(getattr(default, name))


def plain(value: Any) -> Any:
    """`value` with sections turned into mappings that hold only what was set."""
    if isinstance(value, Section):
        return value.model_dump(by_alias=True, exclude_unset=True)
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value
