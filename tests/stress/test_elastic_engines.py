"""Real engines that leave, come back, take new weights below running requests, hang and die: no token is lost or
mislabelled.

First the stress run: prompt groups through engines that are never left alone, each of which arrives once, each token
of its version. It is recomputed under the version it is labelled with, and a label that is off by one must be seen.
Then every move by itself, on the same engines.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from nemo_rl.distributed.worker_groups import WorkerError
from nemo_rl.models.generation.interfaces import GenerationError, ShardStateError
from nemo_rl.models.generation.vllm import engine_actors
from nemo_rl.models.generation.vllm.fleet import ShardState
from nemo_rl.utils.record_events import (
    GroupCommitted,
    ShardRouted,
    ShardSlept,
    ShardUnrouted,
    ShardWoken,
    SyncFinished,
    VersionPublished,
)
from nemo_rl.weight_sync.cache import CachedSource
from nemo_rl.weight_sync.sync_session import SyncSession
from nemo_rl.weight_sync.transports import TransportError
from tests.models.broadcasting_service import broadcast_weights
from tests.models.elastic_engines import CPU, Elastic, elastic_engines
from tests.models.test_receiver_methods import payloads
from tests.stress.chaos import (
    PROMPTS,
    SAMPLES,
    SEED,
    SHARDS,
    STEPS,
    TRANSITIONS,
    TURNS,
    Chaos,
    Kept,
    Seen,
    check_record,
    collector_of,
    moved_boundary,
)

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def no_memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory") / "taken"


@pytest.fixture(scope="module")
def engines(ray_session: None, tiny_model: Path, no_memory: Path) -> Iterator[Elastic]:
    no_memory_while = f"+policy.generation.vllm_cfg.env_vars.NRL_TEST_NO_MEMORY={no_memory}"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine_actors, "EXTENSION", "tests.models.failing_extension.FailingExtension")
        with elastic_engines(tiny_model, SHARDS, no_memory_while) as some:
            yield some


def test_no_token_is_lost_or_mislabelled_while_shards_come_and_go(engines: Elastic) -> None:
    kept, seen = Kept(engines), Seen()
    collector = collector_of(engines, kept, seen)
    # A second try finds the engines, the cache and the record of the first.
    first, known = engines.cache.version or 0, len(engines.record.entries)
    groups, beside = [], []
    with Chaos(engines, SEED) as chaos:
        collector.set_weight_version(0)
        for step in range(STEPS):
            groups += collector.take()
            collector.finish_step()

            def refit(version: int = first + step + 1) -> None:
                engines.cache.build(version)
                chaos.refit()

            # The weights change below running requests, of the next step and beside it, while shards come and go.
            requests, results = asyncio.run(engines.under_load(refit, lanes=12))
            beside += zip(requests, results, strict=True)
            collector.set_weight_version(step + 1)
            assert chaos.error is None, chaos.error
        while chaos.transitions < TRANSITIONS and chaos.error is None:
            chaos.move()
    collector.stop()
    assert chaos.error is None, chaos.error
    assert chaos.transitions >= TRANSITIONS and chaos.to_zero > 0
    assert chaos.refits == STEPS and len(engines.elastic.pauses_s) >= chaos.refits
    record = engines.record.entries[known:]

    # Every group arrived once, and every environment step happened once per sample and turn.
    assert len(groups) == STEPS * PROMPTS
    committed = Counter(entry.event.group_id for entry in record if isinstance(entry.event, GroupCommitted))
    assert len(committed) == len(groups) and set(committed.values()) == {1}
    # A response that was cut by its length ends its sample after the first turn.
    assert [count for (_, turn), count in seen.steps.items() if turn == 1] == [SAMPLES] * len(groups)
    assert any(turn == TURNS for _, turn in seen.steps) and max(seen.steps.values()) == SAMPLES
    assert len(kept.answered) == sum(seen.steps.values())

    # Every token is what its version would have drawn it with, and a label that is off by one is seen.
    answered = kept.answered + beside
    requests, results = zip(*answered, strict=True)
    differences = engines.differences(requests, results)
    assert len(differences) == sum(len(result.token_ids) for result in results) > 700 * STEPS
    assert max(differences) < TOLERANCE
    few = answered[:: max(1, len(answered) // 100)]
    for shift in (1, -1):
        shifted = engines.differences([r for r, _ in few], [r for _, r in few], shift)
        assert statistics.median(shifted) > 100 * TOLERANCE
    across = [(request, result) for request, result in answered if len({span.version for span in result.spans}) > 1]
    assert len(across) >= 5, "too few requests ran across a refit to say anything"
    assert engines.generation._dispatcher.preempted >= 10
    boundary = [moved_boundary(result) for _, result in across]
    assert max(engines.differences([request for request, _ in across], boundary)) > 100 * TOLERANCE
    check_record(record)


def shards_of(results: list) -> set[int]:
    return {result.shard for result in results}


def test_every_shard_serves_and_every_token_is_of_its_version(engines: Elastic) -> None:
    requests = engines.requests(24)
    results = asyncio.run(engines.run(requests))
    assert shards_of(results) == {0, 1}
    assert engines.worst(requests, results) < TOLERANCE


def test_requests_of_a_leaving_shard_go_on_elsewhere_with_every_token_they_have(engines: Elastic) -> None:
    before = engines.generation._dispatcher.preempted
    requests, results = asyncio.run(engines.under_load(lambda: engines.elastic.shrink([1]), lanes=30, tokens=40))
    assert engines.generation._dispatcher.preempted > before
    ended = [
        (len(result.token_ids), request.max_new_tokens)
        for request, result in zip(requests, results, strict=True)
        if result.finish_reason == "length"
    ]
    assert ended and all(drawn == limit for drawn, limit in ended)
    assert engines.worst(requests, results) < TOLERANCE
    assert engines.generation.router.active == {0}
    resized = engines.elastic.expand([1])
    assert (resized.shards, resized.failed) == ([1], {})
    assert engines.generation.router.active == {0, 1}


def test_a_shard_that_joins_changes_no_seeded_draw(engines: Elastic) -> None:
    requests = engines.requests(200, tokens=40)
    alone = asyncio.run(engines.run(requests))
    again = [replace(request, request_id=f"{request.request_id}-joined") for request in requests]
    engines.elastic.shrink([1])
    results = asyncio.run(engines.while_running(again, lambda: engines.elastic.expand([1]), 0.1))
    assert [one.token_ids for one in results] == [one.token_ids for one in alone]
    assert engines.worst(again, results) < TOLERANCE


def test_a_shard_that_joins_takes_requests_that_have_no_token_yet(engines: Elastic) -> None:
    engines.elastic.shrink([1])
    # More than a shard runs at once, so that some have no token yet whenever the other joins.
    requests, results = asyncio.run(engines.under_load(lambda: engines.elastic.expand([1]), lanes=1300, tokens=16))
    assert sum(one.shard == 1 for one in results) >= 20
    # A request that has tokens stays, since another seed would draw the rest.
    again = [replace(request, request_id=f"{request.request_id}-again") for request in requests]
    assert [one.token_ids for one in asyncio.run(engines.run(again))] == [one.token_ids for one in results]


def test_a_greedy_response_is_the_same_whether_its_shard_left_or_not(engines: Elastic) -> None:
    requests = engines.requests(12, tokens=40, greedy=True)
    undisturbed = asyncio.run(
        engines.run([replace(request, request_id=f"{request.request_id}u") for request in requests])
    )
    results = asyncio.run(engines.while_running(requests, lambda: engines.elastic.shrink([0])))
    engines.elastic.expand([0])
    assert [result.token_ids for result in results] == [result.token_ids for result in undisturbed]


def test_sleep_frees_the_memory_is_idempotent_and_zero_shards_is_legal(engines: Elastic) -> None:
    resident = engines.generation.group.run("model_bytes")
    reports = engines.generation.sleep_partial([0, 1])
    for shard, report in reports.items():
        assert report["before"] - report["after"] >= 0.9 * (
            resident[shard][0]["weights"] + resident[shard][0]["kv_cache"]
        )
    assert engines.generation.sleep_partial([0, 1]) == {}
    assert engines.generation.router.active == frozenset()
    assert engines.generation.fleet.having(ShardState.ASLEEP) == [0, 1]

    async def wait_for_a_shard() -> None:
        requests = engines.requests(6)
        results = await engines.while_running(requests, lambda: engines.elastic.expand([1]))
        assert shards_of(results) == {1}
        assert engines.worst(requests, results) < TOLERANCE

    asyncio.run(wait_for_a_shard())
    engines.elastic.expand([0, 1])
    assert engines.generation.router.active == {0, 1}


def test_no_shard_within_the_deadline_is_an_error_that_says_so(engines: Elastic) -> None:
    engines.generation.mark_dp_ranks_inactive([0, 1])
    request = engines.requests(1)[0]

    async def hasty() -> None:
        await asyncio.wrap_future(
            engines.generation.start_on_dispatch_loop(engines.generation._dispatcher.run(request, 0.3))
        )

    with pytest.raises(GenerationError, match="no shard took requests within 0 s; all of them sleep or left"):
        asyncio.run(hasty())
    engines.generation.activate_dp_ranks([0, 1])


def test_a_shard_without_current_weights_is_never_routed(engines: Elastic) -> None:
    engines.generation.sleep_partial([1])
    with pytest.raises(WorkerError, match="shard 1 sleeps"):
        engines.generation.activate_dp_ranks([1])
    engines.generation.wake_up_partial([1], skip_activate=True)
    engines.generation.wake_up_partial([1], skip_activate=True)
    with pytest.raises(WorkerError, match="shard 1 slept at level 2 and has had no weights since"):
        engines.generation.activate_dp_ranks([1])
    engines.elastic.sync_selected_workers([1])
    engines.generation.activate_dp_ranks([1])
    requests = engines.requests(9)
    assert engines.worst(requests, asyncio.run(engines.run(requests))) < TOLERANCE


@pytest.mark.parametrize("own", [False, True])
def test_spans_are_exact_across_refits_below_running_requests(engines: Elastic, own: bool) -> None:
    engines.generation.group.run("count_versions", own=own)
    version = engines.cache.version or 0
    reports = []

    def two_refits() -> None:
        reports.append(engines.refresh(version + 1))
        reports.append(engines.refresh(version + 2))

    requests, results = asyncio.run(engines.under_load(two_refits))
    assert any(len(result.spans) > 1 for result in results), "no request ran across a refit"
    assert not any(span.mixed_kv for result in results for span in result.spans)
    assert engines.worst(requests, results) < TOLERANCE
    assert max(engines.differences(requests, results, shift=1)) > 100 * TOLERANCE
    assert all(0 < pause < 60 for report in reports for pause in report.pauses_s) and len(reports[0].pauses_s) == SHARDS
    assert engines.elastic.pause_metrics()["pause_s/p50"] > 0
    engines.generation.group.run("count_versions", own=False)


def test_without_recomputing_keys_the_spans_say_so(engines: Elastic) -> None:
    version = engines.cache.version or 0
    _, results = asyncio.run(engines.under_load(lambda: engines.refresh(version + 1, recompute_kv=False)))
    across = [result for result in results if len(result.spans) > 1]
    assert across
    for result in across:
        assert [span.mixed_kv for span in result.spans] == [False, True]
    later = engines.requests(9)
    results = asyncio.run(engines.run(later))
    assert not any(span.mixed_kv for result in results for span in result.spans)
    assert engines.worst(later, results) < TOLERANCE


def test_a_shard_that_was_left_out_of_a_refit_notices_nothing(engines: Elastic) -> None:
    version = engines.cache.version or 0
    engines.cache.build(version + 1)
    engines.elastic.refresh([0])
    requests = engines.requests(24)
    results = asyncio.run(engines.run(requests))
    stamped = {result.shard: {span.version for span in result.spans} for result in results}
    assert (stamped[0], stamped[1]) == ({version + 1}, {version})
    assert engines.worst(requests, results) < TOLERANCE
    engines.elastic.refresh([1])


def test_a_sync_that_cannot_be_is_refused_and_changes_nothing(engines: Elastic) -> None:
    version = engines.cache.version or 0
    engines.generation.sleep_partial([1])
    with pytest.raises(ShardStateError, match="cannot sync shards that are {1: 'asleep'}"):
        engines.elastic.sync_selected_workers([0, 1])
    engines.elastic.expand([1])

    class Older(type(engines.cache.source(version))):  # type: ignore[misc]
        def begin(self, *arguments: object) -> None:
            self._version = version
            super().begin(*arguments)

    source = Older(engines.cache, version - 1)
    targets = engines.generation.get_model_update_receiver([0, 1])
    with pytest.raises(
        WorkerError,
        match=f"brings version {version - 1} to shard . which has {version}|brings version {version - 1} to shard",
    ):
        SyncSession(source, targets, version=version - 1, options=engines.elastic._options).run()

    first = {"id": "first", "version": version, "staged": True, "windows": 1, "verify": False, "timeout_s": 30.0}
    targets.begin(first, [{"transport": "host", "group": None}] * SHARDS, 30.0)
    with pytest.raises(WorkerError, match="session first is open; abort it first"):
        engines.elastic.sync_selected_workers([0, 1])
    targets.abort("first")
    requests = engines.requests(9)
    assert engines.worst(requests, asyncio.run(engines.run(requests))) < TOLERANCE


def test_a_sync_service_that_drives_the_receivers_itself_brings_whole_versions(engines: Elastic) -> None:
    """After a sleep that lost the weights, and below running requests, which stand still meanwhile."""
    generation = engines.generation

    def send(shards: list[int], version: int) -> None:
        buckets = payloads(engines.versions.weights(version))
        for bucket in buckets:
            rpc = [generation.group.workers[shard].rlix_model_update_rpc for shard in shards]
            ray.get(
                [one.remote("update_parameter_in_bucket", [bucket], False, [0], "cpu_serialize") for one in rpc],
                timeout=60,
            )

    first = (engines.cache.version or 0) + 1
    engines.refresh(first)
    generation.sleep_partial([0], level=2)
    with pytest.raises(WorkerError, match="sleeps: wake its weights"):
        generation.fleet.call([0], "rlix_model_update_rpc", name="broadcast_parameter")
    generation.wake_up_partial([0], skip_activate=True)
    with pytest.raises(WorkerError, match="has had no weights"):
        generation.activate_dp_ranks([0])
    send([0], first + 1)
    with pytest.raises(WorkerError, match="has had no weights"):
        generation.activate_dp_ranks([0])
    generation.finalize_weight_update([0])
    generation.activate_dp_ranks([0])
    others = list(range(1, SHARDS))
    generation.mark_dp_ranks_inactive(others)
    requests = engines.requests(8)
    results = asyncio.run(engines.run(requests))
    assert {span.version for result in results for span in result.spans} == {first + 1}
    assert engines.worst(requests, results) < TOLERANCE
    generation.activate_dp_ranks(others)

    everybody = list(range(SHARDS))

    def replace_all() -> None:
        send(everybody, first + 3)
        generation.finalize_weight_update(everybody, first + 3)

    requests, results = asyncio.run(engines.under_load(replace_all))
    assert first + 3 in {span.version for result in results for span in result.spans}
    assert engines.worst(requests, results) < TOLERANCE

    def broadcast_all() -> None:
        ready = broadcast_weights(generation.group.workers, engines.versions.weights(first + 4), CPU)
        assert ready == [[True]] * SHARDS
        generation.finalize_weight_update(everybody, first + 4)

    requests, results = asyncio.run(engines.under_load(broadcast_all))
    assert first + 4 in {span.version for result in results for span in result.spans}
    assert engines.worst(requests, results) < TOLERANCE
    # The cache, from which the other tests refresh, goes on from here.
    engines.refresh(first + 5)


def test_after_a_session_that_broke_off_half_way_the_next_one_brings_the_whole_version(
    engines: Elastic, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BreaksOff(CachedSource):
        def staging_budget(self) -> int:
            return engines.elastic._options.bucket_bytes

        def export_window(self, index: int, timeout_s: float) -> list[Any]:
            if index == 1:
                raise TransportError("planted: the sender is gone")
            return super().export_window(index, timeout_s)

    engines.generation.sleep_partial([1])
    with monkeypatch.context() as broken:
        broken.setattr(engines.cache, "source", lambda version: BreaksOff(engines.cache, version))
        # A shard that wakes sleeps again when its weights do not come.
        with pytest.raises(TransportError, match="planted"):
            engines.elastic.expand([1])
    assert engines.generation.fleet.state(1) is ShardState.ASLEEP
    slept = [entry.event for entry in engines.record.entries if isinstance(entry.event, ShardSlept)][-1]
    assert slept.freed_bytes > 30 << 20
    engines.generation.wake_up_partial([1], skip_activate=True, tags=["weights"])
    with monkeypatch.context() as broken:
        broken.setattr(engines.cache, "source", lambda version: BreaksOff(engines.cache, version))
        with pytest.raises(TransportError, match="planted"):
            engines.elastic.sync_selected_workers([1])
    assert engines.elastic.expand([1]).shards == [1]
    requests = engines.requests(9)
    assert engines.worst(requests, asyncio.run(engines.run(requests))) < TOLERANCE


def test_an_engine_out_of_memory_at_wake_sleeps_again_and_the_others_live(engines: Elastic, no_memory: Path) -> None:
    engines.elastic.shrink([0])
    no_memory.touch()
    resized = engines.elastic.expand([0])
    no_memory.unlink()
    assert resized.shards == [] and "planted: no memory is left" in resized.failed[0]
    assert engines.generation.fleet.state(0) is ShardState.ASLEEP
    requests = engines.requests(6)
    assert shards_of(asyncio.run(engines.run(requests))) == {1}
    assert engines.elastic.expand([0]).shards == [0]


def test_the_record_tells_every_move_in_its_order(engines: Elastic) -> None:
    start = len(engines.record.entries)
    engines.elastic.shrink([1])
    engines.elastic.expand([1])
    kinds = (ShardUnrouted, ShardSlept, ShardWoken, SyncFinished, VersionPublished, ShardRouted)
    told = [entry.event for entry in engines.record.entries[start:] if isinstance(entry.event, kinds)]
    assert [type(event) for event in told] == list(kinds)
    assert told[1].freed_bytes > 30 << 20


def test_a_shard_with_wrong_weights_is_quarantined_and_the_others_live(engines: Elastic) -> None:
    engines.elastic.shrink([1])
    manifest = engines.cache.manifest()
    with open(manifest.path, "r+b") as segment:
        segment.seek(4096)
        byte = segment.read(1)[0]
        segment.seek(4096)
        segment.write(bytes([byte ^ 1]))
    resized = engines.elastic.expand([1])
    assert resized.shards == [] and "received" in resized.failed[1] and "sent" in resized.failed[1]
    assert engines.generation.fleet.state(1) is ShardState.FAILED
    with pytest.raises(ShardStateError, match=r"shards \[1\] are quarantined"):
        engines.generation.activate_dp_ranks([1])
    requests = engines.requests(9)
    assert shards_of(asyncio.run(engines.run(requests))) == {0}
    engines.cache.build((engines.cache.version or 0) + 1)
    engines.elastic.refresh()
    requests = engines.requests(9)
    assert engines.worst(requests, asyncio.run(engines.run(requests))) < TOLERANCE


def test_when_the_last_shard_hangs_its_requests_fail_by_name(engines: Elastic) -> None:
    dispatcher = engines.generation._dispatcher
    dispatcher.hang_s, dispatcher.poll_s = 3.0, 1.0
    pid = engines.generation.fleet.shards[0].ranks[0]["pid"]

    async def hang() -> None:
        await engines.under_load(lambda: os.kill(pid, signal.SIGSTOP))

    with pytest.raises(
        GenerationError,
        match=r"(?s)no shard is left to serve: .*vllm \(rank 0, node [\d.]+\) is gone while request \w+ ran: ",
    ):
        asyncio.run(hang())
    os.kill(pid, signal.SIGKILL)
