"""Writes and reads a policy checkpoint: a Hugging Face directory of weights, and the sharded optimizer state.

Snapshots are taken while the step waits; a background thread writes the files. Invariants: weights are the float32
master weights, so a run resumes bit for bit; files load without running code.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from nemo_rl.models.dtensor.export import hf_name
from nemo_rl.models.dtensor.parallelize import ParallelMesh
from nemo_rl.models.dtensor.scorer import CausalLMScorer
from nemo_rl.models.policy.checkpoint_files import BackgroundWriter, host_copy
from nemo_rl.models.policy.model_config import CheckpointMismatchError
from nemo_rl.models.policy.optimizer import advance_scheduler

SCHEDULE_FILE = "schedule.json"
_PLAIN_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
            *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        )
    ),
}
"""What torch's description of a sharded checkpoint is made of, beside names of number types."""


class DTensorCheckpointWriter(BackgroundWriter):
    """Writes checkpoints of one rank in the background: whole weights, and its part of the optimizer's state."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__(whole=mesh.rank == 0)
        self._mesh = mesh
        # Background collectives must not interleave with those of training.
        self._group: Any = dist.new_group(backend="gloo")

    def save_optimizer(
        self, scorer: CausalLMScorer, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, path: str
    ) -> None:
        """Snapshots this rank's optimizer shards and writes them."""
        state = host_copy(_named_state(scorer, optimizer))
        steps = 0 if scheduler is None else scheduler.last_epoch
        self.submit(self._write_optimizer, state, {"steps": steps}, path)

    def _write_optimizer(self, state: dict[str, object], schedule: dict[str, int], path: str) -> None:
        if self._mesh.rank == 0:
            os.makedirs(path, exist_ok=True)
        dist.barrier(group=self._group)
        dcp.save({"optimizer": state}, checkpoint_id=path, process_group=self._group)
        if self._mesh.rank == 0:
            with open(os.path.join(path, SCHEDULE_FILE), "w") as file:
                json.dump(schedule, file)


def _named_state(scorer: CausalLMScorer, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, object]]:
    return {
        hf_name(name): dict(optimizer.state[parameter])
        for name, parameter in scorer.named_parameters()
        if parameter in optimizer.state
    }


@torch.no_grad()
def _initialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer create its state, by a step of length zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


class _PlainUnpickler(pickle.Unpickler):
    """Reads a pickle whose classes hold values and run no code."""

    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        is_dtype = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if is_dtype or (module_name, global_name) in _PLAIN_CLASSES:
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(
            f"it names {module_name}.{global_name}, which belongs to no optimizer state and could run code"
        )


class _PlainReader(dcp.FileSystemReader):
    """torch's reader, which unpickles the description of a checkpoint as it comes, made safe for files of others."""

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as file:
            metadata = _PlainUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("it is no description of a sharded checkpoint")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _PlainPlanner(dcp.DefaultLoadPlanner):
    """torch's load planner, which unpickles non-tensor entries, restricted to plain values for files of others."""

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # Raises for whatever is more than a plain value; what passes is read again.
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


def load_optimizer(
    scorer: CausalLMScorer, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, path: str
) -> None:
    """Restores the optimizer's state and brings the schedule to the step of the checkpoint, both in place, resharding
    where the number of ranks changed. Learning rate and every other argument stay the configuration's. Raises
    CheckpointMismatchError: the files belong to another model or optimizer.
    """
    _initialise_state(optimizer)
    state = _named_state(scorer, optimizer)
    try:
        dcp.load({"optimizer": state}, storage_reader=_PlainReader(path), planner=_PlainPlanner())
    except (RuntimeError, ValueError, KeyError, pickle.UnpicklingError, dcp.api.CheckpointException) as error:
        raise CheckpointMismatchError(
            f"{path}: optimizer state does not fit the configured model or optimizer ({error})"
        ) from error
    for name, parameter in scorer.named_parameters():
        for key, value in state.get(hf_name(name), {}).items():
            optimizer.state[parameter][key] = value
    # Rate and schedule are the configuration's, at the step where the run is: a changed one is obeyed.
    if scheduler is not None:
        with open(os.path.join(path, SCHEDULE_FILE)) as file:
            advance_scheduler(scheduler, json.load(file)["steps"])
