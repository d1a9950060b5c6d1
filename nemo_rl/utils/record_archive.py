"""The older lines of a run record, compressed: `<record>.xz` beside the growing file.

Lines move in pieces, each an xz stream, which reaches the disk before the growing file is truncated. Invariants: at any
stop every line is in the archive, the growing file, or both; a reader yields it once. An unreadable piece is a torn
move if the growing file still starts with the piece's first line; anywhere else it is damage, and nothing after it is
read or removed.
"""

from __future__ import annotations

import io
import lzma
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nemo_rl.config.errors import UserError

_PRESET = 1
_CHUNK = 1 << 16
_NUMBER = re.compile(rb'"n":(\d+)')


class ArchiveDamaged(UserError):
    """A piece of the archive at byte `offset` cannot be read, and its lines are nowhere else."""

    def __init__(self, archive: Path, offset: int, reason: str) -> None:
        super().__init__(f"{archive}: byte {offset}: {reason}")
        self.archive, self.offset, self.reason = archive, offset, reason


class _Piece(NamedTuple):
    """Lines that moved together, the bytes that they take in the archive, and why not all of them can be read."""

    content: bytes
    size: int
    problem: str | None = None


def archive_of(record: Path) -> Path:
    """Archive of a record's older lines."""
    real = record.resolve()
    return real.with_name(f"{real.name}.xz")


def move_to_archive(record: Path) -> None:
    """Moves the lines of a record that no one writes to meanwhile. Raises OSError: the archive cannot be written; the
    record is unchanged.
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
    """The lines of a record, with their ends, the archived ones first. Raises OSError: there is no such record;
    ArchiveDamaged: the lines so far are all that can be read.
    """
    archive = archive_of(record)
    seen = archived = 0
    while True:
        for piece in (piece for piece in _pieces(archive, seen) if piece.problem is None):
            seen += piece.size
            lines = piece.content.splitlines(keepends=True)
            archived += len(lines)
            yield from lines
        growing = record.read_bytes()
        # Lines leave the growing file only once they are archived: where nothing was since, it was read whole.
        rest = next(_pieces(archive, seen), None)
        if rest is None or rest.problem is not None:
            break
    first = _first_number(growing)
    if rest is not None and first != archived:
        yield from rest.content.splitlines(keepends=True)
        raise ArchiveDamaged(archive, seen, rest.problem or "")
    if first is None or first >= archived:
        yield from io.BytesIO(growing)


def mend_archive(record: Path) -> int:
    """Removes the remains of an unfinished move, so that the record can be written again; returns the number of
    archived lines. Raises ArchiveDamaged: lines of the archive cannot be read; the record is unchanged.
    """
    archive = archive_of(record)
    archived = whole = 0
    with record.open("rb") as file:
        first = _first_number(file.readline())
    for piece in _pieces(archive):
        if piece.problem is None:
            archived, whole = archived + piece.content.count(b"\n"), whole + piece.size
        elif first == archived:
            os.truncate(archive, whole)
        else:
            raise ArchiveDamaged(archive, whole, piece.problem)
    if first is not None and first < archived:
        os.truncate(record, 0)
    return archived


def _first_number(lines: bytes) -> int | None:
    """The number of the first line. Pieces are moved whole, so it tells whether those of the growing file moved."""
    number = _NUMBER.search(lines.partition(b"\n")[0])
    return None if number is None else int(number[1])


def _pieces(archive: Path, offset: int = 0) -> Iterator[_Piece]:
    """The pieces of an archive from a piece's offset on; the last of them is the first that cannot be read. None where
    there is no archive.
    """
    if not archive.exists():
        return
    with archive.open("rb") as file:
        file.seek(offset)
        rest = memoryview(file.read())
    while rest:
        piece = _piece(rest)
        yield piece
        if piece.problem is not None:
            return
        rest = rest[piece.size :]


def _piece(compressed: memoryview) -> _Piece:
    """The first piece; of an unreadable one, the content before the damage."""
    stream, content, problem = lzma.LZMADecompressor(), io.BytesIO(), "the file ends within a compressed piece"
    at = 0
    try:
        while at < len(compressed) and not stream.eof:
            content.write(stream.decompress(compressed[at : at + _CHUNK]))
            at += _CHUNK
    except lzma.LZMAError as error:
        problem = f"a compressed piece cannot be read ({error})"
    if stream.eof:
        return _Piece(content.getvalue(), min(at, len(compressed)) - len(stream.unused_data))
    return _Piece(content.getvalue(), 0, problem)
