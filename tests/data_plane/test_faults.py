"""The data plane when something dies, fills up or is not alone: an error that names what died, within the deadline;
nothing lost, nothing left.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

from nemo_rl.data_plane import DataPlaneClient, MetricsDataPlaneClient
from nemo_rl.data_plane.adapters.mooncake import start_master
from nemo_rl.data_plane.interfaces import DataPlaneCapacityError, DataPlaneClosedError, DataPlaneError
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.data_plane_store import DataPlaneStore
from nemo_rl.experience.store import StageOutput, TokenStage
from tests.data_plane.conftest import plane_config, require_mooncake, start
from tests.models.engines import wait_until_gone

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_session")]

IDS = ["a", "b", "c", "d"]


def write(client: Any, partition: str = "train") -> None:
    client.put_samples(IDS, partition, {"x": torch.arange(4)})


def controller_of(client: Any) -> str:
    return getattr(client, "inner", client)._connect.__self__.controller


def pid_of(actor: Any) -> int:
    return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=60)


def kill(actor: Any) -> None:
    """Kills an actor and waits until its process is gone."""
    pid = pid_of(actor)
    ray.kill(actor)
    wait_until_gone([pid])


@pytest.fixture(scope="module")
def small(ray_session: None) -> Iterator[Any]:
    """A system of its own with room for four rows."""
    client = start("simple", num_storage_units=1, storage_capacity=4, full_wait_s=0.2, observability={"enabled": True})
    yield client
    client.close()


def test_a_part_that_is_killed_is_named_within_the_deadline() -> None:
    client = start("simple", ack_timeout_ms=60_000)
    write(client)
    for victim, says in (("-unit-0", "storage unit 0 at "), ("", "the controller at ")):
        kill(ray.get_actor(controller_of(client) + victim))
        with pytest.raises(DataPlaneError, match=f"{says}.* died; the rows it held are lost"):
            client.get_samples(IDS, "train", ["x"])
    client.close()


def test_two_runs_on_one_cluster_do_not_see_each_other(small: Any) -> None:
    other = start("simple", num_storage_units=1)
    write(small)
    assert other.list_samples("train") == {}
    other.put_samples(IDS[:1], "train", {"x": torch.tensor([9])})
    pid = pid_of(ray.get_actor(controller_of(other)))
    other.close()
    wait_until_gone([pid])
    assert small.get_samples(IDS, "train", ["x"])["x"].tolist() == [0, 1, 2, 3]
    small.clear_samples(IDS, "train")


def test_a_storage_that_stays_full_fails_the_write_and_keeps_what_it_has(small: Any) -> None:
    write(small)
    with pytest.raises(
        DataPlaneCapacityError, match=r"no room for 0 s \(Storage capacity exceeded: 4 existing \+ 2 new > 4\)"
    ):
        small.put_samples(["e", "f"], "train", {"x": torch.arange(2)})
    assert (
        small.get_samples(IDS, "train", ["x"])["x"].tolist() == [0, 1, 2, 3]
        and list(small.list_samples("train")) == IDS
    )
    small.clear_samples(IDS[:2], "train")
    small.put_samples(["e", "f"], "train", {"x": torch.arange(2)})
    small.clear_samples(None, "train")


def test_a_run_reports_prometheus_metrics_of_its_own_and_of_the_controller(small: Any) -> None:
    assert isinstance(small, MetricsDataPlaneClient)
    write(small)
    assert "nemo_rl_data_plane_n_keys_outstanding 4" in small.prometheus_text()
    small.clear_samples(IDS, "train")


def test_a_call_that_is_under_way_when_the_client_closes_ends_at_once_and_quietly(
    small: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(small)
    client = pickle.loads(pickle.dumps(small))
    assert client.get_samples(IDS, "train", ["x"])["x"].tolist() == [0, 1, 2, 3]
    failed: list[str] = []

    def read() -> None:
        try:
            client.get_samples(IDS, "train", ["x"])
        except DataPlaneClosedError as error:
            failed.append(str(error))

    complaints: list[str] = []
    monkeypatch.setattr(
        sys,
        "unraisablehook",
        lambda raised: complaints.append(f"{raised.err_msg} {raised.object!r}: {raised.exc_value}"),
    )
    controller = pid_of(ray.get_actor(controller_of(small)))
    os.kill(controller, signal.SIGSTOP)
    try:
        reader = threading.Thread(target=read)
        reader.start()
        time.sleep(0.5)
        client.close()
        reader.join(timeout=60)
    finally:
        os.kill(controller, signal.SIGCONT)
    assert failed and "closed" in failed[0]
    # A call that is only forgotten would complain when it is collected.
    gc.collect()
    assert complaints == [] and "was destroyed but it is pending" not in caplog.text
    small.clear_samples(IDS, "train")


def add_up(columns: BatchedDataDict[Any]) -> StageOutput:
    return StageOutput({"advantages": columns["input_ids"].float()}, {"sum": columns["input_ids"].sum(-1)})


def held_memory(_actor: Any = None) -> int:
    """The bytes that this process holds: what its allocator only keeps for later (tens of MB, and different at each
    look) is given back first.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def held_by(actor: Any) -> int:
    return ray.get(actor.__ray_call__.remote(held_memory), timeout=60)


def test_fifty_steps_leave_no_row_and_no_memory_behind(shared_clients: Callable[[str], DataPlaneClient]) -> None:
    client = shared_clients("simple")
    store = DataPlaneStore(client, 0, 8, partition="fifty")
    parts = [ray.get_actor(controller_of(client) + part) for part in ("", "-unit-0", "-unit-1")]
    batch = BatchedDataDict(
        input_ids=torch.ones(32, 8000, dtype=torch.int64), input_lengths=torch.full((32,), 8000), content=["text"] * 32
    )
    before: list[int] = []
    for step in range(50):
        with store.step():
            handle = store.write(batch)
            handle, rows = store.apply(handle, TokenStage(add_up, ("input_ids",), ("advantages",)))
            assert rows["sum"].tolist() == [8000] * 32
            store.update(handle, {"sample_mask": torch.ones(32)})
        if step == 9:
            parts.append(store._runner)
            before = [held_memory(), *map(held_by, parts)]
    after = [held_memory(), *map(held_by, parts)]
    assert client.list_samples("fifty") == {}
    # Forty steps wrote 40 x 32 x 8000 x (8 + 4) bytes = 123 MB; a sixth of it would show.
    assert all(late - early < 20e6 for early, late in zip(before, after, strict=True)), (before, after)
    store.close()


class OwnMooncake:
    """A process with a Mooncake of its own: engines start once per process."""

    def master(self) -> int:
        self.undo = ExitStack()
        start_master(plane_config("mooncake_cpu"), self.undo, one_host=True)
        return self._master().pid

    def _master(self) -> psutil.Process:
        (master,) = [
            child
            for child in psutil.Process().children(recursive=True)
            if "mooncake_master" in " ".join(child.cmdline())
        ]
        return master

    def write_after_the_death_of_its_master(self) -> str:
        client = start("mooncake_cpu", ack_timeout_ms=60_000)
        write(client)
        assert client.get_samples(IDS, "train", ["x"])["x"].tolist() == [0, 1, 2, 3]
        self._master().kill()
        try:
            client.put_samples(["e"], "train", {"x": torch.ones(1)})
        except DataPlaneError as error:
            return str(error)
        return "no error"


@pytest.fixture
def own_mooncake() -> Any:
    require_mooncake()
    root = str(Path(__file__).parents[2])
    actor_class: Any = ray.remote(OwnMooncake)
    actor = actor_class.options(num_cpus=0, runtime_env={"env_vars": {"PYTHONPATH": root}}).remote()
    yield actor
    ray.kill(actor)


def test_metadata_and_metrics_of_mooncake_listen_on_the_loopback_address(own_mooncake: Any) -> None:
    master = psutil.Process(ray.get(own_mooncake.master.remote(), timeout=120))
    listening = [one.laddr.ip for one in master.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    # Its port for requests is open on every address, whatever it is told.
    assert sorted(listening)[1:] == ["127.0.0.1", "127.0.0.1"]


def test_a_mooncake_master_that_is_killed_is_named(own_mooncake: Any) -> None:
    said = ray.get(own_mooncake.write_after_the_death_of_its_master.remote(), timeout=200)
    assert "mooncake_master at " in said and "died" in said


def test_no_mooncake_master_outlives_the_process_that_started_it(own_mooncake: Any) -> None:
    master = ray.get(own_mooncake.master.remote(), timeout=120)
    assert psutil.pid_exists(master)
    ray.kill(own_mooncake)
    wait_until_gone([master])
