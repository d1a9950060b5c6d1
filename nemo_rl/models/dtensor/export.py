"""The collective export of full weights in the engine's precision, tensor by tensor.

Every rank iterates; each gets every full tensor for as long as it holds it. Names are those of Hugging Face's files.
Knows neither transports nor engines. Invariant: names, shapes and order are those of `tensor_metas`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch.distributed.tensor import DTensor

from nemo_rl.models.dtensor.disk_names import hf_name, on_disk
from nemo_rl.models.dtensor.lora import AdaptedLinear, is_factor, merged_weight
from nemo_rl.models.dtensor.scorer import CausalLMScorer
from nemo_rl.weight_sync.layout import TensorMeta, dtype_name


def tensor_metas(scorer: CausalLMScorer, dtype: torch.dtype) -> list[TensorMeta]:
    """Names, shapes and dtypes in export order; a tied output projection is not repeated."""
    shapes = [
        (hf_name(name), torch.empty(parameter.shape, device="meta"))
        for name, parameter in scorer.named_parameters()
        if not is_factor(name)
    ]
    parts = [part for name, shape in shapes for part in on_disk(scorer.lm, name, shape).items()]
    return [TensorMeta(name, tuple(part.shape), dtype_name(dtype)) for name, part in parts]


def adapter_factors(scorer: CausalLMScorer, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The adapters' full factors in float32, by their names in the Hugging Face model. Collective."""
    for name, parameter in scorer.named_parameters():
        if is_factor(name):
            tensor = parameter.detach()
            tensor = tensor if tensor.device == device else tensor.to(device)
            yield hf_name(name), tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def adapter_metas(scorer: CausalLMScorer) -> list[TensorMeta]:
    """Names, shapes and dtypes of `sent_adapters`."""
    return [
        TensorMeta(hf_name(name), tuple(parameter.shape), dtype_name(torch.float32))
        for name, parameter in scorer.named_parameters()
        if is_factor(name)
    ]


def sent_adapters(scorer: CausalLMScorer, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The factors as engines take them: in float32, the scale of the product in the second. Collective."""
    scales = {
        hf_name(f"{name}.lora_B"): module.scale
        for name, module in scorer.named_modules()
        if isinstance(module, AdaptedLinear)
    }
    for name, tensor in adapter_factors(scorer, device):
        yield name, tensor.float() * scales.get(name, 1.0)


def full_weights(
    scorer: CausalLMScorer, dtype: torch.dtype | None, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Full tensors in order. Those that must be gathered are converted to `dtype` first (None keeps float32); a rank
    that holds all of a tensor yields it as it is, since the receiver's copy converts it anyway. Adapters are added to
    the weights that they adapt.
    """
    for name, parameter in scorer.named_parameters():
        if is_factor(name):
            continue
        layer = scorer.get_submodule(name.rpartition(".")[0])
        if isinstance(layer, AdaptedLinear) and name.endswith(".weight"):
            whole = merged_weight(parameter, layer, device)
            yield from on_disk(scorer.lm, hf_name(name), whole if dtype is None else whole.to(dtype)).items()
            continue
        tensor = parameter.detach()
        if isinstance(tensor, DTensor) and tensor.device_mesh.size() == 1:
            tensor = tensor.to_local()
        if tensor.device != device:
            tensor = tensor.to(device)
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor() if dtype is None else cast(DTensor, tensor.to(dtype)).full_tensor()
        yield from on_disk(scorer.lm, hf_name(name), tensor).items()
