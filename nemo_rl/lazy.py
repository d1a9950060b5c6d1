"""Modules whose names are looked up when they are first used: NeMo-RL's import paths, and packages that load lightly.

Knows no name; `nemo_rl.compat.names` has the table. Invariant: nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def names_in(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """`__getattr__` of a package that loads its names when they are first used.

    Args:
        package: Its `__name__`.
        homes: Module of each name.
    """

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return __getattr__


def names_of(module: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a module that stands for one of NeMo-RL's.

    Args:
        module: its `__name__`, under which the table lists the names.
    """

    def __getattr__(name: str) -> Any:
        table = importlib.import_module("nemo_rl.compat.names")
        return table.find(module, name)

    def __dir__() -> list[str]:
        table = importlib.import_module("nemo_rl.compat.names")
        return sorted({*vars(sys.modules[module]), *table.NAMES.get(module, {})})

    return __getattr__, __dir__
