"""The driver's checks of the Megatron backend: installed packages, the model's family, and divisible sizes.

Reads configurations only. Refuses before Ray starts, or as soon as the kind of slot is known.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_rl.config import PolicyConfig
from nemo_rl.config.world_sizes import divisors
from nemo_rl.models.megatron import bridge, megatron_lora
from nemo_rl.models.megatron.families import Sizes
from nemo_rl.models.policy.model_config import KernelUnavailableError, UnsupportedModelError, check_not_quantized

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_KEY = "policy.megatron_cfg"


def check_policy(cfg: PolicyConfig, model: PretrainedConfig) -> None:
    """See `BackendSpec.check`. Raises KernelUnavailableError: Megatron-Core is not installed; UnsupportedModelError:
    the model is of no known family, or does not divide as asked.
    """
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise KernelUnavailableError(
            f"{_KEY}.enabled=true needs the package megatron-core, which is not installed; pip install "
            "'megatron-core>=0.16', or train with policy.dtensor_cfg.enabled=true"
        )
    if bridge.is_known(model):
        check_not_quantized(model, cfg)
    sizes = Sizes.of(model) if bridge.is_known(model) else bridge.check(cfg, model)
    depths = cfg.megatron_cfg.mtp_num_layers
    if depths and not bridge.is_known(model):
        raise UnsupportedModelError(
            f"{_KEY}.mtp_num_layers={depths}: layers of multi-token prediction are not built for the model type "
            f"{model.model_type!r}, whose weights the package megatron-bridge carries; set it to 0"
        )
    if cfg.megatron_cfg.peft.enabled:
        if not bridge.is_known(model):
            raise UnsupportedModelError(
                f"{megatron_lora.KEY}.enabled=true: adapters are not built for the model type {model.model_type!r}, "
                "whose weights the package megatron-bridge carries; train them with policy.dtensor_cfg.enabled=true"
            )
        megatron_lora.check_adapters(cfg, sizes)
    for problem in _sizes_that_do_not_divide(cfg, sizes):
        raise UnsupportedModelError(problem)


def _sizes_that_do_not_divide(cfg: PolicyConfig, sizes: Sizes) -> Iterator[str]:
    mcore = cfg.megatron_cfg
    tp, pp, ep = (
        mcore.tensor_model_parallel_size,
        mcore.pipeline_model_parallel_size,
        mcore.expert_model_parallel_size,
    )
    cut = {
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.groups,
        "vocab_size": sizes.vocabulary,
        **({} if sizes.experts else {"intermediate_size": sizes.feed_forward}),
    }
    for name, size in cut.items():
        if size % tp:
            yield (
                f"{_KEY}.tensor_model_parallel_size={tp} does not divide the model's {name}={size}; possible: "
                f"{divisors(size)}"
            )
    if sizes.experts and sizes.feed_forward % mcore.expert_tensor_parallel_size:
        yield (
            f"{_KEY}.expert_tensor_parallel_size={mcore.expert_tensor_parallel_size} does not divide the model's "
            f"moe_intermediate_size={sizes.feed_forward}; possible: {divisors(sizes.feed_forward)}"
        )
    uneven = mcore.num_layers_in_first_pipeline_stage or mcore.num_layers_in_last_pipeline_stage
    virtual = mcore.model_overrides.get("virtual_pipeline_model_parallel_size") or 1
    if sizes.layers % (pp * virtual) and not uneven:
        yield (
            f"{_KEY}.pipeline_model_parallel_size={pp} does not divide the model's num_hidden_layers={sizes.layers}; "
            f"possible: {divisors(sizes.layers)}, or set num_layers_in_first_pipeline_stage or "
            "num_layers_in_last_pipeline_stage"
        )
    if sizes.experts and tp > 1 and not mcore.sequence_parallel:
        yield (
            f"{_KEY}.tensor_model_parallel_size={tp} with experts needs {_KEY}.sequence_parallel=true: Megatron routes "
            "each token on one rank"
        )
    if sizes.experts and ep == 1 and mcore.expert_tensor_parallel_size != tp:
        yield (
            f"{_KEY}.expert_tensor_parallel_size={mcore.expert_tensor_parallel_size} differs from "
            f"tensor_model_parallel_size={tp}, which needs expert_model_parallel_size > 1: Megatron reduces gradients "
            f"of experts like others otherwise; set it to {tp}"
        )
    if mcore.load_balancing_weight and not sizes.experts:
        yield f"{_KEY}.moe_aux_loss_coeff={mcore.load_balancing_weight:g}, but the model has no experts; set it to 0"
    if ep > 1 and not sizes.experts:
        yield f"{_KEY}.expert_model_parallel_size={ep}, but the model has no experts; set it to 1"
    if sizes.experts % ep:
        yield (
            f"{_KEY}.expert_model_parallel_size={ep} does not divide the model's {sizes.experts} experts; possible: "
            f"{divisors(sizes.experts)}"
        )


def check_device(cfg: PolicyConfig, *, cuda: bool) -> None:
    engine = cuda and importlib.util.find_spec("transformer_engine") is not None
    mcore = cfg.megatron_cfg
    wanted = {
        "fp8_cfg.enabled": mcore.fp8_cfg.enabled,
        "gradient_accumulation_fusion": mcore.gradient_accumulation_fusion,
    }
    for key, value in wanted.items():
        if value and not engine:
            raise KernelUnavailableError(
                f"{_KEY}.{key}=true needs Transformer Engine on a GPU, and "
                f"{'it is not installed' if cuda else 'this run trains on CPU slots'}; set it to false"
            )
    if mcore.optimizer.optimizer_cpu_offload and not cuda:
        raise KernelUnavailableError(
            f"{_KEY}.optimizer.optimizer_cpu_offload=true, but this run trains on CPU slots; set it to false"
        )
