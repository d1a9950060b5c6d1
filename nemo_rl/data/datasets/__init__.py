"""Datasets. Names are loaded when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_rl.data.datasets.processed import AllTaskProcessedDataset
    from nemo_rl.data.datasets.raw import RawDataset
    from nemo_rl.data.datasets.registry import load_response_dataset

__all__ = ["AllTaskProcessedDataset", "RawDataset", "load_response_dataset"]
_HOME = {"AllTaskProcessedDataset": "processed", "RawDataset": "raw", "load_response_dataset": "registry"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
