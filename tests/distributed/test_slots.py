"""What a slot says of its GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray

from nemo_rl.distributed import virtual_cluster
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster


@pytest.mark.parametrize(("named", "device"), [("3", 3), ("GPU-5c4b", "GPU-5c4b"), ("MIG-41b3", "MIG-41b3")])
def test_gpus_keep_the_names_that_the_machine_gives_them(
    named: str, device: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = SimpleNamespace(get_node_id=lambda: "node", get_accelerator_ids=lambda: {"GPU": [named]})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    described = virtual_cluster._describe_slot._function()
    monkeypatch.setattr(ray, "get", lambda refs, timeout: [described])
    monkeypatch.setattr(RayVirtualCluster, "_on", lambda self, node, bundle, task: SimpleNamespace(remote=lambda: None))
    assert [slot.device_index for slot in RayVirtualCluster([1]).slots()] == [device]
