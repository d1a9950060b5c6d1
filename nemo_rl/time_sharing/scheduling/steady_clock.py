"""The scheduler's own time: seconds that only go forward, and never by more than a tick can explain.

Deadlines and leases are measured on it. A machine clock that is set back, or a process that was suspended, would
otherwise expire every lease at once.
"""

from __future__ import annotations


class SteadyClock:
    """Turns readings of any clock into steady time.

    start: the first steady time, after a restart no earlier than the last log entry. reading: the reading that belongs
    to it, by default the first one taken. max_step_s: the largest step believed; the rest of a larger one is left out
    and returned by `advance`.
    """

    def __init__(self, *, start: float = 0.0, reading: float | None = None, max_step_s: float = 5.0) -> None:
        self.now = start
        self._max_step_s = max_step_s
        self._reading = reading

    def advance(self, reading: float) -> float:
        """Takes a reading, in seconds; returns by how much it jumped (negative: backwards), 0.0 for a normal step."""
        if self._reading is None:
            self._reading = reading
            return 0.0
        step = reading - self._reading
        self._reading = reading
        if step < 0:
            return step
        self.now += min(step, self._max_step_s)
        return max(step - self._max_step_s, 0.0)

    def steady(self, reading: float) -> float:
        """What `advance` would make of a reading, without taking it."""
        step = 0.0 if self._reading is None else min(max(reading - self._reading, 0.0), self._max_step_s)
        return self.now + step
