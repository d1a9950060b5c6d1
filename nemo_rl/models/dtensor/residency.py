"""Where training state lives at a moment: on the device, or on the host while generation has the device.

Moves model parameters and optimizer state, and swaps the reference weights in. On a CPU slot there is only one memory,
so moves do nothing. Invariant: a move never changes a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nemo_rl.models.dtensor.lora import base_model
from nemo_rl.models.dtensor.parallelize import local_tensor
from nemo_rl.models.dtensor.scorer import CausalLMScorer


def move_model(scorer: CausalLMScorer, device: torch.device) -> None:
    """Moves parameters and buffers."""
    if next(scorer.parameters()).device != device:
        scorer.to(device)


def move_optimizer(optimizer: torch.optim.Optimizer | None, device: torch.device) -> None:
    """Moves the tensors of the optimizer's state."""
    if optimizer is None:
        return
    for state in optimizer.state.values():
        for key, value in state.items():
            # Step counters stay where the optimizer put them: some optimizers want them on the host.
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.device != device:
                state[key] = value.to(device, non_blocking=True)
    if device.type == "cpu" and torch.cuda.is_available():
        torch.cuda.synchronize()


class BaseModel:
    """The reference of a policy with adapters: the policy without them."""

    @contextmanager
    def swapped_in(self, scorer: CausalLMScorer) -> Iterator[None]:
        """The model computes without its adapters inside the block."""
        with base_model(scorer):
            yield


class ReferenceWeights:
    """A copy of this rank's shards on the host, and the swap that puts them in for a while."""

    def __init__(self, scorer: CausalLMScorer) -> None:
        pinned = torch.cuda.is_available()
        self._shards = []
        for parameter in scorer.parameters():
            copy = local_tensor(parameter).detach().to("cpu", copy=True)
            self._shards.append(copy.pin_memory() if pinned else copy)

    @contextmanager
    @torch.no_grad()
    def swapped_in(self, scorer: CausalLMScorer) -> Iterator[None]:
        """The model computes with the reference weights inside the block; the current ones come back bit for bit."""
        current = [local_tensor(parameter).detach().clone() for parameter in scorer.parameters()]
        try:
            for parameter, shard in zip(scorer.parameters(), self._shards, strict=True):
                local_tensor(parameter).copy_(shard, non_blocking=True)
            yield
        finally:
            for parameter, shard in zip(scorer.parameters(), current, strict=True):
                local_tensor(parameter).copy_(shard)
