"""Puts a new object into every place of the process that holds an old one, whatever module or class the place is in.

The places are searched for among all objects of the process once, which takes long where there are many, and are
remembered under the name of what they hold. Invariant: after `replace` nothing that a search would find holds an old
object; where the remembered places were not all, the old object's reference count tells, and the search is repeated.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from types import CellType, ModuleType
from typing import Any, NamedTuple

from nemo_rl.distributed.processes import keep_living


class Swap(NamedTuple):
    """What replaces what. `name`: the same at every replacement of the same thing."""

    name: str
    old: object
    new: object


class _Place(NamedTuple):
    """Where an object is held, by itself or inside tuples. `key`: of a dictionary or list; None for a cell."""

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
    """The places of a holder that hold one of some objects, given by their ids, and what each holds."""
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
