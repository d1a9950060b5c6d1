"""Real engines that share a slot and are killed between requests: the run goes on with the others, and each comes back
with the weights of the next refit.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import ray

from nemo_rl.algorithms.grpo.refitter import Refitter
from nemo_rl.models.generation.interfaces import GenerationError
from nemo_rl.models.generation.vllm.fleet import ShardState
from tests.models.engines import Colocated, colocated, engine_pids, kill, wait_until_gone

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


def serving(engines: Colocated, version: int) -> set[int]:
    """The shards that answer a few requests; every token must be of `version` and as the policy scores it."""
    requests = engines.requests(16)
    results = engines.run(requests)
    assert {span.version for result in results for span in result.spans} == {version}
    assert engines.disagreement(requests, results) <= 1.001
    return {result.shard for result in results}


def test_a_shard_that_was_killed_between_requests_costs_nothing_but_itself_and_comes_back(
    ray_session: None, tiny_model: Path
) -> None:
    with colocated(tiny_model, 1, "policy.generation.vllm_cfg.engines_per_gpu=2") as engines:
        generation = engines.generation
        generation.fleet.enable_rebuilds()
        taking_turns = Refitter(
            engines.policy,
            generation,
            engines.config.weight_sync,
            colocated=True,
            cuda=False,
            record=engines.record,
        )
        taking_turns.bring_to(0)
        assert serving(engines, 0) == {0, 1}
        resident = [rank for shard in generation.group.run("model_bytes") for rank in shard]
        taking_turns.release_device()
        assert generation.released_bytes() >= 0.9 * sum(rank["weights"] + rank["kv_cache"] for rank in resident)
        taking_turns.bring_to(0)

        # The engine's own process, while nothing runs; the actor around it lives on.
        pids = sorted({worker["pid"] for worker in generation.fleet.shards[1].ranks})
        for pid in pids:
            kill(pid)
        taking_turns.release_device()
        assert generation.fleet.state(1) is ShardState.FAILED
        engines.train_step()
        taking_turns.bring_to(1)
        assert serving(engines, 1) == {0, 1}

        # The actor, while its shard sleeps.
        taking_turns.release_device()
        pids = engine_pids(generation)
        ray.kill(generation.group.workers[0])
        engines.train_step()
        taking_turns.bring_to(2)
        assert serving(engines, 2) == {1}

        # Engines with slots of their own are built beside the run, which goes on with the others meanwhile.
        beside = Refitter(
            engines.policy,
            generation,
            engines.config.weight_sync,
            colocated=False,
            cuda=False,
            record=engines.record,
        )
        engines.train_step()
        beside.bring_to(3)
        assert serving(engines, 3) == {1}
        builds = [shard.build for shard in generation.fleet.shards.values() if shard.build is not None]
        assert builds and wait(builds, timeout=120.0)
        engines.train_step()
        beside.bring_to(4)
        assert serving(engines, 4) == {0, 1}
        assert generation.engine_metrics() == {}
        wait_until_gone([pid for pid in pids if pid not in engine_pids(generation)])

        # All of them at once, while requests run: these wait for the new engines, which have the version of the old.
        beside.await_rebuild(True)
        requests = engines.requests(16)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(engines.run, requests)
            for pid in engine_pids(generation):
                kill(pid)
            deadline = time.monotonic() + 60.0
            while generation.fleet.healthy():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            beside.revive(4)
            results = waiting.result(timeout=60.0)
        assert {span.version for result in results for span in result.spans} == {4}
        assert engines.disagreement(requests, results) <= 1.001

        # All of them at once, while nothing runs: the next refit finds out.
        for pid in engine_pids(generation):
            kill(pid)
        engines.train_step()
        beside.bring_to(5)
        assert serving(engines, 5) <= {0, 1}

        # Nobody waits where nobody builds: the request says what it lost.
        beside.await_rebuild(False)
        for pid in engine_pids(generation):
            kill(pid)
        with pytest.raises(GenerationError, match=r"no shard is left to serve: .*is gone while request"):
            engines.run(engines.requests(1))
