"""Resizing brings back what can come back, in its order, and leaves what cannot asleep or quarantined."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl.compat.control_plane import Coordinator
from nemo_rl.distributed.worker_groups import WorkerError
from nemo_rl.models.generation.elastic import ElasticGeneration
from nemo_rl.models.generation.vllm.fleet import ShardState
from nemo_rl.utils.record import MemoryRecord
from nemo_rl.utils.record_events import ShardRouted, SyncFinished, VersionPublished
from nemo_rl.weight_sync.cache import BucketCache, CacheBuilder, CacheError, CacheManifest
from nemo_rl.weight_sync.layout import TensorMeta
from nemo_rl.weight_sync.sync_session import SyncOptions
from nemo_rl.weight_sync.transports import TransportError
from tests.models.local_fleet import LocalFleet, LocalWorker
from tests.weight_sync.models import DictModel, Engines, weights

OPTIONS = SyncOptions(bucket_bytes=4096, verify=True, timeout_s=120.0)


class Targets(Engines):
    """Receivers of some shards; one of them may break."""

    def __init__(self, fleet: Fleet, shards: Sequence[int]) -> None:
        super().__init__()
        self._fleet = fleet
        self.shards = tuple(shards)
        self.models = tuple(fleet.engines.models[shard] for shard in shards)
        self.receivers = [fleet.engines.receivers[shard] for shard in shards]
        self.culprits: dict[int, str] = {}

    def staging_fits(self, nbytes: int) -> bool:
        return self._fleet.fits

    def receive_window(self, window: dict[str, Any], timeout_s: float) -> None:
        if not self._fleet.fits:
            for shard in self.shards:
                self._fleet.shards[shard].has(None, half_new=True)
        broken = [shard for shard in self.shards if shard in self._fleet.broken]
        if broken:
            self.culprits = dict.fromkeys(broken, "planted: wrong bytes")
            raise WorkerError("planted")
        super().receive_window(window, timeout_s)

    def finish(self, version: int, timeout_s: float) -> list[float]:
        self._fleet.before_load()
        self._fleet.happened.append(f"load {list(self.shards)}")
        super().finish(version, timeout_s)
        self._fleet.set_version(self.shards, version)
        return [0.25] * len(self.shards)


class Fleet(LocalFleet):
    """Shards that take weights from a session."""

    def __init__(self, count: int, record: MemoryRecord) -> None:
        super().__init__([LocalWorker() for _ in range(count)], record=record)
        self.engines = Engines(*(DictModel() for _ in range(count)))
        self.broken: set[int] = set()
        self.fits = True
        self.before_load: Callable[[], None] = lambda: None

    def targets(self, shards: Sequence[int], *, recompute_kv: bool = True) -> Any:
        return Targets(self, shards)


class World:
    """Generation, a cache of made-up versions, and what resizes the one from the other."""

    def __init__(self, shards: int = 3) -> None:
        self.builder = CacheBuilder(OPTIONS.bucket_bytes, torch.device("cpu"))
        self.cache = BucketCache(self._build)
        self.record = MemoryRecord()
        self.fleet = Fleet(shards, self.record)
        self.elastic = ElasticGeneration(SimpleNamespace(fleet=self.fleet), self.cache, OPTIONS, record=self.record)

    def _build(self, version: int, served: str | None) -> CacheManifest:
        tensors = weights(float(version))
        return self.builder.build(
            version,
            [TensorMeta(n, tuple(t.shape), "float32") for n, t in tensors.items()],
            tensors.items(),
            served=served,
        )

    @property
    def versions(self) -> list[int | None]:
        return self.fleet.engines.versions


@pytest.fixture
def world() -> Iterator[World]:
    one = World()
    yield one
    one.builder.close()


def test_shards_come_back_in_the_order_that_memory_and_versions_need(world: World) -> None:
    world.cache.build(4)
    assert world.elastic.shrink([2, 0]).shards == [0, 2]
    world.fleet.happened.clear()
    resized = world.elastic.expand([0, 1, 2])
    assert (resized.shards, resized.failed) == ([0, 2], {})
    assert world.fleet.happened == ["wake weights [0, 2]", "load [0, 2]", "wake kv_cache [0, 2]", "route [0, 2]"]
    assert world.versions == [4, None, 4]
    world.fleet.happened.clear()
    assert world.elastic.expand([0, 1, 2]).shards == [] and world.fleet.happened == []


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_a_shard_without_memory_sleeps_on_and_the_others_come_back(world: World, tag: str) -> None:
    world.cache.build(1)
    world.elastic.shrink([0, 1, 2])
    world.fleet.workers[1].no_memory = {tag}
    resized = world.elastic.expand([0, 1, 2])
    assert resized.shards == [0, 2] and "planted: no memory" in resized.failed[1]
    assert world.fleet.having(ShardState.ASLEEP) == [1] and world.fleet.having(ShardState.ACTIVE) == [0, 2]
    world.fleet.workers[1].no_memory = set()
    assert world.elastic.expand([1]).shards == [1]


def test_shards_leave_before_others_come(world: World) -> None:
    world.cache.build(1)
    world.elastic.shrink([0])
    coordinator = Coordinator.__new__(Coordinator)
    coordinator._elastic = world.elastic
    with pytest.raises(ValueError, match=r"shards \[1\] are to be removed and added"):
        coordinator.resize_infer([1, 2], [0, 1])
    assert world.fleet.state(2) is ShardState.ACTIVE
    coordinator.resize_infer([1, 2], [0])
    assert [world.fleet.state(shard) for shard in range(3)] == [
        ShardState.ACTIVE,
        ShardState.ASLEEP,
        ShardState.ASLEEP,
    ]


def test_a_shard_with_wrong_bytes_is_quarantined_and_the_others_are_synced_again(world: World) -> None:
    world.cache.build(1)
    world.elastic.shrink([0, 1, 2])
    world.fleet.broken = {1}
    resized = world.elastic.expand([0, 1, 2])
    assert resized.shards == [0, 2] and resized.failed == {1: "planted: wrong bytes"}
    assert world.fleet.state(1) is ShardState.FAILED and world.versions == [1, None, 1]
    failed, done = [entry.event for entry in world.record.entries if isinstance(entry.event, SyncFinished)]
    assert (failed.outcome, failed.checksums, done.outcome, sorted(done.checksums)) == (
        "failed",
        {},
        "done",
        ["0", "2"],
    )
    assert len(set(done.checksums.values())) == 1


def test_a_refresh_reaches_those_that_serve_and_measures_their_pause(world: World) -> None:
    world.cache.build(1)
    world.elastic.shrink([1])
    report = world.elastic.refresh().sync
    assert report is not None and report.pauses_s == [0.25, 0.25]
    assert world.versions == [1, None, 1]
    assert world.elastic.pause_metrics() == {"pause_s/p50": 0.25, "pause_s/p99": 0.25}
    assert [entry.event.shards for entry in world.record.entries if isinstance(entry.event, VersionPublished)] == [
        (0, 2)
    ]
    world.elastic.shrink([0, 2])
    assert world.elastic.refresh().sync is None


def test_a_shard_that_is_routed_again_after_a_refresh_has_its_new_version_in_the_record(world: World) -> None:
    world.cache.build(4)
    world.elastic.refresh()
    world.fleet.set_routable(0, False)
    world.fleet.set_routable(0, True)
    routed = [entry.event for entry in world.record.entries if isinstance(entry.event, ShardRouted)]
    assert [(event.shard, event.version) for event in routed] == [(0, 4)]


def test_a_failed_refresh_costs_only_what_it_must(world: World) -> None:
    world.cache.build(1)
    world.fleet.broken = {2}
    resize = world.elastic.refresh()
    assert (resize.shards, resize.failed) == ([0, 1], {2: "planted: wrong bytes"})
    assert world.fleet.happened[-2:] == ["quarantine [2]", "load [0, 1]"]
    assert world.versions == [1, 1, None]
    world.cache.build(2)
    # Those that staged beside their live weights still serve them, and nothing but the culprits is lost.
    world.fleet.broken = {0, 1}
    with pytest.raises(WorkerError, match="planted"):
        world.elastic.refresh([1])
    assert world.fleet.happened[-1] == "quarantine [1]" and world.versions == [1, 1, None]


def test_a_refresh_without_staging_brings_whole_weights_to_the_others_or_ends_them(world: World) -> None:
    world.cache.build(1)
    world.fleet.fits = False
    world.fleet.broken = {0}
    resize = world.elastic.refresh()
    assert (resize.shards, list(resize.failed)) == ([1, 2], [0]) and world.versions == [None, 1, 1]
    world.cache.build(2)
    nowhere = ElasticGeneration(SimpleNamespace(fleet=world.fleet), world.cache, replace(OPTIONS, transport="nccl"))
    with pytest.raises(TransportError, match="weight_sync.transport=nccl needs GPUs"):
        nowhere.refresh()
    assert world.fleet.having(ShardState.ACTIVE) == [1, 2], "nothing was sent: they serve their old weights"

    def sender_gone() -> None:
        raise TransportError("planted: the sender is gone")

    world.fleet.before_load = sender_gone
    with pytest.raises(TransportError, match="planted"):
        world.elastic.refresh()
    assert world.fleet.failures(range(3)) == {
        0: "planted: wrong bytes",
        1: "its weights may be half new",
        2: "its weights may be half new",
    }


def test_a_session_that_fails_through_no_shards_fault_leaves_them_asleep(world: World) -> None:
    world.cache.build(1)
    world.elastic.shrink([0, 1])
    nowhere = ElasticGeneration(SimpleNamespace(fleet=world.fleet), world.cache, replace(OPTIONS, transport="nccl"))
    with pytest.raises(TransportError, match="weight_sync.transport=nccl needs GPUs"):
        nowhere.expand([0, 1])
    assert world.fleet.having(ShardState.ASLEEP) == [0, 1] and world.fleet.having(ShardState.ACTIVE) == [2]
    assert world.elastic.expand([0, 1]).shards == [0, 1]


@pytest.mark.parametrize("wakes", [True, False])
def test_a_version_that_is_built_while_shards_are_synced_is_the_one_they_get(world: World, wakes: bool) -> None:
    world.cache.build(1)
    world.fleet.fits = False
    if wakes:
        world.elastic.shrink([0, 1])
    source = world.cache.source

    def overtaken(version: int) -> Any:
        read = source(version)
        if version == 1:
            world.cache.build(2)
        return read

    world.cache.source = overtaken  # type: ignore[method-assign]
    report = (world.elastic.expand([0, 1]) if wakes else world.elastic.refresh([0, 1])).sync
    assert report is not None and report.version == 2
    assert world.versions == [2, 2, None]
    assert not [line for line in world.fleet.happened if line.startswith("quarantine")]


def test_moves_and_refreshes_take_turns(world: World) -> None:
    world.cache.build(1)
    world.elastic.shrink([1])
    world.cache.build(2)
    refreshing, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        refreshing.set()
        go_on.wait(60.0)

    world.fleet.before_load = hold
    threads = [threading.Thread(target=world.elastic.refresh)]
    threads[0].start()
    refreshing.wait(60.0)
    world.fleet.before_load = lambda: None
    threads.append(threading.Thread(target=world.elastic.expand, args=([1],)))
    threads[1].start()
    threads[1].join(timeout=0.1)
    assert "wake weights [1]" not in world.fleet.happened
    go_on.set()
    for thread in threads:
        thread.join()
    assert world.fleet.happened[-5:] == [
        "load [0, 2]",
        "wake weights [1]",
        "load [1]",
        "wake kv_cache [1]",
        "route [1]",
    ]
    assert world.versions == [2, 2, 2]


def test_nothing_is_woken_from_an_empty_cache(world: World) -> None:
    world.elastic.shrink([0])
    with pytest.raises(CacheError, match="the weight cache is empty; build a version before shards are woken"):
        world.elastic.expand([0])
    assert world.fleet.state(0) is ShardState.ASLEEP
