"""What of Megatron's memory moves between device and host.

Megatron's parameters and gradients are views into a few large buffers, and its optimizer keeps views of those; they
move by `policy.residency`, storage by storage.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable

import torch

_WORKSPACES = ("transformer_engine.pytorch.module.base", "transformer_engine.pytorch.cpp_extensions.gemm")


def optimizer_tensors(optimizers: Iterable[object], model: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """An optimizer's tensors beside the model's own memory: state, and float32 parameters."""
    known = {tensor.untyped_storage()._cdata for tensor in model}
    found: list[torch.Tensor] = []
    for optimizer in optimizers:
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            continue
        found += [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
        found += [parameter.data for group in inner.param_groups for parameter in group["params"]]
    return [tensor for tensor in found if tensor.dim() > 0 and tensor.untyped_storage()._cdata not in known]


def forget_workspaces() -> None:
    """Lets go of the workspaces that Transformer Engine keeps for its matrix products, tens of MiB for each stream; it
    makes new ones when it needs them.
    """
    for name in _WORKSPACES:
        if name not in sys.modules:
            continue
        module = importlib.import_module(name)
        for attribute, value in list(vars(module).items()):
            if "workspace" not in attribute:
                continue
            if hasattr(value, "cache_clear"):
                value.cache_clear()
            elif isinstance(value, (list, dict)):
                value.clear()
            elif isinstance(value, torch.Tensor):
                setattr(module, attribute, None)
