"""How large the product is, and how much of it has a twin: at most what `tools/shape.toml` says."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHAPE: dict[str, int] = tomllib.loads((ROOT / "tools" / "shape.toml").read_text())["at_most"]
FILES = sorted((ROOT / "nemo_rl").rglob("*.py"))
NODES = [node for path in FILES for node in ast.walk(ast.parse(path.read_bytes()))]
CLASSES = [node.name for node in NODES if isinstance(node, ast.ClassDef)]
_MANY_PARAMETERS = 8


def _lines(paths: Iterator[Path] | list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def _parameters(node: ast.AST) -> int:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return 0
    given = node.args
    return len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) + bool(given.vararg) + bool(given.kwarg)


def _shared(names: list[str]) -> int:
    return sum(count > 1 for count in Counter(names).values())


COUNTS = {
    "lines": lambda: _lines(FILES),
    "files": lambda: len(FILES),
    "lines_of_tests": lambda: _lines((ROOT / "tests").rglob("*.py")),
    "placement_and_accelerator_classes": lambda: sum(name.endswith(("Placement", "Accelerators")) for name in CLASSES),
    "functions_of_many_parameters": lambda: sum(_parameters(node) > _MANY_PARAMETERS for node in NODES),
    "file_names_used_twice": lambda: _shared([path.stem for path in FILES if not path.stem.startswith("__")]),
    "class_names_used_twice": lambda: _shared([name for name in CLASSES if not name.startswith("_")]),
    "any": lambda: sum(isinstance(node, ast.Name) and node.id == "Any" for node in NODES),
}


@pytest.mark.parametrize("name", COUNTS)
def test_the_product_keeps_its_shape(name: str) -> None:
    count = COUNTS[name]()
    assert count <= SHAPE[name], (
        f"{name}: {count}, at most {SHAPE[name]} by tools/shape.toml; look for a twin to use or code to delete. A "
        "feature that needs more raises the number in its own commit and says why"
    )


def test_every_count_has_a_bound() -> None:
    assert set(SHAPE) == set(COUNTS)
