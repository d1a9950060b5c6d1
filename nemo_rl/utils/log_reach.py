"""A tracker that may go out of reach without taking the run with it.

The first failure of a tracker's own kind switches it off with one line; every metric is in `metrics.jsonl` in any case.
Knows trackers by their interface. Invariant: no call raises what its tracker declares as a failure, and none is made
after the first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.utils.log_backends import LoggerInterface, TrackerUnreachable, first_line
from nemo_rl.utils.metrics_file import METRICS_FILE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)


class ReachableTracker:
    """A tracker while it can be reached, and nothing afterwards.

    Args:
        name: the tracker's name.
        make: starts it.
        log_dir: where the metrics are kept anyway, for the message.

    Raises:
        BackendMissing: its package is not installed.
    """

    def __init__(self, name: str, make: Callable[[], LoggerInterface], log_dir: Path) -> None:
        self._name = name
        self._log_dir = log_dir
        self._tracker: LoggerInterface | None = None
        try:
            self._tracker = make()
        except (TrackerUnreachable, OSError) as error:
            self._switch_off(error)

    @property
    def reachable(self) -> bool:
        """Whether it still gets metrics."""
        return self._tracker is not None

    def log_metrics(
        self,
        metrics: Mapping[str, Any],
        step: int,
        prefix: str = "",
        step_metric: str | None = None,
        step_finished: bool = False,
    ) -> None:
        """See `LoggerInterface`."""
        self._call(lambda tracker: tracker.log_metrics(metrics, step, prefix, step_metric, step_finished))

    def log_hyperparams(self, params: Mapping[str, object]) -> None:
        """See `LoggerInterface`."""
        self._call(lambda tracker: tracker.log_hyperparams(params))

    def log_histogram(self, histogram: Sequence[float], step: int, name: str) -> None:
        """See `LoggerInterface`."""
        self._call(lambda tracker: tracker.log_histogram(histogram, step, name))

    def log_plot(self, figure: Figure, step: int, name: str) -> None:
        """See `LoggerInterface`."""
        self._call(lambda tracker: tracker.log_plot(figure, step, name))

    def log_table(self, table: Mapping[str, Sequence[object]], step: int, name: str) -> None:
        """See `LoggerInterface`."""
        self._call(lambda tracker: tracker.log_table(table, step, name))

    def close(self) -> None:
        """See `LoggerInterface`."""
        self._call(lambda tracker: tracker.close())
        self._tracker = None

    def _call(self, work: Callable[[LoggerInterface], None]) -> None:
        if self._tracker is None:
            return
        try:
            work(self._tracker)
        except self._tracker.failures() as error:
            self._switch_off(error)

    def _switch_off(self, error: Exception) -> None:
        self._tracker = None
        logger.warning(
            "tracker=%s event=switched_off: %s; the run goes on, its metrics are in %s",
            self._name,
            first_line(error),
            self._log_dir / METRICS_FILE,
        )
