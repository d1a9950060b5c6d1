"""Accelerator slots reserved on the Ray cluster.

`RayVirtualCluster` reserves slots as placement groups (one per node), finds the physical device of each, and hands out
rendezvous addresses. Invariants: a slot stays in its bundle while the cluster exists; no rendezvous port is given out
twice, not even to another run on the machine.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl.config.errors import UserError
from nemo_rl.distributed.accelerator_slots import CPU, CUDA, Accelerator
from nemo_rl.distributed.ports import free_ports
from nemo_rl.lazy import names_of

logger = logging.getLogger(__name__)

MEETING_S = 900.0
"""How long a port is reserved where ranks meet once, at once: far longer than they take to listen there."""

_OF = " of "
_SAID_AFTER_S = 5.0
_COMMAND_SHOWN = 120


class ResourceInsufficientError(UserError, RuntimeError):
    """The Ray cluster does not have the slots that were asked for."""


@dataclass(frozen=True)
class AcceleratorSlot:
    """One reserved accelerator slot. `device_index`: physical GPU of the node as CUDA_VISIBLE_DEVICES names it, by
    index, UUID or MIG slice; the running slot number on a CPU node.
    """

    node_rank: int  # index of the node inside this virtual cluster
    bundle_index: int  # bundle inside the node's placement group
    node_id: str  # Ray's id of the node
    node_ip: str
    device_index: int | str


@ray.remote(num_cpus=0)
def _gpu_of_slot() -> int | str:
    (gpu,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return int(gpu) if str(gpu).isdecimal() else str(gpu)


def this_run() -> str:
    """This process as other runs on the cluster see it: its command line, process id and host."""
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    shown = command if len(command) <= _COMMAND_SHOWN else f"{command[:_COMMAND_SHOWN]}..."
    return f"{shown}, process {os.getpid()} on {socket.gethostname()}"


def holders_of(resource: str) -> str:
    """Holders of the cluster's slots in words, with the number of slots of each."""
    held: Counter[str] = Counter()
    for group in placement_group_table().values():
        if group["state"] == "CREATED":
            owner = str(group["name"]).partition(_OF)[2] or str(group["name"]) or "a run without a name"
            held[owner] += round(sum(bundle.get(resource, 0) for bundle in group["bundles"].values()))
    return "; ".join(f"{count} by {owner}" for owner, count in held.items() if count) or "none by a run"


def first_not_reserved(groups: Sequence[PlacementGroup], timeout_s: float) -> int | None:
    """Waits for all reservations and returns None; after the timeout it releases them and returns the first that is
    missing. A wait of some seconds is logged with the holders of the slots.
    """
    deadline = time.monotonic() + timeout_s
    bundles = [bundle for group in groups for bundle in group.bundle_specs]
    said = False
    for index, group in enumerate(groups):
        if not said and not group.wait(max(0.0, min(_SAID_AFTER_S, deadline - time.monotonic()))):
            resource = next((name for name in bundles[0] if name != "CPU"), "CPU")
            wanted = round(sum(bundle.get(resource, 0) for bundle in bundles))
            logger.warning(
                "waiting up to %.0f s for %d x %s; held: %s", timeout_s, wanted, resource, holders_of(resource)
            )
            said = True
        if not group.wait(max(0.0, deadline - time.monotonic())):
            for other in groups:
                remove_placement_group(other)
            return index
    return None


class RayVirtualCluster:
    """Accelerator slots on one or more nodes, reserved when first used.

    Args:
        use_gpus: GPU slots; otherwise CPU slots.
        max_colocated_worker_groups: Worker groups that take turns on each slot.
        num_gpus_per_node: Devices of one node, for consistency checks.
        name: Shown in errors and logs.
        placement_group_strategy: Ray strategy inside one node's group; nodes are always distinct groups.
        timeout_s: How long a reservation may wait for other jobs to leave.

    Attributes:
        slot_bytes: Device memory that a slot's workers may take at a time, since neighbours use the rest; None for all.
        worker_env: Environment variables of every worker besides those that a group sets.
    """

    def __init__(
        self,
        bundle_ct_per_node_list: list[int],
        use_gpus: bool = True,
        max_colocated_worker_groups: int = 1,
        num_gpus_per_node: int = 8,
        name: str = "",
        placement_group_strategy: str = "STRICT_PACK",
        port_range_low: int = 1400,
        port_range_high: int = 1999,
        timeout_s: float = 180.0,
    ) -> None:
        if not bundle_ct_per_node_list or min(bundle_ct_per_node_list) < 1:
            raise ValueError(f"cluster {name!r}: every node needs at least one slot, got {bundle_ct_per_node_list}")
        if max(bundle_ct_per_node_list) > num_gpus_per_node:
            raise ValueError(
                f"cluster {name!r}: {max(bundle_ct_per_node_list)} slots on one node, but a node has "
                f"{num_gpus_per_node}"
            )
        self.name = name
        self.slot_bytes: int | None = None
        self.worker_env: dict[str, str] = {}
        self.accelerator: Accelerator = CUDA if use_gpus else CPU
        self.max_colocated_worker_groups = max_colocated_worker_groups
        self.num_gpus_per_node = num_gpus_per_node
        self._bundle_counts = list(bundle_ct_per_node_list)
        self._strategy = placement_group_strategy
        self._ports = (port_range_low, port_range_high)
        self._timeout_s = timeout_s
        self._groups: list[PlacementGroup] | None = None
        self._slots: list[AcceleratorSlot] | None = None
        self._handed_out: dict[int, float] = {}  # until when, by the monotonic clock

    def world_size(self) -> int:
        """Number of slots."""
        return sum(self._bundle_counts)

    def node_count(self) -> int:
        """Number of nodes."""
        return len(self._bundle_counts)

    def get_placement_groups(self) -> list[PlacementGroup]:
        """One placement group per node, reserved on the first call. Raises ResourceInsufficientError: the cluster lacks
        the slots, or they did not become free in time.
        """
        if self._groups is None:
            self._check_totals()
            self._groups = self._reserve()
        return self._groups

    def group_of(self, node_rank: int) -> PlacementGroup:
        """The placement group of a node."""
        return self.get_placement_groups()[node_rank]

    def current(self, slot: AcceleratorSlot) -> AcceleratorSlot:
        """A slot as it is now: a node may have been replaced by another machine."""
        return slot

    def _check_totals(self) -> None:
        resource = self.accelerator.ray_resource
        have = ray.cluster_resources().get(resource, 0.0)
        if have < self.world_size():
            raise ResourceInsufficientError(
                f"cluster {self.name!r} needs {self.world_size()} x {resource}, the Ray cluster has {have:.0f}; "
                "lower cluster.gpus_per_node / cluster.num_nodes (or raise cluster.cpu_slots on a machine without GPUs)"
            )

    def _reserve(self) -> list[PlacementGroup]:
        bundle: dict[str, float] = {self.accelerator.ray_resource: 1.0, "CPU": float(self.max_colocated_worker_groups)}
        groups = [
            placement_group(
                [dict(bundle) for _ in range(count)],
                strategy=self._strategy,
                name=f"{self.name}-{index}{_OF}{this_run()}",
            )
            for index, count in enumerate(self._bundle_counts)
        ]
        late, resource = first_not_reserved(groups, self._timeout_s), self.accelerator.ray_resource
        if late is not None:
            raise ResourceInsufficientError(
                f"cluster {self.name!r}: node {late} could not reserve {self._bundle_counts[late]} x {resource} within "
                f"{self._timeout_s:.0f} s; free now: {ray.available_resources().get(resource, 0.0):.0f}; held: "
                f"{holders_of(resource)}"
            )
        return groups

    def places(self) -> list[tuple[int, int]]:
        """Placement group and bundle of each slot, in rank order."""
        return [(node, bundle) for node, count in enumerate(self._bundle_counts) for bundle in range(count)]

    def slots(self) -> list[AcceleratorSlot]:
        """Every slot in rank order, with its node and physical device."""
        if self._slots is None:
            places = self.places()
            groups = {node: self.group_of(node) for node in {node for node, _ in places}}
            tables = {node: placement_group_table(group)["bundles_to_node_id"] for node, group in groups.items()}
            node_ids = [tables[node][bundle] for node, bundle in places]
            addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
            devices = self._devices(node_ids, places)
            self._slots = [
                AcceleratorSlot(node, bundle, node_id, addresses[node_id], device)
                for (node, bundle), node_id, device in zip(places, node_ids, devices, strict=True)
            ]
        return self._slots

    def _devices(self, node_ids: Sequence[str], places: Sequence[tuple[int, int]]) -> list[int | str]:
        if not self.accelerator.is_cuda:
            return [node_ids[:index].count(node_id) for index, node_id in enumerate(node_ids)]
        # Only a task inside a bundle can see which GPU Ray gave to it.
        asked = [self._on(node, bundle, _gpu_of_slot).remote() for node, bundle in places]
        return ray.get(asked, timeout=self._timeout_s)

    def actor_name(self, group: str, rank: int) -> dict[str, str]:
        """Ray options with the name of a rank's actor; none by default."""
        return {}

    def strategy_for(self, node_rank: int, bundle_index: int) -> PlacementGroupSchedulingStrategy:
        """Ray scheduling strategy that puts an actor on one slot."""
        return PlacementGroupSchedulingStrategy(self.group_of(node_rank), placement_group_bundle_index=bundle_index)

    def _on(self, node_rank: int, bundle_index: int, task: Any) -> Any:
        gpu = {"num_gpus": 0.01} if self.accelerator.is_cuda else {}
        return task.options(scheduling_strategy=self.strategy_for(node_rank, bundle_index), **gpu)

    def get_master_address_and_port(self, hold_s: float = math.inf) -> tuple[str, int]:
        """Address of the first slot's node and a free port there; see `free_ports`."""
        return self.slots()[0].node_ip, self.free_ports(1, hold_s=hold_s)[0]

    def free_ports(self, count: int, *, node_rank: int | None = None, hold_s: float = math.inf) -> list[int]:
        """Free ports on one node (by default that of the first slot). A port is handed out again after `hold_s`
        seconds, if it is free then; by default never. Raises ResourceInsufficientError: fewer than `count` ports of the
        range are free.
        """
        low, high = self._ports
        now = time.monotonic()
        self._handed_out = {port: until for port, until in self._handed_out.items() if until >= now}
        slot = next(slot for slot in self.slots() if node_rank is None or slot.node_rank == node_rank)
        question = (count, low, high, sorted(self._handed_out), hold_s)
        if slot.node_id == ray.get_runtime_context().get_node_id():
            ports = free_ports(*question)
        else:
            there = self._on(slot.node_rank, slot.bundle_index, ray.remote(num_cpus=0)(free_ports))
            ports = ray.get(there.remote(*question), timeout=self._timeout_s)
        if len(ports) < count:
            raise ResourceInsufficientError(
                f"cluster {self.name!r}: {len(ports)} of {count} ports free in {low}-{high}; widen "
                "cluster.master_port_range_low/high"
            )
        self._handed_out |= dict.fromkeys(ports, now + hold_s)
        return ports

    def shutdown(self) -> None:
        """Gives the slots back. Safe to call twice."""
        if self._groups and ray.is_initialized():
            for group in self._groups:
                remove_placement_group(group)
        self._groups, self._slots = None, None


def cores_per_slot(slots_on_node: int) -> int:
    """CPU threads that each of `slots_on_node` slots may use on this kind of node."""
    return max(1, (os.cpu_count() or 1) // max(1, slots_on_node))


# NeMo-RL's names besides.
__getattr__, __dir__ = names_of(__name__)
