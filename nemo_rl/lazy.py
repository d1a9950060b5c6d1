"""Modules whose names are looked up when they are first used: NeMo-RL's import paths, and packages that load lightly.

Knows no name; `nemo_rl.compat.names` has the table. Invariant: nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def names_of(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
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
