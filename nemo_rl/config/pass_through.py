"""Rules of free mappings, which reach a library as they are: what they can set is held to the rules of the keys that
this package has for it.

Invariant: nothing is set in two places, and what is refused under its own key is refused here.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
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


# Arguments of vLLM's engine that are a key of this package under another name; {policy} is where the model's keys are.
_ENGINE_OTHERS = {
    "model": "{policy}.model_name",
    "model_weights": "{policy}.model_name",
    "tokenizer": "{tokenizer}.name",
    "trust_remote_code": "{policy}.trust_remote_code",
    "dtype": "{generation}.vllm_cfg.precision",
    "hf_overrides": "policy.hf_config_overrides",
    "disable_log_stats": "{generation}.vllm_cfg.enable_vllm_metrics_logger",
    "seed": "{seed}",
    "lora_dtype": "policy.precision",
}
_OTHER_MODEL = "engines would load another model than is trained; {policy}.model_name says which"
_OTHER_DISTRIBUTION = (
    "tokens would be drawn from another distribution than their log-probabilities are of; use {generation}.bad_words, "
    "top_k or top_p"
)
_ONE_ENGINE_EACH = "every accelerator has an engine of its own, and requests are dealt among them; leave it out"
_STALE_KV = "KV that another store keeps would outlive the weights that it is of; leave it out"
_EXPERTS_MOVE = "refits write each expert where it was at the start; leave it out"
_LORA = "adapters reach engines by refits; policy.dtensor_cfg.lora_cfg says which"
# Beginnings of arguments that would make an engine sample from another model, or another distribution, than is
# trained; and of those that belong to refits and the router.
_ENGINE_REFUSED = {
    **dict.fromkeys(
        ("revision", "code_revision", "tokenizer_revision", "hf_config_path", "rope_scaling", "rope_theta"),
        _OTHER_MODEL,
    ),
    **dict.fromkeys(("model_class_overrides", "runner", "convert", "diffusion_config", "pooler_config"), _OTHER_MODEL),
    **dict.fromkeys(("logits_processor", "watermark_config", "reasoning_config"), _OTHER_DISTRIBUTION),
    **dict.fromkeys(
        ("quantization", "load_in_4bit", "load_in_8bit", "allow_deprecated_quantization"),
        "quantised engines cannot take the weights that are trained",
    ),
    **dict.fromkeys(
        (
            *("worker_cls", "worker_extension_cls", "enable_sleep_mode", "sleep_preserve_parameter_names"),
            *("enable_cumem_allocator", "weight_transfer_config", "generation_config", "override_generation_config"),
        ),
        "it is set for refits and sampling; leave it out",
    ),
    **dict.fromkeys(
        (
            *("data_parallel_", "nnodes", "node_rank", "master_addr", "master_port", "device_ids"),
            *("prefill_context_parallel_size", "_api_process_"),
        ),
        _ONE_ENGINE_EACH,
    ),
    **dict.fromkeys(("kv_transfer_config", "kv_offloading_", "ec_transfer_config"), _STALE_KV),
    **dict.fromkeys(("enable_eplb", "eplb_config", "enable_elastic_ep", "elastic_ep_"), _EXPERTS_MOVE),
    **dict.fromkeys(
        (
            *("enable_lora", "max_loras", "max_lora_", "max_cpu_loras", "default_mm_loras", "fully_sharded_loras"),
            *("lora_target_modules", "specialize_active_lora", "enable_mixed_moe_lora", "enable_moe_shared_loras"),
            "enable_tower_connector_lora",
        ),
        _LORA,
    ),
}
# Options of vLLM's command line, which its engine does not know by these names.
_ENGINE_ALIASES = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "ep": "enable_expert_parallel",
    "max_seq_len": "max_model_len",
    "max_sequence_length": "max_model_len",
    "gpu_memory": "gpu_memory_utilization",
    "eager": "enforce_eager",
}


def engine_arguments_are_safe(config: MasterConfig | EvalMasterConfig) -> Iterator[Problem]:
    if isinstance(config, EvalMasterConfig):
        generation, model, tokenizer = config.generation, config.generation, config.tokenizer
        names = {"generation": "generation", "policy": "generation", "tokenizer": "tokenizer", "seed": "eval.seed"}
        overrides: Mapping[str, object] = {}
    else:
        generation, model, tokenizer = config.policy.generation, config.policy, config.policy.tokenizer
        names = {"generation": "policy.generation", "policy": "policy", "tokenizer": "policy.tokenizer"}
        names["seed"], overrides = "grpo.seed", config.policy.hf_config_overrides
    own = {
        "model": model.model_name,
        "tokenizer": tokenizer.name,
        "trust_remote_code": model.trust_remote_code,
        "dtype": generation.vllm_cfg.precision,
        "hf_overrides": overrides,
        "disable_log_stats": not generation.vllm_cfg.enable_vllm_metrics_logger,
        "generation_config": "vllm",
    }
    prefix, known = names["generation"], engine_arguments()
    yield from _no_numbers(f"{prefix}.vllm_kwargs", generation.vllm_kwargs)
    for spelled, value in generation.vllm_kwargs.items():
        key = f"{prefix}.vllm_kwargs.{spelled}"
        name = spelled.strip("-").replace("-", "_").lower()
        name = _ENGINE_ALIASES.get(name, name)
        if spelled in own and value == own[spelled]:
            continue
        why = next((why for begin, why in _ENGINE_REFUSED.items() if name.startswith(begin)), None)
        if name in _ENGINE_OTHERS:
            yield f"{key}: {value!r}: this is {_ENGINE_OTHERS[name].format(**names)}; set it there"
        elif name in VllmConfig.model_fields:
            yield from _as_its_own_key(key, value, generation.vllm_cfg, name, f"{prefix}.vllm_cfg.{name}", spelled)
        elif name in GenerationConfig.model_fields:
            yield from _as_its_own_key(key, value, generation, name, f"{prefix}.{name}", spelled)
        elif why is not None:
            if value not in (None, False) or name in ("generation_config", "revision"):
                yield f"{key}: {value!r}: {why.format(**names)}"
        elif known and spelled not in known:
            meant = name if name in known else spelled
            yield f"{key}: {value!r}: vLLM's engine has no such argument.{did_you_mean(meant, known)}"


@functools.cache
def engine_arguments() -> frozenset[str]:
    """Names of the arguments of the installed vLLM's engine, read without importing it, which takes many seconds;
    empty where it is not installed.
    """
    found = importlib.util.find_spec("vllm")
    folders = found.submodule_search_locations if found is not None else None
    names: set[str] = set()
    for folder in folders or ():
        file = Path(folder) / "engine" / "arg_utils.py"
        for node in ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else ():
            if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs"):
                fields = (one.target for one in node.body if isinstance(one, ast.AnnAssign))
                names |= {target.id for target in fields if isinstance(target, ast.Name)}
    return frozenset(names)


def _as_its_own_key(key: str, value: object, section: Any, name: str, own: str, spelled: str) -> Iterator[Problem]:
    mark = annotation_of(type(section).model_fields[name], NotYet)
    if value == getattr(section, name) and spelled == name:
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
        elif name in OPTIMIZER_AMOUNTS and not _is_number(value):
            yield f"{key}: {value!r} is no number; write one such as 1e-6 or 0.01"
        elif name == "betas" and not (isinstance(value, list) and all(map(_is_number, value))):
            yield f"{key}: {value!r} is no list of numbers; write one such as [0.9, 0.999]"
        elif name in ("maximize", "differentiable") and value:
            yield f"{key}: {value!r}: training minimises the loss, and keeps no graph of its steps; leave it out"
        elif name == "params":
            yield f"{key}: the parameters are the model's; leave it out"


# What torch's schedulers take as text; everything else of theirs is a number, a switch, or a list of numbers.
_SCHEDULER_TEXTS = ("mode", "threshold_mode", "anneal_strategy", "scale_mode")


def scheduler_arguments_are_safe(config: RootConfig) -> Iterator[str]:
    for index, entry in enumerate(config.policy.scheduler or ()):
        for name, value in entry.kwargs.items():
            key = f"policy.scheduler.{index}.kwargs.{name}"
            if name == "optimizer":
                yield f"{key}: the optimizer is policy.optimizer; leave it out"
            elif name == "last_epoch":
                yield f"{key}: {value!r}: a schedule begins with the run, and a resumed run goes on in it; leave it out"
            elif (entry.name or "").startswith("torch.optim.lr_scheduler.") and name not in _SCHEDULER_TEXTS:
                texts = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]
                if texts:
                    yield f"{key}: {texts[0]!r} is no number; write one such as 0.1 or 50"


# Arguments of transformers' rendering that are a key of this package, or that say how its result is used.
_RENDERING_OTHERS = {
    "chat_template": "{tokenizer}.chat_template",
    "tools": "the column tools of the rows",
    "add_generation_prompt": "data.add_generation_prompt",
    **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "the tokenizer's files"),
}
_RENDERING_OWN = """
    conversation messages documents continue_final_message tokenize padding truncation max_length return_tensors
    return_dict return_assistant_tokens_mask tokenizer_kwargs add_special_tokens processor_kwargs
""".split()  # noqa: SIM905 -- as above


def template_arguments_are_safe(config: RootConfig | EvalMasterConfig) -> Iterator[str]:
    """Whether a template reads its other variables is seen when it is loaded."""
    if isinstance(config, EvalMasterConfig):
        tokenizer, prefix = config.tokenizer, "tokenizer"
    else:
        tokenizer, prefix = config.policy.tokenizer, "policy.tokenizer"
    for name, value in (tokenizer.chat_template_kwargs or {}).items():
        key = f"{prefix}.chat_template_kwargs.{name}"
        if name in _RENDERING_OTHERS:
            yield f"{key}: {value!r}: this is set by {_RENDERING_OTHERS[name].format(tokenizer=prefix)}"
        elif name in _RENDERING_OWN:
            yield f"{key}: {value!r}: it is no variable of a template, and set wherever one is rendered; leave it out"


# Variables that say which rank a process is, where it runs and whom it meets.
_PLACEMENT = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "RAY_ADDRESS", "RAY_JOB_ID", "VLLM_RPC_BASE_PATH"),
    *("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_DP_RANK", "VLLM_DP_SIZE", "VLLM_DP_MASTER_PORT"),
)


def variables_are_safe(config: RootConfig | EvalMasterConfig) -> Iterator[str]:
    if isinstance(config, EvalMasterConfig):
        sections = {"generation.vllm_cfg": config.generation.vllm_cfg.env_vars}
    else:
        sections = {
            "policy.generation.vllm_cfg": config.policy.generation.vllm_cfg.env_vars,
            "policy.dtensor_cfg": config.policy.dtensor_cfg.env_vars,
            "policy.megatron_cfg": config.policy.megatron_cfg.env_vars,
        }
    for section, variables in sections.items():
        for name in _PLACEMENT:
            if name in (variables or {}):
                yield (
                    f"{section}.env_vars.{name}: {(variables or {})[name]!r}: it is set for each process by where "
                    "cluster.* puts it; leave it out"
                )


# Arguments of trackers that are a key of this package, or what a run needs of them.
_TRACKERS = {
    "wandb": {
        "dir": "logger.log_dir",
        "config": "the run's configuration, which is logged whole",
        "reinit": "the run, which opens one tracker",
        "settings": "the run; WANDB_* variables set what it leaves open",
        "run_name": "logger.wandb.name",
    },
    "swanlab": {
        "log_dir": "logger.log_dir",
        "logdir": "logger.log_dir",
        "config": "the run's configuration, which is logged whole",
        "experiment_name": "logger.swanlab.name",
    },
}


def tracker_arguments_are_safe(config: RootConfig) -> Iterator[str]:
    for tracker, others in _TRACKERS.items():
        given = getattr(config.logger, tracker).model_extra or {}
        for name in given.keys() & others.keys():
            yield f"logger.{tracker}.{name}: {given[name]!r}: this is set by {others[name]}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _counted(name: str) -> bool:
    """Whether an option that is passed on is a number by its name."""
    return name.startswith(("max_", "min_", "num_")) or name.endswith(
        ("_size", "_gb", "_bytes", "_len", "_theta", "_eps", "_layers", "_utilization")
    )


def _no_numbers(prefix: str, options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in _leaves(options):
        if _counted(name.rsplit(".", 1)[-1]) and isinstance(value, str) and value != "auto":
            yield f"{prefix}.{name}: {value!r} is no number; write one without quotes and units"


def passed_on_numbers_are_numbers(config: RootConfig) -> Iterator[str]:
    policy = config.policy
    if policy.megatron_cfg.enabled:
        yield from _no_numbers(f"{_MEGATRON}.model_overrides", policy.megatron_cfg.model_overrides)
    yield from _no_numbers("policy.hf_config_overrides", policy.hf_config_overrides)


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
    scheduler_arguments_are_safe,
    passed_on_numbers_are_numbers,
    model_overrides_are_safe,
    template_arguments_are_safe,
    variables_are_safe,
    tracker_arguments_are_safe,
)
EVAL_PASS_THROUGH_RULES: tuple[Callable[[EvalMasterConfig], Iterator[Problem]], ...] = (
    template_arguments_are_safe,
    variables_are_safe,
)
