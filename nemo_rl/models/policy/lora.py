"""Low-rank adapters (https://arxiv.org/abs/2106.09685) on every training backend: choice of layers, initial factors,
and those of a checkpoint.

A layer's factors are `lora_A` `[rank, in]` and `lora_B` `[out, rank]`. Invariant: `lora_A` is drawn by the name of its
layer and `lora_B` is 0, so that every rank starts with the same adapters and the model is the base model.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from nemo_rl.models.policy.model_config import CheckpointMismatchError, UnsupportedModelError
from nemo_rl.utils.adapter_files import FACTORS, AdapterError, AdapterInfo, read_adapter
from nemo_rl.weight_sync.layout import TensorMeta, dtype_name


def is_factor(name: str) -> bool:
    """Whether a parameter is a factor of an adapter."""
    return name.rpartition(".")[2] in FACTORS


@contextmanager
def base_model(parts: Iterable[nn.Module]) -> Generator[None]:
    """The model of these parts computes without its adapters inside the block: modules that add one have a switch
    `adapted`.
    """
    modules: list[Any] = [module for part in parts for module in part.modules() if hasattr(module, "adapted")]
    try:
        for module in modules:
            module.adapted = False
        yield
    finally:
        for module in modules:
            module.adapted = True


def choose_layers(
    names: Sequence[str], targets: Sequence[str], excluded: Sequence[str], *, every: bool, key: str, model: str
) -> list[str]:
    """The chosen names, in order; may be empty.

    Args:
        names: Of the linear layers that can be adapted.
        targets: Layers to choose: whole names, last parts, or patterns with `*`.
        excluded: Layers not to choose, named the same way.
        every: Whether all are chosen but those that are excluded, whatever `targets` holds.
        key: The section of the configuration that chooses.
        model: Name of the model in errors.

    Raises UnsupportedModelError: a pattern matches no name.
    """
    for patterns, wanted in ((targets, "target_modules"), (excluded, "exclude_modules")):
        idle = [pattern for pattern in patterns if not any(_matches(name, pattern) for name in names)]
        if idle:
            kinds = sorted({name.rpartition(".")[2] for name in names})
            raise UnsupportedModelError(
                f"{key}.{wanted}: {', '.join(idle)} matches no linear layer of {model}; it has {', '.join(kinds)}"
            )
    chosen = [name for name in names if every or any(_matches(name, pattern) for pattern in targets)]
    return [name for name in chosen if not any(_matches(name, pattern) for pattern in excluded)]


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or name.rpartition(".")[2] == pattern


def drawn_factors(sizes: Mapping[str, tuple[int, int]], rank: int, init: str) -> dict[str, torch.Tensor]:
    """Factors at the start of layers with these numbers of inputs and outputs, by `<layer>.lora_A` and `.lora_B`.
    `init`: how `lora_A` is drawn, `xavier`, or `kaiming` or `uniform`, which are the same.
    """
    state: dict[str, torch.Tensor] = {}
    for name, (inputs, outputs) in sizes.items():
        drawn = torch.empty(rank, inputs)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if init == "xavier":
            nn.init.xavier_normal_(drawn, generator=generator)
        else:
            nn.init.kaiming_uniform_(drawn, a=5**0.5, generator=generator)
        state[f"{name}.lora_A"] = drawn
        state[f"{name}.lora_B"] = torch.zeros(outputs, rank)
    return state


def start_factors(
    path: str | None, wanted: AdapterInfo, sizes: Mapping[str, tuple[int, int]], init: str, key: str
) -> dict[str, torch.Tensor]:
    """Factors of a checkpoint or, without a path, those at the start. For arguments and errors see `read_factors` and
    `drawn_factors`.
    """
    if path is None:
        return drawn_factors(sizes, wanted.r, init)
    return read_factors(path, wanted, [f"{layer}.{factor}" for layer in sizes for factor in FACTORS], key)


def sent_metas(shapes: Iterable[tuple[str, Sequence[int]]]) -> list[TensorMeta]:
    """Names, shapes and dtypes of `sent_factors`."""
    return [TensorMeta(name, tuple(shape), dtype_name(torch.float32)) for name, shape in shapes]


def sent_factors(factors: Iterable[tuple[str, torch.Tensor]], scale: float) -> Iterator[tuple[str, torch.Tensor]]:
    """The factors as engines take them: in float32, the scale of the product in the second."""
    for name, tensor in factors:
        yield name, tensor.float() * (scale if name.endswith(FACTORS[1]) else 1.0)


def read_factors(path: str, wanted: AdapterInfo, names: Collection[str], key: str) -> dict[str, torch.Tensor]:
    """The factors of a checkpoint, by their names in Hugging Face's model.

    Args:
        path: A directory in PEFT's format.
        wanted: The adapter that the run trains.
        names: Of the factors of the layers that the run adapts.
        key: The section of the configuration that says so.

    Raises CheckpointMismatchError: there is no adapter, or it is of another base, rank, scale or choice of layers.
    """
    try:
        found, tensors = read_adapter(path)
    except AdapterError as error:
        raise CheckpointMismatchError(f"{error}; {key}.enabled goes on from adapters") from error
    if found.base_model_name_or_path != wanted.base_model_name_or_path:
        raise CheckpointMismatchError(
            f"{path}: is an adapter of {found.base_model_name_or_path}, not of policy.model_name "
            f"{wanted.base_model_name_or_path}"
        )
    if found.r != wanted.r or not math.isclose(found.scale, wanted.scale):
        raise CheckpointMismatchError(
            f"{path}: the adapter has dim {found.r} and alpha {found.lora_alpha:g}"
            f"{' (over the root of dim)' if found.use_rslora else ''}, {key} has {wanted.r} and {wanted.lora_alpha:g}"
        )
    different = sorted(tensors.keys() ^ set(names))
    if different:
        raise CheckpointMismatchError(
            f"{path}: the adapter is of other layers than {key} chooses: {', '.join(different[:3])}"
        )
    return tensors
