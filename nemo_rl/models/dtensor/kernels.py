"""Kernels that a configuration asks for and that a machine may lack: attention on GPUs, and Liger's layers.

Liger (https://github.com/linkedin/Liger-Kernel) is an optional package, imported only where a model is built. Knows no
mesh. Invariants: what is missing is said before weights are read; the loss and the output projection stay ours, for
scores need log-probabilities.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

from nemo_rl.config import DTensorConfig
from nemo_rl.models.policy.model_config import KernelUnavailableError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LIGER = "policy.dtensor_cfg.automodel_kwargs.use_liger_kernel"
_ATTENTION = "policy.dtensor_cfg.automodel_kwargs.backend.attn"


def check_packages(cfg: DTensorConfig) -> None:
    """Whether the optional packages are installed.

    Raises:
        KernelUnavailableError: One is not.
    """
    if cfg.automodel_kwargs.use_liger_kernel and importlib.util.find_spec("liger_kernel") is None:
        raise KernelUnavailableError(
            f"{_LIGER}=true needs the package liger-kernel, which is not installed; pip install "
            "liger-kernel, or set it to false"
        )


def check_device(cfg: DTensorConfig, *, cuda: bool) -> None:
    """Whether the accelerators can run the kernels.

    Args:
        cfg: `policy.dtensor_cfg`.
        cuda: Whether training runs on GPUs.

    Raises:
        KernelUnavailableError: They cannot.
    """
    attn = cfg.automodel_kwargs.backend.attn
    if cuda:
        return
    if cfg.automodel_kwargs.use_liger_kernel:
        raise KernelUnavailableError(
            f"{_LIGER}=true, but Liger's kernels run on GPUs only and this run trains on CPU slots; set it to false"
        )
    if attn in ("flash_attention_2", "flex", "flex_attention"):
        raise KernelUnavailableError(
            f"{_ATTENTION}={attn} needs a GPU for training and this run trains on CPU slots; set it to sdpa or eager"
        )


def apply_liger(model: PreTrainedModel, *, keep_experts: bool) -> None:
    """Replaces the model's norms, feed-forwards and rotary embeddings by Liger's, in place.

    Args:
        model: A transformers model, before it is cut.
        keep_experts: Leave feed-forwards alone: Liger's experts compute with all experts of a layer at once.

    Raises:
        UnsupportedModelError: Liger has no layers for this kind of model.
    """
    kind = model.config.model_type
    known = _functions()
    if kind not in known:
        raise UnsupportedModelError(
            f"{_LIGER}=true, but the installed liger-kernel has no layers for {kind!r} models; set it to false"
        )
    wanted = {"rope": True, "rms_norm": True, "swiglu": not keep_experts, "geglu": not keep_experts}
    # The loss must stay off in either of Liger's forms: it would replace the model's forward or torch's cross entropy.
    wanted |= {"cross_entropy": False, "fused_linear_cross_entropy": False}
    parameters = inspect.signature(known[kind]).parameters
    known[kind](model=model, **{name: value for name, value in wanted.items() if name in parameters})


def _functions() -> dict[str, Callable[..., None]]:
    from liger_kernel.transformers import monkey_patch

    return monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
