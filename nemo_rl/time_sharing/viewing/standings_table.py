"""The pipelines of a pool as a table: live on a terminal, one line per change elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from nemo_rl.time_sharing.pool import Standing


class StandingsTable:
    """Shows standings as they change.

    Args:
        console: Where; standard error by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, transient=True) if self._console.is_terminal else None
        self._said: dict[str, tuple[str, ...]] = {}
        self._newest: Sequence[Standing] = ()

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
            self._console.print(_table(self._newest))

    def show(self, standings: Sequence[Standing]) -> None:
        """How the pipelines stand now."""
        self._newest = standings
        if self._live is not None:
            self._live.update(_table(standings))
            return
        for standing in standings:
            state = _state(standing)
            if self._said.get(standing.name) != state:
                self._said[standing.name] = state
                self._console.print(f"{standing.name}: {' '.join(state)}", highlight=False, soft_wrap=True)


def _state(standing: Standing) -> tuple[str, ...]:
    if standing.outcome is not None:
        return (standing.outcome.kind, f"steps={standing.outcome.steps}", standing.outcome.reason)
    if standing.progress is None:
        return ("starting",)
    return (f"step {standing.progress.step}/{standing.progress.of}",)


COLUMNS = (
    "pipeline",
    "training GPUs",
    "generation GPUs",
    "step",
    "doing",
    "waited for GPUs",
    "share",
    "slowdown",
    "seconds",
)


def steps_of(standing: Standing) -> int:
    """Its completed steps, as far as it has said."""
    if standing.outcome is not None:
        return standing.outcome.steps
    return standing.progress.step if standing.progress is not None else 0


def cells(standing: Standing) -> list[str]:
    """One pipeline as text, column by column."""
    progress, outcome, sharing = standing.progress, standing.outcome, standing.sharing
    doing = outcome.kind if outcome is not None else progress.phase if progress is not None else "starting"
    step = f"{progress.step}/{progress.of}" if progress is not None else str(outcome.steps) if outcome else ""
    waited = outcome.waited_s if outcome is not None else progress.waited_s if progress is not None else 0.0
    return [
        standing.name,
        ",".join(map(str, standing.train)),
        ",".join(map(str, standing.infer)),
        step,
        doing,
        f"{waited:.1f} s",
        f"{sharing.share:.0%}" if sharing is not None else "",
        f"{sharing.slowdown:.2f}" if sharing is not None else "",
        f"{(standing.ended_at or time.time()) - standing.submitted_at:.0f}",
    ]


def _table(standings: Sequence[Standing]) -> Table:
    table = Table(box=None, header_style="bold")
    for column in COLUMNS:
        table.add_column(column)
    for standing in standings:
        table.add_row(*cells(standing))
    return table
