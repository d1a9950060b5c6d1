"""What lets Megatron-Core run without CUDA changes nothing where there is a GPU, and nobody else's torch."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from nemo_rl.models.megatron import cpu


def test_with_cuda_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("megatron.core.made_up")
    module.__dict__["torch"] = torch
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    moves = (torch.Tensor.cuda, nn.Module.cuda)
    layer = nn.Linear(2, 2)
    cpu.install()
    cpu.name_types(layer)
    assert cpu.options() == {}
    assert module.__dict__["torch"] is torch
    assert (torch.Tensor.cuda, nn.Module.cuda) == moves
    assert layer.weight.type() == "torch.FloatTensor"


def test_without_cuda_only_megatrons_modules_see_another_torch() -> None:
    assert cpu._VIEW.zeros(2, device="cuda").device.type == "cpu"
    assert cpu._VIEW.cuda.current_device() == torch.device("cpu")
    assert cpu._VIEW.nn is torch.nn and cpu._VIEW.float32 is torch.float32
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")
    layer = nn.Linear(2, 2)
    cpu.name_types(layer)
    assert layer.weight.type() == "torch.cuda.FloatTensor"
    assert layer.weight.detach().clone().type() == "torch.FloatTensor"
