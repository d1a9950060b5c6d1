"""A record as one self-contained HTML page: occupation of GPUs over time by pipeline and phase, demand and GPU curves,
hand-over latencies, and the checker's verdict.

The page, `pool_report.html`, holds its data as JSON and draws it on canvases; it loads nothing from elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nemo_rl.time_sharing.history.checker import INVARIANTS, Violation
from nemo_rl.time_sharing.log.accounts import Accounts, in_whole_seconds, statement
from nemo_rl.time_sharing.log.comparison import LEGEND
from nemo_rl.time_sharing.viewing.standings_table import columns
from nemo_rl.time_sharing.viewing.timeline import Interval, Level, Timeline, in_unit, percentile
from nemo_rl.utils.text import filled_page

TEMPLATE = Path(__file__).with_name("pool_report.html")
_MOST_POINTS = 3000
_MOST_DECISIONS = 2000
# A real run's clock counts from 1970, a simulation's from its start.
_A_CLOCK = 1e8


def write_report(
    timeline: Timeline,
    accounts: Accounts | None,
    violations: Sequence[Violation],
    path: str | Path,
    *,
    title: str,
    unit: str = "GPU",
) -> None:
    """Writes the page. `accounts`: None where the record has none; `violations`: of the same record, as
    `history.checker.check` found them.
    """
    data = report_data(timeline, accounts, violations, title, unit)
    Path(path).write_text(filled_page(TEMPLATE, f"{title}: time-sharing report", data), encoding="utf-8")


def report_data(
    timeline: Timeline,
    accounts: Accounts | None,
    violations: Sequence[Violation],
    title: str,
    unit: str = "GPU",
) -> dict[str, object]:
    """Data of the page as plain values. Times in seconds, GPUs by number, pipelines by their index in `pipelines`."""
    pipelines = timeline.pipelines
    index = {name: number for number, name in enumerate(pipelines)}
    gpu_seconds = [0.0] * len(pipelines)
    pool = timeline.pool
    held = timeline.of("gpus")
    for o in held:
        gpu_seconds[index[o.pipeline]] += pool.gpus_in(o.gpus) * (o.end - o.start)
    bars = [
        [first, last, round(o.start, 3), round(o.end, 3), index.get(o.pipeline, 0), _kind(o), o.label]
        # First those out of use, so that the holder of a GPU that is closed to one pipeline only is drawn over it.
        for o in (*timeline.of("out"), *held)
        for first, last in _runs(o.gpus)
    ]
    spans = sorted(timeline.handovers)
    said = timeline.simulated
    return {
        "title": title,
        "end": timeline.end,
        "gpus": pool.gpus,
        "rows": [pool.name_of(slot) for slot in range(pool.size)],
        "pipelines": pipelines,
        "bars": bars,
        "demand": _curves(timeline.demand, index),
        "share": _curves(timeline.gpus, index),
        "handovers": [round(span, 3) for span in spans],
        "handoverP50": percentile(spans, 50),
        "handoverP99": percentile(spans, 99),
        "gpuSeconds": [round(s) for s in gpu_seconds],
        "steps": [timeline.steps.get(name, 0) for name in pipelines],
        "held": timeline.busy(),
        "busy": None if said is None else said.gpu_busy,
        "about": "" if said is None else said.about,
        "runs": "" if said is None else f"{said.runs} run{'' if said.runs == 1 else 's'} from seed {said.seed}",
        "jobTable": [] if said is None else said.jobs,
        "wayTable": [] if said is None else said.ways,
        "notes": [] if said is None else said.notes,
        "accounts": [] if accounts is None else _accounts(accounts),
        "legend": LEGEND,
        "invariants": INVARIANTS,
        "violations": [str(v) for v in violations[:20]],
        "faults": [[round(t, 3), in_unit(text, unit)] for t, text in timeline.faults],
        "decisions": [
            [round(t, 3), plan, in_unit(text, unit)] for t, plan, text in timeline.decisions[-_MOST_DECISIONS:]
        ],
        "measured": timeline.measured,
        "entitled": [round(timeline.entitled.get(name, 0.0), 2) for name in pipelines],
        "began": timeline.origin if timeline.origin > _A_CLOCK else 0.0,
        "live": False,
        "checked": True,
        "standings": [],
        "columns": columns(unit),
        "unit": unit,
        "acts": False,
        "notice": "",
    }


def _accounts(accounts: Accounts) -> list[list[list[str]]]:
    """Tables, each with what it is by as the name of its first column."""
    whose = ("user", "group") if any(key.user for key in accounts.by_key) else ()
    return [in_whole_seconds(statement(accounts, by)) for by in ("job", *whose, "day")]


def _kind(bar: Interval) -> str:
    if bar.lane == "out" or bar.phase == "fenced":
        return bar.phase
    if bar.tag != "GEN":
        return "init" if bar.tag == "INIT" else "train"
    return "generate" if bar.phase == "serving" else "handover"


def _runs(gpus: tuple[int, ...]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for gpu in gpus:
        if runs and runs[-1][1] == gpu - 1:
            runs[-1] = (runs[-1][0], gpu)
        else:
            runs.append((gpu, gpu))
    return runs


def _curves(levels: Sequence[Level], index: dict[str, int]) -> list[list[list[float]]]:
    curves: list[list[list[float]]] = [[] for _ in index]
    for level in levels:
        curves[index[level.pipeline]].append([round(level.time, 2), level.value])
    return [curve[:: max(len(curve) // _MOST_POINTS, 1)] for curve in curves]
