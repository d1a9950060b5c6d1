"""Low-rank adapters (https://arxiv.org/abs/2106.09685) on Megatron's linear layers: only they are trained.

A layer keeps its class and its weight's name; it gets a module `adapter`, whose output a hook adds to the layer's, so
Megatron's own layers and Transformer Engine's are adapted alike. A layer that fuses several projections of Hugging
Face's model (query, key and value; gate and up) has one `lora_A`, which its projections share, and their `lora_B` below
each other. Of each pair tensor-parallel ranks cut the factor that meets the cut side of the weight, and hold the other
one whole; they exchange `rank` numbers for each token. Invariants: base weights never change; without adapters the
model is the base model bit for bit; whole factors stay the same on all tensor-parallel ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nemo_rl.config import PolicyConfig
from nemo_rl.config.megatron import MegatronPeftConfig
from nemo_rl.models.megatron.families import Naming, Sizes, Weight, weights_of
from nemo_rl.models.megatron.groups import MegatronGroups
from nemo_rl.models.megatron.sharded_weights import ShardedWeights, whole_name
from nemo_rl.models.policy.lora import choose_layers, drawn_factors, read_factors, sent_factors, sent_metas
from nemo_rl.models.policy.model_config import CheckpointMismatchError, UnsupportedModelError
from nemo_rl.utils.adapter_files import FACTORS, AdapterInfo, with_product
from nemo_rl.weight_sync.layout import TensorMeta

KEY = "policy.megatron_cfg.peft"
_LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
_INPUTS_CUT = ("linear_proj", "linear_fc2")
_EXPERT = re.compile(r"\.experts\.local_experts\.\d+\.")


class LowRankAdapter(nn.Module):
    """The scaled product of two factors, as one rank holds them.

    Args:
        weight: This rank's part of the layer's weight.
        scale: Of the product.
        inputs_cut: Whether tensor-parallel ranks cut the layer's inputs; otherwise they cut its outputs.
        group: These ranks.
        sequence_parallel: Whether they cut the sequence outside of the layer.
    """

    def __init__(
        self, weight: torch.Tensor, rank: int, scale: float, *, inputs_cut: bool, group: object, sequence_parallel: bool
    ) -> None:
        from megatron.core import tensor_parallel as tp

        super().__init__()
        outputs, inputs = weight.shape
        self.lora_A = nn.Parameter(weight.new_empty(rank, inputs))
        self.lora_B = nn.Parameter(weight.new_empty(outputs, rank))
        self.adapted = True  # false computes with the base weight alone
        self._scale, self._group = scale, group
        # Between the factors. Inputs cut: each rank has a part of every sum, and the second factor wants it whole.
        # Outputs cut: each rank hands back a gradient of its own outputs alone.
        self._exchange: Callable[..., torch.Tensor] = {
            (True, True): tp.reduce_scatter_to_sequence_parallel_region,
            (True, False): tp.reduce_from_tensor_model_parallel_region,
            (False, True): tp.gather_from_sequence_parallel_region,
            (False, False): tp.copy_to_tensor_model_parallel_region,
        }[inputs_cut, sequence_parallel]
        # A whole factor sees this rank's part of the sequence; the mark makes Megatron add up the ranks' gradients.
        whole = self.lora_B if inputs_cut else self.lora_A
        setattr(whole, "sequence_parallel", sequence_parallel)  # noqa: B010 - Megatron's mark

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The addition to the layer's output, from its input."""
        inner = self._exchange(F.linear(inputs, self.lora_A), group=self._group)
        return F.linear(inner, self.lora_B) * self._scale


def _add_adapter(layer: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, object]) -> object:
    """A forward hook of an adapted layer, which gives its output and a bias for its caller to add."""
    if not layer.adapter.adapted:
        return None
    whole, bias = output
    return whole + layer.adapter(_projected(layer, inputs[0])), bias


def _projected(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    """The layer's input to its weight: Transformer Engine's layers may begin with their block's norm."""
    norm = getattr(layer, "layer_norm_weight", None)
    return inputs if norm is None else F.rms_norm(inputs, inputs.shape[-1:], norm, layer.config.layernorm_epsilon)


def chosen_layers(sizes: Sizes, cfg: MegatronPeftConfig) -> list[str]:
    """Names of the layers that get an adapter, numbered over the whole model. Raises UnsupportedModelError: none is
    chosen, a pattern chooses none, or layers of experts are chosen.
    """
    names = list(dict.fromkeys(_layer_of(weight) for weight in weights_of(sizes, Naming()) if _is_linear(weight)))
    every = not cfg.target_modules
    chosen = choose_layers(names, cfg.target_modules, cfg.exclude_modules, every=every, key=KEY, model="the model")
    if not chosen:
        raise UnsupportedModelError(f"{KEY} chooses no layer; name other target_modules, or exclude fewer")
    if any(".experts." in name for name in chosen):
        raise UnsupportedModelError(
            f"{KEY} chooses layers of experts, for which adapters are not built; set {KEY}.exclude_modules to "
            "['*.experts.*'], or train the model with policy.dtensor_cfg.enabled=true"
        )
    return chosen


def _is_linear(weight: Weight) -> bool:
    layer, _, kind = weight.name.rpartition(".")
    return kind == "weight" and layer.endswith(_LAYERS)


def _layer_of(weight: Weight) -> str:
    return _EXPERT.sub(".experts.", weight.name.removesuffix(".weight"))


def check_adapters(cfg: PolicyConfig, sizes: Sizes) -> None:
    """The driver's check. Raises UnsupportedModelError: see `chosen_layers`; or a pipeline stage may lack adapters."""
    mcore = cfg.megatron_cfg
    chosen = chosen_layers(sizes, mcore.peft)
    adapted = {int(name.split(".")[2]) for name in chosen}
    if mcore.pipeline_model_parallel_size > 1 and len(adapted) < sizes.layers:
        without = sorted(set(range(sizes.layers)) - adapted)
        raise UnsupportedModelError(
            f"{KEY} chooses nothing in layers {', '.join(map(str, without[:5]))} of the model; with "
            "policy.megatron_cfg.pipeline_model_parallel_size > 1 every layer needs an adapter, so that every stage "
            "has something to train"
        )


def attach_adapters(chunks: Iterable[nn.Module], cfg: PolicyConfig, sizes: Sizes, groups: MegatronGroups) -> None:
    """Freezes this rank's parts of the model and gives the chosen layers adapters without values, in place."""
    peft = cfg.megatron_cfg.peft
    chosen = set(chosen_layers(sizes, peft))
    for chunk in chunks:
        chunk.requires_grad_(False)
        for name, part in list(chunk.named_modules()):
            if whole_name(chunk, name) not in chosen:
                continue
            weight: Any = part.weight
            adapter = LowRankAdapter(
                weight,
                peft.dim,
                peft.alpha / peft.dim,
                inputs_cut=name.endswith(_INPUTS_CUT),
                group=groups.tp_group,
                sequence_parallel=cfg.megatron_cfg.sequence_parallel and groups.sizes.tp > 1,
            )
            part.add_module("adapter", adapter)
            part.register_forward_hook(_add_adapter)


def factors_of(weight: Weight, rank: int) -> tuple[Weight, Weight]:
    """The factors of a layer, by its weight."""
    layer = weight.name.removesuffix(".weight")
    modules = [(name.removesuffix(".weight"), shape) for name, shape in weight.parts]
    down, up = (
        tuple((f"{module}.{FACTORS[0]}", (rank, shape[1])) for module, shape in modules),
        tuple((f"{module}.{FACTORS[1]}", (shape[0], rank)) for module, shape in modules),
    )
    inputs_cut = weight.cut == "columns"
    return (
        Weight(f"{layer}.adapter.{FACTORS[0]}", down, "columns" if inputs_cut else "whole", shared=len(modules) > 1),
        Weight(f"{layer}.adapter.{FACTORS[1]}", up, "whole" if inputs_cut else weight.cut, weight.groups),
    )


class AdaptedWeights(ShardedWeights):
    """The parameters of a model with adapters, which are added to the weights that are exported.

    Args:
        chunks: This rank's parts of the model, with adapters.
        naming: Of its kind of layers.

    Attributes:
        info: The adapters' configuration in checkpoints.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], sizes: Sizes, naming: Naming, groups: MegatronGroups, cfg: PolicyConfig
    ) -> None:
        peft = cfg.megatron_cfg.peft
        chosen = set(chosen_layers(sizes, peft))
        adapted = [weight for weight in weights_of(sizes, naming) if _is_linear(weight) and _layer_of(weight) in chosen]
        self._pairs = {weight.name: factors_of(weight, peft.dim) for weight in adapted}
        self._factors = [factor for pair in self._pairs.values() for factor in pair]
        modules = (name.rpartition(".")[0] for factor in self._factors for name, _ in factor.parts)
        self.info = AdapterInfo.of(cfg.model_name, peft.dim, peft.alpha, modules)
        self._init = peft.lora_A_init_method
        super().__init__(chunks, sizes, naming, groups, self._factors)

    def load_factors(self, path: str | None) -> None:
        """Sets this rank's part of every factor: those of a checkpoint, or with None those of the start. Raises
        CheckpointMismatchError: the checkpoint holds no adapter that fits.
        """
        whole = self._first() if path is None else self._saved(path)
        self.put(self._factors, lambda factor: whole[factor.name])

    def _first(self) -> dict[str, torch.Tensor]:
        sizes = {down.name.rpartition(".")[0]: (down.shape[1], up.shape[0]) for down, up in self._pairs.values()}
        return drawn_factors(sizes, self.info.r, self._init)

    def _saved(self, path: str) -> dict[str, torch.Tensor]:
        names = [name for factor in self._factors for name, _ in factor.parts]
        saved = read_factors(path, self.info, names, KEY)
        for factor in self._factors:
            first, *others = [saved[name] for name, _ in factor.parts]
            if factor.shared and not all(torch.equal(first, other) for other in others):
                raise CheckpointMismatchError(
                    f"{path}: {', '.join(name for name, _ in factor.parts)} differ; Megatron computes them by one "
                    "layer, whose adapter has one lora_A; go on with policy.dtensor_cfg.enabled=true"
                )
        return {factor.name: factor.join([saved[name] for name, _ in factor.parts]) for factor in self._factors}

    def _exported(self, weight: Weight, device: torch.device) -> torch.Tensor | None:
        own = super()._exported(weight, device)
        if own is None or weight.name not in self._pairs:
            return own
        # A rank's parts of the factors give its part of the product.
        down, up = (self.own()[factor.name].detach().to(device) for factor in self._pairs[weight.name])
        return with_product(own.detach().to(device), down, up, self.info.scale).to(own.dtype)

    def factors(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole factors under their names in Hugging Face's model. Collective over the replica."""
        return self.gathered(self._factors, None, device)

    def sent_metas(self) -> list[TensorMeta]:
        """Names, shapes and dtypes of the factors as they are sent."""
        return sent_metas(part for factor in self._factors for part in factor.parts)

    def sent_factors(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """The factors as engines take them. Collective."""
        return sent_factors(self.factors(device), self.info.scale)
