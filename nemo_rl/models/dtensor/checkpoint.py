"""Writes and reads a policy checkpoint: a Hugging Face directory of weights, and the sharded optimizer state.

Snapshots are taken on the host while the step waits; files are written by a background thread, so the next step does
not. Knows nothing of retention or of what else a run saves. Invariants: weights are the float32 master weights, so a
resumed run goes on bit for bit; files load without running code.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.optim.lr_scheduler import LRScheduler

from nemo_rl.models.dtensor.export import full_weights, hf_name
from nemo_rl.models.dtensor.mesh import ParallelMesh
from nemo_rl.models.dtensor.model_config import CheckpointMismatchError
from nemo_rl.models.dtensor.scorer import CausalLMScorer

SCHEDULE_FILE = "schedule.json"
_PER_GROUP = ("base_lrs", "_last_lr")


class CheckpointWriter:
    """Writes checkpoints of one rank in the background.

    Args:
        mesh: This rank's groups.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: list[Future[None]] = []
        # Background collectives must not interleave with those of training.
        self._group: Any = dist.new_group(backend="gloo")

    def save_weights(self, scorer: CausalLMScorer, path: str, *, dtype_in_config: torch.dtype, save_format: str) -> None:
        """Snapshots the full weights on rank 0 and writes a Hugging Face directory."""
        state: dict[str, torch.Tensor] = {}
        for name, tensor in full_weights(scorer, None, self._mesh.device):
            if self._mesh.rank == 0:
                state[name] = tensor.to("cpu", copy=True)
        if self._mesh.rank == 0:
            model = scorer.lm
            self._pending.append(self._pool.submit(_write_weights, model, state, path, dtype_in_config, save_format))

    def save_optimizer(self, scorer: CausalLMScorer, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, path: str) -> None:
        """Snapshots this rank's optimizer shards and writes them."""
        state = _copied(_named_state(scorer, optimizer))
        schedule = {"groups": [_scalars(group) for group in optimizer.param_groups], "scheduler": None if scheduler is None else scheduler.state_dict()}
        self._pending.append(self._pool.submit(self._write_optimizer, state, schedule, path))

    def _write_optimizer(self, state: dict[str, Any], schedule: dict[str, Any], path: str) -> None:
        if self._mesh.rank == 0:
            os.makedirs(path, exist_ok=True)
        dist.barrier(group=self._group)
        dcp.save({"optimizer": state}, checkpoint_id=path, process_group=self._group)
        if self._mesh.rank == 0:
            with open(os.path.join(path, SCHEDULE_FILE), "w") as file:
                json.dump(_plain(schedule), file)

    def poll(self) -> bool:
        """Whether everything is on disk.

        Raises:
            OSError: The disk is full or the directory cannot be written.
        """
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if future not in done]
        for future in done:
            future.result()
        return not self._pending

    def wait(self) -> None:
        """Waits until everything is on disk.

        Raises:
            OSError: The disk is full or the directory cannot be written.
        """
        pending = self._pending
        self._pending = []
        for future in pending:
            future.result()


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return tree.to("cpu", copy=True) if isinstance(tree, torch.Tensor) else tree


def _write_weights(model: Any, state: dict[str, torch.Tensor], path: str, dtype: torch.dtype, save_format: str) -> None:
    os.makedirs(path, exist_ok=True)
    config = model.config
    config.save_pretrained(path)
    with open(os.path.join(path, "config.json")) as file:
        plain = json.load(file)
    # Readers that follow the config load in the precision the model is used in; the file itself keeps float32.
    plain["dtype"] = str(dtype).removeprefix("torch.")
    plain.pop("_attn_implementation", None)
    with open(os.path.join(path, "config.json"), "w") as file:
        json.dump(plain, file, indent=2)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(path)
    if save_format == "torch_save":
        torch.save(state, os.path.join(path, "pytorch_model.bin"))
        return
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(state, path, max_shard_size="5GB", metadata={"format": "pt"})


def _named_state(scorer: CausalLMScorer, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    return {hf_name(name): dict(optimizer.state[parameter]) for name, parameter in scorer.named_parameters() if parameter in optimizer.state}


def _scalars(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _plain(tree: Any) -> Any:
    """The tree without callables and tensors, so that it can be read back without running code."""
    if isinstance(tree, dict):
        return {str(key): _plain(value) for key, value in tree.items() if not callable(value)}
    if isinstance(tree, (list, tuple)):
        return [_plain(item) for item in tree]
    return tree.item() if isinstance(tree, torch.Tensor) else tree


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


def load_optimizer(scorer: CausalLMScorer, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, path: str) -> None:
    """Restores optimizer and scheduler in place, resharding where the number of ranks changed.

    Raises:
        CheckpointMismatchError: The files belong to another model or optimizer.
    """
    _initialise_state(optimizer)
    state = _named_state(scorer, optimizer)
    try:
        dcp.load({"optimizer": state}, checkpoint_id=path)
    except (RuntimeError, ValueError, KeyError, dcp.api.CheckpointException) as error:
        raise CheckpointMismatchError(f"{path}: optimizer state does not fit the configured model or optimizer ({error})") from error
    for name, parameter in scorer.named_parameters():
        for key, value in state.get(hf_name(name), {}).items():
            optimizer.state[parameter][key] = value
    with open(os.path.join(path, SCHEDULE_FILE)) as file:
        schedule = json.load(file)
    # All groups share the configuration's one schedule; their number depends on how the model was cut when it was saved.
    groups, saved = len(optimizer.param_groups), schedule["groups"][0]
    for group in optimizer.param_groups:
        # The schedule owns the learning rate; everything else is the configuration's.
        group.update({key: saved[key] for key in ("lr", "initial_lr") if key in saved})
    if scheduler is not None and schedule["scheduler"] is not None:
        _restore_scheduler(scheduler, schedule["scheduler"], groups)


def _restore_scheduler(scheduler: LRScheduler, state: dict[str, Any], groups: int) -> None:
    children = state.pop("_schedulers", None)
    if children is not None:
        made_of_others: Any = scheduler
        for child, child_state in zip(made_of_others._schedulers, children, strict=True):
            _restore_scheduler(child, child_state, groups)
    for key, value in state.items():
        # Functions of the step are not in files; the configuration has made them anew.
        if key != "lr_lambdas":
            setattr(scheduler, key, _like(getattr(scheduler, key, None), value[:1] * groups if key in _PER_GROUP else value))


def _like(current: Any, saved: Any) -> Any:
    # JSON keys are text; schedulers look milestones up by number.
    return Counter({int(key): count for key, count in saved.items()}) if isinstance(current, Counter) else saved
