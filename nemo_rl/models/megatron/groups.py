"""The process groups of the Megatron backend and this rank's place in them.

Invariants: ranks are numbered as in the policy's grid, pipeline outermost, then data, context and tensor; reductions of
the train step give the same value on all ranks of a replica.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from nemo_rl.config.world_sizes import ParallelSizes
from nemo_rl.distributed.accelerator_slots import Accelerator
from nemo_rl.distributed.communicators import COLLECTIVE_TIMEOUT_S, RankGroups
from nemo_rl.models.megatron import cpu


class MegatronGroups(RankGroups):
    """Groups of this rank; made once per process and set of sizes. `virtual_stages`: parts of the model on each
    pipeline stage; None for one.
    """

    def __init__(self, sizes: ParallelSizes, accelerator: Accelerator, virtual_stages: int | None = None) -> None:
        super().__init__(sizes, accelerator)
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
        self._coordinates = {
            "data_parallel": self.dp_group.rank(),
            "context_parallel": self.cp_group.rank(),
            "tensor_parallel": self.tp_group.rank(),
            "pipeline_parallel": self.pp_group.rank(),
            "expert_parallel": self.ep_group.rank(),
        }

    @property
    def data_group(self) -> dist.ProcessGroup:
        return self.dp_group

    def from_last_stage(self, value: object) -> Any:
        """Broadcasts the last pipeline stage's value to all stages of this replica."""
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
