"""Reads the records of a pool: whole, merged by time, or while they grow.

The scheduler's clock leaves out what a machine's clock jumps, and time for which its process was suspended; the others
write by the machine's. Entries keep the time that they carry; only the order of several records is by the machine's
clock. Invariant: entries of one file keep their order and come once, over all segments.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from nemo_rl.config.errors import UserError
from nemo_rl.time_sharing.log.events import ClockJumped, SchedulerStarted
from nemo_rl.time_sharing.log.segments import first_segment, missing_segment, segment_number, segments_of
from nemo_rl.utils.record import Entry, RecordDamaged, decode_line, read_record
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


class Reread(Iterable[Entry]):
    """Entries that `read` takes from their files each time, the same ones, so that they are never all in memory."""

    def __init__(self, read: Callable[[], Iterator[Entry]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[Entry]:
        return self._read()


class LogTail:
    """Follows one log while it grows.

    Args:
        first: Its first segment, such as `scheduler.jsonl`; it may not exist yet.

    Attributes:
        damage: Error of the first unreadable line, behind which nothing is read. None while all is well.
    """

    def __init__(self, first: Path) -> None:
        self._first = first
        self._places: dict[Path, tuple[int, int]] = {}
        self.damage: str | None = None

    def new(self) -> Iterator[Entry]:
        """Yields the entries written since the last call; an incomplete last line is left for the next one."""
        for path in segments_of(self._first):
            if self.damage is not None:
                return
            offset, number = self._places.get(path, (0, 0))
            with path.open("rb") as file:
                file.seek(offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    try:
                        entry = decode_line(line, number)
                    except (ValueError, TypeError, KeyError) as error:
                        self.damage = f"{path}: line {number + 1} {error}"
                        break
                    offset, number = offset + len(line), number + 1
                    self._places[path] = (offset, number)
                    yield entry


class UnusableLogError(UserError, ValueError):
    """The records given are incomplete or empty."""


def read_logs(given_logs: Sequence[Path], *, recover: bool) -> tuple[list[Entry], bool]:
    """The entries of all records given, by time, with the later segments of a scheduler's log.

    Args:
        given_logs: Records of runs, first segments of schedulers' logs, or folders of a pool's records.
        recover: Read a damaged record up to the damage, and write to stderr how far that is.

    Returns the entries, and whether all records are whole. Raises UnusableLogError: a segment is missing, or there is
    no entry; RecordDamaged: a record is damaged and `recover` is off, or nothing of it can be read.
    """
    given = [_segments(log) for given_log in given_logs for log in _records(given_log)]
    damaged = [_first_damaged(segments) if recover else None for segments in given]
    whole = all(damage is None for damage in damaged)
    # Entries behind damage would be read without those they rest on.
    kept = (
        segments if damage is None else segments[: segments.index(damage) + 1]
        for segments, damage in zip(given, damaged, strict=True)
    )
    logs = list(dict.fromkeys(path for segments in kept for path in segments))
    entries = list(
        merge_by_machine_time(logs, recover=recover) if len(logs) > 1 else read_record(logs[0], recover=recover)
    )
    if not entries:
        raise UnusableLogError(f"{', '.join(map(str, logs))}: is empty; there is no record in it")
    return entries, whole


def _records(given: Path) -> list[Path]:
    if not given.is_dir():
        return [given]
    found = sorted({first_segment(path) for path in given.glob("*.jsonl")})
    if not found:
        raise UnusableLogError(f"{given}: has no records; give a pool's folder, such as logs/time_sharing/latest")
    return found


def _segments(log: Path) -> list[Path]:
    """The record and, if it is the first segment of a scheduler's log, those after it; all of them must be there."""
    segments = segments_of(log) or [log]
    missing = missing_segment(segments)
    if missing is not None:
        raise UnusableLogError(
            f"{missing}: is missing, and segments behind it are there ({segments[-1].name}); give those that "
            "are whole, each by its name"
        )
    return segments


def _first_damaged(segments: Sequence[Path]) -> Path | None:
    """The first of them that is not whole; says how far it is read. Raises RecordDamaged where nothing of it can be."""
    for path in segments:
        try:
            for _ in read_record(path):
                pass
        except RecordDamaged as damage:
            if not damage.intact:
                raise
            left_out = ", without the segments after it" if path != segments[-1] else ""
            sys.stderr.write(
                f"{path}: line {damage.line} (byte {damage.offset}) {damage.reason}; read up to "
                f"there{left_out}, as a run that did not end\n"
            )
            return path
    return None
