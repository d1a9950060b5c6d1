"""Finds names that scripts import from NeMo-RL: their homes here, different calls, and missing ones.

`find` is what the modules at NeMo-RL's paths ask; `names.yaml` has the tables. Invariant: every home exists, and a name
is in one table only.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_rl.config.layers import read_yaml

_FILE: dict[str, Any] = read_yaml(Path(__file__).with_name("names.yaml").read_text(encoding="utf-8"))


def _homes(module: Mapping[str, list[str | dict[str, str]]]) -> Iterator[tuple[str, str]]:
    for home, names in module.items():
        for name in names:
            here = name if isinstance(name, dict) else {name: ""}
            yield from ((there, f"{home}:{attribute or there}") for there, attribute in here.items())


# module -> name -> home, as module:attribute.
NAMES = {module: dict(_homes(homes)) for module, homes in _FILE["names"].items()}
AT_HOME: dict[str, list[str]] = _FILE["at_home"]
CHANGED: dict[str, str] = _FILE["changed"]
ABSENT: dict[str, str] = _FILE["absent"]
ABSENT_MEMBERS: dict[str, str] = _FILE["absent_members"]
CONTROL_PLANE: dict[str, str] = {
    name: f"{key}.{name}" if isinstance(home, list) else home
    for key, home in _FILE["control_plane"].items()
    for name in (home if isinstance(home, list) else [key])
}


def find(module: str, name: str) -> Any:
    """The object at one of NeMo-RL's paths under a name. Raises AttributeError: there is none, or NeMo-RL's is not
    here; the message names a replacement.
    """
    home = NAMES.get(module, {}).get(name)
    if home is None:
        instead = ABSENT.get(f"{module}.{name}")
        hint = f"; {instead}" if instead else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")
    path, _, attribute = home.partition(":")
    return getattr(importlib.import_module(path), attribute)
