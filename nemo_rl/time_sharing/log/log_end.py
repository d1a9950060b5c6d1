"""Decides whether a scheduler's log is complete or may have lost its end.

Data handed to the operating system survives the process, not the machine: a log is complete if it is read under the
boot that wrote it, or if its writer closed it. So every writer signs first, and has its signature on the disk before it
acts: a log that lost its end cannot end in the closing mark of an earlier writer.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import NamedTuple

from nemo_rl.time_sharing.log.events import LogClosed, LogSigned
from nemo_rl.utils.record import Entry, RecordWriter, read_record

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class PastLog(NamedTuple):
    """Entries of a log, and whether they are all that its writers had acted on."""

    entries: list[Entry]
    complete: bool


def this_boot() -> str:
    """The boot of this machine, as a text that no other has; "" where the system does not tell."""
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        return ""
    return f"{platform.node()}/{boot}" if boot else ""


def read_log(path: Path, boot: str) -> PastLog:
    """The intact entries of a log, none if there is no log yet; `boot` is the boot under which it is read."""
    if not path.exists():
        return PastLog([], True)
    entries = list(read_record(path, recover=True))
    # A torn last line was never acted upon; a whole line that cannot be read means that effects are missing.
    damaged = path.read_bytes().count(b"\n") > len(entries)
    closed = bool(entries) and isinstance(entries[-1].event, LogClosed)
    writer = next((entry.event.boot for entry in reversed(entries) if isinstance(entry.event, LogSigned)), "")
    return PastLog(entries, not damaged and (closed or (boot != "" and writer == boot)))


def sign(record: RecordWriter, boot: str) -> None:
    """Records this writer's boot, and waits for the disk."""
    record.emit(LogSigned(boot))
    record.flush(durable=True)


def close(record: RecordWriter) -> None:
    """Marks the log as complete, waits for the disk, and closes the file."""
    record.emit(LogClosed())
    record.flush(durable=True)
    record.close()
