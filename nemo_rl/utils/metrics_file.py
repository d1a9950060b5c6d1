"""`metrics.jsonl`: every metric of a run, one JSON object per line, and the reader that pictures and tests share.

A line is `{"step": int, "time": seconds since the epoch, "prefix": "train" | "validation" | "timing/train" | ...,
<name>: number | list | null}`; null is a value that was not finite. Invariant: lines are whole or, after a kill, the
last one is torn and skipped.
"""

import json
import logging
import math
import re
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl.config.errors import UserError, why_not_written
from nemo_rl.utils.files import load_yaml

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
_UNNUMBERED = (0, 0)
_RESERVED = ("step", "time", "prefix")


class MetricsFile:
    """Appends metrics to `metrics.jsonl` in a directory, one flushed line per call."""

    def __init__(self, log_dir: Path | str) -> None:
        self.path = Path(log_dir) / METRICS_FILE
        self._file = self.path.open("a", encoding="utf-8")
        self._lost = False

    def append(self, metrics: Mapping[str, float | Sequence[float]], step: int, prefix: str) -> None:
        """Write one line. Raises ValueError: a metric has the name of one of the line's own fields; MetricsLost: the
        line cannot be written.
        """
        taken = [name for name in _RESERVED if name in metrics]
        if taken:
            raise ValueError(
                f"metrics under {prefix!r} may not be called {taken}: {METRICS_FILE} uses those names itself"
            )
        line = {
            "step": step,
            "time": round(time.time(), 3),
            "prefix": prefix,
            **{name: _finite(value) for name, value in metrics.items()},
        }
        with self._reported_once():
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file. Raises MetricsLost: pending metrics cannot be written, and this was not reported yet."""
        with suppress(OSError) if self._lost else self._reported_once():
            self._file.close()

    @contextmanager
    def _reported_once(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            self._lost = True
            reason = why_not_written(error)
            raise MetricsLost(
                f"{self.path} cannot be written: {reason}; free some and start the command again: the run goes on from "
                "its last checkpoint"
            ) from error


class MetricsLost(UserError, OSError):
    """Metrics cannot be written; the run ends."""


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


class NoMetrics(UserError, FileNotFoundError):
    """A directory holds no metrics."""


def metrics_paths(run_dir: Path | str) -> list[Path]:
    """The metrics files of a run, oldest first: of the given part (or the newest in a `logger.log_dir`) and of the
    parts that it resumed from.

    A part resumed from an earlier one if it starts after step 0 and shares its checkpoint directory; other runs in the
    same `logger.log_dir` are skipped. Raises NoMetrics: there are none.
    """
    root = Path(run_dir)
    numbered = _numbered(root)
    named = root.resolve() if (root / METRICS_FILE).is_file() else numbered[-1].resolve() if numbered else None
    if named is None:
        raise NoMetrics(
            f"{root} holds neither {METRICS_FILE} nor exp_NNN/{METRICS_FILE}; give the logger.log_dir of a run"
        )
    parts, begins = [named], _first_step(named)
    before = (
        [part for part in _numbered(named.parent) if _order(part) < _order(named)]
        if _order(named) != _UNNUMBERED
        else []
    )
    for part in reversed(before):
        if begins == 0:
            break
        if _checkpoint_dir(part) == _checkpoint_dir(named):
            parts.append(part)
            begins = min(begins, _first_step(part))
    return [part / METRICS_FILE for part in reversed(parts)]


def read_metrics(run_dir: Path | str) -> RunMetrics:
    """All logged metrics of a run, over all of its parts (see `metrics_paths`).

    What a part logged behind the step from which a later one went on is lost, and left out.

    Raises NoMetrics: there is none.
    """
    run = RunMetrics()
    for path in metrics_paths(run_dir):
        begins = _first_step(path.parent)
        for points in (*run.series.values(), *run.times.values()):
            for step in [step for step in points if step > begins]:
                del points[step]
        for line in _lines(path):
            step, prefix = int(line.pop("step")), str(line.pop("prefix"))
            run.times.setdefault(prefix, {})[step] = float(line.pop("time"))
            for name, value in line.items():
                run.series.setdefault(f"{prefix}/{name}" if prefix else name, {})[step] = value
    run.series = {name: dict(sorted(points.items())) for name, points in run.series.items() if points}
    run.times = {prefix: dict(sorted(points.items())) for prefix, points in run.times.items() if points}
    return run


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, start=1):
            try:
                yield json.loads(text)
            except json.JSONDecodeError as error:
                logger.warning("metrics_line_skipped path=%s line=%d: %s", path, number, error)


def _numbered(log_dir: Path) -> list[Path]:
    """The `exp_NNN` directories with metrics, in the order in which they were made."""
    return sorted(
        (path.parent for path in log_dir.glob(f"exp_*/{METRICS_FILE}") if _order(path.parent) != _UNNUMBERED),
        key=_order,
    )


def _order(part: Path) -> tuple[int, int]:
    match = re.fullmatch(r"exp_(\d+)", part.name)
    return (1, int(match[1])) if match is not None else _UNNUMBERED


def _first_step(part: Path) -> int:
    """The step that a part began from: that of its first line, which set-up writes, or the one before a step's."""
    for line in _lines(part / METRICS_FILE):
        step = int(line["step"])
        return step if not str(line["prefix"]).startswith("train") else max(step - 1, 0)
    return 0


def _checkpoint_dir(part: Path) -> str | None:
    config = part / "config.yaml"
    loaded = load_yaml(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return str((loaded or {}).get("checkpointing", {}).get("checkpoint_dir"))


def _finite(value: float | Sequence[float]) -> object:
    if isinstance(value, (int, float)):
        return value if math.isfinite(value) else None
    return [_finite(item) for item in value]
