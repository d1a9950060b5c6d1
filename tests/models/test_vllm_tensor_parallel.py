"""An engine of two tensor-parallel ranks beside a policy of two: agreement, refit, sleep, waking from the policy's
cache, and an end without orphans.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl.models.generation.elastic import ElasticGeneration
from nemo_rl.models.generation.interfaces import GenerationError
from nemo_rl.models.policy.weights import PolicyWeightCache
from nemo_rl.weight_sync.sync_session import SyncOptions
from tests.models.engines import Colocated, colocated, engine_pids, kill, wait_until_gone, without_place

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def engine(ray_session: None, tiny_model: Path) -> Iterator[Colocated]:
    overrides = [
        "policy.dtensor_cfg.tensor_parallel_size=2",
        "policy.dtensor_cfg.sequence_parallel=true",
        "policy.generation.vllm_cfg.tensor_parallel_size=2",
        "policy.sequence_packing.enabled=false",
    ]
    with colocated(tiny_model, 2, *overrides) as both:
        yield both


def test_both_sides_cut_in_two_agree_before_and_after_a_refit(engine: Colocated) -> None:
    requests = engine.requests(16)
    before = engine.run(requests)
    assert engine.disagreement(requests, before) <= 1.001
    resident = [rank for shard in engine.generation.group.run("model_bytes") for rank in shard]
    engine.refitter.release_device()
    assert engine.generation.released_bytes() >= 0.9 * sum(rank["weights"] + rank["kv_cache"] for rank in resident)
    engine.refitter.bring_to(0)
    assert engine.run(requests) == before
    engine.refitter.release_device()
    engine.train_step()
    engine.refitter.bring_to(1)
    after = engine.run(requests)
    assert without_place(after) != without_place(before)
    assert engine.disagreement(requests, after) <= 1.001


def test_a_shard_wakes_with_the_weights_that_the_policy_had_when_they_were_cached(engine: Colocated) -> None:
    requests = engine.requests(16)
    old = engine.run(requests)
    bucket_bytes = engine.config.weight_sync.bucket_bytes
    cache = PolicyWeightCache(engine.policy, bucket_bytes=bucket_bytes)
    elastic = ElasticGeneration(engine.generation, cache, SyncOptions(bucket_bytes=bucket_bytes, verify=True))
    engine.train_step()
    # Both ranks take part in the export; the first one owns the cache.
    version = cache.build(2).version
    elastic.shrink([0])
    resized = elastic.expand([0])
    assert (resized.shards, resized.failed) == ([0], {})
    assert resized.sync is not None and (resized.sync.version, resized.sync.transport) == (version, "host")
    new = engine.run(requests)
    assert {span.version for result in new for span in result.spans} == {version}
    assert engine.disagreement(requests, new) <= 1.001 < engine.disagreement(requests, old)
    # The policy trains on; a shard that comes back gets what is cached.
    engine.train_step()
    elastic.shrink([0])
    elastic.expand([0])
    assert without_place(engine.run(requests)) == without_place(new)


def test_no_engine_process_outlives_its_actor(engine: Colocated) -> None:
    import psutil

    pids = engine_pids(engine.generation)
    assert len(pids) >= 2
    actor = next(
        parent for parent in psutil.Process(pids[-1]).parents() if "VllmGenerationWorker" in " ".join(parent.cmdline())
    )
    kill(actor.pid)
    wait_until_gone(pids)
    with pytest.raises(GenerationError, match=r"vllm \(rank 0, node [\d.]+\) is gone while request r0 ran"):
        engine.run(engine.requests(1))
