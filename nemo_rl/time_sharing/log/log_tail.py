"""Follows a scheduler's log while it grows: each call gives the entries that were written since the last one.

Invariant: entries come once, in the order in which they were written, over all segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nemo_rl.time_sharing.log.segments import segments_of
from nemo_rl.utils.record import Entry, decode_line


class LogTail:
    """One log.

    Args:
        first: Its first segment, such as `scheduler.jsonl`; it may not be there yet.

    Attributes:
        damage: What is wrong with a line that cannot be read; nothing behind it is. None while all is well.
    """

    def __init__(self, first: Path) -> None:
        self._first = first
        self._places: dict[Path, tuple[int, int]] = {}
        self.damage: str | None = None

    def new(self) -> Iterator[Entry]:
        """What was written since the last call; a line that is still being written comes with the next one."""
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
