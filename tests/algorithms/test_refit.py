"""Refits follow versions: one per version, in the order that memory needs, and again after a failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from nemo_rl.algorithms.grpo.refitter import Refitter
from nemo_rl.config import WeightSyncConfig
from nemo_rl.distributed.worker_groups import WorkerDiedError, WorkerError
from nemo_rl.models.generation.interfaces import GenerationError, ShardStateError
from nemo_rl.models.generation.vllm import fleet
from nemo_rl.utils.record import MemoryRecord
from nemo_rl.utils.record_events import SyncFinished, SyncStarted, VersionPublished
from nemo_rl.weight_sync.sync_session import SyncReport
from tests.models.local_fleet import LocalFleet, LocalWorker


class Targets:
    """Targets of a session, as a test would have it fail."""

    def __init__(self, both: Both, shards: Sequence[int]) -> None:
        self.both, self.shards = both, tuple(shards)
        self.culprits, self.died = both.culprits, both.died

    def staging_fits(self, nbytes: int) -> bool:
        return self.both.fits


class Fleet(LocalFleet):
    """Two engines by the number of their starts that fail before one succeeds."""

    def __init__(self, both: Both, record: MemoryRecord, failures: Sequence[int]) -> None:
        super().__init__(
            [LocalWorker() for _ in failures], record=record, start=self._start_or_fail, end=both.ended.append
        )
        self._both, self.starts_left = both, list(failures)
        self.happened = both.happened

    def _start_or_fail(self, shard: int) -> None:
        self.starts_left[shard] -= 1
        if self.starts_left[shard] >= 0:
            raise WorkerError(f"shard {shard} cannot start\nwith more below")

    def targets(self, shards: Sequence[int], *, recompute_kv: bool = True) -> Any:
        self._both.before_targets()
        return Targets(self._both, shards)

    def lose(self, *shards: int) -> None:
        """Quarantines shards for what no refit did."""
        super(LocalFleet, self).fail(dict.fromkeys(shards, "it died"))


class Both:
    """Policy and generation in one, writing down what happens to them."""

    fits, died = True, True

    def __init__(self, record: MemoryRecord, free_bytes: int, failures: Sequence[int]) -> None:
        self.happened: list[str] = []
        self.ended: list[int] = []
        self.culprits: dict[int, str] = {}
        self.staged: bool | None = None
        self.before_targets: Callable[[], None] = lambda: None
        self._free, self.cached = free_bytes, 0
        self.fleet = Fleet(self, record, failures)

    def sleep(self) -> None:
        self.fleet.sleep(self.fleet.healthy(), in_place=True)

    def released_bytes(self) -> int:
        return max(shard.freed for shard in self.fleet.shards.values())

    def tensor_metas(self) -> list[Any]:
        return []

    def finish_training(self) -> None:
        self.happened.append("release cached")
        self._free += self.cached
        self.cached = 0

    def offload_before_refit(self) -> None:
        self.happened.append("offload optimizer")

    def offload_after_refit(self) -> None:
        self.happened.append("offload model")

    def get_free_memory_bytes(self) -> int:
        return self._free


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A refitter whose sessions write themselves down, and fail when told to."""

    def make(
        *,
        colocated: bool = True,
        cuda: bool = False,
        free_bytes: int = 1 << 40,
        slept: bool = False,
        failures: tuple[int, ...] = (),
    ) -> tuple[Refitter, Both, MemoryRecord, list[int]]:
        record, failing = MemoryRecord(), []
        both = Both(record, free_bytes, failures or (0, 0))

        class Session:
            session_id = "s"

            def __init__(self, _: Any, targets: Targets, *, version: int, staged: bool, **__: Any) -> None:
                self.version, self._shards = version, targets.shards
                both.staged = staged

            def run(self) -> SyncReport:
                both.happened.append(f"send {self.version}")
                both.fleet.set_version(self._shards, None)
                if failing:
                    raise failing.pop() if isinstance(failing[-1], Exception) else RuntimeError("planted")
                both.fleet.set_version(self._shards, self.version)
                for shard in self._shards:
                    both.fleet.workers[shard].version = self.version
                return SyncReport(self.version, "host", 1 << 20, 1, {"total": 0.1}, [0.2, 0.4])

        monkeypatch.setattr(fleet, "SyncSession", Session)
        if failures:
            both.fleet.enable_rebuilds()
        if slept:
            both.sleep()
            both.happened.clear()
        made = Refitter(both, both, WeightSyncConfig(), colocated=colocated, cuda=cuda, record=record)
        return made, both, record, failing

    return make


def test_one_refit_serves_validation_and_the_next_step(parts: Any) -> None:
    refitter, both, record, _ = parts()
    refitter.bring_to(0)
    refitter.bring_to(0)
    refitter.release_device()
    refitter.bring_to(1)
    refitter.bring_to(1)
    assert [entry for entry in both.happened if entry.startswith("send")] == ["send 0", "send 1"]
    assert [entry.event.version for entry in record.entries if isinstance(entry.event, VersionPublished)] == [0, 1]


def test_weights_wake_before_the_sync_and_the_cache_after_it(parts: Any) -> None:
    refitter, both, _, _ = parts()
    refitter.release_device()
    refitter.release_device()
    refitter.bring_to(3)
    assert both.happened == ["sleep", "wake weights", "send 3", "wake kv_cache"]


def test_generation_that_slept_before_training_took_its_memory_wakes_with_the_first_weights(parts: Any) -> None:
    refitter, both, _, _ = parts(cuda=True, free_bytes=50, slept=True)
    refitter.bring_to(0)
    assert both.happened == [
        "release cached",
        "offload optimizer",
        "wake weights",
        "send 0",
        "offload model",
        "wake kv_cache",
    ]


def test_generation_that_lost_its_weights_gets_the_same_version_again(parts: Any) -> None:
    refitter, both, _, _ = parts()
    refitter.bring_to(0)
    refitter.release_device()
    refitter.bring_to(0)
    assert both.happened[-3:] == ["wake weights", "send 0", "wake kv_cache"]


@pytest.mark.parametrize(
    ("free", "cached", "released", "offloads"), [(50, 20, True, True), (50, 100, True, False), (200, 0, False, False)]
)
def test_training_leaves_the_device_only_where_memory_is_short_even_without_caches(
    free: int, cached: int, released: bool, offloads: bool, parts: Any
) -> None:
    refitter, both, _, _ = parts(cuda=True, free_bytes=free)
    both.cached = cached
    refitter.release_device()
    refitter.bring_to(0)
    assert ("release cached" in both.happened, "offload model" in both.happened) == (released, offloads)


def test_a_checkpoint_has_generation_sleep_only_where_training_state_had_to_leave(parts: Any) -> None:
    for free, sleeps in ((50, True), (200, False)):
        refitter, both, _, _ = parts(cuda=True, free_bytes=free)
        refitter.make_room()
        refitter.release_device()
        refitter.bring_to(0)
        both.happened.clear()
        refitter.make_room()
        refitter.make_room()
        assert both.happened == ["sleep"] * sleeps


def test_generation_of_its_own_slots_never_sleeps_and_stages_where_two_copies_fit(parts: Any) -> None:
    refitter, both, _, _ = parts(colocated=False)
    refitter.release_device()
    refitter.bring_to(0)
    assert (both.happened, both.staged) == (["send 0"], True)
    both.fits = False
    refitter.bring_to(1)
    assert (both.happened, both.staged) == (["send 0", "send 1"], False)


def test_after_a_failed_session_also_the_old_version_is_sent_anew(parts: Any) -> None:
    refitter, both, record, failing = parts()
    refitter.bring_to(0)
    failing.append(1)
    with pytest.raises(RuntimeError, match="planted"):
        refitter.bring_to(1)
    failing.clear()
    refitter.bring_to(0)
    assert [entry for entry in both.happened if entry.startswith("send")] == ["send 0", "send 1", "send 0"]
    assert [entry.event.outcome for entry in record.entries if isinstance(entry.event, SyncFinished)] == [
        "done",
        "failed",
        "done",
    ]
    assert sum(isinstance(entry.event, SyncStarted) for entry in record.entries) == 3


def test_a_shard_that_dies_in_the_session_is_left_out_and_the_others_get_the_version(parts: Any) -> None:
    refitter, both, _, failing = parts()
    both.culprits = {1: "it died"}
    failing.append(WorkerDiedError("shard 1 died"))
    refitter.bring_to(0)
    assert both.happened == ["send 0", "quarantine [1]", "send 0"]
    assert both.fleet.failures([0, 1]) == {1: "it died"}
    # When all fail it is no shard's fault, and none is taken from the run for it.
    both.culprits = {0: "no answer"}
    failing.append(WorkerDiedError("no answer"))
    with pytest.raises(WorkerDiedError):
        refitter.bring_to(1)
    assert both.happened[-1] == "send 1" and both.fleet.healthy() == [0]


def test_a_lost_shard_is_built_anew_and_given_up_when_it_never_starts(
    parts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _, both, _, _ = parts(failures=(0, 1, 99))
    fleet = both.fleet
    fleet.lose(0, 1, 2)
    assert both.ended == [0, 1, 2]
    backs = []
    while fleet.lost():
        fleet.rebuild()
        fleet.rebuild()
        backs.append(fleet.take_back(10.0))
    assert backs == [[0], [1], []] and fleet.starts_left[2] == 96
    assert [fleet.state(shard).value for shard in range(3)] == ["inactive", "inactive", "failed"]
    said = [entry.getMessage() for entry in caplog.records if "given_up=true" in entry.getMessage()]
    assert said == ["shard=2 rebuild=failed attempt=3 of=3 given_up=true reason=shard 2 cannot start"]
    fleet.close()


def test_when_every_shard_is_lost_the_first_that_is_built_anew_gets_the_version_again(parts: Any) -> None:
    refitter, both, _, _ = parts(colocated=False, failures=(1, 99))
    refitter.bring_to(4)
    both.fleet.lose(1)
    refitter.revive(4)
    assert both.happened == ["send 4"], "the other shard serves on"
    both.fleet.lose(0)
    refitter.revive(4)
    assert both.happened == ["send 4", "send 4", "route [0]"] and both.fleet.healthy() == [0]
    # The next refit of a run that was training meanwhile waits for them too.
    both.fleet.lose(0)
    refitter.bring_to(5)
    assert both.happened[-2:] == ["send 5", "route [0]"] and both.fleet.shards[0].version == 5
    refitter.close()


def test_when_every_shard_dies_in_a_refit_it_waits_for_the_first_that_is_built_anew(parts: Any) -> None:
    refitter, both, _, failing = parts(colocated=False, failures=(0, 0))
    # One is lost to the session, the other to a request a moment later: the next session is refused.
    both.culprits = {1: "it died"}
    failing += [ShardStateError("quarantined"), WorkerDiedError("shard 1 died")]

    def lost_meanwhile() -> None:
        if both.fleet.healthy() == [0]:
            both.culprits = {0: "it is quarantined"}
            both.fleet.lose(0)

    both.before_targets = lost_meanwhile
    refitter.bring_to(3)
    assert both.happened[-2:] == ["send 3", "route [0, 1]"]
    assert both.fleet.healthy() == [0, 1]
    refitter.close()


@pytest.mark.parametrize(("died", "sends"), [(False, 1), (True, 2)])
def test_a_refit_that_ends_every_engine_is_not_tried_for_ever(parts: Any, died: bool, sends: int) -> None:
    refitter, both, _, failing = parts(colocated=False, failures=(0, 0))
    both.culprits, both.died = {0: "it broke", 1: "it broke"}, died
    failing += [WorkerError("it broke")] * 3
    with pytest.raises(WorkerError, match="it broke"):
        refitter.bring_to(3)
    assert both.happened.count("send 3") == sends
    refitter.close()


def test_when_no_engine_starts_any_more_the_run_ends_with_one_line(parts: Any) -> None:
    refitter, both, _, _ = parts(colocated=False, failures=(99, 99))
    both.fleet.lose(0, 1)
    with pytest.raises(GenerationError, match="every generation shard is lost and none could be restarted"):
        refitter.revive(0)
    assert both.happened == [] and both.fleet.starts_left == [96, 96]
    refitter.close()


def test_shards_on_the_slots_of_training_are_rebuilt_by_the_next_refit_alone(parts: Any) -> None:
    refitter, both, _, _ = parts(colocated=True, failures=(0, 0))
    both.fleet.lose(0, 1)
    refitter.revive(0)
    refitter.await_rebuild(True)
    assert both.happened == []
    # The next refit builds them, or ends the run.
    both.fleet.starts_left = [99, 99]
    for _ in range(3):
        with pytest.raises(GenerationError, match="every generation shard is lost and none could be restarted"):
            refitter.bring_to(0)


def test_the_last_refit_is_measured(parts: Any) -> None:
    refitter, _, _, _ = parts()
    assert refitter.metrics() == {}
    refitter.bring_to(5)
    assert refitter.metrics() == {
        "gib": 1 / 1024,
        "windows": 1.0,
        "version": 5.0,
        "total_s": 0.1,
        "pause_s/p50": pytest.approx(0.3),
        "pause_s/p99": pytest.approx(0.398),
    }
