"""Ending processes of this machine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from nemo_rl.distributed.processes import has_ended, kill_and_wait

# Starts a process, says its number and never asks how it ended, like the first process of many containers.
PARENT = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def uncollected() -> Iterator[psutil.Process]:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        yield child
        child.kill()
        parent.kill()


def test_a_zombie_has_ended(uncollected: psutil.Process) -> None:
    assert not has_ended(uncollected)
    began = time.monotonic()
    assert kill_and_wait([uncollected], 60.0) == []
    assert time.monotonic() - began < 30.0
    assert uncollected.status() == psutil.STATUS_ZOMBIE and has_ended(uncollected)


def test_what_does_not_end_is_named() -> None:
    class Immortal(psutil.Process):
        def kill(self) -> None:
            pass

    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        stays = Immortal(process.pid)
        assert kill_and_wait([stays], 0.3) == [stays]
        process.kill()
