"""NVIDIA's Multi-Process Service for the processes of a pool, so that kernels of several jobs run on a GPU at once.

Without it, a GPU switches between the processes that use it. Invariant: the service that is started here ends with the
block, by force if it must, after the processes that use it, and its sockets lie in a directory of its own.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress

import psutil

from nemo_rl.config.errors import UserError
from nemo_rl.distributed.processes import kill_and_wait

logger = logging.getLogger(__name__)

_COMMAND = "nvidia-cuda-mps-control"
_START_S = 30.0
_QUIT_S = 15.0
_CLIENTS_S = 5
_KILL_S = 5.0
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NAMES = "nvidia-cuda-mps"  # of the daemon and its servers


class MpsError(UserError, RuntimeError):
    """The Multi-Process Service cannot be used."""


@contextmanager
def multi_process_service(choice: str, *, several: bool) -> Generator[bool]:
    """Runs the service for every process that is started inside the block; whether it runs.

    Args:
        choice: `on`, `off`, or `auto`: where several jobs use a GPU and the service can be started.
        several: Whether several jobs use a GPU.

    Raises MpsError: it is to be on, and is not installed or does not start.
    """
    if choice == "off" or (choice == "auto" and not several):
        yield False
        return
    with tempfile.TemporaryDirectory(prefix="nrl_mps_") as folder:
        given = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        if not _starts(choice, given):
            yield False
            return
        os.environ.update(given)
        try:
            yield True
        finally:
            try:
                # The service waits for clients: processes of the pool that are still ending.
                _end_clients(given)
                _control(commands=f"quit -t {_CLIENTS_S}\n", timeout_s=_QUIT_S, given=given)
            except MpsError as error:
                # The block's own error says more.
                logger.warning("mps=killed reason=%s", error)
            _kill_left(folder)
            for name in given:
                os.environ.pop(name, None)


def _starts(choice: str, given: Mapping[str, str]) -> bool:
    try:
        if shutil.which(_COMMAND) is None:
            raise MpsError(f"--mps on: {_COMMAND} is not on PATH; it comes with the NVIDIA driver, or set --mps off")
        if os.environ.get("RAY_ADDRESS", "local") != "local":
            raise MpsError("--mps on: the processes of the Ray cluster RAY_ADDRESS names were started without it")
        _control("-d", timeout_s=_START_S, given=given)
    except MpsError as error:
        _kill_left(given["CUDA_MPS_PIPE_DIRECTORY"])
        if choice == "on":
            raise
        logger.warning("mps=off reason=%s", error)
        return False
    logger.info("mps=on")
    return True


def _end_clients(given: Mapping[str, str]) -> None:
    """Waits until no other process uses the service; kills those that still do after `_CLIENTS_S`."""
    clients: list[psutil.Process] = []
    for server in _numbers(_control(commands="get_server_list\n", timeout_s=_QUIT_S, given=given)):
        for pid in _numbers(_control(commands=f"get_client_list {server}\n", timeout_s=_QUIT_S, given=given)):
            with suppress(psutil.NoSuchProcess):
                clients.append(psutil.Process(pid))
    _, left = psutil.wait_procs([one for one in clients if one.pid != os.getpid()], timeout=_CLIENTS_S)
    if left:
        logger.warning("mps=clients_killed pids=%s", [one.pid for one in left])
        kill_and_wait(left, _KILL_S)


def _numbers(answer: str) -> list[int]:
    return [int(word) for word in answer.split() if word.isdigit()]


def _kill_left(folder: str) -> None:
    """Kills the service's remaining processes: its daemon and servers keep the GPU memory of clients that are gone."""
    left = []
    for process in psutil.process_iter(["name"]):
        try:
            if process.info["name"].startswith(_NAMES) and process.environ().get("CUDA_MPS_PIPE_DIRECTORY") == folder:
                left.append(process)
        except psutil.Error:
            continue  # it has ended, or is another user's
    kill_and_wait(left, _KILL_S)


def _control(*arguments: str, commands: str = "", timeout_s: float, given: Mapping[str, str]) -> str:
    """Output of a control command. Raises MpsError: it fails, or does not end in time."""
    # The service keeps its output open: with a pipe the reader would wait until the service ends.
    with tempfile.TemporaryFile("w+") as output:
        try:
            done = subprocess.run(
                [_COMMAND, *arguments],
                input=commands,
                stdout=output,
                stderr=output,
                text=True,
                timeout=timeout_s,
                check=False,
                # Where a service has a list of GPUs, it numbers them from 0, so that lists of its clients name others.
                env={name: value for name, value in os.environ.items() if name != _VISIBLE} | dict(given),
            )
        except subprocess.TimeoutExpired as error:
            raise MpsError(f"{_COMMAND} did not answer within {timeout_s:.0f} s") from error
        output.seek(0)
        said = output.read().strip()
        if done.returncode:
            raise MpsError(f"{_COMMAND} ended with {done.returncode}: {said}")
        return said
