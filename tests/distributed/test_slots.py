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
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": [named]})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    told = virtual_cluster._gpu_of_slot._function()
    monkeypatch.setattr(ray, "get", lambda refs, timeout: [told])
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "n", "NodeManagerAddress": "10.0.0.1"}])
    monkeypatch.setattr(virtual_cluster, "placement_group_table", lambda group: {"bundles_to_node_id": {0: "n"}})
    monkeypatch.setattr(RayVirtualCluster, "get_placement_groups", lambda self: [None])
    monkeypatch.setattr(RayVirtualCluster, "_on", lambda self, node, bundle, task: SimpleNamespace(remote=lambda: None))
    (slot,) = RayVirtualCluster([1]).slots()
    assert (slot.device_index, slot.node_ip) == (device, "10.0.0.1")
