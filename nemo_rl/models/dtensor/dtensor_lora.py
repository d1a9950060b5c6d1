"""Low-rank adapters on a model's linear layers (https://arxiv.org/abs/2106.09685): only they are trained.

A layer keeps its place and its weight's name; beside the frozen weight it gets `lora_A` `[rank, in]` and `lora_B`
`[out, rank]`, whose product starts at 0. Invariants: without adapters the model is the base model bit for bit; the
vocabulary's output projection is never adapted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from nemo_rl.config import LoraConfig
from nemo_rl.models.policy.lora import choose_layers
from nemo_rl.models.policy.model_config import UnsupportedModelError
from nemo_rl.utils.adapter_files import with_product

KEY = "policy.dtensor_cfg.lora_cfg"


class AdaptedLinear(nn.Linear):
    """A linear layer with a frozen weight plus a trained low-rank product."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float
    dropout: float
    drops_input: bool
    adapted: bool  # false computes with the base weight alone

    @override
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        base = F.linear(input, self.weight, self.bias)
        if not self.adapted:
            return base
        inner = F.dropout(input, self.dropout, self.training and self.drops_input)
        change = F.linear(F.linear(inner, self.lora_A), self.lora_B) * self.scale
        return base + F.dropout(change, self.dropout, self.training and not self.drops_input)


def apply_adapters(model: nn.Module, cfg: LoraConfig) -> dict[str, tuple[int, int]]:
    """Freezes the model and gives the chosen layers adapters, in place; returns their numbers of inputs and outputs by
    name. Raises UnsupportedModelError: no layer is chosen, or a pattern chooses none.
    """
    names = chosen_layers(model, cfg)
    model.requires_grad_(False)
    return {name: _adapt(model.get_submodule(name), cfg) for name in names}


def chosen_layers(model: nn.Module, cfg: LoraConfig) -> list[str]:
    """Names of a model's linear layers that get an adapter."""
    head = getattr(model, "lm_head", None)
    linear = [name for name, part in model.named_modules() if type(part) is nn.Linear and part is not head]
    return chosen_of(linear, cfg, type(model).__name__)


def chosen_of(linear: Sequence[str], cfg: LoraConfig, model: str) -> list[str]:
    """Those of the linear layers that get an adapter: all, or those that match `target_modules` (a whole name, its last
    part, or a pattern with `*`), without those that match `exclude_modules`; with exclusions alone, all but these.
    `model`: its name in errors.
    """
    every = cfg.match_all_linear or (bool(cfg.exclude_modules) and not cfg.target_modules)
    kept = choose_layers(linear, cfg.target_modules, cfg.exclude_modules, every=every, key=KEY, model=model)
    if not kept:
        raise UnsupportedModelError(f"{KEY} chooses no layer; set match_all_linear: true, or name target_modules")
    return kept


def merged_weight(weight: torch.Tensor, module: AdaptedLinear, device: torch.device) -> torch.Tensor:
    """The full weight of a layer with its adapter added, in float32. Collective where the layer is sharded."""
    whole, down, up = (_full(tensor.detach(), device) for tensor in (weight, module.lora_A, module.lora_B))
    return with_product(whole, down, up, module.scale)


def _adapt(layer: Any, cfg: LoraConfig) -> tuple[int, int]:
    kind = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    layer.__class__ = AdaptedLinear
    layer.lora_A = nn.Parameter(torch.empty(cfg.dim, layer.in_features, **kind))
    layer.lora_B = nn.Parameter(torch.empty(layer.out_features, cfg.dim, **kind))
    layer.scale = cfg.alpha / cfg.dim
    layer.dropout, layer.drops_input = cfg.dropout, cfg.dropout_position == "pre"
    layer.adapted = True
    return layer.in_features, layer.out_features


def _full(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = tensor.to(device) if tensor.device != device else tensor
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
