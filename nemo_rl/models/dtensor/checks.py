"""What the driver asks the DTensor backend before anything starts.

Reads configurations, never weights. Invariant: what is refused here is refused before Ray starts, or as soon as the
kind of slot is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_rl.config import PolicyConfig
from nemo_rl.models.dtensor import kernels
from nemo_rl.models.policy.model_config import check_divisible, check_experts
from nemo_rl.models.policy.optimizer import check_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_policy(cfg: PolicyConfig, model: PretrainedConfig) -> None:
    """See `BackendSpec.check`."""
    check_divisible(model, cfg.dtensor_cfg.tensor_parallel_size, "policy.dtensor_cfg.tensor_parallel_size")
    check_experts(model, cfg.dtensor_cfg)
    kernels.check_packages(cfg.dtensor_cfg)
    check_names(cfg.optimizer, cfg.scheduler)
    if cfg.dtensor_cfg.lora_cfg.enabled:
        _check_adapters(cfg, model)


def _check_adapters(cfg: PolicyConfig, model: PretrainedConfig) -> None:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    from nemo_rl.models.dtensor.lora import chosen_layers

    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(model, trust_remote_code=cfg.trust_remote_code)
    chosen_layers(empty, cfg.dtensor_cfg.lora_cfg)


def check_device(cfg: PolicyConfig, *, cuda: bool) -> None:
    """See `BackendSpec.check_device`."""
    kernels.check_device(cfg.dtensor_cfg, cuda=cuda)
