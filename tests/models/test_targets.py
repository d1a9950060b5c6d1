"""Room for a second copy of the weights is looked for where the targets are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from nemo_rl.distributed.worker_calls import WorkerIdentity
from nemo_rl.models.generation.vllm.targets import ShardTargets

pytestmark = pytest.mark.ray


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

    shards = range(len(devices))
    workers: list[Any] = [worker(len(ranks)) for ranks in devices]
    identities = [WorkerIdentity("vllm", shard, "") for shard in shards]
    states: Any = None
    targets = ShardTargets(states, shards, workers, identities, devices, True)
    assert targets.staging_fits(100) == fits
    assert targets.staging_fits(50)
