"""An engine of two tensor-parallel ranks beside a policy of two: agreement, refit, sleep, and an end without orphans."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl.models.generation.interfaces import GenerationError
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
    assert engine.refitter._released_bytes >= 0.9 * sum(rank["weights"] + rank["kv_cache"] for rank in resident)
    engine.refitter.bring_to(0)
    assert engine.run(requests) == before
    engine.refitter.release_device()
    engine.train_step()
    engine.refitter.bring_to(1)
    after = engine.run(requests)
    assert without_place(after) != without_place(before)
    assert engine.disagreement(requests, after) <= 1.001


def test_no_engine_process_outlives_its_actor(engine: Colocated) -> None:
    import psutil

    pids = engine_pids(engine.generation)
    assert len(pids) >= 2
    actor = next(parent for parent in psutil.Process(pids[-1]).parents() if "VllmGenerationWorker" in " ".join(parent.cmdline()))
    kill(actor.pid)
    wait_until_gone(pids)
    with pytest.raises(GenerationError, match=r"vllm \(rank 0, node [\d.]+\) is gone while request r0 ran"):
        engine.run(engine.requests(1))
