"""What Transformer Engine keeps behind the model's back is let go of with the model."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from nemo_rl.models.megatron.megatron_backend import forget_workspaces


def test_workspaces_of_transformer_engine_do_not_outlive_an_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Cached:
        """A function behind `functools.cache`, as Transformer Engine makes a workspace per device."""

        def cache_clear(self) -> None:
            calls.append("cleared")

    module = ModuleType("transformer_engine.pytorch.module.base")
    held: dict[str, Any] = {
        "_multi_stream_cublas_workspace": [torch.zeros(4)],
        "_dummy_workspaces": {0: torch.zeros(4)},
        "_cublas_workspace": torch.zeros(4),
        "get_workspace": Cached(),
        "weights": [torch.zeros(4)],
    }
    module.__dict__.update(held)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    forget_workspaces()
    kept = vars(module)
    assert kept["_multi_stream_cublas_workspace"] == [] and kept["_dummy_workspaces"] == {}
    assert kept["_cublas_workspace"] is None and calls == ["cleared"]
    assert len(kept["weights"]) == 1
