"""Starts commands and Ray's workers as forks of one process (`tests.fork_server`) that has imported what they import.

Imports of torch, transformers, vLLM and Ray cost a short run three quarters of its time. One process for all sessions
imports them once; it stays without threads, so that forks of it are whole. A fork gets the arguments, environment,
directory, output and search path that a process of its own would have had. Tests of commands as a user types them
start real processes.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import psutil

from nemo_rl.distributed.processes import has_ended

ROOT = Path(__file__).parents[1]
# Where the process listens that is forked, and its id.
ADDRESS, _PROCESS = "NRL_TEST_FORKS", "NRL_TEST_FORKED_PROCESS"
_SHIM = str(ROOT / "tests" / "fork_worker.py")
_AGENT_OF_RAY = re.compile(rf"(?<=--runtime_env_agent_command=){re.escape(sys.executable)} -u ")
_AGENT = f"{sys.executable} -I -S {ROOT / 'tests' / 'fork_agent.py'} "
# Room for the variables of a fork where Linux shows those of a process.
ROOM, _ROOM_BYTES = "NRL_TEST_ROOM", 32_768
_START_S = 200.0  # less than a test may take
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
MARKS = {"RAY_JOB_ID": "f0f1f2f3", "RAY_RAYLET_PID": "9876543210"}


@dataclass(frozen=True)
class Order:
    """What to start. `command`: a Python file, or -m and a module, and arguments. `ends_with_caller`: it is killed when
    the connection of the order closes.
    """

    command: list[str]
    environment: dict[str, str]
    folder: str
    new_session: bool
    ends_with_caller: bool = False

    def send(self, connection: socket.socket, outputs: Sequence[int]) -> int:
        """The process id of the fork. `outputs`: descriptors of its standard input, output and error."""
        body = json.dumps(asdict(self)).encode()
        socket.send_fds(connection, [len(body).to_bytes(4, "big")], list(outputs))
        connection.sendall(body)
        return int.from_bytes(read(connection, 4), "big")


def read(connection: socket.socket, size: int) -> bytes:
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
                self.returncode = int.from_bytes(read(self._connection, 4), "big", signed=True)
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


def begin_template() -> None:
    """Starts the process that is forked, for this process and those that it starts; `template` waits for it."""
    place = tempfile.mkdtemp(prefix="forks")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= _READ_AT_IMPORT | MARKS | {"PYTHONPATH": str(ROOT), ROOM: "." * _ROOM_BYTES}
    address = f"{place}/socket"
    process = subprocess.Popen([sys.executable, "-m", "tests.fork_server", address], cwd=ROOT, env=environment)
    _template.append((process, place))
    os.environ |= {ADDRESS: address, _PROCESS: str(process.pid)}


def template() -> str | None:
    """Where the process that is forked listens; started by the first call, or for several sessions by what starts
    them. None where it cannot be forked, as with a Ray that keeps its settings elsewhere: everything is then a process
    of its own, and slower.
    """
    if ADDRESS not in os.environ:
        begin_template()
    address = os.environ[ADDRESS]
    if address and not _listens(address):
        address = os.environ[ADDRESS] = ""
    return address or None


def _listens(address: str) -> bool:
    deadline = time.monotonic() + _START_S
    while not os.path.exists(address):
        try:
            ended = has_ended(psutil.Process(int(os.environ[_PROCESS])))
        except psutil.NoSuchProcess:
            ended = True
        if ended or time.monotonic() > deadline:
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
        del os.environ[ADDRESS], os.environ[_PROCESS]


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
    """Ray's `start_raylet`, with `fork_worker.py` in place of what Ray calls to start a worker, and `fork_agent.py` in
    place of the interpreter that runs the agent of runtime environments.
    """

    def start_with_forks(*args: Any, **kwargs: Any) -> Any:
        from ray._private import services

        start = services.start_ray_process

        def start_raylet_process(command: list[str], *options: Any, **named: Any) -> Any:
            return start([_AGENT_OF_RAY.sub(lambda _: _AGENT, part) for part in command], *options, **named)

        with patch.object(services, "start_ray_process", start_raylet_process):
            return start_raylet(*(_SHIM if _is_setup(value) else value for value in args), **kwargs)

    return start_with_forks


def _is_setup(value: object) -> bool:
    return isinstance(value, str) and value.endswith("setup_worker.py")


def forking_environment() -> dict[str, str]:
    """Variables with which a real command forks the workers of its Ray cluster."""
    address = template()
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "forked")] if address else [str(ROOT)])
    return {"PYTHONPATH": path, ADDRESS: address or ""}
