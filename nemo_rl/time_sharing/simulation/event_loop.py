"""Virtual time: a queue of callbacks in order of their time; a network that delays, loses and repeats messages; and the
disk with the scheduler's log.

Two runs with the same seed and the same calls happen in the same order, because ties are broken by the order of
scheduling.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import fields

from nemo_rl.time_sharing.log.segments import saved
from nemo_rl.time_sharing.log.state import SchedulerState, replay
from nemo_rl.time_sharing.protocol.types import SCHEDULER
from nemo_rl.time_sharing.simulation.scenario import Network
from nemo_rl.utils.record import Entry, Record, decode_line, encode_entry


class Loop:
    """The virtual clock. `now` in seconds; `events` counts the callbacks that have run."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.stopped = False
        self._queue: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = 0

    def at(self, time: float, callback: Callable[..., None], *arguments: object) -> None:
        """Calls back at a time, now at the earliest."""
        self._order += 1
        heapq.heappush(self._queue, (max(time, self.now), self._order, callback, arguments))

    def after(self, seconds: float, callback: Callable[..., None], *arguments: object) -> None:
        self.at(self.now + seconds, callback, *arguments)

    def run(self, until: float, max_events: int | None = None) -> None:
        """Runs until the queue is empty, `stopped` is set, or time or number of events are spent."""
        queue, pop = self._queue, heapq.heappop
        limit = float("inf") if max_events is None else max_events
        while queue and not self.stopped and self.events < limit:
            time, _, callback, arguments = pop(queue)
            if time > until:
                self.now = until
                return
            self.now = time
            self.events += 1
            callback(*arguments)


class Wire:
    """Sends messages over the loop. `cut_until`: time until which nothing is delivered to an agent (`TO`) or from it
    (`FROM`), by its name.
    """

    TO, FROM = "to", "from"

    def __init__(self, loop: Loop, network: Network, rng: random.Random) -> None:
        self._loop, self._network, self._rng = loop, network, rng
        self.cut_until: dict[tuple[str, str], float] = {}

    def cut(self, endpoint: str, directions: Iterable[str], until: float) -> None:
        """Delivers nothing that way before `until`."""
        for direction in directions:
            self.cut_until[direction, endpoint] = max(until, self.cut_until.get((direction, endpoint), 0.0))

    def is_cut(self, direction: str, endpoint: str) -> bool:
        """Whether nothing passes that way now."""
        return self.cut_until.get((direction, endpoint), 0.0) > self._loop.now

    def send(self, direction: str, endpoint: str, deliver: Callable[..., None], *arguments: object) -> None:
        """Delivers to, or from, the agent called `endpoint`: never, once or twice."""
        network, rng = self._network, self._rng
        if self.cut_until and self.is_cut(direction, endpoint):
            return
        if network.loss and rng.random() < network.loss:
            return
        copies = 2 if network.duplicate and rng.random() < network.duplicate else 1
        for _ in range(copies):
            delay = rng.expovariate(1.0) * network.delay_s
            if network.slow and rng.random() < network.slow:
                delay += rng.random() * network.slow_s
            self._loop.after(delay, deliver, *arguments)


class LogCopy:
    """The record of one run plus the scheduler's log, which the next scheduler reads whole, cut or by segments."""

    def __init__(self, record: Record, clock: Callable[[], float]) -> None:
        self.entries: list[Entry] = []
        self._record, self._clock = record, clock

    def emit(self, event: object) -> None:
        self.entries.append(Entry(len(self.entries), self._clock(), "scheduler", event))
        self._record.emit(event)

    def bind(self, source: str, *, clock: Callable[[], float] | None = None) -> Record:
        return self

    def flush(self) -> None:
        self._record.flush()


class ForgetfulSegment(AssertionError):
    """A segment of the log leads to another state than the entries that it stands for."""


def saved_state_of(state: SchedulerState, at: float) -> Entry:
    """First entry of a log segment that starts from this state, encoded and read back. Raises ForgetfulSegment if the
    entry restores another state.
    """
    entry = decode_line(encode_entry(Entry(0, at, SCHEDULER, saved(state))), 0)
    again = replay([entry])
    for name, value in vars(state).items():
        if name not in ("pipelines", "time", "claimed") and value != vars(again)[name]:
            raise ForgetfulSegment(f"{name} was {value}, and is {vars(again)[name]} after the segment was read")
    for name, pipeline in state.pipelines.items():
        for member in fields(pipeline):
            before, after = getattr(pipeline, member.name), getattr(again.pipelines[name], member.name)
            if member.name != "topology" and before != after:
                raise ForgetfulSegment(
                    f"{member.name} of {name} was {before}, and is {after} after the segment was read"
                )
    return entry
