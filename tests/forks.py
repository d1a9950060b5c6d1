"""Starts commands and Ray's workers as forks of one process that has imported what they import.

Imports of torch, transformers, vLLM and Ray cost a short run three quarters of its time. One process per session
imports them once; it stays without threads, so that forks of it are whole. A fork gets the arguments, environment,
directory, output and search path that a process of its own would have had. Tests of commands as a user types them
start real processes.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
# Where the process listens that is forked.
ADDRESS = "NRL_TEST_FORKS"
_SHIM = str(ROOT / "tests" / "fork_worker.py")
# Room for the variables of a fork where Linux shows those of a process.
_ROOM, _ROOM_BYTES = "NRL_TEST_ROOM", 32_768
_PR_SET_PDEATHSIG = 1
_START_S = 200.0  # less than a test may take
# Megatron-Core is not here: it may only be imported by ranks that train with it. Nor is TransferQueue, which makes Ray
# draw random names: forks would go on from there, all with the same names.
_IMPORTED = (
    "torch",
    "datasets",
    "matplotlib.backends.backend_agg",
    "ray._private.node",
    "nemo_rl.algorithms.startup",
    "nemo_rl.utils.report",
    "nemo_rl.algorithms.grpo.assembly",
    "nemo_rl.models.policy.worker",
    "nemo_rl.models.dtensor.backend",
    "transformers.models.qwen3.modeling_qwen3",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "nemo_rl.models.generation.vllm.worker",
)
# What libraries read when they are imported, as the product sets it for its workers.
_READ_AT_IMPORT = {
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's memory would have a thread
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_num_server_call_thread": "4",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
# Ray keeps these from the moment it is imported. In the process that is forked they are marks by which it finds them.
_MARKS = {"RAY_JOB_ID": "f0f1f2f3", "RAY_RAYLET_PID": "9876543210"}


@dataclass(frozen=True)
class Order:
    """What to start. `command`: a Python file, or -m and a module, and arguments."""

    command: list[str]
    environment: dict[str, str]
    folder: str
    new_session: bool

    def send(self, connection: socket.socket, outputs: Sequence[int]) -> int:
        """The process id of the fork. `outputs`: descriptors of its standard input, output and error."""
        body = json.dumps(asdict(self)).encode()
        socket.send_fds(connection, [len(body).to_bytes(4, "big")], list(outputs))
        connection.sendall(body)
        return int.from_bytes(_read(connection, 4), "big")


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the process that is forked has ended")
        data += part
    return data


class Forked:
    """A started command, with what tests use of `subprocess.Popen`. `stdout`: what it writes, if that is read here."""

    def __init__(self, connection: socket.socket, pid: int, stdout: IO[str] | None) -> None:
        self.pid, self.returncode, self.stdout = pid, None, stdout
        self._connection = connection
        self.returncode: int | None

    def communicate(self, timeout: float) -> tuple[str, None]:
        """The rest of its output, and waits for its end; a command that takes longer than `timeout` is killed."""
        assert self.stdout is not None
        deadline = threading.Timer(timeout, self.kill)
        deadline.start()
        with self.stdout:
            said = self.stdout.read()
        deadline.cancel()
        self.wait(timeout)
        return said, None

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int.from_bytes(_read(self._connection, 4), "big", signed=True)
            except TimeoutError as error:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from error
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0.001)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_template: list[tuple[subprocess.Popen[bytes], str]] = []


def template() -> str | None:
    """Where the session's process that is forked listens; started by the first call. None where it cannot be forked,
    as with a Ray that keeps its settings elsewhere: everything is then a process of its own, and slower.
    """
    if ADDRESS not in os.environ:
        place = tempfile.mkdtemp(prefix="forks")
        address = f"{place}/socket"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= _READ_AT_IMPORT | _MARKS | {"PYTHONPATH": str(ROOT), _ROOM: "." * _ROOM_BYTES}
        process = subprocess.Popen([sys.executable, "-m", "tests.forks", address], cwd=ROOT, env=environment)
        _template.append((process, place))
        os.environ[ADDRESS] = address if _listens(address, process) else ""
    return os.environ[ADDRESS] or None


def _listens(address: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + _START_S
    while not os.path.exists(address):
        if process.poll() is not None or time.monotonic() > deadline:
            warnings.warn("no process can be forked; tests with Ray are slower", stacklevel=2)
            return False
        time.sleep(0.02)
    return True


def end_template() -> None:
    """Ends the process that is forked; its forks have ended by then."""
    while _template:
        process, folder = _template.pop()
        process.kill()
        process.wait()
        shutil.rmtree(folder)
        del os.environ[ADDRESS]


def start(
    command: Sequence[str], environment: Mapping[str, str], output: int, error: int | None = None, folder: Path = ROOT
) -> Forked | subprocess.Popen[str]:
    """Starts a Python file or module with arguments, in a session of its own. Ray's workers that it starts are forks,
    too.

    Args:
        command: The file, or -m and the module, and arguments.
        environment: All its variables.
        output, error: Descriptors of its output; errors go to the output by default. subprocess.PIPE as the output of
            both: to be read from the result's `stdout`.
        folder: Where it runs.
    """
    address = template()
    if address is None:
        # A shell that starts pytest in the background makes its children ignore Ctrl-C; a user's terminal does not.
        listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT if error is None else error,
            text=True,
            start_new_session=True,
            preexec_fn=listen,  # noqa: PLW1509 - one thread
        )
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    order = Order(list(command), {**environment, ADDRESS: address}, str(folder), new_session=True)
    with ExitStack() as ours:
        nothing, stdout = ours.enter_context(open(os.devnull)), None
        if output == subprocess.PIPE:
            here, output = os.pipe()
            ours.callback(os.close, output)
            stdout = os.fdopen(here)
        pid = order.send(connection, [nothing.fileno(), output, output if error is None else error])
    return Forked(connection, pid, stdout)


def run(
    command: Sequence[str], environment: Mapping[str, str], timeout_s: float, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Runs a Python file or module to its end, like `subprocess.run`.

    Raises subprocess.TimeoutExpired: it is killed then.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as error:
        process = start(command, environment, output.fileno(), error.fileno(), folder)
        try:
            code = process.wait(timeout_s)
        except BaseException:
            process.kill()
            raise
        output.seek(0)
        error.seek(0)
        return subprocess.CompletedProcess(list(command), code, output.read().decode(), error.read().decode())


@contextmanager
def forked_workers() -> Iterator[None]:
    """Inside the block a Ray cluster that this process starts forks its workers."""
    from ray._private import services

    if template() is None:
        yield
        return
    with patch.object(services, "start_raylet", forking(services.start_raylet)):
        yield


def forking(start_raylet: Callable[..., Any]) -> Callable[..., Any]:
    """Ray's `start_raylet`, with `fork_worker.py` in place of what Ray calls to start a worker."""

    def start_with_forks(*args: Any, **kwargs: Any) -> Any:
        return start_raylet(*(_SHIM if _is_setup(value) else value for value in args), **kwargs)

    return start_with_forks


def _is_setup(value: object) -> bool:
    return isinstance(value, str) and value.endswith("setup_worker.py")


def forking_environment() -> dict[str, str]:
    """Variables with which a real command forks the workers of its Ray cluster."""
    address = template()
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "forked")] if address else [str(ROOT)])
    return {"PYTHONPATH": path, ADDRESS: address or ""}


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

    def next_fork(self) -> Order:
        """Returns in each fork only."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        selector = selectors.DefaultSelector()
        selector.register(self._listener, selectors.EVENT_READ)
        selector.register(self._ended, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is self._ended:
                    with suppress(BlockingIOError):
                        self._ended.recv(4096)
                    self._reap()
                    continue
                order = self._fork()
                if order is not None:
                    selector.close()
                    return order

    def _fork(self) -> Order | None:
        connection, _ = self._listener.accept()
        try:
            head, outputs, _, _ = socket.recv_fds(connection, 4, 3)
            order = Order(**json.loads(_read(connection, int.from_bytes(head, "big"))))
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
        with suppress(OSError):
            connection.sendall(pid.to_bytes(4, "big"))
        return None

    def _reap(self) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            connection = self._running.pop(pid)
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
        raise RuntimeError(f"{_ROOM} is too small for {len(shown)} bytes of variables")
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
    import_module("ray")
    kept = {name: _find(text) for name, text in _MARKS.items()}
    for name in _IMPORTED:
        import_module(name)
    if len({_random_name() for _ in range(2)}) != 2:
        raise RuntimeError("an import made Ray draw a random name: all forks would go on alike")
    gc.collect()
    gc.freeze()
    # Whoever waits sees the address once it answers.
    fork = _Template(f"{address}.new")
    os.rename(f"{address}.new", address)
    order = fork.next_fork()
    _become(order, search_path, kept)
    with forked_workers():
        _end(_run(order.command))


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
