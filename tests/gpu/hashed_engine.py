"""vLLM workers that say which weights arrived and which they hold, by SHA-256.

The policy's tensors reach an engine under Hugging Face's names; vLLM fuses some of them and gives each tensor-parallel
rank its part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from nemo_rl.models.generation.vllm import engine_actors
from nemo_rl.models.generation.vllm.engine_processes import EngineSpec
from nemo_rl.models.generation.vllm.extension import VllmInternalWorkerExtension
from nemo_rl.weight_sync.receiver import LoadTarget

_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_ROWS, _COLUMNS = ("embed_tokens", "lm_head"), ("o_proj", "down_proj")


def sha256(tensor: torch.Tensor) -> str:
    """Of a tensor's bytes."""
    # A copy: memory that NumPy has seen can no longer be given up in a sleep.
    flat = tensor.detach().cpu().clone().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


class _Hashing:
    """A target that notes what it is given."""

    def __init__(self, target: LoadTarget, arrived: dict[str, str]) -> None:
        self._target, self._arrived = target, arrived

    def begin_load(self) -> None:
        self._arrived.clear()
        self._target.begin_load()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._arrived |= {name: sha256(tensor) for name, tensor in weights}
        self._target.load_weights(weights)

    def finish_load(self) -> None:
        self._target.finish_load()

    def abandon_load(self) -> None:
        self._target.abandon_load()


class HashingExtension(VllmInternalWorkerExtension):
    """The worker extension, and what it knows of weights."""

    def nrl_load_target(self) -> LoadTarget:
        return _Hashing(super().nrl_load_target(), self._arrived())

    def _arrived(self) -> dict[str, str]:
        if not hasattr(self, "_nrl_arrived"):
            self._nrl_arrived: dict[str, str] = {}
        return self._nrl_arrived

    def nrl_arrived(self) -> dict[str, str]:
        """SHA-256 of each tensor of the last session."""
        return self._arrived()

    def nrl_held(self, rows: dict[str, int]) -> dict[str, str]:
        """SHA-256 of each parameter; of one that is padded, of its first `rows`."""
        parameters = dict(self.model_runner.get_model().named_parameters())
        return {name: sha256(tensor[: rows.get(name, len(tensor))]) for name, tensor in parameters.items()}


@contextmanager
def hashing_engines() -> Iterator[None]:
    """Engines whose workers have the extension above."""
    made = engine_actors.engine_spec

    def hashing(*args: Any, **kwargs: Any) -> EngineSpec:
        spec = made(*args, **kwargs)
        named = f"{HashingExtension.__module__}.{HashingExtension.__qualname__}"
        return replace(spec, engine_kwargs={**spec.engine_kwargs, "worker_extension_cls": named})

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine_actors, "engine_spec", hashing)
        yield


def held_by_a_rank(weights: Mapping[str, torch.Tensor], rank: int, ranks: int) -> tuple[dict[str, str], dict[str, int]]:
    """SHA-256 of each parameter that a tensor-parallel rank of vLLM makes of a dense model's weights, and how many rows
    count of those that it pads.
    """
    hashes, rows = {}, {}
    for name, tensor in weights.items():
        layer, _, kind = name.rpartition(".")
        stem, _, projection = layer.rpartition(".")
        for fused, parts in (("qkv_proj", _QKV), ("gate_up_proj", _GATE_UP)):
            if projection == parts[0]:
                pieces = [weights[f"{stem}.{part}.{kind}"].chunk(ranks)[rank] for part in parts]
                hashes[f"{stem}.{fused}.{kind}"] = sha256(torch.cat(pieces))
        if projection in (*_QKV, *_GATE_UP):
            continue
        if projection in _ROWS:
            # vLLM pads a vocabulary to a multiple of 64 before it is divided.
            padded = -(-len(tensor) // 64) * 64 // ranks
            part = tensor[rank * padded : (rank + 1) * padded]
            rows[name] = len(part)
        elif projection in _COLUMNS:
            part = tensor.chunk(ranks, dim=1)[rank]
        else:
            part = tensor
        hashes[name] = sha256(part)
    return hashes, rows
