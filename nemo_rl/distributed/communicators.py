"""Destroys NCCL process groups to free their device memory, and recreates them with the same ranks.

Every object of the process that held the old group holds the new one afterwards, whatever its framework, and the new
group has the old name. Invariants: all ranks create groups in the same order; no destroyed group is still referenced.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed import distributed_c10d

from nemo_rl.distributed.accelerators import Accelerator
from nemo_rl.distributed.holders import Holders, Swap

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GroupName

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Dropped:
    group: dist.ProcessGroup
    name: GroupName
    ranks: tuple[int, ...]


class Communicators:
    """The groups of this process, but for the default one and those that are kept.

    Args:
        backend: Which groups: those of this backend.
        host_group: A group of all ranks on the host, over which ranks agree on what to make; it is never dropped.
    """

    def __init__(self, backend: str, timeout_s: float, host_group: Any) -> None:
        self._backend = backend
        self._timeout = timedelta(seconds=timeout_s)
        self._host_group = host_group
        self._dropped: list[_Dropped] = []
        self._holders = Holders()

    @classmethod
    def of_ranks(cls, accelerator: Accelerator, timeout_s: float) -> Self:
        """Joins the ranks of this process's worker group, on its own accelerator. Collective."""
        backend = accelerator.process_group_backend
        if accelerator.is_cuda:
            torch.cuda.set_device(accelerator.torch_device())
        if not dist.is_initialized():
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        return cls(backend, timeout_s, dist.new_group(backend="gloo"))

    @property
    def dropped(self) -> bool:
        """Whether groups wait to be made again."""
        return bool(self._dropped)

    @property
    def searches(self) -> int:
        """How often all objects of the process were searched for holders of groups."""
        return self._holders.searches

    def drop(self) -> None:
        """Destroys the groups. Collective; nothing to do when they are gone."""
        if self._dropped:
            return
        kept = (dist.group.WORLD, self._host_group)
        dist.barrier(group=self._host_group)
        for group, (backend, _store) in list(distributed_c10d._world.pg_map.items()):
            if backend != self._backend or any(group is other for other in kept):
                continue
            entry = _Dropped(group, group.group_name, tuple(dist.get_process_group_ranks(group)))
            self._dropped.append(entry)
        for entry in self._dropped:
            dist.destroy_process_group(entry.group)
        logger.info("communicators=dropped groups=%d", len(self._dropped))

    def rebuild(self) -> None:
        """Makes the groups again. Collective; nothing to do when none was dropped."""
        if not self._dropped:
            return
        waiting: dict[tuple[int, ...], list[_Dropped]] = {}
        for entry in self._dropped:
            waiting.setdefault(entry.ranks, []).append(entry)
        swaps = []
        for ranks in self._agreed(Counter({ranks: len(entries) for ranks, entries in waiting.items()})):
            group: Any = dist.new_group(list(ranks), timeout=self._timeout, backend=self._backend)
            if ranks in waiting:
                entry = waiting[ranks].pop(0)
                _rename(group, entry.name)
                swaps.append(Swap(str(entry.name), entry.group, group))
        count = len(self._dropped)
        self._dropped = []
        self._holders.replace(swaps)
        logger.info("communicators=rebuilt groups=%d searches=%d", count, self._holders.searches)

    def _agreed(self, own: Counter[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Every group of any rank, as often as its members have it, in an order that is the same on all."""
        said: list[Counter[tuple[int, ...]]] = [Counter()] * dist.get_world_size(self._host_group)
        dist.all_gather_object(said, own, group=self._host_group)
        most: Counter[tuple[int, ...]] = Counter()
        for counts in said:
            most |= counts
        return sorted(most.elements())


def _rename(group: dist.ProcessGroup, name: GroupName) -> None:
    # Device meshes know groups by name alone, so that the name must outlast every rebuild, not the next one only.
    _unregister_process_group(group.group_name)
    group._set_group_name(name)
    distributed_c10d._world.pg_names[group] = name
    _register_process_group(name, group)
