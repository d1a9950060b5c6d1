"""What a run does before its first step, on the terminal: each phase with its seconds, and what a person should know.

On a terminal the running phases are live; elsewhere a phase is one line when it ends, and one each half minute while it
lasts. Shows what it is told and measures nothing but time. Invariant: whatever happens inside a phase, the terminal is
left as it was found.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status

_STILL_S = 30.0


class StartPhases:
    """The phases of a start, one at a time.

    Args:
        console: Where to show; standard error by default.
        clock: Monotonic seconds.
        failed: Is given an error that ends a phase at once, before what was begun beside it is ended.
    """

    def __init__(
        self,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        failed: Callable[[Exception], object] | None = None,
    ) -> None:
        self.console = console or Console(stderr=True)
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._failed = failed
        self._began = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Shows the block as a phase and keeps its seconds under its name; one that raises is not shown as done."""
        began = self._clock()
        try:
            with self._watched(name, began):
                yield
        except Exception as error:
            if self._failed is not None:
                self._failed(error)
            raise
        self.seconds[name] = self._clock() - began
        self._line(f"{name} {self.seconds[name]:.1f} s")

    def say(self, line: str) -> None:
        """A line for the person."""
        self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def done(self) -> float:
        """The start is over; its seconds."""
        total = self._clock() - self._began
        self._line(f"ready after {total:.1f} s")
        return total

    def _line(self, text: str) -> None:
        self.console.print(f"start: {text}", highlight=False, soft_wrap=True, markup=False, style="dim")

    @contextmanager
    def _watched(self, name: str, began: float) -> Iterator[None]:
        over = threading.Event()
        status = Status(f"{name} ...", console=self.console) if self.console.is_terminal else None
        period = 1.0 if status is not None else _STILL_S

        def watch() -> None:
            while not over.wait(period):
                seconds = self._clock() - began
                if status is not None:
                    status.update(f"{name} ... {seconds:.0f} s")
                else:
                    self._line(f"{name}, {seconds:.0f} s so far")

        thread = threading.Thread(target=watch, name="start-phase", daemon=True)
        if status is not None:
            status.start()
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            if status is not None:
                status.stop()
