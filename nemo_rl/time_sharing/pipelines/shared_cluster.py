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
from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from nemo_rl.distributed.accelerator_slots import Accelerator
from nemo_rl.distributed.virtual_cluster import (
    AcceleratorSlot,
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
_RESERVE_NODE_S = 30.0
# https://docs.nvidia.com/deploy/mps: read when a process first uses the GPU; without MPS it changes nothing.
_MPS_PRIORITY, _BELOW_NORMAL = "CUDA_MPS_CLIENT_PRIORITY", "1"
RESERVATION = "time_sharing_"
"""Begins the names of a pool's placement groups."""


def reserve_pool(pool: Pool, accelerator: Accelerator, nodes: int | None = None) -> list[PlacementGroup]:
    """One placement group per node, or for the first `nodes` of them, with one bundle per GPU; they outlive the process
    that reserves them. Raises
    ResourceInsufficientError: the Ray cluster does not have the slots, or they did not become free in time.
    """
    groups = [_reserve_node(pool, accelerator, node) for node in range(pool.nodes if nodes is None else nodes)]
    if first_not_reserved(groups, _RESERVE_S) is not None:
        raise ResourceInsufficientError(
            f"the pool needs {len(groups)} x {pool.gpus_per_node} {accelerator.ray_resource}; the Ray cluster has "
            f"{ray.cluster_resources().get(accelerator.ray_resource, 0.0):.0f}, of which "
            f"{ray.available_resources().get(accelerator.ray_resource, 0.0):.0f} are free; held: "
            f"{holders_of(accelerator.ray_resource)}"
        )
    return groups


def _reserve_node(pool: Pool, accelerator: Accelerator, node: int, on: str | None = None) -> PlacementGroup:
    bundle = {accelerator.ray_resource: 1.0, "CPU": 1.0}
    return placement_group(
        [dict(bundle) for _ in range(pool.gpus_per_node)],
        strategy="STRICT_PACK",
        name=f"{RESERVATION}{node}",
        lifetime="detached",
        _soft_target_node_id=on,
    )


def reserve_node(pool: Pool, accelerator: Accelerator, node: int, on: str) -> None:
    """Reserves a node of a pool on the Ray node `on`. Raises ResourceInsufficientError: that has not so many slots, or
    they did not become free in time.
    """
    group = _reserve_node(pool, accelerator, node, on)
    late = first_not_reserved([group], _RESERVE_NODE_S) is not None
    if late or reservations()[node][1] != on:
        remove_placement_group(group)
        raise ResourceInsufficientError(
            f"Ray node {on[:8]} has not {pool.gpus_per_node} free {accelerator.ray_resource}, as each node of the pool "
            f"has; held: {holders_of(accelerator.ray_resource)}"
        )


def release_node(node: int) -> None:
    """Ends the reservation of a node of the pool, if there is one, and what still runs in it."""
    if (found := reservations().get(node)) is not None:
        remove_placement_group(found[0])


def reservations() -> dict[int, tuple[PlacementGroup, str]]:
    """The placement groups of the pool's nodes that are there, and the Ray nodes that they are on."""
    return {
        int(entry["name"].removeprefix(RESERVATION)): (
            PlacementGroup(PlacementGroupID(bytes.fromhex(entry["placement_group_id"]))),
            str(entry["bundles_to_node_id"][0]),
        )
        for entry in placement_group_table().values()
        if entry["name"].startswith(RESERVATION) and entry["state"] == "CREATED"
    }


class SharedCluster(RayVirtualCluster):
    """The slots of one cluster of a pipeline.

    Args:
        incarnation: Which life of the pipeline.
        leads_ranks: Whether each worker leads a generation rank, so that it can be ended by itself.
        ports: First and last port for process groups.
        slot_bytes: Device memory that the slots of its pool may take; None where each is a whole GPU.
    """

    def __init__(
        self,
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
        self._pipeline, self._incarnation, self._leads_ranks = pipeline, incarnation, leads_ranks

    def group_of(self, node_rank: int) -> PlacementGroup:
        """That of a node of the pool, as it is reserved now: one that was away has another than before."""
        return reservations()[node_rank][0]

    def current(self, slot: AcceleratorSlot) -> AcceleratorSlot:
        """The slot on the machine that is its node now."""
        ray_node = reservations()[slot.node_rank][1]
        address = next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == ray_node)
        (device,) = self._devices([ray_node], [(slot.node_rank, slot.bundle_index)])
        device = device if self.accelerator.is_cuda else slot.device_index
        return AcceleratorSlot(slot.node_rank, slot.bundle_index, ray_node, address, device)

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
