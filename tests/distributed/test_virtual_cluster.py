"""Ports are promised to one asker at a time, on the whole machine; and what a slot says of its GPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import ray

from nemo_rl.distributed import virtual_cluster
from nemo_rl.distributed.ports import free_ports
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster

LOW, HIGH = 21400, 21409
_CHOOSES = "import sys; from nemo_rl.distributed.ports import free_ports; print(free_ports(5, 21400, 21409))"


def test_two_runs_that_choose_before_either_listens_get_different_ports() -> None:
    waits = f"{_CHOOSES}; sys.stdout.flush(); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        theirs = set(json.loads(other.stdout.readline()))
        ours = set(free_ports(5, LOW, HIGH))
        assert len(theirs) == len(ours) == 5
        assert not theirs & ours
        other.communicate()
    assert theirs == set(free_ports(5, LOW, HIGH)), "a promise ends with the process that held it"


def test_ports_for_a_short_time_neither_run_out_nor_collect_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("nemo_rl.distributed.ports.time.monotonic", lambda: now)
    before = len(os.listdir("/proc/self/fd"))
    slot = SimpleNamespace(node_rank=0, node_ip="10.0.0.1", node_id="here")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    cluster = RayVirtualCluster([1], use_gpus=False, name="narrow", port_range_low=HIGH + 30, port_range_high=HIGH + 34)
    cluster._slots = [slot]  # type: ignore[list-item]
    (lasting,) = cluster.free_ports(1)
    seen: set[int] = set()
    for _ in range(30):
        address, port = cluster.get_master_address_and_port(hold_s=10.0)
        assert address == "10.0.0.1" and port != lasting
        seen.add(port)
        now += 6.0
    assert seen <= set(range(HIGH + 30, HIGH + 35)) - {lasting}
    assert len(os.listdir("/proc/self/fd")) <= before + 4
    # The newest is still reserved.
    assert not set(cluster.free_ports(3, hold_s=10.0)) & {lasting, port}
    with pytest.raises(virtual_cluster.ResourceInsufficientError, match="0 of 1 ports free"):
        cluster.free_ports(1, hold_s=10.0)


def test_a_promised_port_is_given_only_where_no_other_is_free() -> None:
    low, high = HIGH + 1, HIGH + 10
    first = free_ports(9, low, high)
    assert len(first) == 9
    (left,) = set(range(low, high + 1)) - set(first)
    assert left in free_ports(2, low, high)
    assert free_ports(1, first[0], first[0]) == [first[0]]
    assert free_ports(1, first[0], first[0], first) == []


def test_a_port_that_is_listened_on_is_not_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert free_ports(1, port, port) == []


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
