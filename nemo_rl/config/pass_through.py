"""Rules of free mappings, which reach a library as they are: what they can set is held to the rules of the keys that
this package has for it.

Invariant: nothing is set in two places, and what is refused under its own key is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nemo_rl.config.errors import Problem, did_you_mean
from nemo_rl.config.evaluation import EvalMasterConfig
from nemo_rl.config.generation import GenerationConfig, VllmConfig
from nemo_rl.config.master import MasterConfig, RootConfig
from nemo_rl.config.megatron import MegatronConfig
from nemo_rl.config.policy import OPTIMIZER_AMOUNTS
from nemo_rl.config.section import NotYet, annotation_of, not_built

_MEGATRON = "policy.megatron_cfg"
# Options of Megatron's TransformerConfig that change speed, memory or rounding, and neither the model nor its loss.
_MEGATRON_FREE = """
    virtual_pipeline_model_parallel_size microbatch_group_size_per_vp_stage attention_backend
    attention_softmax_in_fp32 masked_softmax_fusion bias_dropout_fusion persist_layer_norm memory_efficient_layer_norm
    fp32_residual_connection disable_bf16_reduced_precision_matmul fused_single_qkv_rope recompute_method
    recompute_num_layers distribute_saved_activations deterministic_mode batch_invariant_mode tp_comm_overlap
    tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad
    tp_comm_bootstrap_backend overlap_p2p_comm batch_p2p_comm batch_p2p_sync cp_comm_type moe_router_fusion
    use_te_activation_func cpu_offloading cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights
    symmetric_ar_type barrier_with_L1_time
""".split()  # noqa: SIM905 -- a list of one name per line says no more
# Beginnings of names that are a part which is not built, or another key's.
_MEGATRON_PARTS = {
    "moe_aux_loss": "auxiliary losses of Megatron's router, whose gradient would depend on lengths",
    "moe_z_loss": "auxiliary losses of Megatron's router, whose gradient would depend on lengths",
    "dsa_indexer_loss": "auxiliary losses of sparse attention",
    "moe_input_jitter": "noise in the router",
    "moe_token_drop": "experts that drop tokens",
    "moe_expert_capacity": "experts that drop tokens",
    "moe_router_enable_expert_bias": "expert biases of Megatron's router",
    "moe_router_force_load_balancing": "routing at random, which is for speed tests and trains another model",
    "hidden_dropout": "dropout, which would make every pass score other tokens",
    "attention_dropout": "dropout, which would make every pass score other tokens",
    "mtp_": "multi-token prediction",
    "moe_flex_dispatcher": "token exchange by DeepEP or HybridEP",
    "moe_deepep": "token exchange by DeepEP or HybridEP",
    "moe_hybridep": "token exchange by DeepEP or HybridEP",
    "enable_cuda_graph": "CUDA graphs in training",
    "external_cuda_graph": "CUDA graphs in training",
    "calculate_per_token_loss": "losses of Megatron's own; the loss function normalises by itself",
}
_MEGATRON_OTHERS = {
    "bf16": "policy.precision",
    "fp16": "policy.precision",
    "params_dtype": "policy.precision",
    "autocast": "policy.precision",
    "enable_autocast": "policy.precision",
    "fp8": f"{_MEGATRON}.fp8_cfg",
}


def megatron_overrides_are_safe(config: RootConfig) -> Iterator[Problem]:
    megatron = config.policy.megatron_cfg
    for name, value in megatron.model_overrides.items() if megatron.enabled else ():
        key = f"{_MEGATRON}.model_overrides.{name}"
        if name in MegatronConfig.model_fields:
            field = MegatronConfig.model_fields[name]
            mark = annotation_of(field, NotYet)
            if value == getattr(megatron, name):
                continue
            if mark is not None:
                yield not_built(key, value, mark.why, mark.instead or f"leave it at {field.default!r}")
            else:
                yield f"{key}: {value!r}: this is {_MEGATRON}.{name}; set it there"
            continue
        part = next((part for begin, part in _MEGATRON_PARTS.items() if name.startswith(begin)), None)
        other = next((other for begin, other in _MEGATRON_OTHERS.items() if name.startswith(begin)), None)
        if part is not None:
            if value not in (None, 0, False):
                yield not_built(key, value, part, "leave it out")
        elif other is not None:
            yield f"{key}: {value!r}: this is set by {other}"
        elif name not in _MEGATRON_FREE:
            yield (
                f"{key}: {value!r}: not known to leave the model and its gradients as they are."
                f"{did_you_mean(name, [*_MEGATRON_FREE, *MegatronConfig.model_fields])} Its sizes follow the model's "
                "files (policy.hf_config_overrides)"
            )


# Arguments of vLLM's engine that are a key of this package under another name.
_ENGINE_OTHERS = {
    "model": "policy.model_name",
    "tokenizer": "policy.tokenizer.name",
    "trust_remote_code": "policy.trust_remote_code",
    "dtype": "policy.generation.vllm_cfg.precision",
    "hf_overrides": "policy.hf_config_overrides",
    "disable_log_stats": "policy.generation.vllm_cfg.enable_vllm_metrics_logger",
    "seed": "grpo.seed",
}
# Arguments that would make an engine sample from another model, or another distribution, than is trained; and what
# refits and the router hold in hand.
_ENGINE_REFUSED = {
    **dict.fromkeys(
        ("revision", "code_revision", "tokenizer_revision", "hf_config_path", "rope_scaling", "rope_theta"),
        "engines would load another model than is trained; policy.model_name and policy.hf_config_overrides say which",
    ),
    **dict.fromkeys(
        ("logits_processors", "logits_processor_pattern"),
        "tokens would be drawn from another distribution than their log-probabilities are of; use "
        "policy.generation.bad_words, top_k or top_p",
    ),
    **dict.fromkeys(
        ("quantization", "load_in_4bit", "load_in_8bit"), "quantised engines cannot take the weights that are trained"
    ),
    **dict.fromkeys(
        ("worker_cls", "worker_extension_cls", "enable_sleep_mode", "generation_config", "override_generation_config"),
        "it is set for refits and sampling; leave it out",
    ),
    **dict.fromkeys(
        ("data_parallel_size", "data_parallel_rank", "data_parallel_backend", "nnodes", "node_rank"),
        "every accelerator has an engine of its own, and requests are dealt among them; leave it out",
    ),
}


def engine_arguments_are_safe(config: MasterConfig | EvalMasterConfig) -> Iterator[Problem]:
    if isinstance(config, EvalMasterConfig):
        generation, prefix = config.generation, "generation"
        own: Mapping[str, object] = {}
    else:
        generation, prefix, policy = config.policy.generation, "policy.generation", config.policy
        own = {
            "model": policy.model_name,
            "tokenizer": policy.tokenizer.name,
            "trust_remote_code": policy.trust_remote_code,
            "dtype": generation.vllm_cfg.precision,
            "hf_overrides": policy.hf_config_overrides,
        }
    for name, value in generation.vllm_kwargs.items():
        key = f"{prefix}.vllm_kwargs.{name}"
        if name in own and value == own[name]:
            continue
        if name in _ENGINE_OTHERS:
            yield f"{key}: {value!r}: this is {_ENGINE_OTHERS[name]}; set it there"
        elif name in _ENGINE_REFUSED:
            yield f"{key}: {value!r}: {_ENGINE_REFUSED[name]}"
        elif name in VllmConfig.model_fields:
            yield from _as_its_own_key(key, value, generation.vllm_cfg, name, f"{prefix}.vllm_cfg.{name}")
        elif name in GenerationConfig.model_fields:
            yield from _as_its_own_key(key, value, generation, name, f"{prefix}.{name}")


def _as_its_own_key(key: str, value: object, section: Any, name: str, own: str) -> Iterator[Problem]:
    mark = annotation_of(type(section).model_fields[name], NotYet)
    if value == getattr(section, name):
        return
    if mark is not None and (not mark.values or value in mark.values):
        yield not_built(key, value, mark.why, mark.instead or "leave it out")
    else:
        yield f"{key}: {value!r}: this is {own}; set it there"


_SWITCHES = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "nesterov")


def optimizer_arguments_are_safe(config: RootConfig) -> Iterator[str]:
    if config.policy.optimizer is None:
        return
    for name, value in config.policy.optimizer.kwargs.items():
        key = f"policy.optimizer.kwargs.{name}"
        if name in _SWITCHES and not (value is None or isinstance(value, bool)):
            yield f"{key}: {value!r} is neither true nor false"
        elif name in OPTIMIZER_AMOUNTS and (isinstance(value, bool) or not isinstance(value, (int, float))):
            yield f"{key}: {value!r} is no number"
        elif name in ("maximize", "differentiable") and value:
            yield f"{key}: {value!r}: training minimises the loss, and keeps no graph of its steps; leave it out"
        elif name == "params":
            yield f"{key}: the parameters are the model's; leave it out"


def model_overrides_are_safe(config: RootConfig) -> Iterator[Problem]:
    for name, value in _leaves(config.policy.hf_config_overrides):
        key, last = f"policy.hf_config_overrides.{name}", name.rsplit(".", 1)[-1]
        if last in ("router_aux_loss_coef", "router_z_loss_coef", "aux_loss_alpha") and value:
            yield not_built(key, value, "auxiliary losses of a router", "set it to 0")
        elif last == "output_router_logits" and value:
            yield not_built(key, value, "auxiliary losses of a router", "leave it out")
        elif (last.endswith(("dropout", "_pdrop")) or last == "router_jitter_noise") and value:
            yield not_built(key, value, "dropout, which would make every pass score other tokens", "set it to 0")
        elif last in ("torch_dtype", "dtype"):
            yield f"{key}: {value!r}: this is set by policy.precision"
        elif last in ("quantization_config", "architectures", "model_type", "auto_map"):
            yield f"{key}: {value!r}: another model than the files of policy.model_name hold; name a model that has it"


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


PASS_THROUGH_RULES: tuple[Callable[[RootConfig], Iterator[Problem]], ...] = (
    megatron_overrides_are_safe,
    optimizer_arguments_are_safe,
    model_overrides_are_safe,
)
