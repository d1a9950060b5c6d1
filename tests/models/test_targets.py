"""Shards as targets of a refit: room for a second copy of their weights, and who is to blame where they fail."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from nemo_rl.distributed.worker_calls import WorkerError, WorkerIdentity
from nemo_rl.models.generation.vllm import targets as module
from nemo_rl.models.generation.vllm.targets import ShardTargets

pytestmark = pytest.mark.ray


def fleet(workers: list[Any], devices: list[list[str]]) -> Any:
    """What targets need of a fleet."""
    identities = [WorkerIdentity("vllm", shard, "") for shard in range(len(workers))]
    shards = [SimpleNamespace(ranks=[{"device": device} for device in ranks]) for ranks in devices]
    return SimpleNamespace(workers=workers, identities=identities, shards=shards)


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

    targets = ShardTargets(fleet([worker(len(ranks)) for ranks in devices], devices), range(len(devices)), True)
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
    engines = fleet([SimpleNamespace(**methods)], [["cpu@a"]])
    engines.having = lambda *states: []
    known: list[tuple[int | None, bool]] = []
    engines.set_version = lambda shards, version, half_new=False: known.append((version, half_new))
    targets = ShardTargets(engines, [0], True)
    targets.begin({"id": "s", "staged": staged}, [{}], 10.0)
    assert known == []
    targets.receive_window({}, 10.0)
    assert known == ([] if staged else [(None, True)])
    assert targets.finish(7, 10.0) == [0.5]
    assert known[-2:] == [(None, True), (7, False)]


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
    monkeypatch.setattr(module, "_ANSWER_S", 1.0)
    monkeypatch.setattr(module, "_CULPRITS_S", 1.0)

    @ray.remote(num_cpus=0)
    def answer(how: str) -> list[int]:
        if how == "raises":
            raise RuntimeError("planted")
        time.sleep(30 if how == "never" else 0)
        return [200]

    ray.get(answer.remote("in time"))
    refs = [answer.remote(how) for how in answers]
    workers: list[Any] = [SimpleNamespace(free_memory=SimpleNamespace(remote=lambda ref=ref: ref)) for ref in refs]
    devices = [[f"cpu{shard}@a"] for shard in range(len(answers))]
    targets = ShardTargets(fleet(workers, devices), range(len(answers)), True)
    with pytest.raises(WorkerError):
        targets.staging_fits(100)
    assert targets.culprits.keys() == culprits.keys() and targets.died == died
    assert all(culprits[shard] in reason for shard, reason in targets.culprits.items())
    for ref in refs:
        ray.cancel(ref, force=True)
