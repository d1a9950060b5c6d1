"""Shards as targets of a refit: room for a second copy of their weights, and who is to blame where they fail."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from nemo_rl.distributed import worker_groups
from nemo_rl.distributed.worker_groups import WorkerError, WorkerIdentity
from nemo_rl.models.generation.vllm import fleet as module
from nemo_rl.models.generation.vllm.fleet import Shard, ShardState, ShardTargets

pytestmark = pytest.mark.ray


def targets_of(workers: list[Any], devices: list[list[str]]) -> ShardTargets:
    """Shards that serve, as targets."""
    known = [Shard(ShardState.ACTIVE, ranks=[{"device": device} for device in ranks]) for ranks in devices]
    who = [WorkerIdentity("vllm", shard, "") for shard in range(len(known))]
    return ShardTargets(dict(enumerate(known)), workers, who, lambda shard: ShardState.ACTIVE)


@pytest.mark.parametrize(
    ("devices", "fits"),
    [
        ([["gpu0@a"], ["gpu1@a"]], True),
        ([["gpu0@a", "gpu1@a"]], True),
        ([["gpu0@a"], ["gpu0@a"]], False),
        ([["gpu0@a"], ["gpu0@a"], ["gpu1@a"]], False),
        ([["cpu@a"], ["cpu@a"]], False),
        ([["cpu@a"], ["cpu@b"]], True),
    ],
)
def test_copies_on_one_device_must_fit_together(ray_session: None, devices: list[list[str]], fits: bool) -> None:
    def worker(ranks: int) -> Any:
        return SimpleNamespace(free_memory=SimpleNamespace(remote=lambda: ray.put([200] * ranks)))

    targets = targets_of([worker(len(ranks)) for ranks in devices], devices)
    assert targets.staging_fits(100) == fits
    assert targets.staging_fits(50)


@pytest.mark.parametrize("staged", [False, True])
def test_weights_count_as_half_new_from_the_first_that_is_loaded_until_the_session_has_ended(
    ray_session: None, staged: bool
) -> None:
    answers = {"begin_sync": None, "receive_window": None, "finish_sync": 0.5}
    methods = {
        name: SimpleNamespace(remote=lambda answer=answer, **_: ray.put(answer)) for name, answer in answers.items()
    }
    targets = targets_of([SimpleNamespace(**methods)], [["cpu@a"]])
    shard = targets._known[0]
    shard.has(6)
    targets.begin({"id": "s", "staged": staged}, [{}], 10.0)
    assert (shard.version, shard.half_new) == (6, False)
    targets.receive_window({}, 10.0)
    assert (shard.version, shard.half_new) == ((6, False) if staged else (None, True))
    assert targets.finish(7, 10.0) == [0.5]
    assert (shard.version, shard.half_new) == (7, False)


@pytest.mark.parametrize(
    ("answers", "culprits", "died"),
    [
        (["never"], {0: "no answer to free_memory"}, True),
        (["never", "never"], {0: "no answer to free_memory", 1: "no answer to free_memory"}, True),
        (["in time", "never"], {1: "no answer to free_memory"}, True),
        # The one that does not answer may wait for the one that raised.
        (["raises", "never"], {0: "planted", 1: "no answer to free_memory"}, False),
        (["raises", "in time"], {0: "planted"}, False),
    ],
)
def test_a_shard_that_hangs_counts_as_dead_unless_another_one_raised(
    ray_session: None,
    answers: list[str],
    culprits: dict[int, str],
    died: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_groups, "_ROOT_CAUSE_WAIT_S", 0.2)
    monkeypatch.setattr(module, "_ANSWER_S", 0.2)
    monkeypatch.setattr(module, "_CULPRITS_S", 0.2)

    @ray.remote(num_cpus=0)
    def answer(how: str) -> list[int]:
        if how == "raises":
            raise RuntimeError("planted")
        time.sleep(10 if how == "never" else 0)
        return [200]

    refs = [answer.remote(how) for how in answers]
    prompt = [ref for ref, how in zip(refs, answers, strict=True) if how != "never"]
    ray.wait(prompt, num_returns=len(prompt), timeout=60.0) if prompt else None
    workers: list[Any] = [SimpleNamespace(free_memory=SimpleNamespace(remote=lambda ref=ref: ref)) for ref in refs]
    devices = [[f"cpu{shard}@a"] for shard in range(len(answers))]
    targets = targets_of(workers, devices)
    with pytest.raises(WorkerError):
        targets.staging_fits(100)
    assert targets.culprits.keys() == culprits.keys() and targets.died == died
    assert all(culprits[shard] in reason for shard, reason in targets.culprits.items())
