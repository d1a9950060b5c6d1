"""Looks logged metrics up in the glossary."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from tools.pages.metrics_page import METRICS


def undocumented(names: Iterable[str]) -> list[str]:
    """The logged names, such as `train/reward`, that the glossary lacks."""
    return [name for name in names if not _documented(name)]


def _documented(name: str) -> bool:
    for group, metrics in METRICS.items():
        prefix = group.partition(":")[0].partition(" ")[0]
        if name.startswith(f"{prefix}/") and any(
            fnmatchcase(name.removeprefix(f"{prefix}/"), metric.name) for metric in metrics
        ):
            return True
    return False
