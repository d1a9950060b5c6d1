"""Every target gets a transport that reaches it, whatever the others get."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.distributed.devices import host_of, in_host_memory
from nemo_rl.weight_sync.receiver import place_of
from nemo_rl.weight_sync.sync_session import Route, RoutePlan, plan_routes
from nemo_rl.weight_sync.transports import TransportError

LIVE = ["gpu0@a", "gpu1@a"]
CACHE = ["cpu@a", "gpu0@a"]
gpus = st.sampled_from([f"gpu{number}@{host}" for host in "ab" for number in range(4)])
sources = st.one_of(
    st.lists(gpus, min_size=1, max_size=4, unique=True), gpus.map(lambda owner: [f"cpu@{host_of(owner)}", owner])
)
targets = st.lists(gpus, min_size=1, max_size=8, unique=True)
configured = st.sampled_from(["auto", "cuda_ipc", "nccl", "host", "tcp"])


def transports(plan: RoutePlan) -> list[str]:
    return [route.transport for route in plan.routes]


def test_live_weights_go_by_ipc_to_their_own_gpu_by_host_memory_beside_it_and_by_a_group_beyond() -> None:
    plan = plan_routes("auto", LIVE, ["gpu1@a", "gpu2@a", "gpu0@b", "gpu0@a", "gpu1@b"])
    assert plan.routes == (
        Route("cuda_ipc", 1),
        Route("host", 0),
        Route("nccl", 0, 1),
        Route("cuda_ipc", 0),
        Route("nccl", 0, 2),
    )
    assert plan.lanes == {0: ("cuda_ipc", "host", "nccl"), 1: ("cuda_ipc",)}
    assert (plan.group_size, plan.summary) == (3, "cuda_ipc+host+nccl")


def test_a_cache_is_read_where_it_lies_and_its_owner_only_sends_to_other_hosts() -> None:
    plan = plan_routes("auto", CACHE, ["gpu0@a", "gpu3@a", "gpu0@b"])
    assert plan.routes == (Route("host", 0), Route("host", 0), Route("nccl", 1, 1))
    assert plan.lanes == {0: ("host",), 1: ("nccl",)}


def test_engines_that_share_a_gpu_are_reached_alike() -> None:
    plan = plan_routes("auto", LIVE, ["gpu1@a", "gpu1@a", "gpu2@a", "gpu2@a"])
    assert plan.routes == (Route("cuda_ipc", 1), Route("cuda_ipc", 1), Route("host", 0), Route("host", 0))
    assert plan_routes("nccl", LIVE, ["gpu0@a", "gpu0@a"]).routes == (Route("cuda_ipc", 0), Route("cuda_ipc", 0))


def test_cpu_slots_share_memory() -> None:
    plan = plan_routes("auto", ["cpu@a"] * 2, ["cpu@a"] * 3)
    assert plan.routes == (Route("host", 0),) * 3 and plan.group_size == 0


def test_cpu_slots_of_other_hosts_are_sent_to_from_host_memory() -> None:
    plan = plan_routes("auto", ["cpu@a"] * 2, ["cpu@a", "cpu@b", "cpu@b", "cpu@c"])
    assert plan.routes == (Route("host", 0), Route("tcp", 0, 1), Route("tcp", 0, 2), Route("tcp", 0, 3))
    assert plan.lanes == {0: ("host", "tcp")} and plan.group_size == 4


@pytest.mark.parametrize(
    ("transport", "sources", "chosen"),
    [
        ("host", LIVE, ["host", "host"]),
        ("nccl", LIVE, ["cuda_ipc", "nccl"]),
        ("nccl", CACHE, ["cuda_ipc", "nccl"]),
        ("auto", ["gpu7@b"], ["nccl", "nccl"]),
        ("auto", ["cpu@b"], ["tcp", "tcp"]),
        ("tcp", LIVE, ["tcp", "tcp"]),
        ("tcp", CACHE, ["tcp", "tcp"]),
    ],
)
def test_a_configured_transport_is_used_wherever_it_can_be(
    transport: str, sources: list[str], chosen: list[str]
) -> None:
    assert transports(plan_routes(transport, sources, ["gpu0@a", "gpu2@a"])) == chosen


@pytest.mark.parametrize(
    ("transport", "sources", "targets", "message"),
    [
        ("cuda_ipc", LIVE, ["gpu2@a"], "weight_sync.transport=cuda_ipc reaches only targets on the source's own GPUs"),
        ("host", LIVE, ["gpu2@b"], "weight_sync.transport=host reaches only targets on the source's own nodes"),
        ("nccl", ["cpu@a"], ["cpu@a"], "weight_sync.transport=nccl needs GPUs; on CPU slots use auto, host or tcp"),
        ("host", ["cpu@a"], ["cpu@b"], "weight_sync.transport=host reaches only targets on the source's own nodes"),
        ("nccl", ["cpu@a"], ["gpu0@b"], "gpu0@b is reached by NCCL alone, and no source is on a GPU"),
        ("nccl", LIVE, ["gpu2@a", "gpu2@a"], "two targets share gpu2@a, and NCCL cannot put two ranks on one GPU"),
        ("pigeon", LIVE, ["gpu0@a"], "weight_sync.transport=pigeon is unknown"),
    ],
)
def test_what_cannot_reach_a_target_is_refused_by_name(
    transport: str, sources: list[str], targets: list[str], message: str
) -> None:
    with pytest.raises(TransportError, match=message):
        plan_routes(transport, sources, targets)


@given(sources, targets)
def test_auto_reaches_every_target_by_something_that_works_there(sources: list[str], targets: list[str]) -> None:
    plan = plan_routes("auto", sources, targets)
    for device, route in zip(targets, plan.routes, strict=True):
        source = sources[route.source]
        assert route.transport in plan.lanes[route.source]
        # What the target looks for is what the source publishes.
        assert place_of(route.transport, device) == place_of(route.transport, source) or route.transport == "nccl"
        if route.transport == "cuda_ipc":
            assert source == device
        elif route.transport == "host":
            assert host_of(source) == host_of(device)
        else:
            assert not in_host_memory(source) and source != device
    members = [route.group_rank for route in plan.routes if route.transport == "nccl"]
    assert members == list(range(1, len(members) + 1)) and plan.group_size == (len(members) + 1 if members else 0)
    assert len({route.source for route in plan.routes if route.transport == "nccl"}) <= 1


@given(configured, sources, targets)
def test_what_a_target_gets_depends_on_no_other_target(configured: str, sources: list[str], targets: list[str]) -> None:
    def alone(device: str) -> tuple[str, int] | None:
        try:
            route = plan_routes(configured, sources, [device]).routes[0]
        except TransportError:
            return None
        return route.transport, route.source

    each = [alone(device) for device in targets]
    if None in each:
        with pytest.raises(TransportError):
            plan_routes(configured, sources, targets)
    else:
        assert [(route.transport, route.source) for route in plan_routes(configured, sources, targets).routes] == each


@given(sources, targets)
def test_one_source_stages_for_a_place(sources: list[str], targets: list[str]) -> None:
    plan = plan_routes("auto", sources, targets)
    staged = [place_of(name, sources[source]) for source, names in plan.lanes.items() for name in names]
    assert len(staged) == len(set(staged))
