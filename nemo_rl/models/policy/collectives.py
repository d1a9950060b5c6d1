"""Collectives with gradients, for work that every rank of a group does on the same tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _SumOverRanks(torch.autograd.Function):
    """Sum of every rank's part; its gradient flows to each part unchanged."""

    @staticmethod
    def forward(ctx: object, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # pyrefly: ignore[bad-override]  # torch's stub takes any arguments, a function has its own
        total = local.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _CopyToRanks(torch.autograd.Function):
    """The same tensor on every rank; its gradient is the sum of what every rank did with it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # pyrefly: ignore[bad-override]  # torch's stub takes any arguments, a function has its own
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _GatherVocabulary(torch.autograd.Function):
    """Logits of the whole vocabulary on every rank; each rank's gradient is its own slice."""

    @staticmethod
    def forward(ctx: Any, local_CW: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # pyrefly: ignore[bad-override]  # torch's stub takes any arguments, a function has its own
        ctx.group = group
        parts = [torch.empty_like(local_CW) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, local_CW.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].chunk(dist.get_world_size(ctx.group), dim=-1)[dist.get_rank(ctx.group)].contiguous(), None


def sum_over_ranks(local: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum of every rank's part; the part itself without a group."""
    return local if group is None else _SumOverRanks.apply(local, group)


def copy_to_ranks(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Marks the entry of a region in which every rank of `group` works on the same tensor."""
    return tensor if group is None else _CopyToRanks.apply(tensor, group)


def gather_logits(logits_CW: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Logits over the whole vocabulary."""
    return logits_CW if group is None else _GatherVocabulary.apply(logits_CW, group)
