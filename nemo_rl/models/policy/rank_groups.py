"""Process groups common to both backends: this rank's place, and reductions over the data-parallel ranks.

Invariant: ranks are numbered as in the policy's grid, pipeline outermost, then data, context and tensor.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

import torch
import torch.distributed as dist

from nemo_rl.config.world_sizes import ParallelSizes
from nemo_rl.distributed.accelerator_slots import Accelerator
from nemo_rl.distributed.communicators import Communicators

COLLECTIVE_TIMEOUT_S = 900.0


class RankGroups(ABC):
    """Process groups of this rank; made once per process."""

    # Known also while communicators are dropped.
    _coordinates: dict[str, int]

    def __init__(self, sizes: ParallelSizes, accelerator: Accelerator) -> None:
        self.sizes = sizes
        self.device = accelerator.torch_device()
        self.rank = int(os.environ["RANK"])
        self.communicators = Communicators.of_ranks(accelerator, COLLECTIVE_TIMEOUT_S)

    @property
    @abstractmethod
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that see different samples."""

    def coordinates(self) -> dict[str, int]:
        """This rank's position along every axis, under the names that drivers use."""
        return dict(self._coordinates)

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over data-parallel ranks."""
        dist.all_reduce(values, group=self.data_group)
        return values

    def max_over_data(self, value: int) -> int:
        """Maximum over data-parallel ranks."""
        if self.sizes.dp == 1:
            return value
        tensor = torch.tensor([value], device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.data_group)
        return int(tensor)

    def gather_over_data(self, numbers: list[int]) -> list[int]:
        """The numbers of all data-parallel ranks, in rank order."""
        parts: list[list[int]] = [[]] * self.sizes.dp
        dist.all_gather_object(parts, numbers, group=self.data_group)
        return [number for part in parts for number in part]

    def make_replica_group(self) -> dist.ProcessGroup | None:
        """A host-side group of the ranks that see the same samples as this one, its leader first; None where there is
        no other. Collective: called on all ranks.
        """
        sizes = self.sizes
        if sizes.replica == 1:
            return None
        grid = torch.arange(sizes.world).reshape(sizes.pp, sizes.dp, sizes.cp, sizes.tp)
        together = grid.transpose(0, 1).reshape(sizes.dp, -1).tolist()
        group, _ = dist.new_subgroups_by_enumeration(together, backend="gloo")
        return group if isinstance(group, dist.ProcessGroup) else None
