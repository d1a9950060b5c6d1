"""Device memory of the adapters of a job: in its engines, which hold room for all slots from their start, and in
training, where each adapter takes its own when it joins. Computed from configurations; measures nothing.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from nemo_rl.config import PolicyConfig
from nemo_rl.config.master import MultiLoraMasterConfig
from nemo_rl.models.dtensor.dtensor_lora import chosen_layers
from nemo_rl.models.policy.model_config import empty_model, model_config

ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM's kernels are made for."""
_TRAINED_BYTES = 16  # of a factor's element: float32 value, gradient and two moments


def engine_rank(rank: int) -> int:
    """The rank that engines hold adapters of a rank with. Raises ValueError: vLLM has none so large."""
    found = next((size for size in ENGINE_RANKS if size >= rank), None)
    if found is None:
        raise ValueError(f"rank {rank}: vLLM takes adapters up to rank {ENGINE_RANKS[-1]}")
    return found


def engine_bytes(config: MultiLoraMasterConfig) -> int:
    """Bytes on each GPU of an engine, at most: every slot has room for an adapter of the largest rank on all linear
    layers, whatever layers the adapters have.
    """
    policy, kwargs = config.policy, config.policy.generation.vllm_kwargs
    widths = [sum(_size(part)) for part in _model(policy).modules() if isinstance(part, nn.Linear)]
    slots = int(str(kwargs.get("max_loras", config.multi_lora.slots)))
    rank = int(str(kwargs.get("max_lora_rank", engine_rank(policy.dtensor_cfg.lora_cfg.dim))))
    width = 4 if policy.generation.vllm_cfg.precision == "float32" else 2
    return slots * rank * sum(widths) * width


def trainer_bytes(config: MultiLoraMasterConfig) -> int:
    """Bytes on each training rank when all slots hold adapters of the base's rank and layers."""
    lora, model = config.policy.dtensor_cfg.lora_cfg, _model(config.policy)
    parts = dict(model.named_modules())
    widths = [sum(_size(parts[name])) for name in chosen_layers(model, lora)]
    return config.multi_lora.slots * lora.dim * sum(widths) * _TRAINED_BYTES


def _model(policy: PolicyConfig) -> nn.Module:
    return empty_model(model_config(policy), trust_remote_code=policy.trust_remote_code)


def layer_kinds(policy: PolicyConfig) -> list[str]:
    """The last parts of the names of the layers that the base may adapt. Raises UnsupportedModelError: it names layers
    that do not exist.
    """
    chosen = chosen_layers(_model(policy), policy.dtensor_cfg.lora_cfg)
    return sorted({name.rpartition(".")[2] for name in chosen})


def _size(layer: Any) -> tuple[int, int]:
    return layer.in_features, layer.out_features
