"""Table of scenarios that were run: one row each, from the record and the outcomes of its jobs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_rl.time_sharing.log.pool_state import Standing
from nemo_rl.time_sharing.viewing.timeline import Timeline
from nemo_rl.utils.text import printable

PASS = "PASS"
_WIDTH = 240


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
