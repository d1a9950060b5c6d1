"""Keeps a run's report page up to date while the run lives.

Decides when the page is written; the page itself is `nemo_rl.utils.report`'s. Invariant: writing takes at most a small
share of the time, however long the run has grown.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from nemo_rl.utils.report import write_page

logger = logging.getLogger(__name__)

_EVERY_S = 30.0
_SHARE = 0.01


class LiveReport:
    """Writes `report.html` every so often, from a thread; a context manager.

    Args:
        log_dir: the run's log directory.
        every_s: seconds between pages, more where a page takes long.
    """

    def __init__(self, log_dir: Path, every_s: float = _EVERY_S) -> None:
        self._log_dir = log_dir
        self._pause_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-report", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._pause_s):
            began = time.monotonic()
            try:
                write_page(self._log_dir)
            except OSError as error:
                logger.warning("report=not_written log_dir=%s: %s", self._log_dir, error)
            self._pause_s = max(self._pause_s, (time.monotonic() - began) / _SHARE)
