"""Starting Ray where its own wait bound is too short."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray._private import node, services

from nemo_rl.distributed import ray_joining, ray_runtime
from nemo_rl.distributed.accelerator_slots import CPU
from nemo_rl.distributed.ray_runtime import (
    RayConnection,
    RayStart,
    RayStartError,
    init_ray,
    shutdown_ray,
    starting_ahead,
)

LATE = "The current node timed out during startup. This could happen because"


def start_with(monkeypatch: pytest.MonkeyPatch, failures: list[Exception]) -> list[Any]:
    """Makes Ray's start fail as listed and then succeed; the calls that were made."""
    calls: list[Any] = []

    def start(**options: Any) -> None:
        calls.append(options)
        if len(calls) <= len(failures):
            raise failures[len(calls) - 1]

    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "init", start)
    return calls


def test_a_start_that_took_too_long_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = start_with(monkeypatch, [Exception(LATE)])
    init_ray(device="cpu", cpu_slots=3)
    assert [call["resources"] for call in calls] == [{"cpu_slot": 3.0}] * 2


def test_a_machine_that_never_gets_there_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = start_with(monkeypatch, [Exception(LATE)] * 9)
    with pytest.raises(RayStartError, match=r"within \d+ s, attempts: 3\. .*load average is .*overloaded"):
        init_ray(device="cpu")
    assert len(calls) == ray_runtime._START_ATTEMPTS


@dataclass
class SlowRay:
    """Ray's start on a machine so busy that its two processes take long, by a clock that runs when one waits."""

    port_s: float
    node_s: float
    now: float = 0.0
    attempts: int = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def port(self, *_: object, timeout_ms: int) -> int:
        if self.now < self.port_s:
            self.now += timeout_ms / 1000
            raise RuntimeError("Timed out waiting for file")
        return 6379

    def init(self, **_: object) -> None:
        self.attempts += 1
        assert node.wait_for_persisted_port("session", "id", "gcs_server", timeout_ms=30_000) == 6379
        assert services.get_node("address", "id") == "the node"

    def GcsClient(self, address: str) -> Any:
        return SimpleNamespace(get_all_node_info=lambda: self.now >= self.node_s)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowRay:
    start_with(monkeypatch, [])
    machine = SlowRay(0.0, 0.0)
    monkeypatch.setattr(ray, "init", machine.init)
    monkeypatch.setattr(ray_runtime, "time", machine)
    monkeypatch.setattr(ray_runtime, "GcsClient", machine.GcsClient)
    monkeypatch.setattr(node, "wait_for_persisted_port", machine.port)
    monkeypatch.setattr(services, "get_node", lambda *_: "the node")
    return machine


def test_a_start_goes_on_while_its_processes_run(slow: SlowRay) -> None:
    slow.port_s, slow.node_s = 60.0, 170.0
    init_ray(device="cpu")
    assert slow.attempts == 1 and slow.now >= 170.0


@pytest.mark.parametrize(
    ("port_s", "node_s", "what"), [(1e9, 0.0, "gcs_server to listen"), (100.0, 1e9, "raylet to register")]
)
def test_all_attempts_together_have_one_deadline(slow: SlowRay, port_s: float, node_s: float, what: str) -> None:
    slow.port_s, slow.node_s = port_s, node_s
    with pytest.raises(RayStartError, match=rf"within 18\d s, attempts: 1\. Ray waited for {what}\. The load average"):
        init_ray(device="cpu")


def test_a_process_that_ended_is_not_waited_for(slow: SlowRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow.port_s = 1e9
    raylet = tmp_path / "raylet"
    raylet.symlink_to(sys.executable)
    started: list[subprocess.Popen[bytes]] = []

    def init(**_: object) -> None:
        started.append(subprocess.Popen([str(raylet), "-c", ""]))
        while started[-1].pid and psutil.Process(started[-1].pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        slow.init()

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(RayStartError, match=r"attempts: 3\. raylet ended while Ray waited for gcs_server to listen"):
        init_ray(device="cpu")
    assert slow.now < 10.0


def test_what_a_late_start_left_running_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[subprocess.Popen[bytes]] = []
    start_with(monkeypatch, [])
    succeed = ray.init

    def start(**options: Any) -> None:
        if not left:
            left.append(subprocess.Popen(["sleep", "600"]))
            raise Exception(LATE)
        succeed(**options)

    monkeypatch.setattr(ray, "init", start)
    other = subprocess.Popen(["sleep", "600"])
    try:
        init_ray(device="cpu")
        assert not psutil.pid_exists(left[0].pid)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_any_other_failure_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = start_with(monkeypatch, [ValueError("a mistake")] * 9)
    with pytest.raises(ValueError, match="a mistake"):
        init_ray(device="cpu")
    assert len(calls) == 1


@pytest.fixture
def listener() -> Iterator[str]:
    """Address at which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def left_by_ray_start(monkeypatch: pytest.MonkeyPatch, folder: Path, address: str) -> None:
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    (folder / "ray").mkdir()
    (folder / "ray" / "ray_current_cluster").write_text(address)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 0.0})


def test_a_cluster_that_runs_on_this_machine_is_joined(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, listener: str
) -> None:
    calls = start_with(monkeypatch, [])
    left_by_ray_start(monkeypatch, tmp_path, listener)
    init_ray(device="cpu")
    assert [call["address"] for call in calls] == ["auto"]
    assert not {"num_cpus", "num_gpus", "resources", "object_store_memory"} & set(calls[0])


def test_the_address_of_a_cluster_that_was_killed_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = start_with(monkeypatch, [])
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = f"127.0.0.1:{server.getsockname()[1]}"
    left_by_ray_start(monkeypatch, tmp_path, gone)
    init_ray(device="cpu")
    assert [call["address"] for call in calls] == ["local"]


def test_a_listener_that_is_no_cluster_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, listener: str
) -> None:
    calls = start_with(monkeypatch, [ConnectionError("Failed to connect to Ray cluster")])
    left_by_ray_start(monkeypatch, tmp_path, listener)
    init_ray(device="cpu")
    assert [call["address"] for call in calls] == ["auto", "local"]


def test_a_cluster_that_is_named_must_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    start_with(monkeypatch, [ConnectionError("Failed to connect to Ray cluster")])
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(RayStartError, match=r"RAY_ADDRESS=10\.0\.0\.1:6379 does not answer"):
        init_ray(device="cpu")


def test_a_run_can_insist_on_a_cluster_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, listener: str
) -> None:
    calls = start_with(monkeypatch, [])
    left_by_ray_start(monkeypatch, tmp_path, listener)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    init_ray(device="cpu")
    assert [call["address"] for call in calls] == ["local"]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to a cluster that this process starts and ends."""
    happened: list[str] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: happened[-1:] == ["up"])
    monkeypatch.setattr(ray, "shutdown", lambda: happened.append("down"))
    monkeypatch.setattr(ray_runtime, "init_ray", lambda **_: happened.append("up") or CPU)
    return happened


def test_a_start_ahead_that_a_run_takes_over_is_the_runs(cluster: list[str]) -> None:
    with starting_ahead(device="cpu", cpu_slots=2):
        connection = RayConnection()
        assert connection.open(device="cpu", cpu_slots=2) is CPU
        connection.close()
        connection.close()
    assert cluster == ["up", "down"]


def test_a_start_ahead_that_nobody_takes_over_is_ended(cluster: list[str]) -> None:
    with pytest.raises(ZeroDivisionError), starting_ahead(device="cpu", cpu_slots=2):
        raise ZeroDivisionError
    assert cluster == ["up", "down"]


def test_a_guest_of_a_cluster_starts_none_ahead(cluster: list[str]) -> None:
    cluster.append("up")
    with starting_ahead(device="cpu", cpu_slots=2):
        connection = RayConnection()
        connection.open(device="cpu", cpu_slots=2)
        connection.close()
    assert cluster == ["up", "up"]


def test_what_began_on_a_cluster_is_ended_before_it_also_where_the_start_failed() -> None:
    ended: list[str] = []

    def begin(divisor: int, stack: ExitStack) -> float:
        stack.callback(ended.append, "actors")
        return 1 / divisor

    for divisor in (1, 0):
        start = RayStart(partial(begin, divisor), lambda: ended.append("cluster"))
        start.after_actors(lambda: ended.append("logs"))
        start.close()
    assert ended == ["actors", "logs", "cluster"] * 2


def test_a_signal_while_ray_starts_is_raised_once_it_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends in the middle of a start crashes."""
    up: list[threading.Thread] = []

    def joined(*_: object) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        up.append(threading.current_thread())
        return True

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_runtime, "_joined", joined)
    monkeypatch.setattr(ray_runtime, "_accelerator_of_cluster", lambda device: CPU)
    # A shell that starts the tests in the background has them ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            init_ray(device="cpu")
    finally:
        signal.signal(signal.SIGINT, before)
    assert up and up[0] is not threading.main_thread()


def test_the_end_of_a_cluster_removes_what_its_killed_processes_left(
    cluster: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        for pid in (engine.pid, os.getpid()):
            (tmp_path / f"nemo_rl-sockets-{pid}-x").mkdir()
        cluster.append("up")
        shutdown_ray()
    finally:
        engine.kill()
        engine.wait()
    assert [path.name for path in tmp_path.iterdir()] == [f"nemo_rl-sockets-{os.getpid()}-x"]


def test_asking_a_cluster_hides_the_lines_of_ray_alone(capfd: pytest.CaptureFixture[str]) -> None:
    """It is asked on a thread, beside which a run says what it does."""
    with ray_joining._no_lines_of_ray():
        os.write(2, b"[2026-11-26 21:00:00,123 E 1 2] rpc_client.cc:80: refused\nI0000 00:00:17.1 2 chttp2.cc:1\n")
        sys.stderr.write("start: directories 0.0 s\n")
    sys.stderr.write("start: Ray\n")
    assert capfd.readouterr().err == "start: directories 0.0 s\nstart: Ray\n"


def test_a_cluster_that_answers_and_lets_nobody_in_is_waited_for_with_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()
    monkeypatch.setattr(ray_joining, "probe", ray_joining.do_nothing)
    monkeypatch.setattr(ray_joining, "_JOIN_S", 0.2)
    monkeypatch.setattr(ray, "init", lambda **options: over.wait(60))
    with pytest.raises(RayStartError, match=r"cluster there:1 answers, but has not let this process in within 0.2 s"):
        ray_joining.join_cluster("there:1")
    over.set()
