"""The data plane when something dies, fills up or is not alone: an error that names what died, within the deadline; nothing lost, nothing left."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import ray
import torch

from nemo_rl.data_plane import MetricsDataPlaneClient
from nemo_rl.data_plane.errors import DataPlaneCapacityError, DataPlaneError
from tests.data_plane.conftest import start
from tests.models.engines import wait_until_gone

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_session")]

IDS = ["a", "b", "c", "d"]


def write(client: Any, partition: str = "train") -> None:
    client.put_samples(IDS, partition, {"x": torch.arange(4)})


def controller_of(client: Any) -> str:
    return client._connect.__self__.controller


def kill(actor: Any) -> None:
    """Kills an actor and waits until its process is gone."""
    pid = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=60)
    ray.kill(actor)
    wait_until_gone([pid])


@pytest.mark.parametrize(("victim", "says"), [("-unit-0", "storage unit 0 at "), ("", "the controller at ")])
def test_a_part_that_is_killed_is_named_within_the_deadline(victim: str, says: str) -> None:
    client = start("simple", ack_timeout_ms=60_000)
    write(client)
    kill(ray.get_actor(controller_of(client) + victim))
    started = time.monotonic()
    with pytest.raises(DataPlaneError, match=f"{says}.* died; the rows it held are lost"):
        client.get_samples(IDS, "train", ["x"])
    assert time.monotonic() - started < 60
    client.close()


def test_two_runs_on_one_cluster_do_not_see_each_other() -> None:
    one, other = start("simple", num_storage_units=1), start("simple", num_storage_units=1)
    write(one)
    assert other.list_samples("train") == {}
    other.put_samples(IDS[:1], "train", {"x": torch.tensor([9])})
    other.close()
    assert one.get_samples(IDS, "train", ["x"])["x"].tolist() == [0, 1, 2, 3]
    controllers = [ray.get_actor(controller_of(one))]
    pids = [ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=60) for actor in controllers]
    one.close()
    wait_until_gone(pids)


def test_a_storage_that_stays_full_fails_the_write_and_keeps_what_it_has() -> None:
    client = start("simple", num_storage_units=1, storage_capacity=4, full_wait_s=0.2)
    write(client)
    with pytest.raises(DataPlaneCapacityError, match=r"no room for 0 s \(Storage capacity exceeded: 4 existing \+ 2 new > 4\)"):
        client.put_samples(["e", "f"], "train", {"x": torch.arange(2)})
    assert client.get_samples(IDS, "train", ["x"])["x"].tolist() == [0, 1, 2, 3] and list(client.list_samples("train")) == IDS
    client.clear_samples(IDS[:2], "train")
    client.put_samples(["e", "f"], "train", {"x": torch.arange(2)})
    client.close()


def test_a_run_reports_prometheus_metrics_of_its_own_and_of_the_controller() -> None:
    client = start("simple", num_storage_units=1, observability={"enabled": True})
    assert isinstance(client, MetricsDataPlaneClient)
    write(client)
    assert "nemo_rl_data_plane_n_keys_outstanding 4" in client.prometheus_text()
    client.close()
