"""The driver's checks of the DTensor backend: parallel sizes, names, adapters, and kernels that a machine may lack
(attention on GPUs, Liger's layers).

Reads configurations only. Refuses before Ray starts, or as soon as the kind of slot is known.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from nemo_rl.config import DTensorConfig, PolicyConfig
from nemo_rl.models.policy.model_config import KernelUnavailableError, check_divisible, check_experts
from nemo_rl.models.policy.optimizer import check_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig


LIGER = "policy.dtensor_cfg.automodel_kwargs.use_liger_kernel"
_ATTENTION = "policy.dtensor_cfg.automodel_kwargs.backend.attn"


def check_policy(cfg: PolicyConfig, model: PretrainedConfig) -> None:
    check_divisible(model, cfg.dtensor_cfg.tensor_parallel_size, "policy.dtensor_cfg.tensor_parallel_size")
    check_experts(model, cfg.dtensor_cfg)
    check_packages(cfg.dtensor_cfg)
    check_names(cfg.optimizer, cfg.scheduler)
    if cfg.dtensor_cfg.lora_cfg.enabled:
        _check_adapters(cfg, model)


def _check_adapters(cfg: PolicyConfig, model: PretrainedConfig) -> None:
    from nemo_rl.models.dtensor.lora import chosen_layers
    from nemo_rl.models.policy.empty_model import empty_model

    chosen_layers(empty_model(model, trust_remote_code=cfg.trust_remote_code), cfg.dtensor_cfg.lora_cfg)


def check_packages(cfg: DTensorConfig) -> None:
    """Whether the optional packages are installed. Raises KernelUnavailableError: one is not."""
    if cfg.automodel_kwargs.use_liger_kernel and importlib.util.find_spec("liger_kernel") is None:
        raise KernelUnavailableError(
            f"{LIGER}=true needs the package liger-kernel, which is not installed; pip install "
            "liger-kernel, or set it to false"
        )


def check_device(cfg: PolicyConfig, *, cuda: bool) -> None:
    if cuda:
        return
    attn = cfg.dtensor_cfg.automodel_kwargs.backend.attn
    if cfg.dtensor_cfg.automodel_kwargs.use_liger_kernel:
        raise KernelUnavailableError(
            f"{LIGER}=true, but Liger's kernels run on GPUs only and this run trains on CPU slots; set it to false"
        )
    if attn in ("flash_attention_2", "flex", "flex_attention"):
        raise KernelUnavailableError(
            f"{_ATTENTION}={attn} needs a GPU for training and this run trains on CPU slots; set it to sdpa or eager"
        )
