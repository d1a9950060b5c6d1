"""Writes and reads a checkpoint of the Megatron backend: a Hugging Face directory of weights, and optimizer state.

Each state tensor is gathered to its whole shape, one at a time, and the ranks take turns keeping them for their files:
all ranks write, none holds everything, and the files load on any grid. Snapshots are taken while the step waits; files
are written in the background. Invariant: a run resumes from the optimizer's own float32 parameters, unrounded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from nemo_rl.models.megatron.bridge import BridgedWeights
from nemo_rl.models.megatron.megatron_optimizer import inner_optimizers
from nemo_rl.models.megatron.sharded_weights import ShardedWeights
from nemo_rl.models.policy.checkpoint_files import BackgroundWriter
from nemo_rl.models.policy.model_config import CheckpointMismatchError

if TYPE_CHECKING:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

ModelWeights = ShardedWeights | BridgedWeights
SCHEDULE_FILE = "schedule.json"
_MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
_MAIN = "param"


class OptimizerState:
    """The state that an optimizer keeps for each parameter, as tensors of the parameter's own shape."""

    def __init__(self, optimizer: object, weights: ModelWeights, device: torch.device) -> None:
        self._inner = [inner for inner in inner_optimizers(optimizer) if getattr(inner, "optimizer", None) is not None]
        self._weights = weights
        self._device = device
        names = _MOMENTS[self._inner[0].config.optimizer]
        # In float32 the optimizer works on the model's own parameters.
        half = self._inner[0].config.params_dtype is not torch.float32
        self.names = (_MAIN, *names) if half else names

    @property
    def step(self) -> float:
        """Optimizer steps so far."""
        for inner in self._inner:
            for group in inner.optimizer.param_groups:
                if "step" in group:
                    return float(group["step"])
            for state in inner.optimizer.state.values():
                if "step" in state:
                    return float(state["step"])
        return 0.0

    def gathered(self, trained: dict[str, bool]) -> Iterator[tuple[str, torch.Tensor]]:
        """Keys and whole tensors of everything; collective, the same on every rank. `trained`: by name whether a
        parameter is trained.
        """
        for weight in self._weights.described:
            if not trained[weight.name]:
                continue
            parameter = self._weights.own().get(weight.name)
            parts = self._of(parameter) if parameter is not None else {}
            for name in self.names:
                whole = self._weights.gather(weight, parts.get(name), self._device, torch.float32)
                yield f"{weight.name}:{name}", whole

    def keeps(self, number: int, key: str) -> bool:
        """Whether this rank writes what `gathered` yielded as its `number`-th, under `key`."""
        return self._weights.keeps(number, key.rpartition(":")[0])

    def _of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """This rank's part of a parameter's state; collective over the ranks that share it."""
        inner, mine = self._owner(parameter)
        if not hasattr(inner, "model_param_gbuf_map"):
            return {name: tensor for name, tensor in self._tensors(inner, parameter).items() if name in self.names}
        tensors = inner._get_main_param_and_optimizer_states(parameter) if mine is not None else {}
        found = {}
        for name in self.names:
            flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=self._device)
            if mine is not None:
                flat[mine].copy_(tensors[name].view(-1))
            # Each element is on one rank and zero on the others.
            dist.all_reduce(flat, group=inner.data_parallel_group)
            found[name] = flat.view(parameter.shape)
        return found

    def _owner(self, parameter: nn.Parameter) -> tuple[DistributedOptimizer, slice | None]:
        """The optimizer of a parameter, and the range of it that this rank keeps where ranks share it."""
        for inner in self._inner:
            if not hasattr(inner, "model_param_gbuf_map"):
                if _holds(inner, parameter):
                    return inner, None
            elif any(parameter in buffer.param_to_bucket for buffer in inner.buffers):
                if parameter not in inner.model_param_gbuf_map:
                    return inner, None
                span = inner._get_model_param_range_map(parameter)[_MAIN]
                return inner, slice(span.start, span.end)
        raise CheckpointMismatchError("a trained parameter has no optimizer")

    @staticmethod
    def _tensors(inner: DistributedOptimizer, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        main = getattr(parameter, "main_param", None)
        main = parameter if main is None else main
        return {_MAIN: main.data, **inner.optimizer.state[main]}

    @torch.no_grad()
    def restore(self, files: StateFiles, trained: dict[str, bool]) -> None:
        """Takes this rank's part of everything from files."""
        for inner in self._inner:
            _make_state(inner, self.names)
        for weight in self._weights.described:
            for parameter in self._weights.copies(weight) if trained[weight.name] else ():
                inner, mine = self._owner(parameter)
                shared = hasattr(inner, "model_param_gbuf_map")
                if shared and mine is None:
                    continue
                tensors = (
                    inner._get_main_param_and_optimizer_states(parameter) if shared else self._tensors(inner, parameter)
                )
                for name in self.names:
                    local = self._weights.part(weight, files.tensor(f"{weight.name}:{name}"))
                    tensors[name].view(-1).copy_(local.reshape(-1)[mine] if mine is not None else local.reshape(-1))
        for inner in self._inner:
            for group in inner.optimizer.param_groups:
                if "step" in group:
                    group["step"] = int(files.step)
            for state in inner.optimizer.state.values():
                state["step"] = torch.tensor(files.step)


def _make_state(inner: DistributedOptimizer, names: Sequence[str]) -> None:
    if inner.init_state_fn is not None:
        inner.init_state_fn(inner.optimizer, inner.config)
        return
    for group in inner.optimizer.param_groups:
        for parameter in group["params"]:
            inner.optimizer.state[parameter] |= {n: torch.zeros_like(parameter) for n in names if n != _MAIN}


def _holds(inner: DistributedOptimizer, parameter: nn.Parameter) -> bool:
    wanted = {id(parameter), id(getattr(parameter, "main_param", None))}
    return any(id(held) in wanted for group in inner.optimizer.param_groups for held in group["params"])


class StateFiles:
    """State tensors of a checkpoint, read one by one from the files of all ranks that wrote it. Raises
    CheckpointMismatchError: it holds no state of this backend.
    """

    def __init__(self, path: str) -> None:
        from safetensors import safe_open

        self._path = path
        folder = Path(path)
        if not (folder / SCHEDULE_FILE).exists() or not any(folder.glob("state-*.safetensors")):
            raise CheckpointMismatchError(f"{path}: there is no optimizer state of the Megatron backend")
        saved = json.loads((folder / SCHEDULE_FILE).read_text())
        self.schedule: dict[str, object] = saved["schedule"]
        self.step: float = saved["step"]
        self._files = [safe_open(file, "pt") for file in sorted(folder.glob("state-*.safetensors"))]
        self._file = {key: number for number, file in enumerate(self._files) for key in file.keys()}  # noqa: SIM118 - no mapping, only the method

    def tensor(self, key: str) -> torch.Tensor:
        """One tensor. Raises CheckpointMismatchError: it is missing."""
        if key not in self._file:
            raise CheckpointMismatchError(f"{self._path}: {key} is missing; it is of another model, optimizer or grid")
        return self._files[self._file[key]].get_tensor(key)


def save_optimizer(
    writer: BackgroundWriter,
    state: OptimizerState,
    schedule: OptimizerParamScheduler,
    trained: dict[str, bool],
    path: str,
    rank: int,
) -> None:
    """Snapshots this rank's share of the state and writes it in the background."""
    own: dict[str, torch.Tensor] = {}
    for number, (key, tensor) in enumerate(state.gathered(trained)):
        if state.keeps(number, key):
            own[key] = tensor.to("cpu", copy=True).contiguous()
    writer.submit(_write_state, own, {"step": state.step, "schedule": schedule.state_dict()}, path, rank)


def _write_state(state: dict[str, torch.Tensor], saved: dict[str, object], path: str, rank: int) -> None:
    from safetensors.torch import save_file

    os.makedirs(path, exist_ok=True)
    save_file(state, os.path.join(path, f"state-{rank:05d}.safetensors"))
    if rank == 0:
        with open(os.path.join(path, SCHEDULE_FILE), "w") as file:
            json.dump(saved, file)


def load_optimizer(
    state: OptimizerState, schedule: OptimizerParamScheduler, trained: dict[str, bool], path: str
) -> None:
    """Restores optimizer and schedule in place, whatever grid they were saved on. Raises CheckpointMismatchError: the
    files belong to another model, optimizer or backend.
    """
    files = StateFiles(path)
    state.restore(files, trained)
    schedule.load_state_dict(files.schedule)
