"""Reads the records that a person names, as far as they are whole."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_rl.config.errors import UserError
from nemo_rl.time_sharing.log.merged import merge_by_machine_time
from nemo_rl.time_sharing.log.segments import missing_segment, segments_of
from nemo_rl.utils.record import Entry, RecordDamaged, read_record


class UnusableLogError(UserError, ValueError):
    """The records given are incomplete or empty."""


def read_logs(given_logs: Sequence[Path], *, recover: bool) -> tuple[list[Entry], bool]:
    """The entries of all records given, by time, with the later segments of a scheduler's log.

    Args:
        given_logs: Records of runs, or first segments of schedulers' logs.
        recover: Read a damaged record up to the damage, and write to stderr how far that is.

    Returns the entries, and whether all records are whole. Raises UnusableLogError: a segment is missing, or there is
    no entry; RecordDamaged: a record is damaged and `recover` is off, or nothing of it can be read.
    """
    given = [_segments(log) for log in given_logs]
    damaged = [_first_damaged(segments) if recover else None for segments in given]
    whole = all(damage is None for damage in damaged)
    # What comes behind damage would be read without what it rests on.
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
