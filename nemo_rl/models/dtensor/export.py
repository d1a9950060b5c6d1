"""The collective export of full weights, tensor by tensor, in the engine's precision and with the names of files.

Every rank iterates and gets every full tensor. transformers 5 stacks the experts of a layer, and renames, when it loads
a file; this undoes it. Invariants: names, shapes and order are those of `tensor_metas`; exported weights load like the
original files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.tensor import DTensor

from nemo_rl.models.dtensor.dtensor_lora import AdaptedLinear, merged_weight
from nemo_rl.models.dtensor.scorer import CausalLMScorer
from nemo_rl.models.policy.lora import is_factor, sent_metas
from nemo_rl.weight_sync.layout import TensorMeta, dtype_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFIX = "lm."
_CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module."


def hf_name(name: str) -> str:
    """A parameter's name in the Hugging Face model in memory."""
    return name.removeprefix(PREFIX).replace(_CHECKPOINT_WRAPPER, "")


def remember_disk_names(model: Any) -> None:
    """Finds the model's weight conversions once and stores them where transformers does for loaded models."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange
    except ImportError:
        # Before version 5 the names in memory are those of the files.
        model._weight_conversions = None
        return
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    # Whether the file had the prefix cannot be known of a model that was built from its configuration.
    model._weight_conversions = [conversion for conversion in conversions if not isinstance(conversion, PrefixChange)]


def on_disk(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A parameter as the files have it: itself, or its parts under their names. Takes meta tensors too."""
    if not model._weight_conversions:
        return {name: tensor}
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, {name: tensor})


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
    """Names, shapes and dtypes of the factors as they are sent."""
    return sent_metas((hf_name(name), held.shape) for name, held in scorer.named_parameters() if is_factor(name))


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
