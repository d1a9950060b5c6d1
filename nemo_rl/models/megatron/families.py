"""The model families that the Megatron backend supports, and the mapping of their Hugging Face weights.

Megatron fuses query, key and value of each attention group, and gate and up of a feed-forward; experts stay separate.
Each parameter is described by its parts and how tensor-parallel ranks cut it. Invariant: joining and splitting, cutting
and pasting are inverse bit for bit.

Shapes: G key/value groups, Q query heads of a group, H head dimension, D model width, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from nemo_rl.models.policy.model_config import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Cut = Literal["whole", "rows", "columns", "qkv", "gate_up"]


@dataclass(frozen=True)
class Family:
    """A model family. `expert_parts`: names of gate, up and down of an expert; None for a dense family."""

    qkv_bias: bool = False  # whether query, key and value have a bias
    qk_norm: bool = False  # whether queries and keys are normalised per head
    mlp: str = "mlp"  # prefix of the feed-forward in a layer
    expert_parts: tuple[str, str, str] | None = None


FAMILIES = {
    "llama": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, expert_parts=("gate_proj", "up_proj", "down_proj")),
    "mixtral": Family(mlp="block_sparse_moe", expert_parts=("w1", "w3", "w2")),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, from its Hugging Face configuration."""

    family: Family
    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    experts: int
    experts_per_token: int
    tied: bool
    norm_epsilon: float

    @staticmethod
    def of(config: PretrainedConfig) -> Sizes:
        """Sizes of the model. Raises UnsupportedModelError: the family is unknown, or the model has a part that
        Megatron's layers here lack.
        """
        family = FAMILIES.get(config.model_type)
        if family is None:
            raise UnsupportedModelError(
                f"policy.megatron_cfg.enabled: the model type {config.model_type!r} is not known; possible: "
                f"{', '.join(FAMILIES)}; or train it with policy.dtensor_cfg.enabled=true"
            )
        _refuse_unknown_parts(config)
        moe = family.expert_parts is not None
        experts = (getattr(config, "num_experts", None) or getattr(config, "num_local_experts", 0)) if moe else 0
        width = (getattr(config, "moe_intermediate_size", None) if moe else None) or config.intermediate_size
        return Sizes(
            family,
            config.num_hidden_layers,
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            width,
            config.vocab_size,
            int(experts),
            int(config.num_experts_per_tok) if moe else 0,
            bool(config.tie_word_embeddings),
            float(config.rms_norm_eps),
        )


def _refuse_unknown_parts(config: PretrainedConfig) -> None:
    refused = {
        "attention_bias": getattr(config, "attention_bias", False) and config.model_type != "qwen2",
        "mlp_bias": getattr(config, "mlp_bias", False),
        "sliding_window": getattr(config, "sliding_window", None) is not None
        and getattr(config, "use_sliding_window", True),
        "hidden_act": config.hidden_act != "silu",
        "attention_dropout": bool(getattr(config, "attention_dropout", 0.0)),
        "mlp_only_layers": bool(getattr(config, "mlp_only_layers", None)),
        "decoder_sparse_step": getattr(config, "decoder_sparse_step", 1) != 1,
    }
    for name, present in refused.items():
        if present:
            raise UnsupportedModelError(
                f"policy.megatron_cfg.enabled: the model's {name}={getattr(config, name)!r} is not supported by this "
                "backend; train it with policy.dtensor_cfg.enabled=true"
            )


@dataclass(frozen=True)
class Weight:
    """One whole parameter of Megatron."""

    name: str  # Megatron's name, layers and experts numbered over the whole model
    parts: tuple[tuple[str, tuple[int, ...]], ...]  # Hugging Face names and shapes of its parts
    cut: Cut = "whole"  # how tensor-parallel ranks cut it
    groups: int = 1  # key/value groups, for `qkv`
    expert: int | None = None  # number of the expert it belongs to, or None
    shared: bool = False  # whether every part is all of the parameter

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        first = self.parts[0][1]
        return first if self.shared else (sum(shape[0] for _, shape in self.parts), *first[1:])

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parameter from its Hugging Face parts."""
        if self.shared:
            return tensors[0]
        if self.cut == "qkv":
            grouped = [tensor.reshape(self.groups, -1, *tensor.shape[1:]) for tensor in tensors]
            return torch.cat(grouped, dim=1).flatten(0, 1)
        return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Its Hugging Face parts from the parameter."""
        if self.shared:
            return [whole] * len(self.parts)
        rows = [shape[0] for _, shape in self.parts]
        if self.cut == "qkv":
            grouped = whole.reshape(self.groups, -1, *whole.shape[1:])
            parts = grouped.split([count // self.groups for count in rows], dim=1)
            return [part.flatten(0, 1) for part in parts]
        return list(whole.split(rows)) if len(rows) > 1 else [whole]

    def shard(self, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """A tensor-parallel rank's part."""
        if ranks == 1 or self.cut == "whole":
            return whole
        if self.cut == "columns":
            return whole.chunk(ranks, dim=1)[rank]
        if self.cut == "gate_up":
            return torch.cat([half.chunk(ranks)[rank] for half in whole.chunk(2)])
        return whole.chunk(ranks)[rank]

    def paste(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole from every tensor-parallel rank's part."""
        if len(shards) == 1 or self.cut == "whole":
            return shards[0]
        if self.cut == "columns":
            return torch.cat(list(shards), dim=1)
        if self.cut == "gate_up":
            halves = [shard.chunk(2) for shard in shards]
            return torch.cat([half[which] for which in (0, 1) for half in halves])
        return torch.cat(list(shards))


@dataclass(frozen=True)
class Naming:
    """Names that differ between Megatron's kinds of layers. `grouped_experts`: whether a layer's experts are one module
    with a weight for each (Transformer Engine).
    """

    fused_norms: bool = False  # whether norms are part of the projection after them (Transformer Engine)
    grouped_experts: bool = False

    def input_norm(self, layer: str) -> str:
        return (
            f"{layer}.self_attention.linear_qkv.layer_norm_weight"
            if self.fused_norms
            else (f"{layer}.input_layernorm.weight")
        )

    def mlp_norm(self, layer: str, *, dense: bool) -> str:
        if self.fused_norms and dense:
            return f"{layer}.mlp.linear_fc1.layer_norm_weight"
        return f"{layer}.pre_mlp_layernorm.weight"

    def expert(self, layer: str, expert: int, linear: str) -> str:
        if self.grouped_experts:
            return f"{layer}.mlp.experts.{linear}.weight{expert}"
        return f"{layer}.mlp.experts.local_experts.{expert}.{linear}.weight"


def weights_of(sizes: Sizes, naming: Naming) -> Iterator[Weight]:
    """Every parameter of the model in the order of its layers; a tied output projection is not repeated."""
    vocabulary = (sizes.vocabulary, sizes.hidden)
    yield Weight("embedding.word_embeddings.weight", (("model.embed_tokens.weight", vocabulary),), "rows")
    for layer in range(sizes.layers):
        yield from _layer(sizes, naming, f"model.layers.{layer}", f"decoder.layers.{layer}")
    yield Weight("decoder.final_layernorm.weight", (("model.norm.weight", (sizes.hidden,)),))
    if not sizes.tied:
        yield Weight("output_layer.weight", (("lm_head.weight", vocabulary),), "rows")


def prediction_weights_of(sizes: Sizes, naming: Naming, depths: int) -> Iterator[Weight]:
    """Every parameter of the layers of multi-token prediction, which none of the families has in its files; the parts
    have names of the same kind. `depths`: how many layers there are.
    """
    norm = (sizes.hidden,)
    for depth in range(depths):
        own = f"mtp.layers.{depth}"
        for which in ("enorm", "hnorm"):
            yield Weight(f"{own}.{which}.weight", ((f"{own}.{which}.weight", norm),))
        projection = ((f"{own}.eh_proj.weight", (sizes.hidden, 2 * sizes.hidden)),)
        yield Weight(f"{own}.eh_proj.weight", projection, "rows")
        yield from _layer(sizes, naming, own, f"{own}.transformer_layer")
        yield Weight(f"{own}.final_layernorm.weight", ((f"{own}.final_layernorm.weight", norm),))


def _layer(sizes: Sizes, naming: Naming, hf: str, own: str) -> Iterator[Weight]:
    queries, keys = sizes.heads * sizes.head_dim, sizes.groups * sizes.head_dim
    rows = {"q": queries, "k": keys, "v": keys}
    yield Weight(naming.input_norm(own), ((f"{hf}.input_layernorm.weight", (sizes.hidden,)),))
    kinds = {"weight": (sizes.hidden,)} | ({"bias": ()} if sizes.family.qkv_bias else {})
    for kind, rest in kinds.items():
        parts = tuple((f"{hf}.self_attn.{which}_proj.{kind}", (count, *rest)) for which, count in rows.items())
        yield Weight(f"{own}.self_attention.linear_qkv.{kind}", parts, "qkv", sizes.groups)
    if sizes.family.qk_norm:
        for which in ("q", "k"):
            part = (f"{hf}.self_attn.{which}_norm.weight", (sizes.head_dim,))
            yield Weight(f"{own}.self_attention.{which}_layernorm.weight", (part,))
    output = (f"{hf}.self_attn.o_proj.weight", (sizes.hidden, queries))
    yield Weight(f"{own}.self_attention.linear_proj.weight", (output,), "columns")
    norm = (f"{hf}.post_attention_layernorm.weight", (sizes.hidden,))
    yield Weight(naming.mlp_norm(own, dense=not sizes.experts), (norm,))
    wide, narrow = (sizes.feed_forward, sizes.hidden), (sizes.hidden, sizes.feed_forward)
    if not sizes.experts:
        gate_up = ((f"{hf}.mlp.gate_proj.weight", wide), (f"{hf}.mlp.up_proj.weight", wide))
        yield Weight(f"{own}.mlp.linear_fc1.weight", gate_up, "gate_up")
        yield Weight(f"{own}.mlp.linear_fc2.weight", ((f"{hf}.mlp.down_proj.weight", narrow),), "columns")
        return
    mlp, (gate, up, down) = f"{hf}.{sizes.family.mlp}", sizes.family.expert_parts or ("", "", "")
    yield Weight(f"{own}.mlp.router.weight", ((f"{mlp}.gate.weight", (sizes.experts, sizes.hidden)),))
    for expert in range(sizes.experts):
        prefix = f"{mlp}.experts.{expert}"
        gate_up = ((f"{prefix}.{gate}.weight", wide), (f"{prefix}.{up}.weight", wide))
        yield Weight(naming.expert(own, expert, "linear_fc1"), gate_up, "gate_up", expert=expert)
        part = (f"{prefix}.{down}.weight", narrow)
        yield Weight(naming.expert(own, expert, "linear_fc2"), (part,), "columns", expert=expert)
