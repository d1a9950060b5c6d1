"""Nested mappings and lists by key: look, put, take. Knows no configuration; a list's entries go by their index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ABSENT: object = object()


def at(node: object, key: Sequence[str | int], default: object = ABSENT) -> Any:
    """The value at a key, `default` where there is none."""
    for part in key:
        if isinstance(node, Mapping) and part in node:
            node = node[part]
        elif isinstance(node, list) and str(part).isdigit() and int(part) < len(node):
            node = node[int(part)]
        else:
            return default
    return node


def put(node: dict[str, Any], key: Sequence[str], value: object) -> None:
    """Sets a value, with mappings made on the way where nothing, or null, is there."""
    for part in key[:-1]:
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
    node[key[-1]] = value


def take(node: object, key: Sequence[str | int]) -> None:
    """Removes a key, where it is there."""
    holder = at(node, key[:-1]) if key else ABSENT
    if isinstance(holder, dict):
        holder.pop(key[-1], None)
    elif isinstance(holder, list) and str(key[-1]).isdigit() and int(key[-1]) < len(holder):
        del holder[int(key[-1])]
