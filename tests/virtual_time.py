"""An event loop whose clock moves on only when nothing is left to do, straight to the next timer: what happens in which
order does not depend on how busy the machine is, and nothing waits.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Skips(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # None: only another thread or a socket can go on from here.
        events = super().select(timeout and 0)
        if not events and timeout:
            self.now += timeout
        return events


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`. For work whose timers are all on this loop."""

    def make_loop() -> asyncio.AbstractEventLoop:
        clock = _Skips()
        loop = asyncio.SelectorEventLoop(clock)
        setattr(loop, "time", lambda: clock.now)  # noqa: B010
        return loop

    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(work)
