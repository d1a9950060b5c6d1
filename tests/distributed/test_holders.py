"""Objects that are replaced wherever the process holds them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from nemo_rl.distributed.communicators import Holders, Swap


class Thing:
    """Something that others hold."""


class Pair(NamedTuple):
    """A named tuple that holds one."""

    what: object
    number: int


def _closure(thing: Thing) -> tuple[object, Callable[[], object]]:
    def read() -> object:
        return thing

    return read, read


def _key(thing: Thing) -> tuple[object, Callable[[], object]]:
    holder = {thing: 1, "other": 2}
    return holder, lambda: next(key for key in holder if key != "other")


def _of(holder: Any, read: Callable[[Any], object]) -> tuple[object, Callable[[], object]]:
    return holder, lambda: read(holder)


# A holder of a thing, and what reads the thing out of it.
HOLDERS: list[Callable[[Thing], tuple[object, Callable[[], object]]]] = [
    lambda thing: _of([0, thing], lambda holder: holder[1]),
    lambda thing: _of({"a": thing}, lambda holder: holder["a"]),
    lambda thing: _of(SimpleNamespace(a=thing), lambda holder: holder.a),
    lambda thing: _of([(1, Pair(thing, 2))], lambda holder: holder[0][1].what),
    lambda thing: _of({"a": ((thing,), 3)}, lambda holder: holder["a"][0][0]),
    _key,
    _closure,
]


@pytest.mark.slow
def test_every_holder_holds_the_new_object_and_only_new_holders_cost_a_search() -> None:
    holders, now = Holders(), [Thing(), Thing()]
    held = [[make(thing) for make in HOLDERS] for thing in now]
    for searches in (1, 1, 2, 2):
        if searches == 2 and len(held[0]) == len(HOLDERS):
            held[0].append(HOLDERS[searches](now[0]))
        new = [Thing(), Thing()]
        swaps = [Swap(str(number), old, put) for number, (old, put) in enumerate(zip(now, new, strict=True))]
        now.clear()
        holders.replace(swaps)
        for number, places in enumerate(held):
            assert all(read() is new[number] for _, read in places)
        assert holders.searches == searches
        now += new
        new.clear()
        swaps.clear()


@pytest.mark.slow
def test_objects_that_searches_leave_out_are_found() -> None:
    old, new = Thing(), Thing()
    holder = [old]
    gc.freeze()
    try:
        swaps = [Swap("thing", old, new)]
        del old
        Holders().replace(swaps)
        assert holder == [new] and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
