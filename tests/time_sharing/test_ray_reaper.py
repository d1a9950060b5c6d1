"""A process is ended whatever state it is in, with its children; and never one that is not Ray's."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from nemo_rl.time_sharing.ray_reaper import end_processes

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


def test_a_stopped_process_and_its_children_are_gone_afterwards(worker: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(worker.pid).children()
    assert children
    worker.send_signal(signal.SIGSTOP)
    assert end_processes([worker.pid], timeout_s=30.0)
    assert not psutil.pid_exists(worker.pid)
    # Its parent gone, a child belongs to init, which may take a moment to bury it.
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_a_number_that_belongs_to_something_else_by_now_is_left_alone() -> None:
    process = subprocess.Popen(["/bin/sleep", "100"])
    try:
        assert end_processes([process.pid], timeout_s=1.0)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_process_that_is_gone_already_is_gone() -> None:
    process = subprocess.Popen(["/bin/true"])
    process.wait()
    assert end_processes([process.pid], timeout_s=1.0)
