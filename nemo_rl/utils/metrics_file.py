"""`metrics.jsonl`: every metric of a run, one JSON object per line, and the reader that pictures and tests share.

A line is `{"step": int, "time": seconds since the epoch, "prefix": "train" | "validation" | "timing/train" | ..., <name>: number | list | null}`;
null is a value that was not finite. Knows no metric by name. Invariant: lines are whole or, after a kill, the last one is torn and skipped.
"""

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
_RESERVED = ("step", "time", "prefix")


class MetricsFile:
    """Appends metrics to `metrics.jsonl` in a directory, one flushed line per call."""

    def __init__(self, log_dir: Path | str) -> None:
        self.path = Path(log_dir) / METRICS_FILE
        self._file = self.path.open("a", encoding="utf-8")

    def append(self, metrics: Mapping[str, float | Sequence[float]], step: int, prefix: str) -> None:
        """Write one line.

        Raises:
            ValueError: a metric has the name of one of the line's own fields.
        """
        taken = [name for name in _RESERVED if name in metrics]
        if taken:
            raise ValueError(f"metrics under {prefix!r} may not be called {taken}: {METRICS_FILE} uses those names itself")
        line = {"step": step, "time": round(time.time(), 3), "prefix": prefix, **{name: _finite(value) for name, value in metrics.items()}}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass
class RunMetrics:
    """The metrics of a run, by full name (`train/loss`).

    Attributes:
        series: value by step, in step order; where a step was logged twice (a resumed run), the later value.
        times: seconds since the epoch at which a prefix was last logged for a step, by prefix and step.
    """

    series: dict[str, dict[int, Any]] = field(default_factory=dict)
    times: dict[str, dict[int, float]] = field(default_factory=dict)

    def scalars(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of a scalar metric; not-a-number where it was not finite. Empty when it was never logged."""
        points = {step: value for step, value in self.series.get(name, {}).items() if not isinstance(value, list)}
        return list(points), [math.nan if value is None else float(value) for value in points.values()]

    def last(self, name: str) -> float | None:
        """The last value of a scalar metric, None when it was never logged."""
        _, values = self.scalars(name)
        return values[-1] if values else None


class NoMetrics(FileNotFoundError):
    """A directory holds no metrics."""


def metrics_paths(run_dir: Path | str) -> list[Path]:
    """The metrics files of a run: the directory's own, or those of the `exp_NNN` directories in it, oldest first.

    Raises:
        NoMetrics: there is none.
    """
    root = Path(run_dir)
    own = root / METRICS_FILE
    paths = [own] if own.is_file() else sorted(root.glob(f"exp_*/{METRICS_FILE}"), key=lambda path: (len(path.parent.name), path.parent.name))
    if not paths:
        raise NoMetrics(f"{root} holds neither {METRICS_FILE} nor exp_NNN/{METRICS_FILE}; give the logger.log_dir of a run")
    return paths


def read_metrics(run_dir: Path | str) -> RunMetrics:
    """Everything a run has logged.

    Args:
        run_dir: directory with `metrics.jsonl`, or a `logger.log_dir` whose `exp_NNN` parts continue each other.

    Raises:
        NoMetrics: there is none.
    """
    run = RunMetrics()
    for path in metrics_paths(run_dir):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        for number, text in enumerate(lines, start=1):
            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                logger.warning("metrics_line_skipped path=%s line=%d of=%d: %s", path, number, len(lines), error)
                continue
            step, prefix = int(line.pop("step")), str(line.pop("prefix"))
            run.times.setdefault(prefix, {})[step] = float(line.pop("time"))
            for name, value in line.items():
                run.series.setdefault(f"{prefix}/{name}" if prefix else name, {})[step] = value
    run.series = {name: dict(sorted(points.items())) for name, points in run.series.items()}
    run.times = {prefix: dict(sorted(points.items())) for prefix, points in run.times.items()}
    return run


def _finite(value: float | Sequence[float]) -> Any:
    if isinstance(value, (int, float)):
        return value if math.isfinite(value) else None
    return [_finite(item) for item in value]
