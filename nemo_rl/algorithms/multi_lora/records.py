"""Records of the adapters of a job: what happens to each one's prompts, versions and tokens.

Invariant: every prompt group of a closed record was trained or dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from nemo_rl.utils.record import RecordWriter
from nemo_rl.utils.record_events import GroupAdmitted, GroupDropped, GroupTrained, adapter_pipeline

_ARCHIVE_BYTES = 1 << 20


class AdapterRecord(RecordWriter):
    """The record of one adapter's run; `close` accounts for prompt groups that are still open."""

    def __init__(self, path: Path, *, source: str) -> None:
        self._open_groups: dict[str, None] = {}
        super().__init__(path, source=source, archive_bytes=_ARCHIVE_BYTES)

    @override
    def _write(self, source: str, clock: Callable[[], float], event: object) -> None:
        super()._write(source, clock, event)
        if isinstance(event, GroupAdmitted):
            self._open_groups[event.group_id] = None
        elif isinstance(event, (GroupTrained, GroupDropped)):
            self._open_groups.pop(event.group_id, None)

    @override
    def close(self) -> None:
        # An adapter that was removed or failed leaves the groups of its step untrained.
        for group in list(self._open_groups):
            self.emit(GroupDropped(group, "adapter_left"))
        super().close()


@dataclass(frozen=True)
class AdapterRecords:
    """Where the adapters of a job write what happens to them: each into its own log directory.

    job: The job's name in a pool, whose other jobs may have adapters of equal names.
    folder: That pool's log, which gets a link to each record.
    """

    job: str = ""
    folder: Path | None = None

    def open(self, adapter: str, log_dir: Path) -> AdapterRecord:
        """The record of an adapter that starts. `log_dir`: the numbered directory of this run of it."""
        path = log_dir / "record.jsonl"
        record = AdapterRecord(path, source=f"{adapter_pipeline(self.job, adapter)}/driver")
        if self.folder is not None:
            # A job that got its GPUs back goes on from checkpoints, in further records.
            link = self.folder / f"{self.job}.{adapter}.{time.time_ns()}.jsonl"
            link.symlink_to(path.absolute())
        return record
