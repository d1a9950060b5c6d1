"""A run's terminal output: start phases with their seconds, then step, reward, accuracy, tokens per second, time left.

Live on a terminal; elsewhere (a file, a Slurm log) one line per finished phase, per half minute of a running one, and
per step (for quick steps every few seconds). Invariant: the terminal is restored, also after an error.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.status import Status
from rich.table import Table
from rich.text import Text

from nemo_rl.utils.text import printable

_STILL_S = 30.0
_LONG_STEP_S = 60.0
_RECENT_STEPS = 8
_QUIET_S = 10.0
_BARS = "▁▂▃▄▅▆▇█"


def fiftieth(done: int, of: int) -> int:
    """The last fiftieth of `of` that `done` has reached; a control plane hears of progress when that changes."""
    return 50 * done // max(1, of)


class StartPhases:
    """The phases of a start, one at a time.

    Args:
        console: Where to show; standard error by default.
        clock: Monotonic seconds.
        failed: Called at once with the error that ends a phase, before work in parallel is stopped.
    """

    def __init__(
        self,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        failed: Callable[[Exception], object] | None = None,
    ) -> None:
        self.console = console or Console(stderr=True)
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._failed = failed
        self._began = clock()

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Shows the block as a phase and keeps its seconds under its name; one that raises is not shown as done."""
        began = self._clock()
        try:
            with self._watched(name, began):
                yield
        except Exception as error:
            if self._failed is not None:
                self._failed(error)
            raise
        self.seconds[name] = self._clock() - began
        self._line(f"{name} {self.seconds[name]:.1f} s")

    def say(self, line: str) -> None:
        """A line for the person."""
        self.console.print(printable(line), highlight=False, soft_wrap=True, markup=False)

    def done(self) -> float:
        """The start is over; its seconds."""
        total = self._clock() - self._began
        self._line(f"ready after {total:.1f} s")
        return total

    def _line(self, text: str) -> None:
        self.console.print(f"start: {text}", highlight=False, soft_wrap=True, markup=False, style="dim")

    @contextmanager
    def _watched(self, name: str, began: float) -> Generator[None]:
        over = threading.Event()
        status = Status(f"{name} ...", console=self.console) if self.console.is_terminal else None
        period = 1.0 if status is not None else _STILL_S

        def watch() -> None:
            while not over.wait(period):
                seconds = self._clock() - began
                if status is not None:
                    status.update(f"{name} ... {seconds:.0f} s")
                else:
                    self._line(f"{name}, {seconds:.0f} s so far")

        thread = threading.Thread(target=watch, name="start-phase", daemon=True)
        if status is not None:
            status.start()
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            if status is not None:
                status.stop()


class RunProgress:
    """Progress of a run of `total_steps` steps; a context manager.

    Args:
        first_step: steps done by earlier runs.
        console: where to show; standard error by default, so that standard output stays clean.
        clock: monotonic seconds.
        measure: name of the validation metric, shown before the first validation too.
        details: describes running work when a step takes long; may be empty.
    """

    def __init__(
        self,
        total_steps: int,
        title: str = "GRPO",
        first_step: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        measure: str = "accuracy",
        details: Callable[[], str] = str,
    ) -> None:
        self.total_steps = total_steps
        self._details = details
        self._over = threading.Event()
        self.title = title
        self.console = console or Console(stderr=True)
        self._clock = clock
        self._step = first_step
        self._phase = "starting"
        self._validated: float | None = None
        self._validated_at = first_step
        self._validation_name = measure
        self._gpu_memory: float | None = None
        self._below: dict[int, str] = {}
        self.said: deque[str] = deque(maxlen=40)
        self._rewards: deque[float] = deque(maxlen=40)
        self._rows: deque[tuple[str, ...]] = deque(maxlen=_RECENT_STEPS)
        self._durations: deque[float] = deque(maxlen=10)
        self._step_began = clock()
        self._line_at = -_QUIET_S
        self._live = (
            Live(get_renderable=self._render, console=self.console, refresh_per_second=4, transient=True)
            if self.console.is_terminal
            else None
        )

    def __enter__(self) -> Self:
        self._step_began = self._clock()
        if self._live is not None:
            self._live.start()
        self._over.clear()
        threading.Thread(target=self._watch, name="long-steps", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._live is not None:
            self._live.stop()
            self.console.print(self._render())

    def _watch(self) -> None:
        while not self._over.wait(_LONG_STEP_S):
            if (said := self.long_step()) is not None:
                self.say(said)

    def long_step(self) -> str | None:
        """The phase in which a step waits for longer than a minute and twice the usual time; None for others."""
        seconds = self._clock() - self._step_began
        usual = statistics.median(self._durations) if self._durations else 0.0
        if seconds < max(_LONG_STEP_S, 2 * usual) or self._step >= self.total_steps:
            return None
        details = f"; {said}" if (said := self._details()) else ""
        return f"step {self._step + 1}/{self.total_steps}: {self._phase} after {format_duration(seconds)}{details}"

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self._step

    @property
    def current_phase(self) -> str:
        """The run's present phase."""
        return self._phase

    def phase(self, name: str) -> None:
        """Sets the run's present phase, such as `generation`; shown on a terminal only."""
        self._phase = name

    def validated(self, value: float, name: str = "accuracy", *, step: int | None = None) -> None:
        """The newest validation result. `step`: the validated step, by default the newest finished; shown below its
        line.
        """
        self._validated, self._validation_name = value, name
        self._validated_at = self._step if step is None else step
        if self._live is None:
            line = f"validation {name}={value:.3f}"
            if step is None or step <= self._step:
                self.say(line)
            else:
                self._below[step] = line

    def gpu_memory(self, gigabytes: float) -> None:
        """Memory in use on the fullest GPU."""
        self._gpu_memory = gigabytes

    def say(self, line: str) -> None:
        """Prints a line above the live display."""
        self.said.append(line)
        self.console.print(printable(line), highlight=False, soft_wrap=True, markup=False)

    def step_done(self, step: int, *, loss: float, tokens: float, reward: float | None = None) -> None:
        """A step has ended.

        Args:
            step: its number, from 1.
            tokens: tokens it trained on, prompts included.
            reward: its mean reward; None where there are no rewards.
        """
        now = self._clock()
        seconds = max(now - self._step_began, 1e-9)
        self._step_began = now
        self._step = step
        self._durations.append(seconds)
        if reward is not None:
            self._rewards.append(reward)
        left = self.seconds_left()
        # A result of an earlier step is no news of this one.
        measured = self._validated if self._validated_at == step else None
        shown, validated = ("-" if value is None else f"{value:.3f}" for value in (reward, measured))
        row = (
            str(step),
            shown,
            validated,
            f"{loss:+.4f}",
            f"{tokens / seconds:,.0f}",
            f"{seconds:.1f}",
            format_duration(left),
        )
        self._rows.append(row)
        below = self._below.pop(step, None)
        due = now - self._line_at >= _QUIET_S or step >= self.total_steps or below is not None
        if self._live is None and due:
            self._line_at = now
            rewarded = "" if reward is None else f"reward={shown} "
            memory = "" if self._gpu_memory is None else f" gpu_gb={self._gpu_memory:.1f}"
            pace = f"tokens/s={row[4]} step_s={row[5]} left={row[6]}{memory}"
            self.say(f"step {step}/{self.total_steps} {rewarded}{self._held_out}={row[2]} loss={row[3]} {pace}")
            if below is not None:
                self.say(below)

    def seconds_left(self) -> float:
        """Time until the last step, at the median pace of the last ten; 0 before the first."""
        return statistics.median(self._durations) * (self.total_steps - self._step) if self._durations else 0.0

    def newest_figures(self) -> dict[str, float]:
        """The newest mean reward and validation, by name, as far as there are any."""
        rewarded = {"reward": self._rewards[-1]} if self._rewards else {}
        validated = {} if self._validated is None else {self._held_out: self._validated}
        return rewarded | validated

    @property
    def _held_out(self) -> str:
        return "val_reward" if self._validation_name == "reward" else self._validation_name

    def _render(self) -> Group:
        head = Table.grid(padding=(0, 2), expand=False)
        validated = "" if self._validated is None else f"{self._validation_name} {self._validated:.3f}"
        left = (
            f"{format_duration(self.seconds_left())} left" if self._durations and self._step < self.total_steps else ""
        )
        head.add_row(
            Text(self.title, style="bold"),
            ProgressBar(total=max(self.total_steps, 1), completed=self._step, width=30),
            Text(f"{self._step}/{self.total_steps}"),
            Text(validated, style="bold green"),
            Text(left, style="dim"),
            Text("" if self._gpu_memory is None else f"GPU {self._gpu_memory:.1f} GB", style="dim"),
            Text(self._phase if self._step < self.total_steps else "done", style="cyan"),
        )
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("step", "reward", self._validation_name, "loss", "tokens/s", "step s", "left"):
            table.add_column(name, justify="right")
        for row in self._rows:
            table.add_row(*row)
        shown: list[Table | Text] = [head, *([table] if self._rows else ())]
        if self._rewards:
            shown.append(Text("reward ", style="dim").append(sparkline(list(self._rewards)), style="green"))
        return Group(*shown)


def sparkline(values: list[float]) -> str:
    """A curve of block characters, scaled to the values' own range.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▄█'
    """
    if not values:
        return ""
    low, span = min(values), max(values) - min(values)
    return "".join(_BARS[int((value - low) / span * (len(_BARS) - 1))] if span > 0 else _BARS[0] for value in values)


def format_duration(seconds: float) -> str:
    """Seconds for people: `42s`, `3m 07s`, `2h 05m`.

    >>> [format_duration(s) for s in (42, 187, 7500)]
    ['42s', '3m 07s', '2h 05m']
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"
