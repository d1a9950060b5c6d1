"""The scheduler's log as files. Going on from a log takes as long as its newest segment is, however long the scheduler
has run.

`scheduler.jsonl` is the first segment; `scheduler.000001.jsonl` and those after it begin with the whole state
(`StateSaved`), so the newest one is all that a scheduler needs, and all of them are what happened. A segment gets its
name when its beginning is on the disk: whenever a scheduler or its machine dies, either the old segment or the new one
is the newest.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from itertools import islice, pairwise
from pathlib import Path

from nemo_rl.time_sharing.log import log_end
from nemo_rl.time_sharing.log.events import NodeAway, NodeDraining, NodeHere, Registered, SchedulerStarted
from nemo_rl.time_sharing.log.state import SavedPipeline, SchedulerState, StateSaved
from nemo_rl.utils.record import BoundRecord, RecordWriter, read_record

logger = logging.getLogger(__name__)

SEGMENT_LINES = 50_000
"""About ten megabytes, read in two seconds."""

_NUMBERED = re.compile(r"\.(\d{6})$")
_DAMAGED = ".damaged"
_SHORTEST = 16
MUST_LAST = (SchedulerStarted, Registered, NodeDraining, NodeAway, NodeHere)
"""What must not be lost once an agent knows of it: a term that a successor may not use again, who may hold GPUs though
its agent dies with the machine, and which machines there are."""
_BEGINNING_LINES = 3  # the file's opening, its writer's signature, the state


def segments_of(first: Path) -> list[Path]:
    """The segments of a log that are there, oldest first; `first` is the path of the first one, which may have been
    removed.
    """
    later = [
        path for path in first.parent.glob(f"*{first.suffix}") if segment_number(path) and first_segment(path) == first
    ]
    return [*([first] if first.exists() else []), *sorted(later, key=segment_number)]


def missing_segment(segments: Sequence[Path]) -> Path | None:
    """The first that is missing between the segments of a log, and was not set aside; None if none is, whatever is
    missing before them.
    """
    for before, after in pairwise(segments):
        for number in range(segment_number(before) + 1, segment_number(after)):
            path = _numbered(first_segment(after), number)
            if not path.with_name(path.name + _DAMAGED).exists():
                return path
    return None


def newest_segment(first: Path) -> tuple[Path, bool]:
    """The segment to go on with, and whether that is the newest. One whose beginning is damaged is set aside, as
    `*.damaged`, for the one before it.
    """
    for path in reversed(segments_of(first)):
        if path == first or any(
            isinstance(entry.event, StateSaved) for entry in islice(read_record(path, recover=True), _BEGINNING_LINES)
        ):
            return path, segment_number(path) >= _newest_damaged(first)
        logger.error("event=segment_damaged path=%s", path)
        path.rename(path.with_name(path.name + _DAMAGED))
    return first, _newest_damaged(first) == 0


def _newest_damaged(first: Path) -> int:
    """The number of the newest segment that was set aside; 0 if there is none."""
    aside = [
        path.with_name(path.name.removesuffix(_DAMAGED)) for path in first.parent.glob(f"*{first.suffix}{_DAMAGED}")
    ]
    return max((segment_number(path) for path in aside if first_segment(path) == first), default=0)


def segment_number(path: Path) -> int:
    """Which segment of its log a file is; 0 is the first."""
    numbered = _NUMBERED.search(path.stem)
    return int(numbered[1]) if numbered else 0


def _numbered(first: Path, number: int) -> Path:
    return first.with_name(f"{first.stem}.{number:06d}{first.suffix}")


def first_segment(path: Path) -> Path:
    """The path of the first segment of the log that a segment belongs to; of another file, its own."""
    return path.with_name(_NUMBERED.sub("", path.stem) + path.suffix)


class SegmentedLog:
    """The scheduler's record (see `utils.record.Record`): goes on with the segment at `path`, signed for `boot`, and
    begins others on request.

    It is `due` when its segment has `segment_lines` lines, and at once behind one that was set aside; the caller then
    calls `begin_segment`, between two events. Raises ValueError for segments of less than 16 lines.
    """

    def __init__(
        self, path: Path, boot: str, *, clock: Callable[[], float], segment_lines: int = SEGMENT_LINES
    ) -> None:
        if segment_lines < _SHORTEST:
            raise ValueError(
                f"segment_lines={segment_lines}: a segment has at least {_SHORTEST} lines, its beginning among them"
            )
        self._boot, self._clock, self._segment_lines = boot, clock, segment_lines
        # Until it is signed nothing else says that terms and epochs of its beginning are taken.
        self._durable = not boot
        self._must_reach_disk = False
        aside = _newest_damaged(first_segment(path))
        self._path, self._number = path, max(segment_number(path), aside)
        self._due_lines = 0 if aside > segment_number(path) else segment_lines
        self._writer = self._open(path)

    @property
    def due(self) -> bool:
        return self._writer.lines >= self._due_lines

    def emit(self, event: object) -> None:
        self._writer.emit(event)
        self._must_reach_disk = self._must_reach_disk or isinstance(event, MUST_LAST)

    def bind(self, source: str, *, clock: Callable[[], float] | None = None) -> BoundRecord:
        """The present segment under another source name; not to be kept."""
        return self._writer.bind(source, clock=clock)

    def flush(self) -> None:
        """Flushes to the operating system; to the disk if an entry must be durable or the log is unsigned."""
        self._writer.flush(durable=self._durable or self._must_reach_disk)
        self._must_reach_disk = False

    def sign(self, boot: str) -> None:
        """Signs for another boot from here on; see `log_end.sign`."""
        self._boot, self._durable = boot, False
        log_end.sign(self._writer, boot)

    def begin_segment(self, state: StateSaved) -> None:
        """Goes on in a new file that begins with `state`. Where none can be written, goes on in the present one and is
        due again later.
        """
        first = first_segment(self._path)
        path = _numbered(first, self._number + 1)
        try:
            self._writer.flush(durable=True)
            writer = self._written(path, state)
        except OSError as error:
            self._due_lines = self._writer.lines + self._segment_lines
            logger.error("event=segment_not_begun path=%s reason=%s", path, error)
            return
        # From here on a successor goes on with the new segment, so this scheduler must too.
        self._writer, finished = writer, self._writer
        self._path, self._number, self._due_lines = path, self._number + 1, self._segment_lines
        finished.close()
        logger.info("event=segment_begun path=%s", path)

    def finish(self) -> None:
        """Closes the file with the mark that nothing is missing at its end; see `log_end.close`."""
        log_end.close(self._writer)

    def close(self) -> None:
        """Closes the file as it is."""
        self._writer.close()

    def _written(self, path: Path, state: StateSaved) -> RecordWriter:
        draft = path.with_name(f"{path.name}.new")
        draft.unlink(missing_ok=True)
        with ExitStack() as undo:
            writer = self._open(draft)
            undo.callback(writer.close)
            writer.emit(state)
            writer.flush(durable=True)
            draft.rename(path)
            undo.pop_all()
        _sync_folder(path.parent)
        return writer

    def _open(self, path: Path) -> RecordWriter:
        writer = RecordWriter(path, source="scheduler", clock=self._clock, resume=True, strict=True)
        log_end.sign(writer, self._boot)
        return writer


def _sync_folder(folder: Path) -> None:
    # Without it a machine that dies may come back with the segment before as the newest: one that has lost its end,
    # which is known.
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def saved(state: SchedulerState) -> StateSaved:
    """Copies the state into an event; later changes of the state do not reach it."""
    return StateSaved(
        nodes=state.pool.nodes,
        gpus_per_node=state.pool.gpus_per_node,
        slots_per_gpu=state.pool.slots_per_gpu,
        limits=asdict(state.limits),
        term=state.term,
        epoch=state.epoch,
        plan=state.plan,
        recovering=state.recovering,
        unsure=state.unsure,
        pipelines=tuple(SavedPipeline.of(pipeline) for pipeline in state.pipelines.values()),
        incarnations=dict(state.incarnations),
        claims=tuple(state.claims.values()),
        quarantines=tuple(state.quarantines),
        commands=tuple(state.commands.values()),
        draining=dict(state.draining),
        away=tuple(sorted(state.away)),
        quota_use=state.quota_use and replace(state.quota_use),
    )
