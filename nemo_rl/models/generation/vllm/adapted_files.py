"""A model's own files with low-rank adapters added: what an engine loads when only adapters are sent.

The base weights of a policy with adapters never change, and every engine has their files: a refit sends the factors,
and the engine adds their product to what it reads. Knows names and tensors, no engine. Invariant: the result is what
the policy would have sent merged, up to the rounding of one float32 product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from nemo_rl.config.errors import UserError

FACTORS = ("lora_A", "lora_B")


class AdapterMismatchError(UserError, RuntimeError):
    """Adapters arrived that do not fit the engine's model files."""


class ArrivedAdapters:
    """Factors of one refit: `lora_A` [rank, in] and `lora_B` [out, rank], the scale of their product in the latter."""

    def __init__(self) -> None:
        self._factors: dict[str, dict[str, torch.Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._factors)

    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Keeps copies of the factors among the weights; yields the others."""
        for name, tensor in weights:
            layer, _, kind = name.rpartition(".")
            if kind in FACTORS:
                self._factors.setdefault(layer, {})[kind] = tensor.detach().float().clone()
            else:
                yield name, tensor

    def merged(
        self, files: Iterable[tuple[str, torch.Tensor]], device: torch.device
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The files' tensors in order, those with an adapter in float32 with its product added.

        Raises:
            AdapterMismatchError: A layer is not in the files, is of another shape, or lacks a factor.
        """
        left = dict(self._factors)
        for name, tensor in files:
            factors = left.pop(name.removesuffix(".weight"), None) if name.endswith(".weight") else None
            if factors is None:
                yield name, tensor
                continue
            down, up = (factors.get(kind) for kind in FACTORS)
            if down is None or up is None or (up.shape[0], down.shape[1]) != tuple(tensor.shape):
                raise AdapterMismatchError(
                    f"the adapter of {name} {tuple(tensor.shape)} came as "
                    f"{ {kind: tuple(factor.shape) for kind, factor in factors.items()} }; the engine's model files "
                    "are of another model than policy.model_name"
                )
            yield name, tensor.to(device).float() + up @ down
        if left:
            raise AdapterMismatchError(
                f"adapters of {', '.join(sorted(left)[:3])} came, which the engine's model files do not have; they are "
                "of another model than policy.model_name"
            )

    def forget(self) -> None:
        """Drops what arrived."""
        self._factors.clear()
