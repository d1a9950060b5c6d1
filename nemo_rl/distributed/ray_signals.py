"""Signals and the processes of a Ray cluster that this process started.

A driver alone decides how its run ends. So Ray's processes lead groups of their own, which a signal to the command's
group does not reach; Ray's own handlers of SIGTERM are taken back; and where something else ends Ray's processes, the
driver is asked at once, where Ray would wait for a minute and then end the driver by itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar
from unittest.mock import patch

import psutil

from nemo_rl.distributed.processes import has_ended

FIRST_PROCESSES = frozenset({"gcs_server", "raylet"})
_LIBC = ctypes.CDLL(None)
# At least as large as the C library's `struct sigaction` on any platform.
_SIGACTION_BYTES = 512
_POLL_S = 0.2


@contextmanager
def in_groups_of_their_own() -> Generator[None]:
    """Inside the block each of Ray's processes is started as the leader of a process group, which its workers join.

    `timeout`, terminals and schedulers signal the whole group of a command; to save, and to end its workers, the
    driver needs Ray.
    """
    # Ray is imported here, so that a command can watch for signals before that.
    from ray._private import services

    with patch.object(services, "ConsolePopen", partial(services.ConsolePopen, process_group=0)):
        yield


@contextmanager
def keeping_sigterm() -> Generator[None]:
    """Takes back the handlers of SIGTERM that Ray installs inside the block: a Python one that exits, on the main
    thread, and one in compiled code that prints its stack.
    """
    python, compiled = signal.getsignal(signal.SIGTERM), ctypes.create_string_buffer(_SIGACTION_BYTES)
    _LIBC.sigaction(int(signal.SIGTERM), None, compiled)
    try:
        yield
    finally:
        if python is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, python)
        _LIBC.sigaction(int(signal.SIGTERM), compiled, None)


def first_processes(but: Collection[psutil.Process] = ()) -> list[psutil.Process]:
    """Ray's first processes among the children of this one. `but`: others of these names."""
    return [one for one in psutil.Process().children() if one not in but and _name(one) in FIRST_PROCESSES]


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


class RayWatch:
    """Watches the first processes of the cluster that this process started, until it ends them itself."""

    _stop: ClassVar[threading.Event] = threading.Event()
    _when_lost: ClassVar[Callable[[str], None] | None] = None

    @classmethod
    def begin(cls, processes: Sequence[psutil.Process]) -> None:
        """Watches them from now on."""
        cls.end()
        cls._stop = threading.Event()
        threading.Thread(target=cls._run, args=(processes, cls._stop), name="ray-watch", daemon=True).start()

    @classmethod
    def end(cls) -> None:
        """They end from here on because this process wants it. Safe to call twice."""
        cls._stop.set()

    @classmethod
    @contextmanager
    def calling(cls, when_lost: Callable[[str], None]) -> Generator[None]:
        """If one of them ends inside the block, another thread calls `when_lost` with its name, once. Nothing that
        waits for Ray returns then, so it has to end this process.
        """
        before, cls._when_lost = cls._when_lost, when_lost
        try:
            yield
        finally:
            cls._when_lost = before

    @classmethod
    def _run(cls, processes: Sequence[psutil.Process], stop: threading.Event) -> None:
        names = {one.pid: _name(one) for one in processes}
        while not stop.wait(_POLL_S):
            ended = [names[one.pid] for one in processes if has_ended(one)]
            if ended and not stop.is_set():
                if cls._when_lost is not None:
                    cls._when_lost(" and ".join(ended))
                return


def end_at_once(code: int) -> None:
    """Ends this process and its children at once, without waiting for Ray."""
    for process in psutil.Process().children(recursive=True):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(code)
