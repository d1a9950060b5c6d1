"""Values by dotted key in nested mappings and lists, whose entries go by their index, and objects by dotted path."""

from __future__ import annotations

import importlib
import re
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


def put(node: Any, key: Sequence[str], value: object) -> None:
    """Sets a value, with mappings made on the way where nothing, or null, is there. Raises LookupError: the key lies
    below a plain value or outside a list.
    """
    for depth, part in enumerate(key[:-1]):
        child = at(node, [part])
        if isinstance(node, dict) and (child is ABSENT or child is None):
            child = node[part] = dict[str, object]()
        if not isinstance(child, (dict, list)):
            above = ".".join(key[: depth + 1])
            raise LookupError(f"no {above}" if child is ABSENT else f"{above} is {child!r}, not a mapping")
        node = child
    if isinstance(node, dict):
        node[key[-1]] = value
    elif at(node, key[-1:]) is ABSENT:
        raise LookupError(f"{key[-1]!r} is not an index of a list of {len(node)}")
    else:
        node[int(key[-1])] = value


def take(node: object, key: Sequence[str | int]) -> None:
    """Removes a key, where it is there."""
    if key and at(node, key) is not ABSENT:
        holder = at(node, key[:-1])
        del holder[int(key[-1]) if isinstance(holder, list) else key[-1]]


def import_dotted(path: str, key: str) -> Any:
    """Imports what `path` (`package.module.name` or `package.module:name`) names; `key` is the dotted key that holds
    it, for messages. Raises ConfigError: the module cannot be imported, or has no such name.
    """
    if file := re.fullmatch(r"(?:\./)?(?P<module>.*?)(?:\.py)(?P<name>[.:/]\w+)?", path):
        module, name = file["module"].strip("/").replace("/", "."), (file["name"] or ".<name>")[1:]
        raise ConfigError(
            [f"{key}: {path!r} is a file; write {module}.{name}, and run the command with PYTHONPATH=. if it is here"]
        )
    module_name, _, name = path.replace(":", ".").rpartition(".")
    if not module_name or not name:
        raise ConfigError([f"{key}: {path!r} is not a dotted path such as package.module.name"])
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            hint = "; if it is in this directory, run the command with PYTHONPATH=."
        raise ConfigError([f"{key}: {path!r} cannot be imported: {error}{hint}"]) from error
    if not hasattr(module, name):
        raise ConfigError([f"{key}: the module {module_name} has no {name!r}.{did_you_mean(name, dir(module))}"])
    return getattr(module, name)
