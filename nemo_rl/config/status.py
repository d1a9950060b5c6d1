"""Refuses what is known but not built yet: the values behind `NotYet` annotations, each by its dotted key.

Reads the annotations only; removing one from a schema is all that honouring a key takes here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nemo_rl.config.defaults import annotation_of
from nemo_rl.config.section import NotYet, Section


def refusals(section: Section, prefix: str = "") -> Iterator[str]:
    """One line per key that is set to a value which is not built yet."""
    for name, field in type(section).model_fields.items():
        value, mark = getattr(section, name), annotation_of(field, NotYet)
        key = f"{prefix}{field.alias or name}"
        if mark is not None:
            yield from _refused(key, value, field.get_default(call_default_factory=True), mark)
        elif isinstance(value, Section):
            yield from refusals(value, f"{key}.")


def _refused(key: str, value: Any, default: Any, mark: NotYet) -> Iterator[str]:
    if mark.values:
        if value in mark.values:
            yield f"{key}: {value!r} is not built yet: {mark.why}; choose another value"
    elif isinstance(value, Section) and "enabled" in value:
        if value["enabled"]:
            yield f"{key}.enabled: true is not built yet: {mark.why}; leave it false"
    elif isinstance(value, Section) and isinstance(default, Section):
        for name, inner in value.items():
            yield from _refused(f"{key}.{name}", inner, default[name], mark)
    elif value != default:
        shown = "it" if isinstance(value, Section) else repr(value)
        yield f"{key}: {shown} is not built yet: {mark.why}; leave it at {'null' if default is None else repr(default)}"
