"""The checks of the DTensor backend: parallel sizes, names, adapters, kinds of layers, and kernels that a machine may
lack (attention on GPUs, Liger's layers).

The driver's read configurations only. They refuse before Ray starts, or as soon as the kind of slot is known.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from typing import TYPE_CHECKING

from nemo_rl.config import DTensorConfig, PolicyConfig
from nemo_rl.models.policy.model_config import (
    KernelUnavailableError,
    UnsupportedModelError,
    auto_class,
    check_divisible,
    check_experts,
    check_not_quantized,
    text_config,
)
from nemo_rl.models.policy.optimizer import check_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

LIGER = "policy.dtensor_cfg.automodel_kwargs.use_liger_kernel"
_ATTENTION = "policy.dtensor_cfg.automodel_kwargs.backend.attn"
# Kinds of layers that the packed attention computes, and those without attention.
_APART = frozenset({"full_attention", "sliding_attention", "attention", "moe", "mlp", "dense", "sparse"})
# Kinds that carry a state along the row, which would go from one sequence into the next.
_CARRY = frozenset({"linear_attention", "mamba", "conv", "hybrid"})
_ONE_EACH = (
    "set policy.train_micro_batch_size and policy.logprob_batch_size (and sft.val_micro_batch_size) to 1, and switch "
    "policy.sequence_packing and policy.dynamic_batching off"
)


def check_policy(cfg: PolicyConfig, model: PretrainedConfig) -> None:
    check_not_quantized(model, cfg)
    if auto_class(model) is None:
        raise UnsupportedModelError(
            f"policy.model_name={cfg.model_name} is a {model.model_type} model, of which transformers has none that "
            "writes text; name a language model"
        )
    _check_layers(cfg, model)
    check_divisible(model, cfg.dtensor_cfg.tensor_parallel_size, "policy.dtensor_cfg.tensor_parallel_size")
    check_experts(model, cfg.dtensor_cfg)
    check_packages(cfg.dtensor_cfg)
    check_names(cfg.optimizer, cfg.scheduler)
    if cfg.dtensor_cfg.lora_cfg.enabled:
        _check_adapters(cfg, model)


def carries_state(model: PretrainedConfig) -> bool:
    """Whether layers carry a state along a row, so that a row may hold one sequence only. `model`: the model's Hugging
    Face configuration.
    """
    return bool(_kinds(model) & _CARRY)


def _kinds(model: PretrainedConfig) -> set[str]:
    config = text_config(model)
    named = (getattr(config, name, None) or () for name in ("layer_types", "layers_block_type"))
    return {kind for kinds in named for kind in kinds}


def _check_layers(cfg: PolicyConfig, model: PretrainedConfig) -> None:
    kinds, parallel = _kinds(model), cfg.dtensor_cfg
    name = f"policy.model_name={cfg.model_name} (a {model.model_type} model)"
    unknown = sorted(kinds - _APART - _CARRY)
    if unknown:
        raise UnsupportedModelError(
            f"{name} has layers of the kind {', '.join(unknown)}, which training by DTensor does not compute; it does "
            f"{', '.join(sorted(_APART | _CARRY))}"
        )
    if not carries_state(model):
        return
    carrying = ", ".join(sorted(kinds & _CARRY))
    if parallel.context_parallel_size > 1 or parallel.sequence_parallel:
        raise UnsupportedModelError(
            f"{name} has layers of the kind {carrying}, which need whole sequences on every rank; set "
            "policy.dtensor_cfg.context_parallel_size to 1 and sequence_parallel to false"
        )
    together = cfg.sequence_packing.enabled or cfg.dynamic_batching.enabled
    if together or cfg.train_micro_batch_size > 1 or cfg.logprob_batch_size > 1:
        raise UnsupportedModelError(
            f"{name} has layers of the kind {carrying}, which carry a state along a row: sequences of one microbatch "
            f"would read each other; {_ONE_EACH}"
        )


def check_one_sequence(rows: int) -> None:
    """Whether a microbatch of a model that carries a state has one sequence. Raises UnsupportedModelError: it has
    `rows`.
    """
    if rows > 1:
        raise UnsupportedModelError(
            f"a microbatch has {rows} sequences, which would read each other in layers that carry a state along a row; "
            f"{_ONE_EACH}"
        )


def check_attention(model: PreTrainedModel) -> None:
    """Whether the model's layers attend by the function that is registered with transformers. Raises
    UnsupportedModelError: they bring an attention of their own, which knows nothing of sequences side by side.
    """
    kind, kinds = type(model), _kinds(model.config)
    if kinds and kinds <= _CARRY - {"hybrid"}:
        return
    if not (kind._supports_attention_backend or hasattr(sys.modules[kind.__module__], "ALL_ATTENTION_FUNCTIONS")):
        raise UnsupportedModelError(
            f"{kind.__name__} computes attention by itself and not through transformers' AttentionInterface, so that "
            "sequences side by side would read each other; training by DTensor needs a model that uses the interface"
        )


def _check_adapters(cfg: PolicyConfig, model: PretrainedConfig) -> None:
    from nemo_rl.models.dtensor.dtensor_lora import KEY, chosen_layers
    from nemo_rl.models.dtensor.experts import expert_modules
    from nemo_rl.models.policy.model_config import empty_model

    whole = empty_model(model, trust_remote_code=cfg.trust_remote_code)
    chosen_layers(whole, cfg.dtensor_cfg.lora_cfg)
    if cfg.dtensor_cfg.lora_cfg.match_all_linear and expert_modules(whole):
        logger.warning(
            "%s.match_all_linear: the experts of %s lie in stacked weights, which get no adapters",
            KEY,
            cfg.model_name,
        )


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
