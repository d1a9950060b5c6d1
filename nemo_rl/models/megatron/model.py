"""Builds Megatron's model of a Hugging Face configuration, sharded as the policy section says.

Layers are Transformer Engine's if it is installed and there is a GPU, else Megatron's own. Invariant: every key of
`policy.megatron_cfg` is honoured here or refused by `checks`.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nemo_rl.config import PolicyConfig
from nemo_rl.config.megatron import MegatronConfig
from nemo_rl.models.megatron import cpu
from nemo_rl.models.megatron.bridge import Bridge, is_known
from nemo_rl.models.megatron.families import Naming, Sizes
from nemo_rl.models.megatron.groups import MegatronGroups
from nemo_rl.models.megatron.megatron_lora import attach_adapters
from nemo_rl.models.megatron.prediction import prediction_block
from nemo_rl.models.policy.model_config import UnsupportedModelError, compute_dtype

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformers import PretrainedConfig


def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed and can run."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


@dataclass(frozen=True)
class BuiltModel:
    """This rank's part of a model."""

    chunks: list[nn.Module]  # one module, or several with virtual stages
    config: TransformerConfig
    sizes: Sizes
    naming: Naming  # of its kind of layers
    kernels: str  # which implementation of the layers it is, in words
    bridge: Bridge | None = None  # what carries its weights where the backend does not know its family


def build_model(cfg: PolicyConfig, model: PretrainedConfig, groups: MegatronGroups, *, depths: int) -> BuiltModel:
    """The model without weights, on this rank's device. `depths`: its layers of multi-token prediction."""
    from megatron.core import __version__, tensor_parallel
    from megatron.core.transformer.moe import moe_utils

    from nemo_rl.models.megatron.packed_layers import PackedGPT

    # Megatron-Core 0.16 asks for this name whether or not Transformer Engine, which would define it, is there.
    moe_utils.__dict__.setdefault("te_general_gemm", None)
    cpu.install()
    engine = has_transformer_engine()
    bridge = None if is_known(model) else Bridge(cfg, model, engine=engine)
    sizes = Sizes.of(model) if bridge is None else bridge.sizes
    if bridge is None:
        config = transformer_config(cfg, sizes, engine=engine, depths=depths)
    else:
        config = bridge.config(_running(cfg, sizes, engine=engine) | _overrides(cfg))
    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    stages = config.virtual_pipeline_model_parallel_size or 1
    angles_D, rotary_factor = rotary_angles(model)
    chunks: list[nn.Module] = []
    for virtual in range(stages):
        stage = virtual if stages > 1 else None
        given = bridge if engine else None
        layers = _layers(config, sizes, stage, engine=engine) if given is None else given.layers(stage)
        chunk = PackedGPT(
            angles_D=angles_D,
            rotary_factor=rotary_factor,
            config=config,
            transformer_layer_spec=layers,
            vocab_size=sizes.vocabulary,
            max_sequence_length=cfg.max_total_sequence_length,
            pre_process=groups.is_first_stage and virtual == 0,
            post_process=groups.is_last_stage and virtual == stages - 1,
            parallel_output=True,
            share_embeddings_and_output_weights=sizes.tied,
            mtp_block_spec=prediction_block(config, layers, stage, engine=engine),
            **({"vp_stage": virtual} if stages > 1 else {}),
        )
        if sizes.tied and chunk.mtp_process and not chunk.pre_process:
            # Its copy of the embedding is the projection; Megatron allocates another, which nothing would use.
            chunk.output_layer.weight = None
        chunks.append(chunk.to(groups.device))
    cpu.install()
    if cfg.megatron_cfg.peft.enabled:
        attach_adapters(chunks, cfg, sizes, groups)
    elif cfg.megatron_cfg.freeze_moe_router:
        for name, parameter in (named for chunk in chunks for named in chunk.named_parameters()):
            parameter.requires_grad_(not is_frozen_router(name))
    for chunk in chunks:
        cpu.name_types(chunk)
    kind = "transformer-engine" if engine else "local"
    by = "" if bridge is None else ", megatron-bridge"
    return BuiltModel(
        chunks,
        config,
        sizes,
        Naming(engine, engine and bool(sizes.experts)),
        f"megatron-core {__version__} ({kind}{by})",
        bridge,
    )


def is_frozen_router(name: str) -> bool:
    """Whether `freeze_moe_router` is about a parameter: not in layers of multi-token prediction, which are new."""
    return ".mlp.router." in name and not name.startswith("mtp.")


def transformer_config(cfg: PolicyConfig, sizes: Sizes, *, engine: bool, depths: int) -> TransformerConfig:
    """Megatron's configuration of the model and of how it is cut. `depths`: see `build_model`."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    architecture: dict[str, object] = {
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "ffn_hidden_size": sizes.feed_forward,
        "num_attention_heads": sizes.heads,
        "num_query_groups": sizes.groups,
        "kv_channels": sizes.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": sizes.norm_epsilon,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": sizes.family.qkv_bias,
        "qk_layernorm": sizes.family.qk_norm,
        "perform_initialization": False,
    }
    if sizes.experts:
        architecture |= {
            "num_moe_experts": sizes.experts,
            "moe_ffn_hidden_size": sizes.feed_forward,
            "moe_router_topk": sizes.experts_per_token,
            # The softmax over the chosen experts alone equals that over all, divided by the mass of the chosen.
            "moe_router_pre_softmax": False,
        }
    if depths:
        architecture |= {
            "mtp_num_layers": depths,
            "mtp_loss_scaling_factor": cfg.megatron_cfg.mtp_loss_scaling_factor,
        }
    return TransformerConfig(**(architecture | _running(cfg, sizes, engine=engine) | _overrides(cfg)))


def _overrides(cfg: PolicyConfig) -> dict[str, Any]:
    """Options that no key here has; those that one has say the same, and mean what that key means."""
    return {
        name: value
        for name, value in cfg.megatron_cfg.model_overrides.items()
        if name not in MegatronConfig.model_fields
    }


def _running(cfg: PolicyConfig, sizes: Sizes, *, engine: bool) -> dict[str, Any]:
    """How the model is cut and computed, whatever its architecture."""
    mcore, dtype = cfg.megatron_cfg, compute_dtype(cfg.precision)
    options: dict[str, object] = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": mcore.tensor_model_parallel_size,
        "pipeline_model_parallel_size": mcore.pipeline_model_parallel_size,
        "context_parallel_size": mcore.context_parallel_size,
        "expert_model_parallel_size": mcore.expert_model_parallel_size,
        "expert_tensor_parallel_size": mcore.expert_tensor_parallel_size,
        "num_layers_in_first_pipeline_stage": mcore.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": mcore.num_layers_in_last_pipeline_stage,
        "sequence_parallel": mcore.sequence_parallel and mcore.tensor_model_parallel_size > 1,
        # Rows of a step differ in length, and the step divides by global counts once, at its end.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "calculate_per_token_loss": True,
        "bias_activation_fusion": mcore.bias_activation_fusion,
        "apply_rope_fusion": mcore.apply_rope_fusion and engine,
        "gradient_accumulation_fusion": mcore.gradient_accumulation_fusion,
        "masked_softmax_fusion": False,
    }
    experts = _experts(cfg, engine=engine) if sizes.experts else {}
    return options | _recompute(cfg) | experts | _fp8(cfg) | cpu.options() | _interleaving(cfg)


def _recompute(cfg: PolicyConfig) -> dict[str, object]:
    mcore = cfg.megatron_cfg
    if not mcore.activation_checkpointing:
        return {}
    if mcore.recompute_granularity == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    modules = {"recompute_modules": mcore.recompute_modules} if mcore.recompute_modules is not None else {}
    return {"recompute_granularity": "selective", **modules}


def _interleaving(cfg: PolicyConfig) -> dict[str, object]:
    if not cfg.megatron_cfg.model_overrides.get("virtual_pipeline_model_parallel_size"):
        return {}
    # Of two stages the neighbours before and after are one rank, whose messages only single operations keep apart.
    return {"overlap_p2p_comm": True, "batch_p2p_comm": False}


def _experts(cfg: PolicyConfig, *, engine: bool) -> dict[str, object]:
    mcore = cfg.megatron_cfg
    return {
        "moe_router_load_balancing_type": "aux_loss" if mcore.load_balancing_weight else "none",
        "moe_router_dtype": mcore.moe_router_dtype,
        "moe_aux_loss_coeff": mcore.load_balancing_weight,
        "moe_permute_fusion": mcore.moe_permute_fusion and engine,
        "moe_grouped_gemm": engine,
    }


def _fp8(cfg: PolicyConfig) -> dict[str, object]:
    fp8 = cfg.megatron_cfg.fp8_cfg
    return {"fp8": fp8.fp8, "fp8_recipe": fp8.fp8_recipe, "fp8_param": fp8.fp8_param} if fp8.enabled else {}


def _layers(config: object, sizes: Sizes, virtual: int | None, *, engine: bool) -> object:
    """The layers of one chunk, as Megatron specifies them."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    from nemo_rl.models.megatron.packed_layers import PackedAttention, RowNorm

    options: dict[str, object] = {"num_experts": sizes.experts or None, "qk_layernorm": sizes.family.qk_norm}
    if engine:
        spec = get_gpt_layer_with_transformer_engine_spec(moe_grouped_gemm=bool(sizes.experts), **options)
        spec.submodules.self_attention.submodules.core_attention = PackedAttention
        return spec
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", **options)
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    # Megatron's own norm cannot work on tokens that are cut over ranks.
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RowNorm
    if sizes.family.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RowNorm
    here = get_num_layers_to_build(config, vp_stage=virtual)
    return TransformerBlockSubmodules(layer_specs=[spec] * here, layer_norm=RowNorm)


def unwrap(chunk: nn.Module) -> GPTModel:
    """The GPT model in a part of the model that Megatron's data parallelism may wrap."""
    return getattr(chunk, "module", chunk)


def rotary_angles(model: GPTModel) -> tuple[torch.Tensor, float]:
    """Rotary frequencies [head dimension / 2] of a model, as transformers computes them, and the factor of queries and
    keys (YaRN's). Raises UnsupportedModelError: its frequencies change with the length of a sequence.
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    embedding = LlamaRotaryEmbedding(config=model)
    if any(kind in str(getattr(embedding, "rope_type", "")) for kind in ("dynamic", "longrope")):
        raise UnsupportedModelError(
            f"policy.megatron_cfg.enabled: rotary embeddings of type {embedding.rope_type!r} are not supported by this "
            "backend; train the model with policy.dtensor_cfg.enabled=true"
        )
    return embedding.inv_freq.detach().float().cpu().clone(), float(embedding.attention_scaling)
