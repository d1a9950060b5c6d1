"""The process groups of a rank; NCCL ones are destroyed to free their device memory, and recreated with the same ranks.

The new group has the old name, and takes every place of the process that held the old one, whatever module or class the
place is in. The places are searched for among all objects once, which takes long where there are many, and are
remembered. Invariants: all ranks create groups in the same order; no destroyed group is still referenced: where the
remembered places were not all, the old object's reference count tells, and the search is repeated.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import CellType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed import distributed_c10d

from nemo_rl.config.world_sizes import ParallelSizes
from nemo_rl.distributed.accelerator_slots import Accelerator
from nemo_rl.distributed.processes import keep_living

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GroupName


class Swap(NamedTuple):
    """Replacement of one object by another. `name`: the same at every replacement of the same thing."""

    name: str
    old: object
    new: object


class _Place(NamedTuple):
    """Place that holds an object, directly or inside tuples. `key`: of a dictionary or list; None for a cell."""

    holder: dict[Any, Any] | list[Any] | CellType
    key: Any
    is_key: bool = False  # the object, not what `key` leads to, is the key

    def replace(self, swap: Swap) -> bool:
        """Replaces the old object; False where it is not there any more."""
        holder = self.holder
        if isinstance(holder, CellType):
            try:
                held = holder.cell_contents
            except ValueError:
                return False  # it has been emptied
            holder.cell_contents = _swapped(held, swap)
        elif isinstance(holder, list):
            if self.key >= len(holder):
                return False
            held = holder[self.key]
            holder[self.key] = _swapped(held, swap)
        elif self.is_key:
            keys = [key for key in holder if _holds(key, swap.old)]
            for key in keys:
                holder[_swapped(key, swap)] = holder.pop(key)
            return bool(keys)
        else:
            held = holder.get(self.key)
            if _holds(held, swap.old):
                holder[self.key] = _swapped(held, swap)
        return _holds(held, swap.old)


class Holders:
    """The places that hold some objects. `searches`: how often all objects of the process were searched."""

    def __init__(self) -> None:
        self._places: dict[str, list[_Place]] = {}
        self._unheld: dict[str, int] = {}
        self.searches = 0

    def replace(self, swaps: Sequence[Swap]) -> None:
        """Puts every new object where the old one is."""
        for swap in swaps:
            self._places[swap.name] = [place for place in self._places.get(swap.name, ()) if place.replace(swap)]
        left = []
        for swap in swaps:
            count = _references(swap)
            if count > self._unheld.get(swap.name, 0):
                left.append(swap)
            else:
                self._unheld[swap.name] = count
        if not left:
            return
        self.searches += 1
        with _all_objects_found():
            for swap, place in _places_of(left):
                if place.replace(swap):
                    self._places[swap.name].append(place)
        for swap in left:
            self._unheld[swap.name] = _references(swap)


def _references(swap: Swap) -> int:
    return sys.getrefcount(swap.old)


@contextmanager
def _all_objects_found() -> Generator[None]:
    """Inside the block searches find also the objects that `keep_living` leaves out of them."""
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            keep_living()


def _places_of(swaps: Sequence[Swap]) -> list[tuple[Swap, _Place]]:
    """Every place that holds an old object. One search, and one more for each depth of tuples around one."""
    places: list[tuple[Swap, _Place]] = []
    looked_for: list[object] = [swap.old for swap in swaps]
    while looked_for:
        wanted = {id(item) for item in looked_for}
        tuples: list[object] = []
        for holder in gc.get_referrers(*looked_for):
            if holder is looked_for or isinstance(holder, Swap | _Place):
                continue
            if isinstance(holder, tuple):
                tuples.append(holder)
            for place, held in _held_by(holder, wanted):
                places += [(swap, place) for swap in swaps if _holds(held, swap.old)]
        looked_for = tuples
    return places


def _held_by(holder: object, wanted: set[int]) -> Iterator[tuple[_Place, object]]:
    """Places of a holder that hold one of the wanted objects (ids), and the objects."""
    if isinstance(holder, CellType):
        yield _Place(holder, None), holder.cell_contents
    elif isinstance(holder, list):
        yield from ((_Place(holder, at), item) for at, item in enumerate(holder) if id(item) in wanted)
    elif not isinstance(holder, (tuple, ModuleType)) and (isinstance(holder, dict) or hasattr(holder, "__dict__")):
        names: dict[Any, object] = holder if isinstance(holder, dict) else vars(holder)
        yield from ((_Place(names, key), item) for key, item in list(names.items()) if id(item) in wanted)
        yield from ((_Place(names, None, is_key=True), key) for key in list(names) if id(key) in wanted)


def _holds(item: object, old: object) -> bool:
    return item is old or (isinstance(item, tuple) and any(_holds(part, old) for part in item))


def _swapped(item: object, swap: Swap) -> object:
    if item is swap.old:
        return swap.new
    if not isinstance(item, tuple) or not _holds(item, swap.old):
        return item
    make = getattr(type(item), "_make", type(item))
    return make([_swapped(part, swap) for part in item])


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
