"""Slots, groups of workers on them, and what the driver learns when one of them fails."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import ray
from ray._private import worker

from nemo_rl.distributed import idle_agent
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, ResourceInsufficientError, this_run
from nemo_rl.distributed.worker_groups import (
    RayWorkerBuilder,
    RayWorkerGroup,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
    resolve_fqn,
    slot_share,
)
from tests.models.engines import wait_until_gone

pytestmark = pytest.mark.ray

PROBE = "tests.distributed.ray_workers.Probe"
# Far above what a report of a failure takes and far below the collective's own timeout.
SOON_S = 60.0


@pytest.fixture(scope="module")
def cluster(ray_session: None) -> Iterator[RayVirtualCluster]:
    cluster = RayVirtualCluster([4], use_gpus=False, max_colocated_worker_groups=2, num_gpus_per_node=4, name="test")
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def grid(cluster: RayVirtualCluster) -> Iterator[RayWorkerGroup]:
    sharding = NamedSharding(np.arange(4).reshape(2, 2), ["data_parallel", "tensor_parallel"])
    group = RayWorkerGroup(cluster, RayWorkerBuilder(PROBE), name_prefix="probe", sharding_annotations=sharding)
    yield group
    group.shutdown()


def test_a_cluster_of_our_own_runs_only_what_it_needs_of_ray(ray_session: None) -> None:
    node = worker._global_node
    assert node is not None
    assert set(node.all_processes) == {"gcs_server", "raylet"}
    started = [each.cmdline() for each in psutil.Process(node.all_processes["raylet"][0].process.pid).children()]
    assert sum(idle_agent.__file__ in command for command in started) == 1
    assert not any("DashboardAgent" in " ".join(command) for command in started)


def test_more_slots_than_there_are_is_an_error_that_names_the_keys(ray_session: None) -> None:
    cluster = RayVirtualCluster([5], use_gpus=False, num_gpus_per_node=5, name="greedy")
    with pytest.raises(
        ResourceInsufficientError,
        match=r"'greedy' needs 5 x cpu_slot, the Ray cluster has 4; lower cluster.gpus_per_node .* cluster.cpu_slots",
    ):
        cluster.get_placement_groups()


def test_a_run_that_waits_for_slots_says_who_holds_them(
    cluster: RayVirtualCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nemo_rl.distributed.virtual_cluster._SAID_AFTER_S", 0.2)
    cluster.get_placement_groups()
    late = RayVirtualCluster([1], use_gpus=False, name="late", timeout_s=1.0)
    held = rf"held: 4 by .*, process {os.getpid()} on "
    with pytest.raises(
        ResourceInsufficientError,
        match=f"'late': node 0 could not reserve 1 x cpu_slot within 1 s; free now: 0; {held}",
    ):
        late.get_placement_groups()
    assert re.search(f"waiting up to 1 s for 1 x cpu_slot; {held}", caplog.text)


@pytest.mark.parametrize("command", ["run_grpo.py --config a.yaml", "run_sft.py seed=1", "train.py " + "x" * 500])
def test_a_run_is_known_to_others_by_its_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", command.split())
    assert re.fullmatch(rf"{re.escape(command[:100])}.{{0,25}}, process {os.getpid()} on \S+", this_run())


@pytest.mark.parametrize(
    ("per_node", "says"),
    [([], "every node needs"), ([2, 0], "every node needs"), ([9], "9 slots on one node, but a node has 8")],
)
def test_an_impossible_shape_is_refused_without_ray(per_node: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RayVirtualCluster(per_node, use_gpus=False, name="odd")


def test_slots_have_distinct_places_and_ports_are_handed_out_once(cluster: RayVirtualCluster) -> None:
    slots = cluster.slots()
    assert [slot.bundle_index for slot in slots] == [0, 1, 2, 3]
    assert [slot.device_index for slot in slots] == [0, 1, 2, 3]
    ports = [port for _ in range(3) for port in cluster.free_ports(4)]
    assert len(set(ports)) == 12
    narrow = RayVirtualCluster([1], use_gpus=False, name="narrow", port_range_low=1999, port_range_high=1999)
    narrow._groups = cluster.get_placement_groups()
    assert narrow.free_ports(1) == [1999]
    with pytest.raises(
        ResourceInsufficientError, match="0 of 1 ports free in 1999-1999; widen cluster.master_port_range"
    ):
        narrow.free_ports(1)


def test_every_worker_knows_its_place(grid: RayWorkerGroup) -> None:
    environments = grid.run("environment")
    assert [env["RANK"] for env in environments] == ["0", "1", "2", "3"]
    assert {env["WORLD_SIZE"] for env in environments} == {"4"}
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in environments}) == 1
    assert all(int(env["OMP_NUM_THREADS"]) >= 1 for env in environments)


def test_actors_that_share_a_slot_are_workers_of_their_own(cluster: RayVirtualCluster, grid: RayWorkerGroup) -> None:
    # Beside the grid, which has a part of every slot.
    group = RayWorkerGroup(
        cluster, RayWorkerBuilder(PROBE), name_prefix="shared", bundle_indices_list=[(0, [0])] * 2 + [(0, [1])]
    )
    try:
        environments = group.run("environment")
        assert [env["RANK"] for env in environments] == [env["LOCAL_RANK"] for env in environments] == ["0", "1", "2"]
        assert len(set(group.run("pid"))) == 3
    finally:
        group.shutdown()


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("engines", [1, 2, 3, 4, 7, 16])
def test_actors_of_a_slot_leave_room_for_a_probe_and_take_what_is_theirs(groups: int, engines: int) -> None:
    share = slot_share(groups * engines)
    assert groups * engines * share <= 0.9 + 1e-9
    assert share > 0 and share == pytest.approx(0.9 / groups / engines, abs=1e-4)


def test_sharded_data_goes_along_its_axis_and_replicas_see_the_same(grid: RayWorkerGroup) -> None:
    future = grid.run_all_workers_sharded_data(
        "echo",
        in_sharded_axes=["data_parallel"],
        replicate_on_axes=["tensor_parallel"],
        common_kwargs={"common": "c"},
        data=["left", "right"],
    )
    assert grid.get_all_worker_results(future) == [
        (0, "left", "c"),
        (1, "left", "c"),
        (2, "right", "c"),
        (3, "right", "c"),
    ]


def test_replicated_outputs_are_returned_once(grid: RayWorkerGroup) -> None:
    future = grid.run_all_workers_sharded_data(
        "echo",
        in_sharded_axes=["data_parallel"],
        replicate_on_axes=["tensor_parallel"],
        output_is_replicated=["tensor_parallel"],
        data=["left", "right"],
    )
    assert [rank for rank, _, _ in grid.get_all_worker_results(future)] == [0, 2]


def test_axes_that_are_named_nowhere_are_called_at_their_first_coordinate(grid: RayWorkerGroup) -> None:
    future = grid.run_all_workers_sharded_data("echo", in_sharded_axes=["data_parallel"], data=["left", "right"])
    assert [rank for rank, _, _ in grid.get_all_worker_results(future)] == [0, 2]
    assert [
        rank
        for rank, _, _ in grid.get_all_worker_results(
            grid.run_all_workers_single_data("echo", run_rank_0_only_axes=["data_parallel"])
        )
    ] == [0, 1]


def test_shards_nested_along_two_axes_reach_their_rank(grid: RayWorkerGroup) -> None:
    future = grid.run_all_workers_sharded_data(
        "echo", in_sharded_axes=["data_parallel", "tensor_parallel"], data=[["a", "b"], ["c", "d"]]
    )
    assert [data for _, data, _ in grid.get_all_worker_results(future)] == ["a", "b", "c", "d"]


def test_arguments_may_be_given_by_position(grid: RayWorkerGroup) -> None:
    calls = (
        grid.run_all_workers_single_data("echo", "same", common="c"),
        grid.run_all_workers_multiple_data("echo", list("abcd"), common_kwargs={"common": "c"}),
        grid.run_all_workers_sharded_data(
            "echo", ["l", "r"], in_sharded_axes=["data_parallel"], replicate_on_axes=["tensor_parallel"]
        ),
    )
    seen = [[(data, common) for _, data, common in grid.get_all_worker_results(future)] for future in calls]
    assert seen == [[("same", "c")] * 4, [(one, "c") for one in "abcd"], [(one, None) for one in "llrr"]]
    assert ray.get(grid.run_single_worker_single_data("echo", 2, "one"))[:2] == (2, "one")


def test_a_list_that_does_not_match_the_workers_is_refused(grid: RayWorkerGroup) -> None:
    with pytest.raises(ValueError, match=r"probe.echo: data has 3 entries for 4 workers"):
        grid.run_all_workers_multiple_data("echo", data=[1, 2, 3])


def test_a_wait_that_passes_its_deadline_names_who_did_not_answer(grid: RayWorkerGroup) -> None:
    future = grid.run_all_workers_single_data(
        "sleep", run_rank_0_only_axes=["data_parallel", "tensor_parallel"], seconds=3.0
    )
    with pytest.raises(WorkerTimeoutError, match=r"probe.sleep: no answer within 1 s from probe \(rank 0, node "):
        grid.get_all_worker_results(future, timeout_s=1.0)


def test_a_worker_may_own_several_slots(cluster: RayVirtualCluster) -> None:
    pairs = RayWorkerGroup(
        cluster, RayWorkerBuilder(PROBE), name_prefix="pairs", bundle_indices_list=[(0, [0, 1]), (0, [2, 3])]
    )
    try:
        assert [[slot.bundle_index for slot in slots] for slots in pairs._slots] == [[0, 1], [2, 3]]
        assert [env["WORLD_SIZE"] for env in pairs.run("environment")] == ["2", "2"]
    finally:
        assert pairs.shutdown()
        assert pairs.shutdown()


def test_a_worker_that_cannot_start_says_why(cluster: RayVirtualCluster) -> None:
    group = RayWorkerGroup(
        cluster,
        RayWorkerBuilder(PROBE, fail_at_start="no such model"),
        name_prefix="broken",
        bundle_indices_list=[(0, [0])],
    )
    with pytest.raises(
        WorkerError, match=r"broken.pid: broken \(rank 0, node [\d.]+\) could not start: ValueError: no such model"
    ) as error:
        group.run("pid")
    assert "in __init__" in str(error.value), "the remote traceback is missing"
    group.shutdown()


@pytest.mark.parametrize("kill", [False, True], ids=["raises", "is killed"])
def test_a_failing_worker_is_named_while_the_others_hang_in_a_collective(
    cluster: RayVirtualCluster, kill: bool
) -> None:
    group = RayWorkerGroup(
        cluster, RayWorkerBuilder(PROBE), name_prefix="pair", bundle_indices_list=[(0, [0]), (0, [1])]
    )
    pids = group.run("pid")
    with pytest.raises(WorkerError, match=r"^pair.refuse: .* raised UserError: key: wrong; put it right$") as one_line:
        group.run("refuse")
    assert str(one_line.value).count("\n") == 0
    group.run("join")
    started = time.monotonic()
    with pytest.raises(
        WorkerDiedError if kill else WorkerError, match=r"pair.reduce: pair \(rank 1, node [\d.]+\)"
    ) as error:
        group.run("reduce", failing_rank=1, kill=kill)
    assert time.monotonic() - started < SOON_S
    if not kill:
        assert "ArithmeticError: planted" in str(error.value)
        assert 'raise ArithmeticError("planted")' in str(error.value), "the remote traceback is missing"
    group.shutdown()
    wait_until_gone(pids)


def test_unfinished_cleanup_is_reported_and_ended(cluster: RayVirtualCluster) -> None:
    group = RayWorkerGroup(cluster, RayWorkerBuilder(PROBE), name_prefix="slow", bundle_indices_list=[(0, [3])])
    pids = group.run("pid")
    ray.wait([group.run_single_worker_single_data("sleep", 0, seconds=60.0)], timeout=0.1)
    assert not group.shutdown(cleanup_method="pid", timeout=0.5)
    wait_until_gone(pids)


@pytest.mark.parametrize(
    ("name", "says"),
    [("Probe", "not a dotted name"), ("nowhere.Probe", "No module"), ("nemo_rl.config.Probe", "has no 'Probe'")],
)
def test_a_dotted_name_that_leads_nowhere_is_an_import_error(name: str, says: str) -> None:
    with pytest.raises(ImportError, match=says):
        resolve_fqn(name)
