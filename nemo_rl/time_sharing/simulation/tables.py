"""Outcomes as tables: one line per job, one per way, and sentences for jobs that gave up and faults that struck.

Decides wording and rounding only; all numbers come from `results`. A number that would mislead because jobs are
unfinished is shown as `-`.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from nemo_rl.time_sharing.log.comparison import Simulated
from nemo_rl.time_sharing.simulation.baselines import OURS, PLACED, SERIAL
from nemo_rl.time_sharing.simulation.results import SimulatedOutcome
from nemo_rl.time_sharing.simulation.scenario import Scenario
from nemo_rl.time_sharing.viewing.timeline import percentile

Rows = Sequence[tuple[str, Sequence[SimulatedOutcome]]]
_MOST_JOBS, _MOST_FATES = 20, 5
_MUCH_SHORTER = 0.97


def simulated(scenario: Scenario, seed: int, rows: Rows) -> Simulated:
    """The output of `simulate`, our way first among `rows`: (way, one outcome per seed from `seed` on)."""
    ours = rows[0][1]
    notes = (*_fates(seed, rows), *_faults(scenario, ours), *_placement(rows))
    jobs, ways = (tuple(map(tuple, table)) for table in (job_table(scenario, rows), way_table(rows)))
    return Simulated(scenario.name, scenario.about, seed, len(ours), ours[0].gpu_busy, jobs, ways, notes)


def _placement(rows: Rows) -> Iterator[str]:
    """Cost of naming GPUs in job files, if it is large."""
    whole = [(name, outcomes) for name, outcomes in rows if not _unfinished(outcomes)]
    total = {name: statistics.fmean(o.total_s for o in outcomes) for name, outcomes in whole}
    if total.get(PLACED, math.inf) < _MUCH_SHORTER * total.get(OURS, 0.0):
        yield (
            f"The jobs name GPUs that others train on too. Where the pool chooses ({PLACED}), all are done after "
            f"{total[PLACED]:.0f} s instead of {total[OURS]:.0f} s: leave the training GPUs out of a job's "
            "file, or give it `placed: true` here."
        )


def job_table(scenario: Scenario, rows: Rows) -> list[list[str]]:
    """Header and one line per job, means over the runs in which it finished; no lines for more than twenty jobs."""
    lines = [["job", *[f"{name} s (slowdown)" for name, _ in rows]]]
    jobs = scenario.jobs if len(scenario.jobs) <= _MOST_JOBS else ()
    return lines + [[job.name, *[_job_cell(job.name, outcomes) for _, outcomes in rows]] for job in jobs]


def _job_cell(name: str, outcomes: Sequence[SimulatedOutcome]) -> str:
    ended = [o for o in outcomes if name not in o.unfinished]
    if not ended:
        return "unfinished"
    slow = [o.slowdown[name] for o in ended if name in o.slowdown]
    cell = f"{sum(o.seconds[name] for o in ended) / len(ended):.0f}" + (
        f" ({sum(slow) / len(slow):.2f})" if slow else ""
    )
    return cell if len(ended) == len(outcomes) else f"{cell}, {len(outcomes) - len(ended)} unfinished"


def way_table(rows: Rows) -> list[list[str]]:
    """Header and one line per way, means over runs."""
    lines = [
        [
            "way",
            "total s",
            "vs serial",
            "slowdown mean",
            "p99",
            "GPU busy",
            "service spread",
            "hand-over p50 / p99 s",
            "preemptions",
            "unfinished",
        ]
    ]
    serial = next(
        (
            statistics.fmean(o.total_s for o in outcomes)
            for name, outcomes in rows
            if name == SERIAL and not _unfinished(outcomes)
        ),
        None,
    )
    for name, outcomes in rows:
        total = statistics.fmean(o.total_s for o in outcomes)
        spans = [s for o in outcomes for s in o.handovers_s]
        known = [o for o in outcomes if o.slowdown]
        lines.append(
            [
                name,
                f"{total:.0f}",
                f"{serial / total:.2f}x" if serial and not _unfinished(outcomes) else "-",
                _mean(known, lambda o: statistics.fmean(o.slowdown.values())),
                _mean(known, lambda o: o.p99_slowdown),
                f"{statistics.fmean(o.gpu_busy for o in outcomes):.0%}",
                f"{statistics.fmean(o.service_spread for o in outcomes):.2f}",
                f"{percentile(spans, 50):.2f} / {percentile(spans, 99):.2f}" if spans else "-",
                f"{statistics.fmean(o.preemptions for o in outcomes):.0f}",
                str(_unfinished(outcomes)),
            ]
        )
    return lines


def _mean(outcomes: Sequence[SimulatedOutcome], value: Callable[[SimulatedOutcome], float]) -> str:
    return f"{statistics.fmean(value(o) for o in outcomes):.2f}" if outcomes else "-"


def _unfinished(outcomes: Sequence[SimulatedOutcome]) -> int:
    return sum(len(o.unfinished) for o in outcomes)


def _fates(seed: int, rows: Rows) -> Iterator[str]:
    for name, outcomes in rows:
        fates = [(seed + number, job, fate) for number, o in enumerate(outcomes) for job, fate in o.fates.items()]
        for number, job, fate in fates[:_MOST_FATES]:
            yield f"unfinished in {name}, seed {number}: job {job!r}: {fate}"
        if len(fates) > _MOST_FATES:
            yield f"unfinished in {name}: {len(fates) - _MOST_FATES} more"


def _faults(scenario: Scenario, ours: Sequence[SimulatedOutcome]) -> Iterator[str]:
    counts: Counter[str] = Counter()
    for outcome in ours:
        counts.update(outcome.faults)
    if counts:
        yield f"faults in {OURS}, {len(ours)} run(s): " + ", ".join(f"{kind} {count}" for kind, count in counts.items())
    elif scenario.faults != type(scenario.faults)():
        yield f"faults in {OURS}: none struck"
