"""The process that `tests.forks` starts: it imports what commands and Ray's workers import, and forks them.

It accepts orders one after the other and has no threads, so that its forks are whole.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from tests.forks import MARKS, ROOM, Order, forked_workers, read

_PR_SET_PDEATHSIG = 1
# Megatron-Core is not here: it may only be imported by ranks that train with it. Nor is TransferQueue, which makes Ray
# draw random names: forks would go on from there, all with the same names.
_IMPORTED = (
    "torch",
    "datasets",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "ray._private.node",
    "nemo_rl.algorithms.startup",
    "nemo_rl.utils.report",
    "nemo_rl.algorithms.grpo.assembly",
    "nemo_rl.models.policy.policy_worker",
    "nemo_rl.models.dtensor.dtensor_backend",
    "transformers.models.qwen3.modeling_qwen3",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "nemo_rl.models.generation.vllm.worker",
    "nemo_rl.models.generation.vllm.extension",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "pydantic.v1",
    "ray.dashboard.optional_deps",
    "ray._common.usage.usage_lib",
    "ray._private.runtime_env.agent.runtime_env_agent",
    "ray._private.runtime_env.uv_runtime_env_hook",
    "tabulate",
    "torch.utils.serialization",
)


class _Template:
    """Accepts orders, forks, and tells how forks ended."""

    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(64)
        self._ended, wake = socket.socketpair()
        self._ended.setblocking(False)
        wake.setblocking(False)
        self._wake = wake
        self._running: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()

    def next_fork(self) -> Order:
        """Returns in each fork only."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._ended, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._ended:
                    with suppress(BlockingIOError):
                        self._ended.recv(4096)
                    self._reap()
                elif key.data is not None:
                    # The caller has ended, unless it is the fork that has just been reaped.
                    if key.data in self._running:
                        self._selector.unregister(key.fileobj)
                        os.kill(key.data, signal.SIGKILL)
                elif (order := self._fork()) is not None:
                    self._selector.close()
                    return order

    def _fork(self) -> Order | None:
        connection, _ = self._listener.accept()
        try:
            head, outputs, _, _ = socket.recv_fds(connection, 4, 3)
            order = Order(**json.loads(read(connection, int.from_bytes(head, "big"))))
        except (ConnectionError, ValueError):
            connection.close()
            return None
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, output in enumerate(outputs):
                os.dup2(output, number)
            for left in (connection, self._listener, self._ended, self._wake, *self._running.values()):
                left.close()
        for output in outputs:
            os.close(output)
        if not pid:
            return order
        self._running[pid] = connection
        if order.ends_with_caller:
            self._selector.register(connection, selectors.EVENT_READ, pid)
        with suppress(OSError):
            connection.sendall(pid.to_bytes(4, "big"))
        return None

    def _reap(self) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            connection = self._running.pop(pid)
            with suppress(KeyError):
                self._selector.unregister(connection)
            with suppress(OSError):
                connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
            connection.close()


def _become(order: Order, search_path: list[str], kept: Mapping[str, int]) -> None:
    """Makes this fork what a process of its own would be."""
    import numpy as np
    import torch
    from ray._raylet import Config, setproctitle

    # Ray ends a worker with its process group.
    os.setsid() if order.new_session else os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ |= order.environment
    if order.ends_with_caller:
        # Ray's agent ends when this is not its parent.
        os.environ["RAY_RAYLET_PID"] = str(os.getppid())
    _show_environment(order.environment)
    tempfile.tempdir = None  # drawn again from the environment
    # Ray read these from the environment of the process that was forked.
    Config.initialize("")
    for name, address in kept.items():
        _overwrite(address, os.environ.get(name, ""))
    os.chdir(order.folder)
    module = order.command[0] == "-m"
    sys.argv = list(order.command[module:])
    own = [path for path in order.environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [order.folder if module else str(Path(order.command[0]).parent), *own, *search_path]
    setproctitle(" ".join([sys.executable, *order.command]))
    np.random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    torch._dynamo.config.disable = os.environ.get("TORCHDYNAMO_DISABLE") == "1"


def _show_environment(environment: Mapping[str, str]) -> None:
    """Writes it where Linux shows the environment that a process was started with: there tests recognise a run."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    shown = b"".join(f"{name}={value}\0".encode() for name, value in environment.items())
    if len(shown) >= end - start:
        raise RuntimeError(f"{ROOM} is too small for {len(shown)} bytes of variables")
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, shown, len(shown))


def _find(text: str) -> int:
    """Where Ray's library keeps a string: in memory, after its length, its capacity and four bytes that are zero.

    Raises LookupError: not in one place.
    """
    head, found = len(text).to_bytes(8, sys.byteorder) * 2 + bytes(4), []
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, access, _, _, _, *path = line.split()
        if not access.startswith("rw") or path not in ([], ["[heap]"]):
            continue
        start, end = (int(border, 16) for border in area.split("-"))
        content, at = ctypes.string_at(start, end - start), -1
        while (at := content.find(text.encode() + b"\0", at + 1)) >= 0:
            if content[at - 24 : at - 4] == head:
                found.append(start + at)
    if len(found) != 1:
        raise LookupError(f"Ray keeps {text} in {len(found)} places")
    return found[0]


def _overwrite(address: int, text: str) -> None:
    ctypes.memmove(address, text.encode() + b"\0", len(text) + 1)
    ctypes.memmove(address - 24, len(text).to_bytes(8, sys.byteorder), 8)


def _main(address: str) -> None:
    # It ends with pytest, however that ends; forks do not inherit this.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    search_path = [path for path in sys.path if path not in ("", os.getcwd(), *own)]
    gc.disable()  # takes a fifth of the imports' time
    import_module("ray")
    kept = {name: _find(text) for name, text in MARKS.items()}
    for name in _IMPORTED:
        import_module(name)
    _warm_up()
    if len({_random_name() for _ in range(2)}) != 2:
        raise RuntimeError("an import made Ray draw a random name: all forks would go on alike")
    gc.freeze()
    gc.enable()
    # Whoever waits sees the address once it answers.
    fork = _Template(f"{address}.new")
    os.rename(f"{address}.new", address)
    order = fork.next_fork()
    _become(order, search_path, kept)
    with forked_workers():
        _end(_run(order.command))


def _warm_up() -> None:
    """Does once what takes each engine and each driver half a second."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from vllm.platforms import current_platform

    # Looks for Triton's kernels in all modules, names that warn included.
    with warnings.catch_warnings(action="ignore"):
        current_platform.register_triton_kernel_overrides()
    setattr(type(current_platform), "register_triton_kernel_overrides", staticmethod(lambda: None))  # noqa: B010
    # Reads fonts.
    figure = Figure()
    figure.add_subplot().set_title("warm", fontweight="bold")
    FigureCanvasAgg(figure).draw()


def _random_name() -> bytes:
    """What Ray draws first in a fork."""
    from ray import WorkerID  # pyrefly: ignore[missing-module-attribute]

    read, write = os.pipe()
    if not os.fork():
        os.write(write, WorkerID.from_random().binary())
        os._exit(0)
    os.wait()
    with os.fdopen(read, "rb") as drawn:
        os.close(write)
        return drawn.read()


def _run(command: Sequence[str]) -> int:
    try:
        if command[0] == "-m":
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        sys.stderr.write(f"{ended.code}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    except BaseException:  # noqa: BLE001 - shown as Python does
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> None:
    """Ends as Python does, without taking apart what was imported, about whose remains its libraries complain."""
    with suppress(AttributeError):
        threading._shutdown()  # pyrefly: ignore[missing-attribute]
    atexit._run_exitfuncs()  # pyrefly: ignore[missing-attribute]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _main(sys.argv[1])
