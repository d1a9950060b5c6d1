"""The run record: an append-only file of checksummed, numbered, versioned JSON lines, one writer per file.

A written line is never changed, and nothing after a damaged line is trusted. A line is one JSON object: `{"crc":"...",
"v":schema, "n":line number, "t":seconds, "src":source, "kind":..., fields}`; the checksum is the CRC-32 of everything
after its own comma. Events are defined in `record_events`.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

from nemo_rl.config.errors import UserError, why_not_written
from nemo_rl.utils.record_archive import ArchiveDamaged, archive_of, lines_of, mend_archive, move_to_archive
from nemo_rl.utils.record_events import SCHEMA_VERSION, RecordOpened, UnknownEvent, event_class, plain, shape_of

logger = logging.getLogger(__name__)

TORN = "is torn: it has no end"
ARCHIVE_BYTES = 1 << 20
"""Size from which the record of a training run is archived while it goes on."""
_ENVELOPE = ("crc", "v", "n", "t", "src", "kind")
_BUFFER_BYTES = 1 << 16
_PREFIX_BYTES = len('{"crc":"00000000",')
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=plain).encode


class RecordError(UserError):
    """A run record cannot be read or written as asked."""


class RecordDamaged(RecordError):
    """A line is torn, altered, missing or out of order; `line` counts from 1, `intact` lines before it are good."""

    def __init__(self, path: Path, line: int, offset: int, reason: str) -> None:
        super().__init__(
            f"{path}: line {line} (byte {offset}) {reason}; the {line - 1} lines before it are intact and "
            "can be read up to there "
            f"(--recover on a command line, recover=True in read_record)"
        )
        self.path, self.line, self.offset, self.reason = path, line, offset, reason

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self.line, self.offset, self.reason)

    @property
    def intact(self) -> int:
        return self.line - 1

    @property
    def torn(self) -> bool:
        """Whether the damage is just a last line that was not written whole."""
        return self.reason == TORN


class RecordUnwritable(RecordError, OSError):
    """Lines cannot be written: what happens would be lost, so the run saves and ends."""

    def __init__(self, path: Path, error: OSError) -> None:
        reason = why_not_written(error)
        super().__init__(f"{path} cannot be written: {reason}; free some and start again: the lines before are intact")
        self.path, self.error = path, error

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self.error)


class RecordTooNew(RecordError):
    """A line has a newer schema than this reader supports."""

    def __init__(self, path: Path, line: int, version: int) -> None:
        super().__init__(
            f"{path}: line {line} has schema {version}, this nemo_rl reads up to {SCHEMA_VERSION}; read it "
            "with the version that wrote it, or a newer one"
        )
        self.path, self.line, self.version = path, line, version

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self.line, self.version)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a record: `seq` counts from 0 in its file, `time` in seconds on the writer's clock, `source` is
    `<pipeline>/<part>` or `scheduler`.
    """

    seq: int
    time: float
    source: str
    event: object  # a dataclass of record_events or of another package; readers dispatch by its type


Handler = Callable[[Entry, Any], None]
"""Takes an entry and its event, which is of the one kind that the handler is for."""


class Record(Protocol):
    """The part of a record that its writers use: a sink for events."""

    def emit(self, event: object) -> None: ...

    def bind(self, source: str, *, clock: Callable[[], float] | None = None) -> Record: ...

    def flush(self) -> None: ...


class NullRecord:
    """Drops all events."""

    def emit(self, event: object) -> None:
        pass

    def bind(self, source: str, *, clock: Callable[[], float] | None = None) -> Record:
        return self

    def flush(self) -> None:
        pass


class MemoryRecord:
    """Keeps entries in a list, in the order in which they were emitted, whichever of the bound sources emitted them."""

    def __init__(
        self, *, source: str = "memory", clock: Callable[[], float] = time.time, entries: list[Entry] | None = None
    ) -> None:
        self.entries: list[Entry] = [] if entries is None else entries
        self._source, self._clock = source, clock

    def emit(self, event: object) -> None:
        self.entries.append(Entry(len(self.entries), self._clock(), self._source, event))

    def bind(self, source: str, *, clock: Callable[[], float] | None = None) -> MemoryRecord:
        return MemoryRecord(source=source, clock=clock or self._clock, entries=self.entries)

    def flush(self) -> None:
        pass


class RecordWriter:
    """Appends events to a file; the file's only writer. May be called from several threads.

    Unwritable lines wait for the next `flush`, which raises RecordUnwritable. Raises RecordError: the file exists and
    `resume` is false; RecordTooNew: a resumed file has a newer schema.

    Args:
        path: The file; its folder must exist.
        source: `<pipeline>/<part>`.
        clock: Seconds.
        flush_interval_s: How much a killed process may lose; 0 passes each event to the system at once.
        resume: Continue an existing file; a damaged tail is copied to another file first.
        archive_bytes: Size from which `flush` moves lines to the compressed archive, as `close` does; None for never.
        strict: `emit` raises RecordUnwritable too.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        source: str,
        clock: Callable[[], float] = time.time,
        flush_interval_s: float = 1.0,
        resume: bool = False,
        archive_bytes: int | None = None,
        strict: bool = False,
    ) -> None:
        self._strict = strict
        self.path = Path(path)
        self.source, self._clock, self._flush_interval_s = source, clock, flush_interval_s
        self._lock, self._archive_bytes = threading.Lock(), archive_bytes
        self._next, self._last_flush, self._lost = 0, time.monotonic(), False
        self._waiting, self._flush_failed = bytearray(), False
        existing = self.path.exists() and (self.path.stat().st_size > 0 or archive_of(self.path).exists())
        if existing and not resume:
            raise RecordError(
                f"{self.path}: already holds a record; choose another path, or pass resume=True to go on with it"
            )
        if existing:
            self._next = _cut_damaged_tail(self.path)
        self._file: BinaryIO = self.path.open("ab", buffering=0)
        self.emit(RecordOpened(source, resumed=existing))
        self.flush()

    @property
    def lines(self) -> int:
        """How many lines the file has."""
        return self._next

    def emit(self, event: object) -> None:
        self._write(self.source, self._clock, event)

    def bind(self, source: str, *, clock: Callable[[], float] | None = None) -> BoundRecord:
        """The same file under another source name, and on another clock if one is given."""
        return BoundRecord(self, source, clock or self._clock)

    def _write(self, source: str, clock: Callable[[], float], event: object) -> None:
        with self._lock:
            self._waiting += encode_entry(Entry(self._next, clock(), source, event))
            self._next += 1
            due = time.monotonic() - self._last_flush >= self._flush_interval_s or len(self._waiting) >= _BUFFER_BYTES
            if due and (self._strict or not self._lost):
                # A part that failed here would fail in the middle of its work; a scheduler has to, since what is not in
                # its log has not happened.
                with suppress(*(() if self._strict else (RecordUnwritable,))):
                    self._hand_over()

    def _hand_over(self) -> None:
        self._last_flush = time.monotonic()
        try:
            while self._waiting:
                del self._waiting[: self._file.write(bytes(self._waiting))]
        except OSError as error:
            self._lost = True
            raise RecordUnwritable(self.path, error) from error
        self._lost = False

    def flush(self, *, durable: bool = False) -> None:
        """Hands everything to the operating system (survives this process); `durable` also waits for the disk (survives
        the machine). Raises RecordUnwritable: lines cannot be written; they wait for the next time.
        """
        with self._lock:
            self._flush_failed = True
            self._hand_over()
            self._flush_failed = False
            try:
                if durable:
                    os.fsync(self._file.fileno())
            except OSError as error:
                raise RecordUnwritable(self.path, error) from error
            if self._archive_bytes is not None and self._file.tell() >= self._archive_bytes:
                move_to_archive(self.path)

    def close(self) -> None:
        with self._lock:
            try:
                if not self._file.closed:
                    self._hand_over()
            except RecordUnwritable:
                if self._flush_failed:
                    return
                raise
            finally:
                self._file.close()
            if self._archive_bytes is not None:
                move_to_archive(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BoundRecord:
    """A RecordWriter under another source name."""

    def __init__(self, writer: RecordWriter, source: str, clock: Callable[[], float]) -> None:
        self._writer, self._source, self._clock = writer, source, clock

    def emit(self, event: object) -> None:
        self._writer._write(self._source, self._clock, event)

    def bind(self, source: str, *, clock: Callable[[], float] | None = None) -> BoundRecord:
        return BoundRecord(self._writer, source, clock or self._clock)

    def flush(self) -> None:
        self._writer.flush()


def encode_entry(entry: Entry) -> bytes:
    """One line, newline included. Raises EventDefinitionError for an event that is not registered."""
    shape = shape_of(type(entry.event))
    body: dict[str, object] = {
        "v": SCHEMA_VERSION,
        "n": entry.seq,
        "t": entry.time,
        "src": entry.source,
        "kind": shape.kind,
    }
    for name in shape.names:
        body[name] = getattr(entry.event, name)
    rest = _encode(body)[1:].encode()
    return b'{"crc":"%08x",%b\n' % (zlib.crc32(rest), rest)


def read_record(path: str | Path, *, recover: bool = False) -> Iterator[Entry]:
    """The entries of a record, in order. Kinds not registered in this process come as UnknownEvent. Raises
    RecordDamaged: a line is torn, altered or out of order; with `recover` the entries before it are returned and a
    warning is logged; RecordTooNew: a newer schema, in both modes.
    """
    path = Path(path)
    offset = index = 0
    try:
        for index, line in enumerate(lines_of(path), start=1):
            entry = _decode(path, index - 1, offset, line, recover=recover)
            if entry is None:
                return
            offset += len(line)
            yield entry
    except ArchiveDamaged as error:
        _found(RecordDamaged(error.archive, index + 1, error.offset, error.reason), error, recover=recover)


def _decode(path: Path, index: int, offset: int, line: bytes, *, recover: bool) -> Entry | None:
    try:
        return decode_line(line, index)
    except _NewerSchema as newer:
        raise RecordTooNew(path, index + 1, newer.version) from newer
    except (ValueError, TypeError, KeyError) as error:
        reason = f"lacks its {error}" if isinstance(error, KeyError) else str(error)
        _found(RecordDamaged(path, index + 1, offset, reason), error, recover=recover)
        return None


def _found(damage: RecordDamaged, cause: Exception, *, recover: bool) -> None:
    if not recover:
        raise damage from cause
    logger.warning(
        "record=%s damaged_line=%d byte=%d reason=%s intact=%d",
        damage.path,
        damage.line,
        damage.offset,
        damage.reason,
        damage.intact,
    )


class _NewerSchema(ValueError):
    def __init__(self, version: int) -> None:
        super().__init__(f"schema {version}")
        self.version = version


def decode_line(line: bytes, expected_seq: int) -> Entry:
    """Parses a line. Raises ValueError: it is damaged."""
    if not line.endswith(b"\n"):
        raise ValueError(TORN)
    rest = line[_PREFIX_BYTES:-1]
    if line[:_PREFIX_BYTES] != b'{"crc":"%08x",' % zlib.crc32(rest):
        raise ValueError(
            f"has a wrong checksum{_newer_by_its_own_word(line)}"
            if line.startswith(b'{"crc":"')
            else "does not begin with a checksum"
        )
    body = json.loads(b"{" + rest)
    version = body.get("v")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise _NewerSchema(version if isinstance(version, int) else -1)
    if body["n"] != expected_seq:
        raise ValueError(f"is number {body['n']} where {expected_seq} was expected: lines are missing or repeated")
    return Entry(body["n"], float(body["t"]), body["src"], _decode_event(body))


def _newer_by_its_own_word(line: bytes) -> str:
    """Names a newer schema, whose checksum may differ, in the error for a line with a wrong checksum."""
    try:
        version = json.loads(line).get("v")
    except ValueError:
        return ""
    newer = isinstance(version, int) and version > SCHEMA_VERSION
    return f", and says that it has schema {version} (this nemo_rl reads up to {SCHEMA_VERSION})" if newer else ""


def _decode_event(body: dict[str, object]) -> object:
    kind = str(body["kind"])
    cls = event_class(kind)
    given = {name: value for name, value in body.items() if name not in _ENVELOPE}
    if cls is None:
        return UnknownEvent(kind, given)
    shape = shape_of(cls)
    wrong = given.keys() ^ (given.keys() & shape.decoders.keys()) | (shape.required - given.keys())
    if wrong:
        raise ValueError(f"of kind {kind!r} has unknown or missing fields: {', '.join(sorted(wrong))}")
    return cls(**{name: shape.decoders[name](value) for name, value in given.items()})


def _cut_damaged_tail(path: Path) -> int:
    """Truncates `path` after its last good line, copies the rest elsewhere, and returns the number of good lines."""
    try:
        intact = mend_archive(path)
    except ArchiveDamaged as error:
        line = sum(1 for _ in read_record(path, recover=True)) + 1
        raise RecordDamaged(error.archive, line, error.offset, error.reason) from error
    good_bytes = 0
    with open(path, "rb") as file:
        for line in file:
            entry = _decode(path, intact, good_bytes, line, recover=True)
            if entry is None:
                break
            intact, good_bytes = intact + 1, good_bytes + len(line)
        file.seek(good_bytes)
        cut = file.read()
    if cut:
        copy = next(name for number in count() if not (name := path.with_name(f"{path.name}.cut{number}")).exists())
        try:
            copy.write_bytes(cut)
        except OSError:
            copy.unlink()  # a writer that is restarted until there is room leaves one copy
            raise
        logger.warning("record=%s cut_bytes=%d copy=%s", path, len(cut), copy)
        os.truncate(path, good_bytes)
    return intact
