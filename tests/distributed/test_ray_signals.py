"""Whose a signal is: the driver's, whatever Ray does with it, and not that of Ray's processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from nemo_rl.distributed import ray_signals
from nemo_rl.distributed.ray_signals import RayWatch, in_groups_of_their_own, keeping_sigterm


def sleeper() -> psutil.Process:
    return psutil.Process(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid)


def test_rays_processes_are_not_in_the_group_of_the_command() -> None:
    from ray._private import services

    with in_groups_of_their_own():
        process = services.ConsolePopen(["sleep", "60"], stdout=subprocess.DEVNULL)
    try:
        assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("on_main_thread", [True, False])
def test_what_ray_installs_for_sigterm_is_taken_back(on_main_thread: bool) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))

    def start_ray() -> None:
        with keeping_sigterm():
            if on_main_thread:
                signal.signal(signal.SIGTERM, signal.default_int_handler)
            # What compiled code installs: here, that the signal is ignored.
            ray_signals._LIBC.signal(int(signal.SIGTERM), 1)

    try:
        if on_main_thread:
            start_ray()
        else:
            thread = threading.Thread(target=start_ray)
            thread.start()
            thread.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_end_of_ray_that_nobody_asked_for_is_reported_once() -> None:
    lost: list[str] = []
    called = threading.Event()

    def when_lost(names: str) -> None:
        lost.append(names)
        called.set()

    processes = [sleeper(), sleeper()]
    try:
        with RayWatch.calling(when_lost):
            RayWatch.begin(processes)
            processes[0].kill()
            assert called.wait(10.0)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert len(lost) == 1


def test_an_end_of_ray_that_was_asked_for_is_none() -> None:
    lost: list[str] = []
    process = sleeper()
    with RayWatch.calling(lost.append):
        RayWatch.begin([process])
        RayWatch.end()
        process.kill()
        process.wait()
        time.sleep(3 * ray_signals._POLL_S)
    assert lost == []
