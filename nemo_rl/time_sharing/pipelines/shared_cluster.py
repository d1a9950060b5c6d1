"""Some GPUs of the pool as a cluster that worker groups can be placed on.

One bundle per GPU is reserved once for the whole pool; every pipeline places its actors on the bundles of its mapping,
with so small a share that all pipelines fit, because the scheduler decides who uses a GPU when. Invariants: rank r of a
group of width w lies on the GPUs `mapping[r * w : (r + 1) * w]`; every actor is named with its pipeline's incarnation,
so that the reaper finds it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group

from nemo_rl.distributed.accelerator_slots import Accelerator
from nemo_rl.distributed.virtual_cluster import (
    RayVirtualCluster,
    ResourceInsufficientError,
    first_not_reserved,
    holders_of,
)
from nemo_rl.time_sharing.agents.ray_reaper import agent_namespace, rank_actor_name
from nemo_rl.time_sharing.pipelines.residents import SlotBytes
from nemo_rl.time_sharing.protocol.topology import Pool

# Every slot is shared by this many worker groups at most: two of each pipeline.
_GROUPS_PER_SLOT = 128
_RESERVE_S = 180.0
# https://docs.nvidia.com/deploy/mps: read when a process first uses the GPU; without MPS it changes nothing.
_MPS_PRIORITY, _BELOW_NORMAL = "CUDA_MPS_CLIENT_PRIORITY", "1"
RESERVATION = "time_sharing_"
"""Begins the names of a pool's placement groups."""


def reserve_pool(pool: Pool, accelerator: Accelerator) -> list[PlacementGroup]:
    """One placement group per node, with one bundle per GPU; they outlive the process that reserves them. Raises
    ResourceInsufficientError: the Ray cluster does not have the slots, or they did not become free in time.
    """
    bundle = {accelerator.ray_resource: 1.0, "CPU": 1.0}
    groups = [
        placement_group(
            [dict(bundle) for _ in range(pool.gpus_per_node)],
            strategy="STRICT_PACK",
            name=f"{RESERVATION}{node}",
            lifetime="detached",
        )
        for node in range(pool.nodes)
    ]
    if first_not_reserved(groups, _RESERVE_S) is not None:
        raise ResourceInsufficientError(
            f"the pool needs {pool.nodes} x {pool.gpus_per_node} {accelerator.ray_resource}; the Ray cluster has "
            f"{ray.cluster_resources().get(accelerator.ray_resource, 0.0):.0f}, of which "
            f"{ray.available_resources().get(accelerator.ray_resource, 0.0):.0f} are free; held: "
            f"{holders_of(accelerator.ray_resource)}"
        )
    return groups


class SharedCluster(RayVirtualCluster):
    """The slots of one cluster of a pipeline.

    Args:
        groups: Of the pool, one per node.
        incarnation: Which life of the pipeline.
        leads_ranks: Whether each worker leads a generation rank, so that it can be ended by itself.
        ports: First and last port for process groups.
        slot_bytes: Device memory that the slots of its pool may take; None where each is a whole GPU.
    """

    def __init__(
        self,
        groups: Sequence[PlacementGroup],
        pool: Pool,
        gpus: Sequence[int],
        accelerator: Accelerator,
        *,
        pipeline: str,
        incarnation: int,
        leads_ranks: bool,
        ports: tuple[int, int],
        slot_bytes: SlotBytes | None = None,
    ) -> None:
        nodes = sorted({gpu // pool.gpus_per_node for gpu in gpus})
        super().__init__(
            [sum(gpu // pool.gpus_per_node == node for gpu in gpus) for node in nodes],
            use_gpus=accelerator.is_cuda,
            max_colocated_worker_groups=_GROUPS_PER_SLOT,
            num_gpus_per_node=pool.gpus_per_node,
            name=pipeline,
            port_range_low=ports[0],
            port_range_high=ports[1],
        )
        if slot_bytes is not None:
            self.slot_bytes = slot_bytes.engines if leads_ranks else slot_bytes.trainer
            if not leads_ranks:
                # A decode step is short and waits on its result; a training kernel that gives way loses next to
                # nothing. Who has set a priority for the whole pool wants that one.
                self.worker_env = {_MPS_PRIORITY: os.environ.get(_MPS_PRIORITY, _BELOW_NORMAL)}
        self._pool, self._gpus = pool, tuple(gpus)
        self._pool_groups = list(groups)
        self._pipeline, self._incarnation, self._leads_ranks = pipeline, incarnation, leads_ranks

    def get_placement_groups(self) -> list[PlacementGroup]:
        """Those of the pool, by node of the pool."""
        return self._pool_groups

    def places(self) -> list[tuple[int, int]]:
        """Node of the pool and bundle of each GPU."""
        return [divmod(gpu, self._pool.gpus_per_node) for gpu in self._gpus]

    def actor_name(self, group: str, rank: int) -> dict[str, str]:
        """The name by which the reaper finds a rank's actor."""
        name = rank_actor_name(rank, self._incarnation) if self._leads_ranks else f"{group}_{rank}.{self._incarnation}"
        return {"name": name, "namespace": agent_namespace(self._pipeline)}

    def shutdown(self) -> None:
        """The slots stay the pool's."""
        self._slots = None
