"""The files of a policy checkpoint that every backend writes alike, and the thread that writes them.

A snapshot is taken on the host while the step waits; files follow in the background, so the next step does not.
Invariant: the weights directory is a whole Hugging Face model, or an adapter in PEFT's format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from operator import methodcaller
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_map_only

from nemo_rl.utils.adapter_files import AdapterInfo, write_adapter

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class BackgroundWriter:
    """Writes files one after the other in a thread. `whole`: whether this rank writes the tensors that all can have."""

    def __init__(self, *, whole: bool = True) -> None:
        self._whole = whole
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: list[Future[object]] = []

    def submit(self, write: Callable[..., object], *args: object) -> None:
        """Queues a write."""
        self._pending.append(self._pool.submit(write, *args))

    def submit_whole(
        self, tensors: Iterable[tuple[str, torch.Tensor]], write: Callable[..., object], *args: object
    ) -> None:
        """Copies whole tensors to the host and queues a write of the copies, its first argument. Ranks that do not
        write them take every tensor too: to gather one may be collective.
        """
        copies: dict[str, torch.Tensor] = {}
        for name, tensor in tensors:
            if self._whole:
                copies[name] = tensor.to("cpu", copy=True).contiguous()
        if self._whole:
            self.submit(write, copies, *args)

    def poll(self) -> bool:
        """Whether everything is on disk. Raises OSError: the disk is full or the directory cannot be written."""
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if future not in done]
        for future in done:
            if future.exception() is not None:
                self.drop()
            future.result()
        return not self._pending

    def drop(self) -> None:
        """Drops a snapshot that failed here or on another rank; a write in progress ends first."""
        for future in self._pending:
            future.cancel()
        wait(self._pending)
        self._pending = []

    def wait(self) -> None:
        """Waits until everything is on disk. Raises OSError: the disk is full or the directory cannot be written."""
        pending = self._pending
        self._pending = []
        for future in pending:
            future.result()


def host_copy(tree: object) -> object:
    """The tree of dictionaries with its tensors copied to the host."""
    return tree_map_only(torch.Tensor, methodcaller("to", "cpu", copy=True), tree)


def write_model_directory(
    state: dict[str, torch.Tensor], model: PreTrainedModel, path: str, dtype: torch.dtype, save_format: str
) -> None:
    """Writes a directory that transformers loads.

    Args:
        state: Full weights on the host under their Hugging Face names.
        model: Has `config`, and `generation_config` or None.
        dtype: The precision in which the model is used.
        save_format: `safetensors` or `torch_save`.
    """
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
        # Not `save_pretrained`, which refuses what many published files hold, such as a temperature without sampling.
        model.generation_config.to_json_file(os.path.join(path, "generation_config.json"))
    if save_format == "torch_save":
        torch.save(state, os.path.join(path, "pytorch_model.bin"))
        return
    write_tensors(state, path)


def write_tensors(state: dict[str, torch.Tensor], path: str) -> None:
    """Writes safetensors files of at most 5 GB into a directory, which is made."""
    from huggingface_hub import save_torch_state_dict

    os.makedirs(path, exist_ok=True)
    save_torch_state_dict(state, path, max_shard_size="5GB", metadata={"format": "pt"})


def write_adapter_directory(
    factors: Mapping[str, torch.Tensor], config: PretrainedConfig, path: str, info: AdapterInfo
) -> None:
    """Writes an adapter in PEFT's format, with the configuration of the model that it adapts. `factors`: see
    `write_adapter`.
    """
    write_adapter(path, info, factors)
    config.save_pretrained(path)
