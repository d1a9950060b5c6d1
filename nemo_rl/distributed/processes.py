"""Processes of this node: ending them for good, and what those that we start say before they die.

Knows neither Ray nor torch. Invariant: whoever is told that all are gone may give on what they held.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

_KEPT_LINES = 12
_EXIT_S = 5.0


def kill_and_wait(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Kills processes and waits; those that are not gone within `timeout_s`."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return list(alive)


class LastWords:
    """Reads the standard error of a child in a thread, passes it on, and keeps its last lines.

    Args:
        process: Started with `stderr=subprocess.PIPE`.
        pass_on: Takes every line; this process's own standard error by default.
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
        """How a child ended that is ending by itself: its exit code, its last line, and the lines before it."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_EXIT_S)
        # Whatever it started may hold its standard error open.
        self._thread.join(timeout=1.0)
        lines = [line for line in self._lines if line]
        if not lines:
            return f"with exit code {self._process.returncode} and without a word"
        return f"with exit code {self._process.returncode}: {lines[-1]}\n" + "\n".join(lines)
