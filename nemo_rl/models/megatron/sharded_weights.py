"""Weights in and out of a model that is cut over tensor, pipeline and expert parallel ranks, under the names of Hugging
Face files.

Reading takes from the files only what this rank holds; writing gathers one parameter after the other, so that never
more than one is whole. Invariants: every rank yields the same names and full tensors in the same order; what was read
comes out again bit for bit.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nemo_rl.models.megatron.families import Naming, Sizes, Weight, weights_of
from nemo_rl.models.megatron.groups import MegatronGroups
from nemo_rl.models.policy.model_config import CheckpointMismatchError, ModelNotFoundError
from nemo_rl.weight_sync.layout import TensorMeta, dtype_name

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(\.experts\.local_experts\.|\.experts\.linear_fc[12]\.weight)(\d+)")
_EMBEDDING = "embedding.word_embeddings.weight"
_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json"]


class ModelFiles:
    """The tensors of a Hugging Face directory, read one by one. `source`: directory or Hugging Face id. Raises
    ModelNotFoundError: there are no weights.
    """

    def __init__(self, source: str) -> None:
        folder = Path(source) if os.path.isdir(source) else _downloaded(source)
        self._source = source
        self._open: dict[Path, object] = {}
        self._state: Mapping[str, torch.Tensor] = {}
        self._file: dict[str, Path] = {}
        index = folder / "model.safetensors.index.json"
        pickled = folder / "pytorch_model.bin"
        if index.exists():
            names = json.loads(index.read_text())["weight_map"]
            self._file = {name: folder / file for name, file in names.items()}
        elif (folder / "model.safetensors").exists():
            path = folder / "model.safetensors"
            self._file = dict.fromkeys(self._handle(path).keys(), path)
        elif pickled.exists():
            self._state = torch.load(pickled, weights_only=True, mmap=True)
        else:
            raise ModelNotFoundError(
                f"{source}: there is neither model.safetensors (or its index) nor pytorch_model.bin"
            )

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            from safetensors import safe_open

            self._open[path] = safe_open(path, "pt")
        return self._open[path]

    def names(self) -> list[str]:
        """Of all tensors."""
        return [*self._file, *self._state]

    def whole(self, weight: Weight) -> torch.Tensor:
        """One parameter, of all its tensors. For errors see `tensor`."""
        return weight.join([self.tensor(name, shape) for name, shape in weight.parts])

    def tensor(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """One tensor. Raises CheckpointMismatchError: it is missing or of another shape."""
        if name not in self._file and name not in self._state:
            raise CheckpointMismatchError(f"{self._source}: the weight {name} is missing; it holds another model")
        tensor = self._state[name] if name in self._state else self._handle(self._file[name]).get_tensor(name)
        if tuple(tensor.shape) != tuple(shape):
            raise CheckpointMismatchError(
                f"{self._source}: the weight {name} has shape {tuple(tensor.shape)}, the configured model "
                f"{tuple(shape)}; it holds another model"
            )
        return tensor


def _downloaded(source: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=_FILES))
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"policy.model_name={source!r} cannot be loaded: {error}") from error


class ShardedWeights:
    """The parameters of a model as this rank holds them.

    Args:
        chunks: This rank's parts of the model, Megatron's GPT modules.
        naming: Of its kind of layers.
        further: Parameters that the model's files do not hold.

    Attributes:
        files: Every parameter that the model's files hold, in order.
        described: Every parameter of the whole model, those first.
    """

    def __init__(
        self,
        chunks: Iterable[nn.Module],
        sizes: Sizes,
        naming: Naming,
        groups: MegatronGroups,
        further: Iterable[Weight] = (),
    ) -> None:
        self._groups = groups
        self.files = list(weights_of(sizes, naming))
        self.described = [*self.files, *further]
        self._tied = sizes.tied
        self._experts_here = sizes.experts // groups.sizes.ep
        self._own = {
            self._global_name(chunk, name): parameter
            for chunk in chunks
            for name, parameter in chunk.named_parameters()
        }
        known = {weight.name for weight in self.described} | ({"output_layer.weight"} if self._tied else set())
        unknown = sorted(set(self._own) - known)
        if unknown:
            raise CheckpointMismatchError(
                f"Megatron's model has parameters that no Hugging Face name is known for: {unknown}"
            )
        self._mark_cuts()
        stages: list[set[str]] = [set()] * groups.sizes.pp
        dist.all_gather_object(stages, set(self._own), group=groups.pp_group)
        # Experts of other expert-parallel ranks are on the same stage as the layer's router.
        self._stage = {
            weight.name: next(
                number for number, names in enumerate(stages) if _anchor(weight) in names or weight.name in names
            )
            for weight in self.described
        }

    def _global_name(self, chunk: nn.Module, name: str) -> str:
        name = whole_name(chunk, name)
        first = self._experts_here * self._groups.ep_group.rank()
        return _EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + first}", name)

    def _mark_cuts(self) -> None:
        """Marks sharded parameters, so that Megatron's norm counts whole ones once; its layers do so only when they
        initialise.
        """
        for weight in self.described:
            for parameter in self.copies(weight):
                if weight.cut != "whole":
                    setattr(parameter, "tensor_model_parallel", True)  # noqa: B010 - Megatron's marks
                    setattr(parameter, "partition_dim", int(weight.cut == "columns"))  # noqa: B010
                    setattr(parameter, "partition_stride", 1)  # noqa: B010

    def _cut_over(self, weight: Weight) -> dist.ProcessGroup:
        return self._groups.tp_group if weight.expert is None else self._groups.etp_group

    def load(self, source: str) -> None:
        """Reads this rank's part of every parameter. Raises ModelNotFoundError: there are no weights;
        CheckpointMismatchError: they are of another model.
        """
        self.put(self.files, ModelFiles(source).whole)

    @torch.no_grad()
    def put(self, weights: Iterable[Weight], whole: Callable[[Weight], torch.Tensor]) -> None:
        """Sets this rank's part of these parameters. `whole`: gives the whole of one; asked only for what is here."""
        for weight in weights:
            for target in self.copies(weight):
                target.copy_(self.part(weight, whole(weight)))

    def metas(self, dtype: torch.dtype) -> list[TensorMeta]:
        """Names, shapes and dtypes of an export, in order."""
        return [TensorMeta(name, shape, dtype_name(dtype)) for weight in self.files for name, shape in weight.parts]

    def full(self, dtype: torch.dtype | None, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and full tensors of an export; collective over the replica."""
        return self.gathered(self.files, dtype, device)

    @torch.no_grad()
    def gathered(
        self, weights: Iterable[Weight], dtype: torch.dtype | None, device: torch.device
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and full tensors of these parameters; collective over the replica. Experts travel over expert-parallel
        ranks, every parameter over stages.
        """
        for weight in weights:
            whole = self.gather(weight, self._exported(weight, device), device, dtype)
            for (name, _), tensor in zip(weight.parts, weight.split(whole), strict=True):
                yield name, tensor

    def _exported(self, weight: Weight, device: torch.device) -> torch.Tensor | None:
        """This rank's part of the exported weight."""
        del device
        return self._own.get(weight.name)

    def own(self) -> Mapping[str, nn.Parameter]:
        """This rank's parameters by their global names."""
        return self._own

    def copies(self, weight: Weight) -> list[nn.Parameter]:
        """This rank's parameters that hold a weight: none, one, or with several stages the last one's own copy of a
        tied embedding.
        """
        names = [weight.name, *(["output_layer.weight"] if self._tied and weight.name == _EMBEDDING else [])]
        return [self._own[name] for name in names if name in self._own]

    def keeps(self, number: int, name: str) -> bool:
        """Whether this rank writes the `number`-th piece of state: ranks take turns."""
        del name
        return number % self._groups.sizes.world == self._groups.rank

    def part(self, weight: Weight, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of anything that is cut like a weight."""
        group = self._cut_over(weight)
        return weight.shard(whole, group.rank(), group.size())

    def gather(
        self, weight: Weight, local: torch.Tensor | None, device: torch.device, dtype: torch.dtype | None
    ) -> torch.Tensor:
        """The whole of anything that is cut like a weight, on every rank of the replica. Collective.

        Args:
            local: This rank's part, None on ranks without one.
            device: Where the whole is wanted.
            dtype: Its precision; None keeps that of the weights.
        """
        groups, stage = self._groups, self._stage[weight.name]
        whole: torch.Tensor | None = None
        if groups.pp_group.rank() == stage:
            if local is not None:
                local = local.detach().to(device=device, dtype=dtype or local.dtype)
                whole = weight.paste(_all_gather(local, self._cut_over(weight), whole=weight.cut == "whole"))
            if weight.expert is not None:
                whole = self._from(groups.ep_group, weight.expert // self._experts_here, whole, weight, dtype, device)
        return self._from(groups.pp_group, stage, whole, weight, dtype, device)

    def _from(
        self,
        group: dist.ProcessGroup,
        rank: int,
        tensor: torch.Tensor | None,
        weight: Weight,
        dtype: torch.dtype | None,
        device: torch.device,
    ) -> torch.Tensor:
        if tensor is None:
            any_own = next(iter(self._own.values()))
            tensor = torch.empty(weight.shape, dtype=dtype or any_own.dtype, device=device)
        if group.size() > 1:
            tensor = tensor.contiguous()
            dist.broadcast(tensor, src=dist.get_process_group_ranks(group)[rank], group=group)
        return tensor


def whole_name(chunk: nn.Module, name: str) -> str:
    """The name of a part of a chunk, its layer numbered over the whole model."""
    found = _LAYER.match(name)
    if found is None:
        return name
    layers: Any = chunk.get_submodule("decoder.layers")
    number = int(layers[int(found[1])].layer_number) - 1
    return f"decoder.layers.{number}.{name[found.end() :]}"


def _anchor(weight: Weight) -> str:
    layer, _, _ = weight.name.partition(".experts.")
    return f"{layer}.router.weight" if weight.expert is not None else ""


def _all_gather(local: torch.Tensor, group: dist.ProcessGroup, *, whole: bool) -> list[torch.Tensor]:
    if whole or group.size() == 1:
        return [local]
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local.contiguous(), group=group)
    return parts
