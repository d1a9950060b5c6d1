"""Turns a dotted path of the configuration into what it names.

Knows no key by itself; the caller says which key the path came from. Invariant: nothing is imported before it is asked
for.
"""

from __future__ import annotations

import importlib
from typing import Any

from nemo_rl.config.errors import ConfigError, did_you_mean


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
