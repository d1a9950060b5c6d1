"""The names and shapes under which weights are stored and sent: those of the model's Hugging Face files.

transformers 5 stacks the experts of a layer, and renames, when it loads a file; engines and other readers expect what
files hold. Knows no mesh. Invariants: what is written here loads like the file that the model came from; a model
without conversions keeps every name.
"""

from __future__ import annotations

from typing import Any

import torch

PREFIX = "lm."
_CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module."


def hf_name(name: str) -> str:
    """A parameter's name in the Hugging Face model in memory."""
    return name.removeprefix(PREFIX).replace(_CHECKPOINT_WRAPPER, "")


def remember_disk_names(model: Any) -> None:
    """Finds the model's conversions once and leaves them where transformers itself keeps those of a model it has
    read.
    """
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


def on_disk(model: Any, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """One parameter as the files have it: itself, or its parts under their names. Works on tensors without storage
    too.
    """
    if not model._weight_conversions:
        return {name: tensor}
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, {name: tensor})
