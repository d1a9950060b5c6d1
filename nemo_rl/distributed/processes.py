"""Processes of this node: set-up of a run's workers, output of children, and killing process trees.

Ray runs workers where its node was started; here they change to the directory of the command, so that relative paths
mean the same in every process. Garbage collection runs less often, and not during the imports of torch, transformers
and vLLM, where it took a sixth of the time.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from nemo_rl.distributed.memory_groups import enter_memory_group
from nemo_rl.distributed.private_variables import take_private_variables
from nemo_rl.distributed.unix_users import become_user

WORKING_DIRECTORY = "NRL_WORKING_DIRECTORY"
# Ray's setup hook of worker processes, by name.
HOOK = f"{__name__}.begin_worker"
# More objects than Python's 700, 10, 10. What holds device memory is freed when it is let go, not by this search.
_OBJECTS, _YOUNG, _MIDDLE = 50_000, 20, 100
_KEPT_LINES = 12
_EXIT_S = 5.0
_ZOMBIE_POLL_S = 0.2
_PR_SET_DUMPABLE = 4
_HARMLESS = {
    *("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HOME", "USER", "LANG", "LANGUAGE", "TZ", "TMPDIR", "PYTHONHASHSEED"),
    *(
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "RAYON_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
        "NRL_LOG_LEVEL",
    ),
}


def begin_worker() -> None:
    """First steps of a Ray worker process."""
    enter_memory_group()  # before it gives up the right to
    become_user()
    collect_rarely()
    take_private_variables()
    enter_working_directory()


def collect_rarely() -> None:
    """Makes this process search for cycles of objects less often."""
    gc.set_threshold(_OBJECTS, _YOUNG, _MIDDLE)


@contextmanager
def importing() -> Generator[None]:
    """Inside the block this process does not search for cycles of objects, nor among those of the block later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def keep_living() -> None:
    """Searches for cycles of objects once more, and never again among those that are alive now: for the end of a start,
    whose objects stay. A search among a trained model's and its compiled kernels' objects takes half a second.
    """
    gc.collect()
    gc.freeze()


def plain_environment() -> dict[str, str]:
    """The variables of this process that a helper may see: none that could hold a token, a key or a password."""
    return {name: value for name, value in os.environ.items() if name in _HARMLESS or name.startswith("LC_")}


def hide_process() -> None:
    """Closes this process's memory and first environment to other processes of its user, as far as Linux can."""
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def enter_working_directory() -> None:
    """Enters the driver's directory; a node that has no such directory keeps its own."""
    directory = os.environ.get(WORKING_DIRECTORY)
    if directory and os.path.isdir(directory):
        os.chdir(directory)


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended. A zombie has: it stays for as long as its container where the container's first
    process waits for no children.
    """
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill_and_wait(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Kills processes and waits; those that have not ended within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    alive = list(processes)
    while True:
        wait_s = min(_ZOMBIE_POLL_S, max(0.0, deadline - time.monotonic()))
        _, alive = psutil.wait_procs(alive, timeout=wait_s)
        alive = [process for process in alive if not has_ended(process)]
        if not alive or time.monotonic() >= deadline:
            return alive


def remove_files_of(pids: Iterable[int]) -> None:
    """Removes what killed processes of this node left in shared memory and among temporary files: segments of weights
    and folders of engines' sockets, which bear the number of the process that made them.
    """
    for pid in pids:
        for place, name in (("/dev/shm", f"nemo_rl-{pid}-*"), (tempfile.gettempdir(), f"nemo_rl-sockets-{pid}-*")):
            for path in Path(place).glob(name):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


class OutputTail:
    """Reads a child's standard error in a thread, passes it on, and keeps its last lines. `process`: started with
    `stderr=subprocess.PIPE`. `pass_on`: gets every line; writes to this process's standard error by default.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        pass_on: Callable[[str], object] = lambda line: sys.stderr.write(f"{line}\n"),
    ) -> None:
        self._process = process
        self._pass_on = pass_on
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._thread = threading.Thread(target=self._read, name=f"stderr-of-{process.pid}", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        stream = self._process.stderr
        if stream is None:
            return
        with stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip()
                self._lines.append(line)
                self._pass_on(line)

    def of_ended(self) -> str:
        """How a child ended that is ending by itself: its exit code and its last lines."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_EXIT_S)
        # Whatever it started may hold its standard error open.
        self._thread.join(timeout=1.0)
        lines = [line for line in self._lines if line]
        if not lines:
            return f"with exit code {self._process.returncode} and no output on stderr"
        return f"with exit code {self._process.returncode}: {lines[-1]}\n" + "\n".join(lines)
