"""Refits follow versions: one per version, in the order that memory needs, and again after a failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from nemo_rl.algorithms.grpo import refit
from nemo_rl.algorithms.grpo.refit import Refitter
from nemo_rl.config import WeightSyncConfig
from nemo_rl.distributed.worker_calls import WorkerDiedError, WorkerError
from nemo_rl.models.generation.interfaces import GenerationError, ShardStateError
from nemo_rl.models.generation.vllm.repair import ShardRepair
from nemo_rl.models.generation.vllm.shards import ShardState
from nemo_rl.utils.record import MemoryRecord
from nemo_rl.utils.record_events import SyncFinished, SyncStarted, VersionPublished
from nemo_rl.weight_sync.session import SyncReport


class Both:
    """Policy and generation in one, writing down what happens to them."""

    shards: Any = (0, 1)
    fits = True

    def __init__(self, free_bytes: int = 1 << 40) -> None:
        self.happened: list[str] = []
        self.culprits: dict[int, str] = {}
        self.died = True
        self.weights_resident = True
        self.staged: bool | None = None
        self._free, self.cached = free_bytes, 0

    def prepare_for_generation(self, tags: Sequence[str]) -> None:
        self.happened.append("wake " + " ".join(tags))

    def sleep(self) -> list[dict[str, int]]:
        self.happened.append("sleep")
        self.weights_resident = False
        return [{"before": 100, "after": 10}]

    def get_model_update_receiver(self, *, recompute_kv: bool) -> Both:
        self.happened.append(f"targets recompute={recompute_kv}")
        return self

    def quarantine(self, dp_ranks: Sequence[int], reason: str) -> None:
        self.happened.append(f"quarantine {dp_ranks} {reason}")
        if isinstance(self.shards, Engines):
            self.shards.lost |= set(dp_ranks)

    def activate_healthy(self, dp_ranks: Sequence[int]) -> None:
        self.happened.append(f"activate {dp_ranks}")

    def staging_fits(self, nbytes: int) -> bool:
        return self.fits

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
        slept: Any = (),
        lost: tuple[int, ...] = (),
    ) -> tuple[Refitter, Both, MemoryRecord, list[int]]:
        both, record, failing = Both(free_bytes), MemoryRecord(), []

        class Session:
            session_id = "s"

            def __init__(self, *_: Any, version: int, staged: bool, **__: Any) -> None:
                self._version = self.version = version
                both.happened.pop()
                both.staged = staged

            def run(self) -> SyncReport:
                both.happened.append(f"send {self._version}")
                if failing:
                    raise failing.pop() if isinstance(failing[-1], Exception) else RuntimeError("planted")
                both.weights_resident = True
                return SyncReport(self._version, "host", 1 << 20, 1, {"total": 0.1}, [0.2, 0.4])

        monkeypatch.setattr(refit, "SyncSession", Session)
        repair = None
        if lost:
            both.shards = Engines(*lost)
            repair = ShardRepair(both.shards)
        return (
            Refitter(
                both,
                both,
                WeightSyncConfig(),
                colocated=colocated,
                cuda=cuda,
                record=record,
                slept=slept,
                repair=repair,
            ),
            both,
            record,
            failing,
        )

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
    refitter, both, _, _ = parts(cuda=True, free_bytes=50, slept=[{"before": 100, "after": 10}])
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
    assert both.happened == ["send 0", "quarantine [1] it died", "send 0"] and refitter.version == 0
    # When all fail it is no shard's fault, and none is taken from the run for it.
    both.culprits = {0: "no answer", 1: "no answer"}
    failing.append(WorkerDiedError("no answer"))
    with pytest.raises(WorkerDiedError):
        refitter.bring_to(1)
    assert both.happened[-1] == "send 1" and refitter.version is None


class Engines:
    """Shards by the number of starts that fail before one succeeds."""

    def __init__(self, *failures: int) -> None:
        self.failures = list(failures)
        self.lost = set(range(len(failures)))
        self.ended: list[int] = []
        self.shards = self

    def having(self, *states: ShardState) -> list[int]:
        return sorted(self.lost) if ShardState.FAILED in states else []

    def __len__(self) -> int:
        return len(self.healthy())

    def healthy(self) -> list[int]:
        return [shard for shard in range(len(self.failures)) if shard not in self.lost]

    def rebuilt(self, shard: int) -> None:
        self.lost.discard(shard)

    def on_failure(self, tell: Any) -> None:
        self.tell = tell

    def end_shard(self, shard: int) -> None:
        self.ended.append(shard)

    def start_shard(self, shard: int) -> None:
        self.failures[shard] -= 1
        if self.failures[shard] >= 0:
            raise WorkerError(f"shard {shard} cannot start\nwith more below")


def test_a_lost_shard_is_built_anew_and_given_up_when_it_never_starts(caplog: pytest.LogCaptureFixture) -> None:
    engines = Engines(0, 1, 99)
    repair = ShardRepair(engines)
    engines.tell(0, "it died")
    assert engines.ended == [0]
    backs = []
    while repair.lost():
        repair.begin()
        repair.begin()
        repair.finish(10.0)
        backs.append(repair.take_back())
    assert backs == [[0], [1], []] and engines.lost == {2} and engines.failures[2] == 96
    said = [entry.getMessage() for entry in caplog.records if "given_up=true" in entry.getMessage()]
    assert said == ["shard=2 rebuild=failed attempt=3 of=3 given_up=true reason=shard 2 cannot start"]
    repair.close()


def test_when_every_shard_is_lost_the_first_that_is_built_anew_gets_the_version_again(parts: Any) -> None:
    refitter, both, _, _ = parts(colocated=False, lost=(1, 99))
    both.shards.lost.clear()
    refitter.bring_to(4)
    both.shards.lost = {0}
    refitter.revive(4)
    assert both.happened == ["send 4"], "the other shard serves on"
    both.shards.lost = {0, 1}
    refitter.revive(4)
    assert both.happened == ["send 4", "send 4", "activate [0]"] and both.shards.lost == {1}
    # The next refit of a run that was training meanwhile waits for them too.
    both.shards.lost = {0, 1}
    refitter.bring_to(5)
    assert both.happened[-2:] == ["send 5", "activate [0]"] and refitter.version == 5
    refitter.close()


def test_when_every_shard_dies_in_a_refit_it_waits_for_the_first_that_is_built_anew(parts: Any) -> None:
    refitter, both, _, failing = parts(colocated=False, lost=(0, 0))
    both.shards.lost.clear()
    # One is lost to the session, the other to a request a moment later: the next session is refused.
    both.culprits = {1: "it died"}
    failing += [ShardStateError("quarantined"), WorkerDiedError("shard 1 died")]
    refused = both.get_model_update_receiver

    def receiver(*, recompute_kv: bool) -> Both:
        if both.shards.lost == {1}:
            both.culprits = {0: "it is quarantined"}
            both.quarantine([0], "a request failed")
        return refused(recompute_kv=recompute_kv)

    both.get_model_update_receiver = receiver  # type: ignore[method-assign]
    refitter.bring_to(3)
    assert both.happened[-2:] == ["send 3", "activate [0, 1]"]
    assert both.shards.lost == set() and refitter.version == 3
    refitter.close()


@pytest.mark.parametrize(("died", "sends"), [(False, 1), (True, 2)])
def test_a_refit_that_ends_every_engine_is_not_tried_for_ever(parts: Any, died: bool, sends: int) -> None:
    refitter, both, _, failing = parts(colocated=False, lost=(0, 0))
    both.shards.lost.clear()
    both.culprits, both.died = {0: "it broke", 1: "it broke"}, died
    failing += [WorkerError("it broke")] * 3
    with pytest.raises(WorkerError, match="it broke"):
        refitter.bring_to(3)
    assert both.happened.count("send 3") == sends and refitter.version is None
    refitter.close()


def test_when_no_engine_starts_any_more_the_run_ends_with_one_line(parts: Any) -> None:
    refitter, both, _, _ = parts(colocated=False, lost=(99, 99))
    with pytest.raises(GenerationError, match="every generation shard is lost and none could be restarted"):
        refitter.revive(0)
    assert both.happened == [] and both.shards.failures == [96, 96]
    refitter.close()


def test_shards_on_the_slots_of_training_are_not_waited_for(parts: Any) -> None:
    refitter, both, _, _ = parts(colocated=True, lost=(0, 0))
    refitter.revive(0)
    refitter.await_rebuild(True)
    assert both.happened == []


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
