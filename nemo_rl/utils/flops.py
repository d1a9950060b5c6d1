"""Floating-point operations of a transformer, from its Hugging Face configuration, and what accelerators can do at
best.

Counts matrix multiplications (2 operations per multiply-add) and causal attention; leaves out norms, activations and
the optimizer, as model FLOPs utilisation (https://arxiv.org/abs/2204.02311, appendix B) does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BACKWARD_FACTOR = 3  # the backward pass multiplies twice for every multiplication of the forward pass

_UNGATED = frozenset({"gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2"})

# Dense peak of 16-bit matrix multiplication, in TFLOP/s, from the vendors' data sheets. Longer names win.
_PEAK_TFLOPS_16BIT = {
    "GB300": 2500.0,
    "GB200": 2500.0,
    "B300": 2250.0,
    "B200": 2250.0,
    "H200": 989.5,
    "GH200": 989.5,
    "H100": 989.5,
    "H100 PCIE": 756.5,
    "H100 NVL": 835.5,
    "H800": 989.5,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10": 125.0,
    "A10G": 70.0,
    "L40S": 362.05,
    "L40": 181.05,
    "L4": 121.0,
    "V100": 125.0,
    "T4": 65.0,
}
_DTYPE_FACTOR = {"bfloat16": 1.0, "float16": 1.0, "float8": 2.0, "float32": 0.5}  # float32 runs as TF32


class UnknownArchitecture(ValueError):
    """A model configuration does not give the sizes of its matrices."""


@dataclass(frozen=True)
class Work:
    """The work of passes over packed rows: tokens, and attention pairs."""

    tokens: int = 0
    pairs: int = 0

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int]) -> Work:
        """The work of segments whose last `queries` of `keys` tokens attend to themselves and all before them."""
        seen = sum(n * (2 * k - n + 1) // 2 for n, k in zip(queries, keys, strict=True))
        return cls(sum(queries), seen)

    def __add__(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.pairs + other.pairs)


@dataclass(frozen=True)
class TransformerShape:
    """The sizes FLOPs depend on, averaged over layers where these differ. `mlp_operations` are multiply-adds per token
    and layer in the feed-forward part.
    """

    layers: int
    hidden: int
    query_width: int
    key_value_width: int
    mlp_operations: float
    vocabulary: int

    @classmethod
    def from_hf_config(cls, config: PretrainedConfig) -> TransformerShape:
        """Read a `transformers` configuration of a decoder with (grouped) attention, dense or mixture of experts.
        Raises UnknownArchitecture: a size is missing.
        """
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        try:
            hidden, layers = config.hidden_size, config.num_hidden_layers
            # Where layers differ in size (Gemma 4), transformers refuses to give one number for all.
            differing = bool(getattr(config, "is_heterogeneous", False))
            each = list(config.per_layer_config) if differing else [config]
            widths = [_attention_widths(layer, hidden) for layer in each]
            return cls(
                layers=layers,
                hidden=hidden,
                query_width=round(fmean(query for query, _ in widths)),
                key_value_width=round(fmean(key_value for _, key_value in widths)),
                mlp_operations=fmean(_mlp_operations(layer, hidden, layers) for layer in each),
                vocabulary=config.vocab_size,
            )
        except AttributeError as error:
            raise UnknownArchitecture(
                f"cannot count the FLOPs of model type {getattr(config, 'model_type', '?')!r}: {error}"
            ) from error

    def forward_flops(self, work: Work) -> float:
        """Operations of one forward pass, logits included, padding not."""
        return self.layers * self._layer_flops(work) + self._logits_flops(work)

    def train_flops(self, work: Work, predicted_tokens: int = 0) -> float:
        """Operations of one forward and backward pass; recomputed activations are not counted. `predicted_tokens`: how
        many tokens further ahead multi-token prediction trains. Each takes a product that joins the hidden state with
        an embedding, a layer like the model's own, and logits.
        """
        joined = 2 * 2 * self.hidden * self.hidden * work.tokens
        predicted = predicted_tokens * (joined + self._layer_flops(work) + self._logits_flops(work))
        return BACKWARD_FACTOR * (self.forward_flops(work) + predicted)

    def _layer_flops(self, work: Work) -> float:
        projections = self.hidden * (2 * self.query_width + 2 * self.key_value_width)
        # Scores and weighted sums.
        attention = 2 * 2 * self.query_width * float(work.pairs)
        return 2 * (projections + self.mlp_operations) * work.tokens + attention

    def _logits_flops(self, work: Work) -> float:
        return 2 * self.hidden * self.vocabulary * work.tokens


def processor_flops_per_s() -> float:
    """Operations per second of a float32 matrix product on this process's cores, measured in about 0.1 s."""
    import torch

    side, tries = 768, 3
    left, right = torch.rand(side, side), torch.rand(side, side)
    seconds = math.inf
    for _ in range(tries):
        began = time.perf_counter()
        torch.mm(left, right)
        seconds = min(seconds, time.perf_counter() - began)
    return 2.0 * side**3 / seconds


def peak_tflops(device_name: str, dtype: str = "bfloat16") -> float | None:
    """Dense matrix-multiplication peak of an accelerator in TFLOP/s; None for one that is not in the table.

    Args:
        device_name: as the driver reports it, such as `NVIDIA H100 80GB HBM3`.
        dtype: bfloat16, float16, float32 or float8.

    Raises ValueError: unknown dtype.
    """
    factor = _DTYPE_FACTOR.get(dtype.removeprefix("torch."))
    if factor is None:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(_DTYPE_FACTOR)}")
    words = device_name.upper().replace("-", " ").split()
    known = [name for name in _PEAK_TFLOPS_16BIT if set(name.split()) <= set(words)]
    return _PEAK_TFLOPS_16BIT[max(known, key=len)] * factor if known else None


def utilization(flops: float, seconds: float, devices: int, peak_tflops_per_device: float) -> float:
    """Model FLOPs utilisation: the fraction of the devices' peak that `flops` in `seconds` amount to."""
    return flops / (seconds * devices * peak_tflops_per_device * 1e12)


def _attention_widths(config: PretrainedConfig, hidden: int) -> tuple[int, int]:
    """Widths of a layer's queries, and of its keys."""
    heads = config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or hidden // heads
    return heads * head_width, (getattr(config, "num_key_value_heads", None) or heads) * head_width


def _mlp_operations(config: PretrainedConfig, hidden: int, layers: int) -> float:
    matrices = 2 if getattr(config, "model_type", "") in _UNGATED else 3
    dense = matrices * hidden * (getattr(config, "intermediate_size", None) or 4 * hidden)
    experts = next(
        (
            count
            for name in ("num_experts", "num_local_experts", "n_routed_experts")
            if (count := getattr(config, name, None))
        ),
        None,
    )
    if not experts:
        return float(dense)
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    shared = (
        (getattr(config, "n_shared_experts", None) or 0) * width
        or getattr(config, "shared_expert_intermediate_size", None)
        or 0
    )
    sparse = matrices * hidden * (config.num_experts_per_tok * width + shared) + hidden * experts
    step = getattr(config, "decoder_sparse_step", None) or 1
    first_dense = getattr(config, "first_k_dense_replace", None) or 0
    sparse_layers = sum(layer >= first_dense and (layer + 1) % step == 0 for layer in range(layers))
    return (sparse_layers * sparse + (layers - sparse_layers) * dense) / layers
