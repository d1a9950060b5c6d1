"""What the driver asks the Megatron backend before anything starts: installed packages, the model's family, sizes that
divide, and keys that it does not honour.

Reads configurations, never weights. Invariant: what is refused here is refused before Ray starts, or as soon as the
kind of slot is known.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from nemo_rl.config import ConfigError, PolicyConfig
from nemo_rl.models.megatron import bridge
from nemo_rl.models.megatron.families import Sizes
from nemo_rl.models.policy.model_config import KernelUnavailableError, UnsupportedModelError

_KEY = "policy.megatron_cfg"


def check_policy(cfg: PolicyConfig, model: Any) -> None:
    """See `BackendSpec.check`.

    Raises:
        ConfigError: A key asks for what is not built.
    """
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise KernelUnavailableError(
            f"{_KEY}.enabled=true needs the package megatron-core, which is not installed; pip install "
            "'megatron-core>=0.16', or train with policy.dtensor_cfg.enabled=true"
        )
    refused = list(_keys_that_are_not_honoured(cfg))
    if refused:
        raise ConfigError(refused)
    sizes = Sizes.of(model) if bridge.is_known(model) else bridge.check(cfg, model)
    for problem in _sizes_that_do_not_divide(cfg, sizes):
        raise UnsupportedModelError(problem)


def _keys_that_are_not_honoured(cfg: PolicyConfig) -> Iterator[str]:
    mcore = cfg.megatron_cfg
    switched_on = {
        "use_fused_linear_logprobs": mcore.use_fused_linear_logprobs,
        "defer_fp32_logits": mcore.defer_fp32_logits,
        "cuda_graph_impl": mcore.cuda_graph_impl != "none",
        "fine_grained_activation_offloading": mcore.fine_grained_activation_offloading,
        "moe_router_bias_update_rate": mcore.moe_router_bias_update_rate,
        "moe_enable_deepep": mcore.moe_enable_deepep,
        "moe_shared_expert_overlap": mcore.moe_shared_expert_overlap,
        "moe_per_layer_logging": mcore.moe_per_layer_logging,
        "mtp_num_layers": mcore.mtp_num_layers,
        "use_fused_weighted_squared_relu": mcore.use_fused_weighted_squared_relu,
        "peft.enabled": mcore.peft.enabled,
        "distributed_data_parallel_config.use_custom_fsdp": mcore.distributed_data_parallel_config.use_custom_fsdp,
    }
    for key, value in switched_on.items():
        if value:
            yield f"{_KEY}.{key} is {value}: not built yet for this backend; leave it off"
    if mcore.moe_router_load_balancing_type != "none":
        # Its gradient is a mean over tokens, which a step of sums divided by another count would weigh wrongly.
        yield (
            f"{_KEY}.moe_router_load_balancing_type is {mcore.moe_router_load_balancing_type}: auxiliary losses of the "
            "router are not trained along; set it to none"
        )
    if mcore.moe_token_dispatcher_type != "alltoall":
        yield (
            f"{_KEY}.moe_token_dispatcher_type is {mcore.moe_token_dispatcher_type}: rows of a step differ in length, "
            "for which only alltoall is made; set it to alltoall"
        )
    if mcore.optimizer.optimizer == "sgd" and mcore.optimizer.use_distributed_optimizer:
        yield (
            f"{_KEY}.optimizer.optimizer is sgd, which Megatron's distributed optimizer does not take; set "
            f"{_KEY}.optimizer.use_distributed_optimizer to false"
        )
    if cfg.precision == "float16":
        yield "policy.precision is float16, which needs loss scaling; with megatron_cfg set it to bfloat16 or float32"
    if cfg.draft.enabled:
        yield "policy.draft.enabled is true: not built yet; leave it off"


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
                f"{_divisors(size)}"
            )
    if sizes.experts and sizes.feed_forward % mcore.expert_tensor_parallel_size:
        yield (
            f"{_KEY}.expert_tensor_parallel_size={mcore.expert_tensor_parallel_size} does not divide the model's "
            f"moe_intermediate_size={sizes.feed_forward}; possible: {_divisors(sizes.feed_forward)}"
        )
    uneven = mcore.num_layers_in_first_pipeline_stage or mcore.num_layers_in_last_pipeline_stage
    virtual = mcore.model_overrides.get("virtual_pipeline_model_parallel_size") or 1
    if sizes.layers % (pp * virtual) and not uneven:
        yield (
            f"{_KEY}.pipeline_model_parallel_size={pp} does not divide the model's num_hidden_layers={sizes.layers}; "
            f"possible: {_divisors(sizes.layers)}, or set num_layers_in_first_pipeline_stage or "
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
    if ep > 1 and not sizes.experts:
        yield f"{_KEY}.expert_model_parallel_size={ep}, but the model has no experts; set it to 1"
    if sizes.experts % ep:
        yield (
            f"{_KEY}.expert_model_parallel_size={ep} does not divide the model's {sizes.experts} experts; possible: "
            f"{_divisors(sizes.experts)}"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)


def check_device(cfg: PolicyConfig, *, cuda: bool) -> None:
    """See `BackendSpec.check_device`."""
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
