"""What of a rank's training state moves between device and host, and the reference weights that are swapped in."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager

import torch

from nemo_rl.models.dtensor.lora import base_model
from nemo_rl.models.dtensor.parallelize import local_tensor
from nemo_rl.models.dtensor.scorer import CausalLMScorer


def model_tensors(scorer: CausalLMScorer) -> Iterator[torch.Tensor]:
    """This rank's parameters, their gradients, those that were not reduced yet, and buffers."""
    for parameter in scorer.parameters():
        yield local_tensor(parameter.detach())
        if parameter.grad is not None:
            yield local_tensor(parameter.grad.detach())
    for gradient in scorer.deferred_gradients():
        yield local_tensor(gradient.detach())
    yield from scorer.buffers()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """This rank's part of the optimizer's state; step counters stay where the optimizer put them."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                yield local_tensor(value)


class BaseModel:
    """The reference of a policy with adapters: the policy without them."""

    @contextmanager
    def swapped_in(self, scorer: CausalLMScorer) -> Generator[None]:
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
    def swapped_in(self, scorer: CausalLMScorer) -> Generator[None]:
        """The model computes with the reference weights inside the block; the current ones come back bit for bit."""
        current = [local_tensor(parameter).detach().clone() for parameter in scorer.parameters()]
        try:
            for parameter, shard in zip(scorer.parameters(), self._shards, strict=True):
                local_tensor(parameter).copy_(shard, non_blocking=True)
            yield
        finally:
            for parameter, shard in zip(scorer.parameters(), current, strict=True):
                local_tensor(parameter).copy_(shard)
