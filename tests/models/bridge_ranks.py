"""A stand-in for the package megatron-bridge, with its entry's names and signatures, and what ranks do with it.

It knows Mistral, whose layers and weights are Llama's: so what it carries can be compared with the backend's own way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch

from nemo_rl.models.megatron.families import FAMILIES, Naming, Sizes
from nemo_rl.models.megatron.sharded_weights import ShardedWeights
from tests.models.policy_ranks import expert_story


class HFWeightTuple(NamedTuple):
    param_name: str
    weight: torch.Tensor


class AutoMapping:
    registered: ClassVar[dict[str, str]] = {}

    @classmethod
    def register_module_type(cls, module_name: str, parallelism_type: str) -> None:
        cls.registered[module_name] = parallelism_type


class AutoBridge:
    """`megatron.bridge.AutoBridge`, as far as the backend calls it."""

    def __init__(self, config: Any) -> None:
        self.hf_config = config
        self.has_files = False

    @classmethod
    def from_hf_config(cls, config: Any) -> AutoBridge:
        if config.architectures != ["MistralForCausalLM"]:
            raise ValueError(f"Model architecture not supported: {config.architectures}\nmore lines")
        return cls(config)

    @classmethod
    def from_hf_pretrained(cls, path: str | Path, **kwargs: Any) -> AutoBridge:
        from transformers import AutoConfig

        assert set(kwargs) <= {"trust_remote_code", "torch_dtype", "device_map", "attn_implementation"}
        made = cls.from_hf_config(AutoConfig.from_pretrained(path, **kwargs))
        made.has_files = True
        return made

    def to_megatron_provider(self, load_weights: bool = True, hf_path: str | Path | None = None) -> Any:
        assert not load_weights or self.has_files
        return _provider(self.hf_config)

    def load_hf_weights(
        self, model: list[Any], hf_path: str | Path | None = None, allowed_mismatched_params: Any = None
    ) -> list[Any]:
        self._weights(model).load(str(hf_path))
        return model

    def export_hf_weights(
        self,
        model: list[Any],
        cpu: bool = False,
        show_progress: bool = True,
        conversion_tasks: Any = None,
        merge_adapter_weights: bool = True,
    ) -> Iterator[HFWeightTuple]:
        if not self.has_files:
            raise ValueError("hf_pretrained.state.source is required for weight ordering")
        for name, tensor in self._weights(model).full(None, torch.device("cpu")):
            yield HFWeightTuple(name, tensor)

    def _weights(self, model: list[Any]) -> ShardedWeights:
        from megatron.core import parallel_state as state

        pp = state.get_pipeline_model_parallel_group()
        groups: Any = SimpleNamespace(
            tp_group=state.get_tensor_model_parallel_group(),
            pp_group=pp,
            ep_group=state.get_expert_model_parallel_group(),
            sizes=SimpleNamespace(ep=1, pp=pp.size()),
        )
        return ShardedWeights(model, _as_llama(self.hf_config), Naming(), groups)


def _as_llama(config: Any) -> Sizes:
    FAMILIES["mistral"] = FAMILIES["llama"]
    try:
        return Sizes.of(config)
    finally:
        del FAMILIES["mistral"]


def _provider(config: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    @dataclass
    class MistralModelProvider(TransformerConfig):
        """Checks nothing before `finalize`."""

        vocab_size: int = 0
        should_pad_vocab: bool = True
        share_embeddings_and_output_weights: bool = False
        position_embedding_type: str = "rope"
        rotary_percent: float = 1.0
        bias_activation_fusion: bool = True
        transformer_layer_spec: Any = None

        def __post_init__(self) -> None: ...

        def finalize(self) -> None:
            super().__post_init__()

    return MistralModelProvider(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        window_size=config.sliding_window,
        vocab_size=config.vocab_size,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        transformer_layer_spec=_layer_spec,
    )


def _layer_spec(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(normalization=config.normalization)


def modules() -> dict[str, ModuleType]:
    """The stand-in's modules by name."""
    bridge = ModuleType("megatron.bridge")
    bridge.__spec__ = ModuleSpec("megatron.bridge", None)
    bridge.__dict__["AutoBridge"] = AutoBridge
    name = "megatron.bridge.models.conversion.param_mapping"
    mappings = ModuleType(name)
    mappings.__dict__["AutoMapping"] = AutoMapping
    return {"megatron.bridge": bridge, name: mappings}


def bridged_stories(
    models: dict[str, str], world: int, folder: str, cases: dict[str, list[str]]
) -> dict[str, dict[str, Any]]:
    """`expert_story` of a family through the stand-in and of the same weights through the backend's own names, and of
    the checkpoint that the first wrote.
    """
    sys.modules.update(modules())
    seen = {}
    own = expert_story(models["llama"], world, f"{folder}/own", next(iter(cases.values())))
    for name, overrides in cases.items():
        seen[name] = {
            "own": own,
            "bridged": expert_story(models["mistral"], world, f"{folder}/{name}", overrides),
            "resumed": expert_story(models["mistral"], world, "", overrides, f"{folder}/{name}"),
        }
    return seen
