"""Engines that keep more and more memory while they sleep are rebuilt."""

from __future__ import annotations

import pytest

from nemo_rl.models.generation.vllm.fleet import ShardState
from nemo_rl.utils.record import MemoryRecord
from nemo_rl.utils.record_events import EngineOutgrown
from tests.models.local_fleet import LocalFleet, LocalWorker

MIB = 1 << 20


class Growing(LocalWorker):
    """Keeps more after each sleep."""

    def __init__(self, kept: list[int]) -> None:
        super().__init__()
        self.kept = iter(kept)

    def sleep(self, level: int) -> dict[str, int]:
        return super().sleep(level) | {"kept": next(self.kept) * MIB}


def turns(fleet: LocalFleet, count: int) -> list[ShardState]:
    """The state of shard 0 after each of so many sleeps; it wakes in between where it sleeps."""
    states = []
    for _ in range(count):
        fleet.sleep([0, 1])
        states.append(fleet.state(0))
        fleet.wake([0, 1])
    return states


@pytest.mark.parametrize("rebuilds", [False, True])
def test_an_engine_that_keeps_too_much_is_built_anew_and_measured_afresh(rebuilds: bool) -> None:
    record, begun, ended = MemoryRecord(), list[int](), list[int]()
    # From 3 GiB on, which the new engine keeps from its start, 1 GiB more is too much again.
    workers = [Growing([400, 700, 1424, 1425, 3000, 4024, 4025]), Growing([400] * 7)]
    fleet = LocalFleet(workers, record=record, start=begun.append, end=ended.append)
    if rebuilds:
        fleet.enable_rebuilds()
    asleep = [ShardState.ASLEEP] * 3
    # Whoever lends the slots builds it before it wakes; else it is lost, as if it had died.
    assert turns(fleet, 3) == asleep and not fleet.build([0, 1]) and not begun
    fleet.sleep([0, 1])
    assert fleet.state(0) is (ShardState.FAILED if rebuilds else ShardState.ASLEEP) and ended == [0] * rebuilds
    if rebuilds:
        assert "keeps 1425 MiB, and kept 400 at its first sleep" in fleet.failures([0])[0]
        fleet.rebuild()
        assert fleet.take_back(10.0) == [0]
    else:
        assert fleet.build([0, 1]) == [0]
    assert begun == [0] and fleet.state(0) is ShardState.INACTIVE
    assert turns(fleet, 2) == asleep[:2] and not fleet.shards[0].outgrown
    fleet.sleep([0])
    events = [entry.event for entry in record.entries if isinstance(entry.event, EngineOutgrown)]
    assert events == [EngineOutgrown(0, 1425 * MIB, 400 * MIB), EngineOutgrown(0, 4025 * MIB, 3000 * MIB)]
