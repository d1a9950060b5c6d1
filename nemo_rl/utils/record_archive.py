"""The older lines of a run record, compressed: `<record>.xz` beside the file that grows.

Lines move there in whole pieces, each a stream of its own, and reach the disk before they leave the growing file. Knows
bytes and lines, no events. Invariant: whenever a process or machine stops, every line is in the archive, in the growing
file, or in both; a reader sees it once.
"""

from __future__ import annotations

import io
import lzma
import os
import re
from collections.abc import Iterator
from pathlib import Path

_PRESET = 1
_NUMBER = re.compile(rb'"n":(\d+)')


def archive_of(record: Path) -> Path:
    """Where a record's older lines are."""
    real = record.resolve()
    return real.with_name(f"{real.name}.xz")


def move_to_archive(record: Path) -> None:
    """Moves the lines of a record that nobody writes to at this moment.

    Raises:
        OSError: The archive cannot be written; the record is as it was.
    """
    content = record.read_bytes()
    if not content:
        return
    with archive_of(record).open("ab") as file:
        file.write(lzma.compress(content, preset=_PRESET))
        file.flush()
        os.fsync(file.fileno())
    os.truncate(record, 0)


def lines_of(record: Path) -> Iterator[bytes]:
    """The lines of a record, with their ends, the archived ones first.

    Raises:
        OSError: There is no such record.
    """
    seen = archived = 0
    while True:
        for piece, size in _pieces(archive_of(record), seen):
            seen += size
            lines = piece.splitlines(keepends=True)
            archived += len(lines)
            yield from lines
        growing = record.read_bytes()
        # Lines leave the growing file only once they are archived: where nothing was since, it was read whole.
        if next(_pieces(archive_of(record), seen), None) is None:
            break
    if not _moved_already(growing.partition(b"\n")[0], archived):
        yield from io.BytesIO(growing)


def mend_archive(record: Path) -> int:
    """Removes what an unfinished move left, so that the record can be written again; how many lines are archived."""
    archive = archive_of(record)
    if archive.exists():
        whole = sum(size for _, size in _pieces(archive))
        if whole < archive.stat().st_size:
            os.truncate(archive, whole)
    archived = sum(1 for _ in _archived(record))
    with record.open("rb") as file:
        moved = _moved_already(file.readline(), archived)
    if moved:
        os.truncate(record, 0)
    return archived


def _moved_already(first_line: bytes, archived: int) -> bool:
    """Whether the growing file still holds what is archived; pieces are moved whole, so its first line tells."""
    number = _NUMBER.search(first_line)
    return number is not None and int(number[1]) < archived


def _archived(record: Path) -> Iterator[bytes]:
    for piece, _ in _pieces(archive_of(record)):
        yield from piece.splitlines(keepends=True)


def _pieces(archive: Path, offset: int = 0) -> Iterator[tuple[bytes, int]]:
    """The whole pieces of an archive from a piece's offset on, and their compressed sizes; a torn last one, whose lines
    have not left the growing file, is left out. None where there is no archive.
    """
    if not archive.exists():
        return
    with archive.open("rb") as file:
        file.seek(offset)
        rest = file.read()
    while rest:
        stream = lzma.LZMADecompressor()
        try:
            piece = stream.decompress(rest)
        except lzma.LZMAError:
            return
        if not stream.eof:
            return
        yield piece, len(rest) - len(stream.unused_data)
        rest = stream.unused_data
