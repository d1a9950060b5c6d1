"""Tables: of a pool's pipelines, live on a terminal and one line per change elsewhere; of scenarios that were run."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from nemo_rl.time_sharing.log.pool_state import Standing
from nemo_rl.time_sharing.viewing.timeline import Timeline
from nemo_rl.utils.progress import format_duration
from nemo_rl.utils.text import printable

_WIDTH = 240


class StandingsTable:
    """Table of standings, updated as they change. `unit`: name of the pool's slots. `file`: output; standard error by
    default.
    """

    def __init__(self, unit: str = "GPU", file: TextIO | None = None) -> None:
        shown = file or sys.stderr
        # Where lines can be as long as they like, no column is cut.
        self._console = Console(file=shown, width=None if shown.isatty() else _WIDTH)
        self._unit = unit
        self._live = Live(console=self._console, transient=True) if self._console.is_terminal else None
        self._said: dict[str, str] = {}
        self._newest: Sequence[Standing] = ()
        self._trouble = ""

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        if self._newest:
            self.print(self._newest)

    def print(self, standings: Sequence[Standing]) -> None:
        """The table once, and below it why pipelines ended that are not done, and the result of those that have one."""
        self._console.print(self._table(standings))
        for standing in standings:
            if standing.outcome is not None and (standing.outcome.kind != "done" or standing.why):
                self._line(f"{standing.name}: {_ended(standing)}")

    def show(self, standings: Sequence[Standing], trouble: str = "") -> None:
        """How the pipelines stand now. `trouble`: of the whole pool; one line each time that it begins or ends."""
        self._newest = standings
        if trouble != self._trouble:
            self._line(trouble or "the pool's log can be written again")
            self._trouble = trouble
        if self._live is not None:
            self._live.update(self._table(standings))
            return
        for standing in standings:
            said = _line_of(standing)
            if self._said.get(standing.name) != said:
                self._said[standing.name] = said
                self._line(f"{standing.name}: {said}")

    def _line(self, text: str) -> None:
        self._console.print(printable(text), highlight=False, soft_wrap=True, markup=False)

    def _table(self, standings: Sequence[Standing]) -> Table:
        table = Table(box=None, header_style="bold")
        users = has_users(standings)
        for column in columns(self._unit, users=users):
            table.add_column(column)
        for standing in standings:
            for row in (cells(standing, users=users), *adapter_cells(standing, users=users)):
                table.add_row(*map(Text, map(printable, row)))
        return table


def _ended(standing: Standing) -> str:
    return f"{standing.state} {standing.why or f'at step {steps_of(standing)}'}"


def _line_of(standing: Standing) -> str:
    """A job's line in a log; unchanged lines are not repeated."""
    progress = standing.progress
    if standing.outcome is not None:
        return _ended(standing)
    if progress is None or not progress.of:
        return standing.state
    figures = "".join(f" {name}={value:.3f}" for name, value in progress.figures.items())
    adapters = "".join(f" {adapter.name}={adapter.step}/{adapter.of}" for adapter in progress.adapters)
    return f"step {progress.step}/{progress.of}{figures}{adapters}{' draining' if standing.asked == 'drain' else ''}"


def has_users(standings: Sequence[Standing]) -> bool:
    """Whether the pool is for a team, so that tables have a column for the users."""
    return any(standing.user for standing in standings)


def columns(unit: str, *, users: bool = False) -> tuple[str, ...]:
    """Headings of `cells`."""
    return (
        "pipeline",
        f"training {unit}s",
        f"generation {unit}s",
        "step",
        "doing",
        "reward",
        "validation",
        "left",
        f"waited for {unit}s",
        "share",
        "slowdown",
        "gain",
        "seconds",
        *(["user"] if users else []),
    )


def steps_of(standing: Standing) -> int:
    """Its completed steps, as far as it has said."""
    if standing.outcome is not None:
        return standing.outcome.steps
    return standing.progress.step if standing.progress is not None else 0


def waited_s(standing: Standing) -> float:
    """Seconds for which it has waited for training GPUs, as far as it has said."""
    said = standing.outcome or standing.progress
    return said.waited_s if said is not None else 0.0


def cells(standing: Standing, *, users: bool = False) -> list[str]:
    """One pipeline as text, column by column; `users`: with that of its user."""
    progress, outcome, sharing = standing.progress, standing.outcome, standing.sharing
    of = f"/{progress.of}" if progress is not None and progress.of else ""
    figures = dict(progress.figures) if progress is not None else {}
    reward = figures.pop("reward", None)
    gained = ""
    if sharing is not None and (gain := sharing.gain) is not None:
        how = f"a step {gain.alone_s:.1f} s alone, {gain.together_s:.1f} s shared"
        gained = f"{gain.of_all:.2f}x{'' if gain.keeps else ', so in turn'} ({how})"
    left_s = progress.left_s if progress is not None and outcome is None else None
    kept = standing.kept(time.time())
    left = "" if left_s is None else format_duration(left_s)
    slowdown = f"{sharing.slowdown:.2f}" if sharing is not None else ""
    return [
        standing.name,
        ",".join(map(str, standing.train)),
        ",".join(map(str, standing.infer)),
        f"{steps_of(standing)}{of}" if of or outcome is not None else "",
        "paused" if sharing is not None and sharing.paused and outcome is None else standing.state,
        "" if reward is None else f"{reward:.3f}",
        " ".join(f"{name} {value:.3f}" for name, value in figures.items()),
        _with_wish(left, kept.get("finish_by")),
        f"{waited_s(standing):.1f} s",
        f"{sharing.share:.0%}" if sharing is not None else "",
        _with_wish(slowdown, kept.get("max_slowdown")),
        gained,
        f"{(standing.ended_at or time.time()) - standing.submitted_at:.0f}",
        *([f"{standing.user} ({standing.group})"] if users else []),
    ]


def _with_wish(figure: str, kept: str | None) -> str:
    return figure if kept is None else f"{figure} ({kept})".lstrip()


def adapter_cells(standing: Standing, *, users: bool = False) -> list[list[str]]:
    """The adapters of a job as text, a row each, in the columns of `cells`; the wait is for training passes."""
    adapters = standing.progress.adapters if standing.progress is not None else ()
    over = standing.outcome is not None
    return [
        [
            f"{standing.name}/{adapter.name}",
            *("", ""),
            f"{adapter.step}/{adapter.of}",
            adapter.phase
            + (f", waits for {adapter.open_samples} samples" if adapter.open_samples and not over else ""),
            *("", "", ""),
            f"{adapter.waited_s:.1f} s",
            *("", "", "", ""),
            *([""] if users else []),
        ]
        for adapter in adapters
    ]


PASS = "PASS"


@dataclass(frozen=True)
class ScenarioResult:
    """One scenario.

    Attributes:
        name: its letter.
        seconds: from the first submission to the last end of a job.
        busy: part of the GPUs' time in which a job trained or generated on them, 0 to 1.
        waited_s: seconds for which its jobs waited for training GPUs, together.
        slowdown: of the job that lost the most to the others, at least 1.
        why: why it did not pass; empty where it did.
    """

    name: str
    seconds: float = 0.0
    busy: float = 0.0
    waited_s: float = 0.0
    slowdown: float = 1.0
    why: str = ""


def result_of(
    name: str, standings: Sequence[Standing], timeline: Timeline, violations: Sequence[object]
) -> ScenarioResult:
    """A scenario that has ended: it passes when every job is done and the record keeps every invariant."""
    ended = [standing.outcome for standing in standings]
    wrong = [
        f"{standing.name}: {standing.state} {standing.why}".rstrip()
        for standing in standings
        if standing.state != "done"
    ] + [str(violation) for violation in violations[:1]]
    return ScenarioResult(
        name,
        max((s.ended_at or 0.0 for s in standings), default=0.0)
        - min((s.submitted_at for s in standings), default=0.0),
        timeline.busy(),
        sum(outcome.waited_s for outcome in ended if outcome is not None),
        max((s.sharing.slowdown for s in standings if s.sharing is not None), default=1.0),
        "; ".join(wrong),
    )


def print_scenarios(results: Sequence[ScenarioResult], unit: str, file: TextIO | None = None) -> None:
    """The table, on standard output by default."""
    shown = file or sys.stdout
    table = Table(box=None, header_style="bold")
    for column in ("scenario", "seconds", f"{unit}s busy", f"waited for {unit}s", "slowdown", "result"):
        table.add_column(column)
    for each in results:
        cells = (
            each.name,
            f"{each.seconds:.0f}",
            f"{each.busy:.0%}",
            f"{each.waited_s:.1f} s",
            f"{each.slowdown:.2f}",
            each.why.partition("\n")[0] or PASS,
        )
        table.add_row(*map(Text, map(printable, cells)))
    Console(file=shown, width=None if shown.isatty() else _WIDTH).print(table)
