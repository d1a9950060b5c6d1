"""The collective export of full weights in the engine's precision, tensor by tensor.

Every rank iterates; each gets every full tensor for as long as it holds it. Names are those of Hugging Face's files. Knows neither
transports nor engines. Invariant: names, shapes and order are those of `tensor_metas`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch.distributed.tensor import DTensor

from nemo_rl.models.dtensor.disk_names import hf_name, on_disk
from nemo_rl.models.dtensor.scorer import CausalLMScorer
from nemo_rl.weight_sync.layout import TensorMeta, dtype_name


def tensor_metas(scorer: CausalLMScorer, dtype: torch.dtype) -> list[TensorMeta]:
    """Names, shapes and dtypes in export order; a tied output projection is not repeated."""
    shapes = [(hf_name(name), torch.empty(parameter.shape, device="meta")) for name, parameter in scorer.named_parameters()]
    parts = [part for name, shape in shapes for part in on_disk(scorer.lm, name, shape).items()]
    return [TensorMeta(name, tuple(part.shape), dtype_name(dtype)) for name, part in parts]


def full_weights(scorer: CausalLMScorer, dtype: torch.dtype | None, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Full tensors in order. Those that must be gathered are converted to `dtype` first (None keeps float32); a rank that
    holds all of a tensor yields it as it is, since the receiver's copy converts it anyway."""
    for name, parameter in scorer.named_parameters():
        tensor = parameter.detach()
        if isinstance(tensor, DTensor) and tensor.device_mesh.size() == 1:
            tensor = tensor.to_local()
        if tensor.device != device:
            tensor = tensor.to(device)
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor() if dtype is None else cast(DTensor, tensor.to(dtype)).full_tensor()
        yield from on_disk(scorer.lm, hf_name(name), tensor).items()
