"""What dotted keys and paths name: values in nested mappings and lists, and objects in modules.

Knows no key by itself; a list's entries go by their index. Invariant: no module is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl.config.errors import ConfigError, did_you_mean

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


def import_dotted(path: str, key: str) -> Any:
    """What `path` (`package.module.name` or `package.module:name`) names.

    Args:
        path: the dotted path.
        key: the dotted key it was given under, for messages.

    Raises:
        ConfigError: the module cannot be imported, or has no such name.
    """
    module_name, _, name = path.replace(":", ".").rpartition(".")
    if not module_name or not name:
        raise ConfigError([f"{key}: {path!r} is not a dotted path such as package.module.name"])
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError([f"{key}: {path!r} cannot be imported: {error}"]) from error
    if not hasattr(module, name):
        raise ConfigError([f"{key}: the module {module_name} has no {name!r}.{did_you_mean(name, dir(module))}"])
    return getattr(module, name)
