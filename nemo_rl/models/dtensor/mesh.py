"""The device mesh of the DTensor backend and this rank's place in it.

Axes, outermost first: dp_replicate, dp_shard, cp, tp. Gradients are summed over the first three (context-parallel ranks
hold parts of the same rows), parameters are sharded over dp_shard x cp and, layer-wise, tp. Experts have a mesh of
their own over the same ranks, in which dp_shard x cp is cut into expert_shard x ep.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nemo_rl.config.world_sizes import ParallelSizes, ParallelSizesError
from nemo_rl.distributed.accelerator_slots import Accelerator
from nemo_rl.models.policy.rank_groups import RankGroups


class ParallelMesh(RankGroups):
    """Process groups of this rank; made once per process. `dp_replicate`: whole copies of the parameters among the
    data-parallel ranks (HSDP). Raises ParallelSizesError: copies or experts do not divide the ranks.
    """

    def __init__(self, sizes: ParallelSizes, accelerator: Accelerator, *, dp_replicate: int = 1) -> None:
        if sizes.dp % dp_replicate:
            raise ParallelSizesError(
                f"policy.dtensor_cfg.dp_replicate_size {dp_replicate} does not divide the {sizes.dp} data-parallel "
                "ranks"
            )
        sharing = sizes.dp // dp_replicate * sizes.cp
        if sharing % sizes.ep:
            raise ParallelSizesError(
                f"policy.dtensor_cfg.expert_parallel_size {sizes.ep} does not divide the {sharing} ranks that share "
                "one copy of the parameters"
            )
        super().__init__(sizes, accelerator)
        self.dp_replicate = dp_replicate
        shape = (dp_replicate, sizes.dp // dp_replicate, sizes.cp, sizes.tp)
        self.mesh = init_device_mesh(accelerator.kind, shape, mesh_dim_names=("dp_replicate", "dp_shard", "cp", "tp"))
        self.shard_mesh = self.mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
        self.data_mesh = self.mesh["dp_replicate", "dp_shard"]._flatten("dp")
        self.gradient_mesh = self.mesh["dp_replicate", "dp_shard", "cp"]._flatten("dp_cp")
        self._experts: DeviceMesh | None = None
        if sizes.ep > 1:
            shape = (dp_replicate, sharing // sizes.ep, sizes.ep, sizes.tp)
            self._experts = init_device_mesh(
                accelerator.kind, shape, mesh_dim_names=("expert_replicate", "expert_shard", "ep", "expert_tp")
            )
        self._coordinates = {
            "data_parallel": self.data_mesh.get_local_rank(),
            "context_parallel": self.mesh.get_local_rank("cp"),
            "tensor_parallel": self.mesh.get_local_rank("tp"),
            "pipeline_parallel": 0,
        }

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that see different samples."""
        return self.data_mesh.get_group()

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """Mesh over which parameters are sharded: one axis, or two with replicas (HSDP)."""
        return self.mesh["dp_replicate", "dp_shard_cp"] if self.dp_replicate > 1 else self.shard_mesh

    @property
    def ep_mesh(self) -> DeviceMesh | None:
        """Ranks among which each layer's experts are shared out, neighbours in rank; None where every rank has all
        experts.
        """
        return None if self._experts is None else self._experts["ep"]

    @property
    def experts_fsdp_mesh(self) -> DeviceMesh:
        """Mesh over which the parameters of this rank's experts are sharded."""
        if self._experts is None:
            return self.fsdp_mesh
        return (
            self._experts["expert_replicate", "expert_shard"]
            if self.dp_replicate > 1
            else self._experts["expert_shard"]
        )

    @property
    def tp_mesh(self) -> DeviceMesh:
        """Tensor-parallel mesh."""
        return self.mesh["tp"]

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """Tensor-parallel group, None when there is one rank."""
        return self.mesh.get_group("tp") if self.sizes.tp > 1 else None

    @property
    def cp_group(self) -> dist.ProcessGroup | None:
        """Context-parallel group, None when there is one rank."""
        return self.mesh.get_group("cp") if self.sizes.cp > 1 else None

    @property
    def cp_rank(self) -> int:
        """Coordinate along cp."""
        return self._coordinates["context_parallel"]
