"""The records of one pool in the order in which things happened: the scheduler's log beside those of its pipelines.

The scheduler's clock leaves out what a machine's clock jumps, and time for which its process was suspended; the others
write by the machine's. Entries keep the time that they carry; only their order is by the machine's clock. Invariant:
entries of one file keep their order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from nemo_rl.time_sharing.log.events import ClockJumped, SchedulerStarted
from nemo_rl.time_sharing.log.segments import first_segment, segment_number
from nemo_rl.utils.record import Entry, read_record
from nemo_rl.utils.record_events import RecordOpened


def merge_by_machine_time(paths: Iterable[str | Path], *, recover: bool = False) -> Iterator[Entry]:
    """Entries of several records of one pool. `paths`: the files; later segments of a scheduler's log follow it as one.
    `recover`: see `read_record`. Raises RecordDamaged, RecordTooNew: a file cannot be read.
    """
    files: dict[Path, list[Path]] = {}
    for path in map(Path, paths):
        files.setdefault(first_segment(path), []).append(path)
    streams = [
        _keyed(index, sorted(segments, key=segment_number), recover) for index, segments in enumerate(files.values())
    ]
    for _, _, _, entry in heapq.merge(*streams):
        yield entry


def _keyed(index: int, segments: Sequence[Path], recover: bool) -> Iterator[tuple[float, int, int, Entry]]:
    latest, drift_s = float("-inf"), 0.0
    entries = chain.from_iterable(read_record(path, recover=recover) for path in segments)
    for number, entry in enumerate(entries):
        if isinstance(entry.event, ClockJumped):
            drift_s += entry.event.seconds
        elif isinstance(entry.event, SchedulerStarted) or (
            isinstance(entry.event, RecordOpened) and entry.event.resumed
        ):
            drift_s = 0.0  # a process begins in step with its machine, and its first lines are about its log
        latest = max(latest, entry.time + drift_s)
        yield latest, index, number, entry
