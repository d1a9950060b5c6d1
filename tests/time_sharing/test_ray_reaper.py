"""A process is ended whatever state it is in, with its children; and never one that is not Ray's."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from nemo_rl.time_sharing.agents import ray_reaper
from nemo_rl.time_sharing.agents.ray_reaper import end_processes

SHELL = "/bin/sh"


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """A process titled like a Ray worker, with a child."""
    process = subprocess.Popen(["ray::Actor", "-c", "sleep 100 & echo; wait"], executable=SHELL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    for child in psutil.Process(process.pid).children() if process.poll() is None else []:
        child.kill()
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.slow
def test_a_stopped_process_and_its_children_are_gone_afterwards(worker: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(worker.pid).children()
    assert children
    worker.send_signal(signal.SIGSTOP)
    assert end_processes([(worker.pid, 0.0)], timeout_s=30.0) == []
    assert not psutil.pid_exists(worker.pid)
    # Its parent gone, a child belongs to init, which may take a moment to bury it.
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_what_an_ended_process_left_in_memory_and_among_files_goes_with_it(
    worker: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = [Path(f"/dev/shm/nemo_rl-{worker.pid}-left"), tmp_path / f"nemo_rl-sockets-{worker.pid}-left"]
    of_others = [tmp_path / f"nemo_rl-sockets-{worker.pid}0-other", Path(f"/dev/shm/nemo_rl-{worker.pid}0-other")]
    try:
        for path in (*left, *of_others):
            path.mkdir()
        assert end_processes([(worker.pid, 0.0)], timeout_s=30.0) == []
        assert not any(path.exists() for path in left) and all(path.is_dir() for path in of_others)
    finally:
        for path in (left[0], of_others[1]):
            shutil.rmtree(path, ignore_errors=True)


def test_a_number_that_belongs_to_something_else_by_now_is_left_alone() -> None:
    process = subprocess.Popen(["/bin/sleep", "100"])
    try:
        assert end_processes([(process.pid, 0.0)], timeout_s=1.0) == []
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_process_that_is_gone_already_is_gone() -> None:
    process = subprocess.Popen(["/bin/true"])
    process.wait()
    assert end_processes([(process.pid, 0.0)], timeout_s=1.0) == []


@pytest.mark.slow
def test_a_process_that_was_not_gone_is_known_again_by_its_number_and_its_start(
    worker: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as stuck:
        stuck.setattr(psutil.Process, "kill", lambda process: None)
        left = end_processes([(worker.pid, 0.0)], timeout_s=0.2)
    assert worker.pid in dict(left) and len(left) == 2, "with its child"
    assert end_processes([(worker.pid, dict(left)[worker.pid] + 1.0)], timeout_s=1.0) == [] and psutil.pid_exists(
        worker.pid
    ), "another process's number"
    assert end_processes(left, timeout_s=30.0) == []
    assert worker.poll() is not None


class _Ray(ModuleType):
    """As much of Ray as a reaper asks: it forgets actors as soon as it is asked to end them."""

    def __init__(self, *names: str) -> None:
        super().__init__("ray")
        self.named = list(names)
        self.util = SimpleNamespace(
            list_named_actors=lambda all_namespaces: [{"name": n, "namespace": "pipeline_a_NS"} for n in self.named]
        )

    def get_actor(self, name: str, namespace: str) -> object:
        return SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: name))

    def kill(self, handle: Any, no_restart: bool) -> None:
        self.named.remove(handle._actor_id.hex())


def test_what_was_not_gone_is_looked_for_again_although_ray_has_forgotten_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", _Ray("agent.0", "rank_0.0", "rank_1.0", "agent.1"))
    stuck = {"rank_0.0"}
    ended: list[set[str]] = []

    def end(processes: set[Any], timeout_s: float) -> set[Any]:
        ended.append({process.node for process in processes})
        return {process for process in processes if process.node in stuck}

    # Each actor is a process on a node of its own name.
    monkeypatch.setattr(
        ray_reaper, "_processes_of", lambda ids: {ray_reaper.SurvivingProcess(name, 7, 0.0) for name in ids}
    )
    monkeypatch.setattr(ray_reaper, "_end_on_their_nodes", end)
    monkeypatch.setattr(ray_reaper, "dead_actors_in", lambda namespace: set())
    reaper = ray_reaper.Reaper(tmp_path / "left")
    assert reaper.end("a", 0, 2, timeout_s=1.0) and not (tmp_path / "left").exists()
    ended.clear()
    assert [reaper.end("a", 0, 0, timeout_s=1.0) for _ in range(2)] == [False, False]
    assert reaper.end("a", 0, 1, timeout_s=1.0), "another rank's processes are none of it"
    assert not reaper.end("a", 0, 0, timeout_s=1.0), (
        "also when no rank actor is left that Ray knows, the agent is none of it"
    )
    reaper = ray_reaper.Reaper(tmp_path / "left")  # of a scheduler that was started anew
    assert not reaper.end("a", 0, -1, timeout_s=1.0)
    stuck.clear()
    assert reaper.end("a", 0, -1, timeout_s=1.0) and ray_reaper.Reaper(tmp_path / "left").end("a", 0, -1, timeout_s=1.0)
    assert ended == [
        {"rank_0.0"},
        {"rank_0.0"},
        {"rank_1.0"},
        {"rank_0.0"},
        {"rank_0.0", "agent.0"},
        {"rank_0.0"},
        set(),
    ]


@pytest.mark.parametrize("text", ["", "[[", '[["a", 0]]', '[["a", 0, 0, [[1]]]]', "\0\0"])
def test_a_memory_that_cannot_be_read_keeps_no_scheduler_from_starting(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_reaper, "dead_actors_in", lambda namespace: set())
    monkeypatch.setitem(sys.modules, "ray", _Ray())
    monkeypatch.setattr(ray_reaper, "_processes_of", lambda ids: set())
    (tmp_path / "left").write_text(text)
    assert ray_reaper.Reaper(tmp_path / "left").end("a", 0, 0, timeout_s=1.0)
