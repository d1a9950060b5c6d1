"""An engine of two tensor-parallel ranks, each on a node of its own, beside a policy on both: agreement, refit, sleep,
and the loss of the rank that is not on the engine's first node.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nemo_rl.models.generation.interfaces import GenerationError
from tests.models.engines import Colocated, colocated, kill, wait_until_gone, without_place

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def engine(ray_session: None, tiny_model: Path) -> Iterator[Colocated]:
    overrides = ["policy.generation.vllm_cfg.tensor_parallel_size=2", "policy.sequence_packing.enabled=false"]
    with colocated(tiny_model, 1, *overrides, nodes=2) as both:
        yield both


def _ranks(engine: Colocated) -> list[int]:
    return [worker["pid"] for worker in engine.generation.fleet.shards[0].ranks]


def _actor_of(pid: int) -> str:
    titles = (title for parent in psutil.Process(pid).parents() for title in parent.cmdline())
    return next(title for title in titles if title.startswith("ray::")).removeprefix("ray::").partition(".")[0]


def test_ranks_on_two_nodes_agree_with_the_policy_before_and_after_sleep_and_refit(engine: Colocated) -> None:
    assert [_actor_of(pid) for pid in _ranks(engine)] == ["VllmGenerationWorker", "EngineNodeWorker"]
    requests = engine.requests(8)
    before = engine.run(requests)
    assert engine.disagreement(requests, before) <= 1.001
    resident = [rank for shard in engine.generation.group.run("model_bytes") for rank in shard]
    assert len(resident) == 2
    engine.refitter.release_device()
    assert engine.generation.released_bytes() >= 0.9 * sum(rank["weights"] + rank["kv_cache"] for rank in resident)
    engine.train_step()
    engine.refitter.bring_to(1)
    after = engine.run(requests)
    assert without_place(after) != without_place(before)
    assert engine.disagreement(requests, after) <= 1.001


def test_the_loss_of_a_rank_ends_the_engine_which_is_rebuilt_on_both_nodes(engine: Colocated) -> None:
    generation, requests, old = engine.generation, engine.requests(4), _ranks(engine)
    generation.fleet.enable_rebuilds()
    kill(old[1])
    with pytest.raises(GenerationError, match="is gone while request"):
        engine.run(requests)
    wait_until_gone(old)
    engine.train_step()
    engine.refitter.bring_to(2)
    assert not set(_ranks(engine)) & set(old)
    results = engine.run(requests)
    assert {span.version for result in results for span in result.spans} == {2}
    assert engine.disagreement(requests, results) <= 1.001
