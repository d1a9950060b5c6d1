"""Agents of another virtual environment, `env.<name>.python`: a process of its own interpreter plays them.

For agents whose packages do not go with those of a run, or which need another Python. Invariant: every episode gets
exactly one answer, or an error that says how the process ended.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nemo_rl.config.errors import ConfigError, UserError
from nemo_rl.distributed.processes import OutputTail
from nemo_rl.environments.interfaces import AgentSession

_SCRIPT = Path(__file__).parent / "other_python" / "agent_process.py"
_START_S = 300.0


@dataclass(frozen=True)
class _Waiting:
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[object]


class AgentError(UserError, RuntimeError):
    """An agent raised in its own process, or that process ended. `overflow`: see `overflow_of`."""

    def __init__(self, said: str, overflow: str | None = None) -> None:
        super().__init__(said)
        self.overflow = overflow


def check_interpreter(python: str, key: str, package: str | None = None) -> None:
    """Whether a file can be run, and has a package. Raises ConfigError: it cannot, or has not."""
    path = os.path.expanduser(python)
    if not os.access(path, os.X_OK) or os.path.isdir(path):
        raise ConfigError(
            [f"{key}.python: {python} cannot be run; name the interpreter of a virtual environment, as venv/bin/python"]
        )
    if package is None:
        return
    looks = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    # Without the modules that this process finds, as the agent is played.
    if subprocess.run([path, "-c", looks], check=False, env=_environment(), timeout=_START_S).returncode != 0:
        raise ConfigError(
            [f"{key}.python: {python} has no package {package}; name the interpreter of a virtual environment that has"]
        )


@dataclass
class _Running:
    """A process, and the callers that wait for its answers."""

    process: subprocess.Popen[bytes]
    tail: OutputTail
    waiting: dict[int, _Waiting] = field(default_factory=dict)


class OtherInterpreter:
    """An agent in a process of another interpreter, which is started again once it has ended.

    Args:
        python: The interpreter.
        agent: Dotted path of the agent, for that interpreter.
        arguments: Keyword arguments of the agent, as JSON has them.
        calls: Episodes at once, where the agent is no `async def`.
        key: Dotted key of the environment, for messages.

    Raises ConfigError: the agent cannot be imported or built there, or is not ready within five minutes.
    """

    def __init__(self, python: str, agent: str, arguments: Mapping[str, object], *, calls: int, key: str) -> None:
        check_interpreter(python, key)
        self._python, self._agent, self._key = os.path.expanduser(python), agent, key
        self._settings = json.dumps(
            {"agent": agent, "arguments": dict(arguments), "calls": calls, "path": _paths_of_users()}
        )
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._running = self._started()

    async def run(self, task: Mapping[str, object], base_url: str, session: AgentSession) -> object:
        """Plays one episode; returns the agent's result. Raises AgentError: it raised, or its process ended."""
        number, loop = next(self._numbers), asyncio.get_running_loop()
        answer: asyncio.Future[object] = loop.create_future()
        request = {"id": number, "task": task, "base_url": base_url, "session": asdict(session)}
        sent = asyncio.ensure_future(asyncio.to_thread(self._send, number, _Waiting(loop, answer), request))
        try:
            running = await asyncio.shield(sent)
            try:
                return await answer
            finally:
                running.waiting.pop(number, None)
        except asyncio.CancelledError:
            # A request that is on its way arrives all the same; it is taken back behind it.
            sent.add_done_callback(lambda done: self._take_back(done, number))
            raise

    def close(self) -> None:
        """Ends the process."""
        self._running.process.kill()
        self._running.process.wait()

    def _send(self, number: int, waiting: _Waiting, request: Mapping[str, object]) -> _Running:
        with self._lock:
            if self._running.process.poll() is not None:
                self._running = self._started()
            running = self._running
            running.waiting[number] = waiting
        try:
            self._write(running, request)
        except AgentError:
            running.waiting.pop(number, None)
            raise
        return running

    def _take_back(self, sent: asyncio.Future[_Running], number: int) -> None:
        if sent.cancelled() or sent.exception() is not None:
            return
        running = sent.result()
        running.waiting.pop(number, None)
        with suppress(AgentError):
            self._write(running, {"cancel": number})

    def _write(self, running: _Running, request: Mapping[str, object]) -> None:
        line = json.dumps(request, default=str).encode() + b"\n"
        pipe = running.process.stdin
        try:
            with self._lock:
                if pipe is not None:
                    pipe.write(line)
                    pipe.flush()
        except OSError as error:
            raise AgentError(self._ended(running)) from error

    def _ended(self, running: _Running) -> str:
        return f"the process of {self._key}.python ended {running.tail.of_ended()}"

    def _started(self) -> _Running:
        process = subprocess.Popen(
            [self._python, str(_SCRIPT), self._settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
        )
        running = _Running(process, OutputTail(process))
        late = threading.Timer(_START_S, process.kill)
        late.start()
        first = process.stdout.readline() if process.stdout is not None else b""
        late.cancel()
        if b'"ready"' not in first:
            raise ConfigError(
                [
                    f"{self._key}.agent: {self._agent} cannot be built by {self._key}.python={self._python}: it ended "
                    f"{running.tail.of_ended()}"
                ]
            )
        threading.Thread(target=self._read, args=(running,), name="agent-answers", daemon=True).start()
        return running

    def _read(self, running: _Running) -> None:
        """Hands answers over until the process ends; what still waits for it then fails."""
        for line in running.process.stdout or ():
            reply = json.loads(line)
            if (waiting := running.waiting.pop(reply["id"], None)) is not None:
                _answer(waiting, reply)
        error = {"error": self._ended(running)}
        with self._lock:
            for waiting in list(running.waiting.values()):
                _answer(waiting, error)
            running.waiting.clear()


def _answer(waiting: _Waiting, reply: Mapping[str, object]) -> None:
    overflow = str(reply["overflow"]) if reply.get("overflow") else None

    def resolve() -> None:
        if waiting.answer.done():
            return
        if "error" in reply:
            waiting.answer.set_exception(AgentError(str(reply["error"]), overflow))
        else:
            waiting.answer.set_result(reply["result"])

    with suppress(RuntimeError):  # the loop is closed: nothing waits there any more
        waiting.loop.call_soon_threadsafe(resolve)


def _environment() -> dict[str, str]:
    """This process's variables, without those that lead another interpreter to the packages of this one."""
    without = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in without}


def _paths_of_users() -> list[str]:
    """Module search paths of this process outside installed packages, such as the agent's own."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths = [os.path.abspath(path) for path in sys.path]
    return [
        path
        for path in dict.fromkeys(paths)
        if os.path.isdir(path)
        and not any(path == other or path.startswith(other + os.sep) for other in installed if other)
    ]
