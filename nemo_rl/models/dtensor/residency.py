"""What of a rank's training state moves between device and host."""

from __future__ import annotations

from collections.abc import Iterator

import torch

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


def shards(scorer: CausalLMScorer) -> list[torch.Tensor]:
    """This rank's parameters."""
    return [local_tensor(parameter.detach()) for parameter in scorer.parameters()]
