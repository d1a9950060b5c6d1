"""Several low-rank adapters beside the frozen layers of one model.

A slot holds the factors of one adapter, as plain float32 parameters outside FSDP: they are small, every rank has all of
them, and their gradients are summed over ranks once per step. A packed row names the tokens of each slot as contiguous
spans, and a layer computes each span with its slot's factors alone. Invariants: without a span the model is the base
model bit for bit; no value of one slot reaches a token or a gradient of another, not even a NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from typing_extensions import override

from nemo_rl.models.dtensor.export import hf_name
from nemo_rl.models.policy.model_config import CheckpointMismatchError

Span = tuple[int, int, int]
"""A slot and the tokens `[start, end)` of the packed row that it adapts."""


class RowPlan:
    """The spans of the row that is being computed; shared by all layers, also while they recompute activations."""

    def __init__(self) -> None:
        self.spans: tuple[Span, ...] = ()

    def aim(self, spans: Sequence[Span]) -> None:
        """Sets the spans of the next passes: ascending, without overlap."""
        self.spans = tuple(spans)


class Factors(nn.Module):
    """One adapter of one layer: `lora_A` [rank, in] and `lora_B` [out, rank], whose product counts `scale`."""

    def __init__(self, down: torch.Tensor, up: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(down)
        self.lora_B = nn.Parameter(up)
        self.scale = scale

    @override
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # Scaled where it is small.
        inner = F.linear(input, self.lora_A.to(input.dtype)) * self.scale
        return F.linear(inner, self.lora_B.to(input.dtype))


class SlotLinear(nn.Linear):
    """A frozen linear layer with an adapter per slot."""

    slots: nn.ModuleDict
    plan: RowPlan

    @override
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        base = F.linear(input, self.weight, self.bias)
        pieces: list[tuple[nn.Module | None, int]] = []  # who adapts the next tokens, and how many
        done = 0
        for slot, start, end in self.plan.spans:
            if str(slot) not in self.slots:
                continue
            if start > done:
                pieces.append((None, start - done))
            pieces.append((self.slots[str(slot)], end - start))
            done = end
        if not pieces:
            return base
        if done < base.shape[-2]:
            pieces.append((None, base.shape[-2] - done))
        # One split and one concatenation: the gradient of a slice is as large as the whole row, for every span.
        sizes = [size for _, size in pieces]
        bases, inputs = base.split(sizes, dim=-2), input.split(sizes, dim=-2)
        parts = [
            part if factors is None else part + factors(tokens)
            for (factors, _), part, tokens in zip(pieces, bases, inputs, strict=True)
        ]
        return torch.cat(parts, dim=-2)


class AdapterSlots:
    """The slots of one model.

    Args:
        model: A loaded and sharded model; it is frozen, and the layers become `SlotLinear`, in place.
        names: The layers that may be adapted, by their names in the Hugging Face model.
        device: Where factors are.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], device: torch.device) -> None:
        self.plan = RowPlan()
        self._device = device
        model.requires_grad_(False)
        by_name = {hf_name(name): module for name, module in model.named_modules()}
        self._layers: dict[str, SlotLinear] = {}
        for name in names:
            layer = by_name[name]
            if not isinstance(layer, nn.Linear):
                raise TypeError(f"{name} is no linear layer")
            layer.__class__ = SlotLinear
            layer.slots, layer.plan = nn.ModuleDict(), self.plan  # type: ignore[attr-defined]
            self._layers[name] = layer  # type: ignore[assignment]

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Numbers of inputs and outputs of the layers that may be adapted, by name."""
        return {name: (layer.in_features, layer.out_features) for name, layer in self._layers.items()}

    def fill(self, slot: int, factors: Mapping[str, torch.Tensor], scale: float) -> None:
        """Puts an adapter into a slot, in place of the one before.

        Args:
            factors: By `<layer>.lora_A` and `<layer>.lora_B`.
            scale: Factor of their product.

        Raises CheckpointMismatchError: a layer may not be adapted, or a factor has another shape.
        """
        names = {name.rpartition(".")[0] for name in factors}
        if strangers := sorted(names - self._layers.keys()):
            raise CheckpointMismatchError(
                f"the adapter is of layers that the base does not adapt: {', '.join(strangers[:3])}; the base's "
                "policy.dtensor_cfg.lora_cfg chooses the layers"
            )
        pairs = {name: (factors[f"{name}.lora_A"], factors[f"{name}.lora_B"]) for name in names}
        for name, (down, up) in pairs.items():
            layer = self._layers[name]
            if (up.shape[0], down.shape[1], up.shape[1]) != (layer.out_features, layer.in_features, down.shape[0]):
                raise CheckpointMismatchError(
                    f"{name}: factors {tuple(down.shape)} and {tuple(up.shape)} do not fit a layer of "
                    f"{layer.in_features} inputs and {layer.out_features} outputs"
                )
        self.clear(slot)
        for name, pair in pairs.items():
            down, up = (part.to(self._device, torch.float32, copy=True) for part in pair)
            self._layers[name].slots[str(slot)] = Factors(down, up, scale)

    def clear(self, slot: int) -> None:
        """Empties a slot."""
        for layer in self._layers.values():
            if str(slot) in layer.slots:
                del layer.slots[str(slot)]

    def named(self, slot: int) -> Iterator[tuple[str, nn.Parameter]]:
        """A slot's factors by `<layer>.lora_A` and `<layer>.lora_B`, in the order of the layers."""
        for name, layer in self._layers.items():
            if str(slot) in layer.slots:
                for kind, parameter in layer.slots[str(slot)].named_parameters():
                    yield f"{name}.{kind}", parameter

    def parameters(self, slot: int) -> list[nn.Parameter]:
        """A slot's factors."""
        return [parameter for _, parameter in self.named(slot)]


def spans_of(slots: Sequence[int], lengths: Sequence[int]) -> list[Span]:
    """The spans of rows that stand one after the other in a packed row; neighbours of one slot make one span.

    Args:
        slots: Slot of each row; rows of one slot must be neighbours.
        lengths: Tokens of each row.
    """
    spans: list[Span] = []
    start = 0
    for slot, length in zip(slots, lengths, strict=True):
        end = start + length
        if spans and spans[-1][0] == slot:
            spans[-1] = (slot, spans[-1][1], end)
        else:
            spans.append((slot, start, end))
        start = end
    return spans
