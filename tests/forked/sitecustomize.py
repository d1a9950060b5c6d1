"""Python imports this at its start where this folder is in PYTHONPATH: Ray clusters of real commands fork their workers
then. Imports little, as it runs in every process of such a command.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_SERVICES = "ray._private.services"


class _ForksWorkers(MetaPathFinder):
    """Has Ray's `start_raylet` use `tests/fork_worker.py` as soon as the module with it is imported."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _SERVICES:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_patch(module: ModuleType) -> None:
            run(module)
            from tests.forks import forking

            setattr(module, "start_raylet", forking(module.start_raylet))  # noqa: B010

        setattr(spec.loader, "exec_module", run_and_patch)  # noqa: B010
        return spec


sys.meta_path.insert(0, _ForksWorkers())
