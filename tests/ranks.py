"""Runs a function on every rank of a small gloo world, one process per rank, without Ray.

One launcher per session imports what ranks need and forks them, since these imports cost more than most tests. Where
several sessions fork one process that has imported everything, the launcher is a fork of it, too. A rank gets the
environment, working directory and search path that its caller has.
"""

from __future__ import annotations

import functools
import multiprocessing as mp
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Client, Connection
from queue import Empty
from typing import Any

import psutil

from nemo_rl.distributed.ports import free_ports
from nemo_rl.distributed.processes import collect_rarely, importing
from tests import forks

_WORKER = "nemo_rl.models.policy.policy_worker"
# What a worker imports once it knows its backend and model.
_OF_WORKERS = ("nemo_rl.models.dtensor.dtensor_backend", "transformers.models.qwen3.modeling_qwen3")
# Megatron-Core may only be imported by ranks that train with it: they are forks of a fork that has imported it.
_OF_MEGATRON = ("nemo_rl.models.megatron.megatron_backend", "megatron.core.models.gpt", "megatron.core.optimizer")
_TRAINS_WITH_MEGATRON = b"policy.megatron_cfg.enabled=true"
_CONFIG = forks.ROOT / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"
_START_S = 120.0


@dataclass
class _Call:
    """A function to run. `pickled`: function and arguments."""

    pickled: bytes
    world: int
    timeout_s: float
    environment: dict[str, str]
    folder: str
    search_path: list[str]


class _Launcher:
    """`_serve` in a process of its own."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/launcher")
            listener.listen()
            listener.settimeout(_START_S)
            command = ["-m", __name__, listener.getsockname()]
            if forks.ADDRESS in os.environ:
                outputs = (stream.fileno() for stream in (sys.__stdout__, sys.__stderr__) if stream is not None)
                self.process = forks.start(command, dict(os.environ), *outputs)
            else:
                self.process = subprocess.Popen([sys.executable, *command], cwd=forks.ROOT, stdin=subprocess.DEVNULL)
            accepted, _ = listener.accept()
        self.connection: Connection[Any, Any] = Connection(accepted.detach())

    def end(self) -> None:
        """Ends it with every rank that is left."""
        with suppress(psutil.NoSuchProcess):
            for left in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    left.kill()
        self.process.kill()
        self.process.wait()
        self.connection.close()


_launchers: list[_Launcher] = []


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout_s: float = 240.0) -> list[Any]:
    """`function(*args)` on ranks 0..world-1, each with torch.distributed's variables set; results in rank order.

    Raises:
        RuntimeError: A rank raised, ended without an answer or passed the deadline; all are ended then.
    """
    if not _launchers:
        _launchers.append(_Launcher())
    (launcher,) = _launchers
    call = _Call(pickle.dumps((function, args)), world, timeout_s, dict(os.environ), os.getcwd(), list(sys.path))
    results, failure = None, "interrupted"
    try:
        launcher.connection.send(call)
        if launcher.connection.poll(timeout_s + 60.0):
            results, failure = launcher.connection.recv()
        else:
            failure = f"no answer within {timeout_s:.0f} s"
    except (EOFError, OSError):
        failure = f"the launcher ended with exit code {launcher.process.wait(timeout=10.0)}"
    finally:
        if failure is not None:
            end_launcher()
    if failure is not None:
        raise RuntimeError(failure)
    return results


def end_launcher() -> None:
    """Ends what `run_ranks` keeps between calls."""
    while _launchers:
        _launchers.pop().end()


def _serve(connection: Any, imported: tuple[str, ...] = ()) -> None:
    """Starts ranks until the other end is closed. `imported`: what they have beside what each call needs."""
    with_megatron: Any = None
    while True:
        try:
            call: _Call = connection.recv()
        except EOFError:
            break
        if (failure := _import_for(call, imported)) is not None:
            connection.send((None, failure))
        elif imported or _TRAINS_WITH_MEGATRON not in call.pickled:
            connection.send(_launch(call))
        else:
            with_megatron = with_megatron or _fork_with_megatron()
            with_megatron.send(call)
            connection.send(with_megatron.recv())
    if with_megatron is not None:
        with_megatron.close()


def _fork_with_megatron() -> Any:
    """The connection to a fork that serves as this process does, and has imported Megatron-Core."""
    context = mp.get_context("fork")
    here, there = context.Pipe()

    def serve() -> None:
        here.close()
        _serve(there, _OF_MEGATRON)

    context.Process(target=serve, daemon=False).start()
    there.close()
    return here


def _import_for(call: _Call, imported: tuple[str, ...]) -> str | None:
    """Imports what ranks need; what failed."""
    sys.path[:] = call.search_path
    try:
        with importing():
            # Stays imported for later calls; each rank unpickles for itself what it may change.
            pickle.loads(call.pickled)
            if _WORKER in sys.modules:
                for name in (*_OF_WORKERS, *imported):
                    import_module(name)
                _fill_caches()
    except Exception:  # noqa: BLE001 - whatever happened is the parent's to report
        return f"the launcher failed:\n{traceback.format_exc()}"
    return None


@functools.cache
def _fill_caches() -> None:
    """Does once what each rank would do when it reads its configuration and its model."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from nemo_rl.config import load_master_config

    get_checkpoint_conversion_mapping("qwen3")
    load_master_config(_CONFIG, [])


def _launch(call: _Call) -> tuple[list[Any] | None, str | None]:
    context = mp.get_context("fork")
    answers: Any = context.Queue()
    (port,) = free_ports(1)
    processes = [
        context.Process(target=_rank, args=(call, rank, port, answers), daemon=True) for rank in range(call.world)
    ]
    for process in processes:
        process.start()
    try:
        return _gather(answers, processes, time.monotonic() + call.timeout_s), None
    except RuntimeError as error:
        return None, str(error)
    finally:
        for process in processes:
            process.join(timeout=2.0)
            if process.is_alive():
                process.kill()
                process.join()
        answers.close()


def _gather(answers: Any, processes: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        try:
            rank, result, failure = answers.get(timeout=1.0)
        except Empty:
            gone = [
                rank
                for rank, process in enumerate(processes)
                if process.exitcode not in (None, 0) and rank not in results
            ]
            if gone or time.monotonic() > deadline:
                raise RuntimeError(f"ranks {gone or 'all'} gave no answer") from None
            continue
        if failure is not None:
            raise RuntimeError(f"rank {rank} failed:\n{failure}")
        results[rank] = result
    return [results[rank] for rank in range(len(processes))]


def _rank(call: _Call, rank: int, port: int, answers: Any) -> None:
    os.environ.clear()
    os.environ |= call.environment | {
        "RANK": str(rank),
        "WORLD_SIZE": str(call.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    os.chdir(call.folder)
    collect_rarely()
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # the launcher imported it with another environment
    try:
        function, args = pickle.loads(call.pickled)
        answers.put((rank, function(*args), None))
    except BaseException:  # noqa: BLE001 - whatever happened is the parent's to report
        answers.put((rank, None, traceback.format_exc()))


if __name__ == "__main__":
    # Calls that are received name this module as their sender does.
    import_module("tests.ranks")._serve(Client(sys.argv[1]))
