"""Several low-rank adapters beside the frozen layers of one model.

A slot holds the factors of one adapter, as plain float32 parameters outside FSDP: they are small, every rank has all of
them, and their gradients are summed over ranks once per step. A packed row names the tokens of each slot as contiguous
spans, and a layer computes each span with its slot's factors alone. Invariants: without a span the model is the base
model bit for bit; no value of one slot reaches a token or a gradient of another, not even a NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

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


class _Piece(NamedTuple):
    """Tokens `[start, end)` of a row, and the factor of their adapter's product."""

    start: int
    end: int
    scale: float


class _AdaptedRow(torch.autograd.Function):
    """The outputs of a frozen layer, and of the adapter of each piece beside it, written where they belong.

    As separate operations every piece would be copied several times in each direction.
    """

    @staticmethod
    @override
    def forward(  # pyrefly: ignore[bad-override]  # torch's stub takes any arguments, a function has its own
        ctx: Any,
        input_TI: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        pieces: Sequence[_Piece],
        *factors: torch.Tensor,
    ) -> torch.Tensor:
        out_TO = F.linear(input_TI, weight, bias)
        inners: list[torch.Tensor] = []
        for (start, end, scale), down, up in zip(pieces, factors[::2], factors[1::2], strict=True):
            # Scaled where it is small.
            inners.append(F.linear(input_TI[start:end], down.to(input_TI.dtype)) * scale)
            out_TO[start:end] += F.linear(inners[-1], up.to(input_TI.dtype))
        ctx.pieces = pieces
        ctx.save_for_backward(input_TI, weight, *factors, *inners)
        return out_TO

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (out_TO,) = gradients
        input_TI, weight, *saved = ctx.saved_tensors
        factors, inners = saved[: 2 * len(ctx.pieces)], saved[2 * len(ctx.pieces) :]
        in_TI = out_TO.mm(weight) if ctx.needs_input_grad[0] else None
        of_factors: list[torch.Tensor] = []
        for (start, end, scale), inner, down, up in zip(ctx.pieces, inners, factors[::2], factors[1::2], strict=True):
            own = out_TO[start:end]
            of_inner = own.mm(up.to(own.dtype)) * scale
            of_factors += [input_TI[start:end].t().mm(of_inner).t().to(down.dtype), inner.t().mm(own).t().to(up.dtype)]
            if in_TI is not None:
                in_TI[start:end] += of_inner.mm(down.to(own.dtype))
        return in_TI, None, None, None, *of_factors


class SlotLinear(nn.Linear):
    """A frozen linear layer with an adapter per slot."""

    slots: nn.ModuleDict
    plan: RowPlan

    @override
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        pieces: list[_Piece] = []
        factors: list[torch.Tensor] = []
        for slot, start, end in self.plan.spans:
            if str(slot) in self.slots:
                own = cast(Factors, self.slots[str(slot)])
                pieces.append(_Piece(start, end, own.scale))
                factors += [own.lora_A, own.lora_B]
        if not pieces:
            return F.linear(input, self.weight, self.bias)
        # One row of tokens: its other dimensions are 1.
        row_TI = input.reshape(-1, input.shape[-1])
        adapted: torch.Tensor = _AdaptedRow.apply(row_TI, self.weight, self.bias, pieces, *factors)
        return adapted.view(*input.shape[:-1], -1)


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


def spans_of(slots: Sequence[int], ends: Sequence[int]) -> list[Span]:
    """The spans of rows that stand one after the other in a packed row; neighbours of one slot make one span.

    Args:
        slots: Slot of each row; rows of one slot must be neighbours.
        ends: Where the tokens of each row end.
    """
    spans: list[Span] = []
    start = 0
    for slot, end in zip(slots, ends, strict=True):
        if spans and spans[-1][0] == slot:
            spans[-1] = (slot, spans[-1][1], end)
        else:
            spans.append((slot, start, end))
        start = end
    return spans
