"""Modules whose names are looked up when they are first used: NeMo-RL's import paths, and packages that load lightly.

Knows no name; `nemo_rl.compat.names` has the table. Invariants: nothing is imported before it is asked for; a path of
NeMo-RL's without a file here is a module that the table fills, and a file always goes before it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def names_in(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
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
    """`__getattr__` and `__dir__` of a module that has names of NeMo-RL's. `module`: its `__name__`, under which the
    table lists the names.
    """

    def __getattr__(name: str) -> Any:
        return _table().find(module, name)

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[module]), *_table().NAMES.get(module, {})})

    return __getattr__, __dir__


def find_paths_of_nemo_rl() -> None:
    """From now on modules that the table lists, and packages of such, can be imported without a file. Safe to call
    twice.
    """
    if not any(isinstance(finder, _PathsOfNemoRL) for finder in sys.meta_path):
        sys.meta_path.append(_PathsOfNemoRL())


class _PathsOfNemoRL(MetaPathFinder, Loader):
    """The last finder: asked for what no file has."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("nemo_rl."):
            return None
        names = _table().NAMES
        package = any(module.startswith(f"{fullname}.") for module in names)
        if fullname not in names and not package:
            return None
        return ModuleSpec(fullname, self, origin="nemo_rl.compat.names", is_package=package)

    def exec_module(self, module: ModuleType) -> None:
        for function in names_of(module.__name__):
            setattr(module, function.__name__, function)


def _table() -> Any:
    return importlib.import_module("nemo_rl.compat.names")
