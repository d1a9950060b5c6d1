"""The scheduler's log as the simulated disk has it: what the next scheduler reads, whole, cut or by segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from nemo_rl.time_sharing.log.segments import saved
from nemo_rl.time_sharing.log.state import SchedulerState, replay
from nemo_rl.time_sharing.protocol.types import SCHEDULER
from nemo_rl.utils.record import Entry, Record, decode_line, encode_entry


class LogCopy:
    """The record of one run plus the scheduler's own entries, from which a crashed scheduler recovers."""

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
    """What a segment of the log that is begun with this state begins with, read back. Raises ForgetfulSegment where
    that leads to another state.
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
