"""One cell of a response's notebook: names of earlier cells, the value of the last expression, names for the next cell.

Imports nothing of nemo_rl and runs in the response's own process. Names cross from cell to cell as one pickle, which is
read in this process alone, so that functions go on to share the notebook's globals; plain values are written beside it
as JSON.
"""

from __future__ import annotations

import ast
import base64
import builtins
import json
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

STATE_LIMIT_BYTES = 16 * 1024**2
_PLAIN_LIMIT_CHARS = 64 * 1024
_SOURCE = "<cell>"
# Modules that reach out of a notebook.
BLOCKED_IMPORTS = (
    "os",
    "shutil",
    "sys",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "multiprocessing",
    "builtins",
    "importlib",
)


class Task(TypedDict):
    """Inputs of a cell; names and state of earlier cells as base64."""

    code: str
    working_dir: str
    answer: str
    packages: list[str]
    state: str
    given: str


def run_cell(task: Task) -> bool:
    """Runs `code` in `working_dir` and writes `value` (text of the last expression or of what it raised, or None),
    `plain` and `state` to the file `answer`. Returns whether nothing was raised.
    """
    import cloudpickle

    os.chdir(task["working_dir"])
    sys.path.insert(0, task["working_dir"])
    names = _names_before(task, cloudpickle.loads)
    names["__name__"], names["__builtins__"] = "__main__", builtins
    _confine_imports_and_files(task["working_dir"], set(task["packages"]))
    value, succeeded = None, True
    try:
        value = _carried_out(task["code"], names)
    except SystemExit:
        pass
    except BaseException as error:  # noqa: BLE001 - of the response
        value, succeeded = repr(error), False
    sys.stdout.flush()
    answer = {"value": value, **_names_after(names, cloudpickle.dumps)}
    Path(task["answer"]).write_text(json.dumps(answer), encoding="utf-8")
    return succeeded


def _carried_out(code: str, names: dict[str, object]) -> str | None:
    tree = ast.parse(code, _SOURCE)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, _SOURCE, "exec", dont_inherit=True), names)
    if not isinstance(last, ast.Expr):
        return None
    value = eval(compile(ast.Expression(last.value), _SOURCE, "eval", dont_inherit=True), names)
    return None if value is None else repr(value)


def _names_before(task: Task, loads: Callable[[bytes], Any]) -> dict[str, object]:
    """The globals of the notebook: those of its functions, so that these see what later cells assign."""
    names: dict[str, object] = {}
    if task["state"]:
        kept, function = loads(base64.b64decode(task["state"]))
        names = function.__globals__
        names.update(kept)
    for name, value in loads(base64.b64decode(task["given"])).items():
        if not (name in names and _same(names[name], value)):
            names[name] = value
    return names


def _same(left: object, right: object) -> bool:
    try:
        return type(left) is type(right) and bool(left == right)
    except Exception:  # noqa: BLE001 - of any type
        return False


def _names_after(names: dict[str, object], dumps: Callable[[object], bytes]) -> dict[str, object]:
    kept = {name: value for name, value in names.items() if not (name.startswith("__") and name.endswith("__"))}
    marker = eval("lambda: None", names)
    try:
        state = dumps((kept, marker))
    except Exception:  # noqa: BLE001 - of any type
        lost = [name for name, value in kept.items() if not _can_be_kept(value, dumps)]
        kept = {name: value for name, value in kept.items() if name not in lost}
        for name in lost:
            del names[name]
        sys.stdout.write(f"[not kept for the next cell: {', '.join(lost)}]\n")
        try:
            state = dumps((kept, marker))
        except Exception:  # noqa: BLE001 - a function that reads what cannot be kept
            state = b""
    if len(state) > STATE_LIMIT_BYTES:
        sys.stdout.write(f"[no name of this cell is kept: {len(state)} bytes, the limit is {STATE_LIMIT_BYTES}]\n")
        return {}
    plain = {name: text for name, value in kept.items() if (text := _plain(value)) is not None}
    return {"state": base64.b64encode(state).decode(), "plain": plain}


def _can_be_kept(value: object, dumps: Callable[[object], bytes]) -> bool:
    try:
        dumps(value)
    except Exception:  # noqa: BLE001 - of any type
        return False
    return True


def _plain(value: object) -> str | None:
    """A value as JSON, if JSON gives the same value back."""
    if type(value) not in (type(None), bool, int, float, str, list, dict):
        return None
    try:
        text = json.dumps(value, allow_nan=False)
        return text if len(text) <= _PLAIN_LIMIT_CHARS and repr(json.loads(text)) == repr(value) else None
    except (TypeError, ValueError, RecursionError):
        return None


def _confine_imports_and_files(folder: str, packages: set[str]) -> None:
    """Lets the cell import the standard library but for a few modules, `packages` and files of its folder, and open
    files there alone.
    """
    real_import, real_open, root = builtins.__import__, builtins.open, os.path.realpath(folder)

    def imported(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> types.ModuleType:
        top = name.partition(".")[0]
        of_cell = sys._getframe(1).f_globals.get("__name__") == "__main__"
        if of_cell and not level and top in BLOCKED_IMPORTS:
            raise ImportError(f"import of {name} is blocked in a notebook")
        if of_cell and not level and top not in packages and top not in sys.stdlib_module_names:
            own = os.path.join(root, top)
            if not (os.path.isfile(f"{own}.py") or os.path.isdir(own)):
                raise ImportError(f"import of {name} is blocked: it is outside the standard library and this folder")
        return real_import(name, globals, locals, fromlist, level)

    def opened(file: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(file, int) and sys._getframe(1).f_globals.get("__name__") == "__main__":
            path = os.path.realpath(os.fsdecode(file))
            if path != root and not path.startswith(root + os.sep):
                raise PermissionError(f"{os.fsdecode(file)} is outside the working directory")
        return real_open(file, *args, **kwargs)

    builtins.__import__, builtins.open = imported, opened
