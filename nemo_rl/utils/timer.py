"""Named durations of a run's phases, and the check whether a run must save and end.

Invariant: a label runs at most once at a time, and its measurements stay in order.
"""

import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
    "std": lambda values: statistics.stdev(values) if len(values) > 1 else 0.0,
    "sum": sum,
    "count": len,
}


class TimerError(RuntimeError):
    """A label was started twice, stopped without start, or never measured."""


@dataclass(frozen=True)
class Mark:
    """A moment: its label, the clock's seconds, and its metadata."""

    label: str
    seconds: float
    metadata: dict[str, object]


class Timer:
    """Seconds by label.

    Args:
        clock: monotonic seconds.
        context: labels of all measurements, such as a worker's rank; kept for the reader in `context`.

    >>> timer = Timer()
    >>> with timer.time("generation"):
    ...     pass
    >>> sorted(timer.get_timing_metrics())
    ['generation']
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, *, context: Mapping[str, object] | None = None
    ) -> None:
        self.context = dict(context or {})
        self.marks: list[Mark] = []
        self._clock = clock
        self._running: dict[str, float] = {}
        self._measured: dict[str, list[float]] = {}
        self._last_mark: dict[str, float] = {}

    def start(self, label: str) -> None:
        """Begin measuring. Raises TimerError: the label is already running."""
        if label in self._running:
            raise TimerError(f"timer {label!r} is already running; stop it before starting it again")
        self._running[label] = self._clock()

    def stop(self, label: str) -> float:
        """End measuring and return the seconds since `start`. Raises TimerError: the label is not running."""
        if label not in self._running:
            raise TimerError(f"timer {label!r} was not started; running are {sorted(self._running)}")
        return self.record(label, self._clock() - self._running.pop(label))

    @contextmanager
    def time(self, label: str) -> Generator[None]:
        """Measure the block, also when it raises."""
        self.start(label)
        try:
            yield
        finally:
            self.stop(label)

    def record(self, label: str, seconds: float) -> float:
        """Add a duration that was measured elsewhere, and return it."""
        self._measured.setdefault(label, []).append(seconds)
        return seconds

    def mark(self, label: str, metadata: Mapping[str, object] | None = None) -> float | None:
        """Add the seconds since the last mark of this label; the first one only sets the beginning and returns None.

        Every mark is kept in `marks`, with its `metadata`.
        """
        now = self._clock()
        self.marks.append(Mark(label, now, dict(metadata or {})))
        before = self._last_mark.get(label)
        self._last_mark[label] = now
        return None if before is None else self.record(label, now - before)

    def elapsed(self, label: str) -> list[float]:
        """All durations of a label, in order."""
        return list(self._measured.get(label, []))

    def get_elapsed(self, label: str) -> list[float]:
        """NeMo-RL's name of `elapsed`."""
        return self.elapsed(label)

    def reduce(self, label: str, operation: str = "mean") -> float:
        """Durations of a label joined into one number. `operation`: mean, median, min, max, std (0 for a single one),
        sum or count. Raises TimerError: the label has no durations; ValueError: unknown operation.
        """
        if operation not in _REDUCTIONS:
            raise ValueError(f"timer reduction {operation!r} must be one of {', '.join(_REDUCTIONS)}")
        if not self._measured.get(label):
            raise TimerError(f"timer {label!r} has no measurements; measured are {sorted(self._measured)}")
        return float(_REDUCTIONS[operation](self._measured[label]))

    def get_timing_metrics(self, reduction_op: str = "mean") -> dict[str, float]:
        """Every measured label, joined by `reduction_op`."""
        return {label: self.reduce(label, reduction_op) for label in self._measured}

    def reset(self, label: str | None = None) -> None:
        """Forget the durations of a label, or of all; running labels go on."""
        for measured in [label] if label is not None else list(self._measured):
            self._measured.pop(measured, None)


def timed(timer: Timer | None, label: str) -> AbstractContextManager[None]:
    """Measures the block, where there is a timer."""
    return nullcontext() if timer is None else timer.time(label)


class TimeoutChecker:
    """Decides when a run must save because its time is nearly up (`checkpointing.checkpoint_must_save_by`).

    Args:
        timeout: run time as `DD:HH:MM:SS`, counted from construction; None never ends.
        fit_last_save_time: look ahead, and save already when the next step, of average length, would end too late.
        clock: monotonic seconds.

    Raises ValueError: `timeout` has another form.
    """

    def __init__(
        self, timeout: str | None = None, fit_last_save_time: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit_s = None if timeout is None else parse_duration(timeout)
        self._look_ahead = fit_last_save_time
        self._clock = clock
        self._started = clock()
        self._iteration_started: float | None = None
        self._iterations: list[float] = []
        self._saved = self._asked = False

    def end_after_step(self) -> None:
        """Save and end when the running step is over, however much time is left."""
        self._asked = True

    @property
    def reason(self) -> str:
        """Why the run saves and ends, once it does."""
        if self._asked:
            return "it was asked to end; the same command goes on from the checkpoint"
        return "checkpointing.checkpoint_must_save_by has come; the same command goes on from the checkpoint"

    def start_iterations(self) -> None:
        """The first step begins now."""
        self._iteration_started = self._clock()

    def mark_iteration(self) -> None:
        """A step has ended."""
        now = self._clock()
        if self._iteration_started is not None:
            self._iterations.append(now - self._iteration_started)
        self._iteration_started = now

    def check_save(self) -> bool:
        """Whether to save and end now; true once."""
        if self._asked and not self._saved:
            self._saved = True
            return True
        if self.limit_s is None or self._saved:
            return False
        ahead = statistics.fmean(self._iterations) if self._look_ahead and self._iterations else 0.0
        self._saved = self._clock() - self._started + ahead >= self.limit_s
        return self._saved


def parse_duration(text: str) -> float:
    """Seconds of `DD:HH:MM:SS`. Raises ValueError: another form."""
    parts = text.split(":")
    if len(parts) != 4 or not all(part.isdigit() for part in parts):
        raise ValueError(
            f"checkpointing.checkpoint_must_save_by={text!r} must have the form DD:HH:MM:SS, such as 00:03:45:00"
        )
    days, hours, minutes, seconds = (int(part) for part in parts)
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
