"""Models whose weights are still to come: every layer, no parameter's values."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Hugging Face's constructors set PyTorch's default dtype for the whole process while they run.
_ONE_AT_A_TIME = threading.Lock()
_BUILDING = threading.local()


def empty_model(config: PretrainedConfig, *, trust_remote_code: bool = False, **further: object) -> PreTrainedModel:
    """A causal language model by its Hugging Face configuration, its parameters on the meta device (shapes, no
    values), its buffers real. `further`: what `from_config` takes besides (`dtype`, `attn_implementation`). Threads
    may call it: modules that others build at the same time are left alone.
    """
    from transformers import AutoModelForCausalLM

    with _ONE_AT_A_TIME:
        _install()
        _BUILDING.here = True
        try:
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **further)
        finally:
            _BUILDING.here = False


_INSTALLED: list[object] = []


def _install() -> None:
    """Watches parameters from now on. It stays: PyTorch's table of hooks may not change while a module is built."""
    if not _INSTALLED:
        _INSTALLED.append(register_module_parameter_registration_hook(_without_values))


def _without_values(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
    if parameter is None or not getattr(_BUILDING, "here", False):
        return None
    empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    empty.__dict__.update(parameter.__dict__)
    return empty
