"""A second Ray node on this machine that shares no memory with the first: its `/dev/shm` is a file system of its own,
in a user namespace, which needs no rights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_rl.distributed.processes import kill_and_wait
from nemo_rl.distributed.ray_joining import credentials
from nemo_rl.distributed.ray_runtime import NODE_ENV

_ALONE = ("unshare", "-Urm", "--propagation", "private")
_START_S, _END_S, _NOTICED_S = 60.0, 20.0, 60.0


def on_node(node: str) -> dict[str, object]:
    """Options of an actor that runs on a node."""
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False), "num_cpus": 0}


@contextmanager
def second_node(logs: Path, slots: int = 2) -> Iterator[str]:
    """The id of another node of the cluster that this process is connected to, with so many CPU slots; afterwards Ray
    knows that it is gone, and gives it no actor of the next test. Skips the test where the system gives no user
    namespaces.
    """
    tried = subprocess.run([*_ALONE, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip("there are no user namespaces here")
    # Local clusters ask for a token; the session's variables that say so are gone.
    with patch.dict(os.environ, RAY_AUTH_MODE="token"):
        mode, token = credentials()
    environment = os.environ | NODE_ENV | {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": token}
    started = (
        "import sys; from ray.scripts.scripts import main; sys.argv[0] = 'ray'; main()",
        "start",
        f"--address={ray.get_runtime_context().gcs_address}",
        "--block",
        "--num-cpus=64",
        f"--resources={json.dumps({'cpu_slot': slots})}",
        f"--object-store-memory={128 << 20}",
    )
    known = _alive()
    script = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
    command = [*_ALONE, "bash", "-c", script, "bash", sys.executable, "-c", *started]
    with (logs / "second_node.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    node = ""
    try:
        yield (node := _joined(known, process, logs / "second_node.log"))
    finally:
        if process.poll() is None:
            family = psutil.Process(process.pid)
            # Ended so, its raylet takes leave at once, instead of being missed after 15 s.
            raylets = [one for one in family.children(recursive=True) if one.name() == "raylet"]
            for raylet in raylets:
                raylet.terminate()
            psutil.wait_procs(raylets, _END_S)
            kill_and_wait([*family.children(recursive=True), family], _END_S)
            process.wait(_END_S)
        deadline = time.monotonic() + _NOTICED_S
        while node in _alive():
            assert time.monotonic() < deadline, f"Ray did not notice within {_NOTICED_S:g} s that node {node} is gone"
            time.sleep(0.2)


def _alive() -> set[str]:
    return {str(node["NodeID"]) for node in ray.nodes() if node["Alive"]}


def _joined(known: set[str], process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        for node in _alive() - known:
            return node
        time.sleep(0.1)
    raise AssertionError(f"the second node did not join: {log.read_text()}")
