"""Ties the engine's processes to the actor that owns them, and finds what a dead engine said last.

An actor that is killed cannot end its children; they watch it instead and end themselves. Knows processes and log lines
only. Invariant: within seconds of the owner's end no engine process is left, also when the owner ended while they
started.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import select
import signal
import sys
import threading

import psutil

OWNER_VARIABLE = "NRL_ENGINE_OWNER_PID"
_TAIL_BYTES = 64 << 10
_TAIL_LINES = 25
# `(EngineCore pid=7) ERROR 01-31 12:00:00 [core.py:1]   File ...`; this process's own lines only repeat that the engine
# is gone.
_ENGINE_ERROR = re.compile(
    r"\W*(?:\x1b\[[0-9;]*m)*\((?:EngineCore|Worker)[^)]*\)(?:\x1b\[[0-9;]*m)* ERROR \S+ \S+ \[[^]]*\] ?(.*)"
)


def follow_owner() -> None:
    """Ends this process, and those between it and the owner, when the process named by NRL_ENGINE_OWNER_PID is gone."""
    owner = int(os.environ.get(OWNER_VARIABLE, "0"))
    if not owner or owner == os.getpid():
        return
    between: list[int] = []
    for ancestor in psutil.Process().parents():
        if ancestor.pid == owner:
            break
        between.append(ancestor.pid)
    else:
        # Without the owner among the ancestors it has ended already, and these are somebody else's.
        between = []
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_end_with, args=(descriptor, between), name="engine-parent watchdog", daemon=True).start()


def end_without_last_collection() -> None:
    """Spares this process the search for cycles at its end: two seconds among an engine's objects, whose memory the
    system takes back anyway.
    """
    atexit.register(_leave_objects)


def _leave_objects() -> None:
    gc.freeze()
    # Bindings whose objects are still there would report each as a leak, the last thing that the engine's log says.
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())


def _end_with(descriptor: int, between: list[int]) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    for pid in between:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
    os._exit(1)


def last_errors() -> str:
    """The last errors of the engine's processes, from the logs that they share with this process; empty if there are
    none.
    """
    lines: list[str] = []
    for descriptor in (1, 2):
        path = os.path.realpath(f"/proc/self/fd/{descriptor}")
        if os.path.isfile(path):
            with open(path, "rb") as log:
                log.seek(max(0, os.path.getsize(path) - _TAIL_BYTES))
                lines += log.read().decode(errors="replace").splitlines()
    errors = (_ENGINE_ERROR.match(line) for line in lines)
    return "\n".join([error[1] for error in errors if error is not None][-_TAIL_LINES:])
