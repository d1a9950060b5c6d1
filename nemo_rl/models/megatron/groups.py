"""The process groups of the Megatron backend and this rank's place in them.

Invariants: ranks are numbered as in the policy's grid, pipeline outermost, then data, context and tensor; reductions of
the train step give the same value on all ranks of a replica.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl.config.placement import ParallelSizes, ParallelSizesError
from nemo_rl.distributed.accelerators import Accelerator
from nemo_rl.distributed.communicators import Communicators
from nemo_rl.models.megatron import cpu

COLLECTIVE_TIMEOUT_S = 900.0


class MegatronGroups:
    """Groups of this rank; made once per process and set of sizes. `virtual_stages`: parts of the model on each
    pipeline stage; None for one. Raises ParallelSizesError: experts do not divide the ranks of a stage.
    """

    def __init__(self, sizes: ParallelSizes, accelerator: Accelerator, virtual_stages: int | None = None) -> None:
        per_stage = sizes.dp * sizes.cp * sizes.tp
        if per_stage % (sizes.ep * sizes.etp):
            raise ParallelSizesError(
                f"policy.megatron_cfg: expert_model_parallel_size * expert_tensor_parallel_size is "
                f"{sizes.ep * sizes.etp}, which does not divide the {per_stage} ranks of a pipeline stage"
            )
        self.sizes = sizes
        self.device = accelerator.torch_device()
        self.rank = int(os.environ["RANK"])
        self.communicators = Communicators.of_ranks(accelerator, COLLECTIVE_TIMEOUT_S)
        from megatron.core import parallel_state

        cpu.install()
        self._state: object = parallel_state
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tp,
            pipeline_model_parallel_size=sizes.pp,
            virtual_pipeline_model_parallel_size=virtual_stages,
            context_parallel_size=sizes.cp,
            expert_model_parallel_size=sizes.ep,
            expert_tensor_parallel_size=sizes.etp,
            distributed_timeout_minutes=int(COLLECTIVE_TIMEOUT_S / 60),
            create_gloo_process_groups=False,
        )
        self.tp_group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
        self.pp_group: dist.ProcessGroup = parallel_state.get_pipeline_model_parallel_group()
        self.cp_group: dist.ProcessGroup = parallel_state.get_context_parallel_group()
        self.dp_group: dist.ProcessGroup = parallel_state.get_data_parallel_group()
        self.ep_group: dist.ProcessGroup = parallel_state.get_expert_model_parallel_group()
        self.etp_group: dist.ProcessGroup = parallel_state.get_expert_tensor_parallel_group()
        # Known also while communicators are dropped.
        self._coordinates = {
            "data_parallel": self.dp_group.rank(),
            "context_parallel": self.cp_group.rank(),
            "tensor_parallel": self.tp_group.rank(),
            "pipeline_parallel": self.pp_group.rank(),
            "expert_parallel": self.ep_group.rank(),
        }

    def coordinates(self) -> dict[str, int]:
        """This rank's position along every axis, under the names that drivers use."""
        return dict(self._coordinates)

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that see different samples."""
        dist.all_reduce(values, group=self.dp_group)
        return values

    def max_over_data(self, value: int) -> int:
        """Maximum over the ranks that see different samples."""
        tensor = torch.tensor([value], device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.dp_group)
        return int(tensor)

    def gather_over_data(self, numbers: list[int]) -> list[int]:
        """The numbers of all data-parallel ranks, in rank order."""
        parts: list[Any] = [None] * self.dp_group.size()
        dist.all_gather_object(parts, numbers, group=self.dp_group)
        return [number for part in parts for number in part]

    def from_last_stage(self, value: object) -> Any:
        """What the last pipeline stage of this replica has, on all of its stages."""
        if self.sizes.pp == 1:
            return value
        said = [value]
        last = dist.get_process_group_ranks(self.pp_group)[-1]
        dist.broadcast_object_list(said, src=last, group=self.pp_group)
        return said[0]

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds tokens."""
        return self._coordinates["pipeline_parallel"] == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank scores tokens."""
        return self._coordinates["pipeline_parallel"] == self.sizes.pp - 1

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
