"""The commands that simulate: one scenario against other ways of running its jobs, and random ones by the thousand."""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from nemo_rl.config.errors import UserError
from nemo_rl.time_sharing.arguments import count
from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log.accounts import accounts_if_any
from nemo_rl.time_sharing.log.comparison import LEGEND, Simulated
from nemo_rl.time_sharing.log.reading import read_logs
from nemo_rl.time_sharing.simulation.baselines import OURS, worth_comparing
from nemo_rl.time_sharing.simulation.coverage import EXPECTED
from nemo_rl.time_sharing.simulation.fit import fit as fit_scenario
from nemo_rl.time_sharing.simulation.random_scenarios import run_many
from nemo_rl.time_sharing.simulation.results import AloneTimes, SimulatedOutcome, run_way
from nemo_rl.time_sharing.simulation.scenario import Scenario
from nemo_rl.time_sharing.simulation.scenario_reading import load_scenario
from nemo_rl.time_sharing.simulation.tables import simulated
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.time_sharing.viewing.pool_report import write_report
from nemo_rl.time_sharing.viewing.timeline import build_timeline
from nemo_rl.utils.progress import format_duration
from nemo_rl.utils.record import NullRecord, Record, RecordWriter, read_record

logger = logging.getLogger(__name__)

_SOAK_BATCH = 200
_ENOUGH_SCENARIOS = 1000
_FAR_OFF = 0.1
_SAID_EVERY_S, _ENOUGH_SHARE = 10.0, 0.05


class UsageError(UserError, ValueError):
    """A command cannot be carried out as asked; found before anything is run or written."""


def add_simulate_arguments(simulate: argparse.ArgumentParser) -> None:
    simulate.epilog = (
        "Without --log and --report nothing is written. Exit status 1: a job did not finish in our way, or "
        "an invariant is broken. "
        "Example: simulate examples/time_sharing/two_jobs.yaml --report two.html writes two.html and two.jsonl."
    )
    simulate.add_argument("scenario", type=Path, help="a scenario file; its keys are in docs/time_sharing_scenarios.md")
    simulate.add_argument(
        "--seed", type=int, default=0, help="the first seed; equal seeds give equal runs (default: %(default)s)"
    )
    simulate.add_argument(
        "--runs", type=count, default=1, help="how many seeds: seed, seed+1, ... (default: %(default)s)"
    )
    simulate.add_argument(
        "--log",
        type=Path,
        help="write the record of the first run here, and check it; `check`, `trace` and `report` read it",
    )
    simulate.add_argument(
        "--report",
        type=Path,
        help="write the HTML page of the first run here, and its record beside it (.jsonl) unless --log says where",
    )
    simulate.add_argument("--only-ours", action="store_true", help="leave the other ways of running the jobs out")


def simulate(chosen: argparse.Namespace) -> int:
    scenario = load_scenario(chosen.scenario)
    log = chosen.log or (chosen.report.with_suffix(".jsonl") if chosen.report else None)
    check_outputs(log, chosen.report)
    rows: list[tuple[str, list[SimulatedOutcome]]] = []
    writer: RecordWriter | None = None
    ways = (OURS,) if chosen.only_ours else tuple(worth_comparing(scenario))
    progress = SimulationProgress(scenario, len(ways), chosen.runs)
    alone = AloneTimes(scenario, watch=progress.begins)

    def record(clock: Callable[[], float]) -> Record:
        nonlocal writer
        if log is None or writer is not None:
            return NullRecord()
        # The first run's, kept open until the comparison of all runs is written to it.
        log.unlink(missing_ok=True)
        writer = RecordWriter(log, source="simulation", clock=clock)
        return writer

    try:
        for name in ways:
            rows.append((name, []))
            for seed in range(chosen.seed, chosen.seed + chosen.runs):
                logger.info("event=run way=%s seed=%d", name, seed)
                progress.way = name
                rows[-1][1].append(run_way(scenario, name, seed, alone, record))
        said = simulated(scenario, chosen.seed, rows)
        if writer is not None:
            writer.emit(said)
    finally:
        progress.end()
        if writer is not None:
            writer.close()
    pool = scenario.gpu_pool
    slots = f" of {pool.slots_per_gpu} slots" if pool.slots_per_gpu > 1 else ""
    print(
        f"{scenario.name}: {len(scenario.jobs)} jobs, {pool.gpus} GPUs{slots}, {chosen.runs} run(s) "
        f"from seed {chosen.seed}\n"
    )
    _print_said(said)
    broken = _judge(log, chosen.report, scenario.name) if log is not None else 0
    return 1 if broken or any(o.unfinished for o in rows[0][1]) else 0


class SimulationProgress:
    """Progress of long simulations, on standard error.

    The remaining time is estimated from the steps still to be simulated: all jobs' steps in every way, and alone.
    """

    def __init__(
        self, scenario: Scenario, ways: int, runs: int, *, say: Callable[[str], object] = sys.stderr.write
    ) -> None:
        self.way = ""
        self._say = say
        steps = sum(job.steps for job in scenario.jobs)
        self._total = max(steps * (ways + 1) * runs, 1)
        self._name, self._before = scenario.name, 0
        self._world: World | None = None
        self._began = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="simulation-progress", daemon=True)
        self._thread.start()

    def begins(self, world: World) -> None:
        """This simulation runs from now on; the one before is over."""
        self._before += _trained(self._world)
        self._world = world

    def end(self) -> None:
        """Stops the reports."""
        self._over.set()
        self._thread.join()

    def line(self, seconds: float) -> str:
        """How far it is after so many seconds."""
        share = min((self._before + _trained(self._world)) / self._total, 1.0)
        left = f", about {format_duration(seconds / share - seconds)} left" if share > _ENOUGH_SHARE else ""
        way = f" ({self.way})" if self.way else ""
        return f"simulating {self._name}{way}: {share:.0%} after {format_duration(seconds)}{left}"

    def _watch(self) -> None:
        while not self._over.wait(_SAID_EVERY_S):
            self._say(self.line(time.monotonic() - self._began) + "\n")


def _trained(world: World | None) -> int:
    return 0 if world is None else sum(world.jobs[job.name].trained_steps for job in world.scenario.jobs)


def check_outputs(log: Path | None, report: Path | None) -> None:
    """Checks before the simulation that the outputs are writable and distinct. Raises UsageError."""
    if report is not None and log == report:
        raise UsageError(
            f"--report {report}: the record would be written there too; call the page something else, such "
            f"as {report.with_suffix('.html')}"
        )
    for option, path in (("--report", report), ("--log", log)):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise UsageError(f"{option} {path}: there is no folder {path.parent}; make it, or choose another place")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UsageError(f"{option} {path}: cannot be written; choose another place")
    if log is not None and log.exists() and log.stat().st_size:
        with log.open("rb") as file:
            if not file.read(8) == b'{"crc":"':
                raise UsageError(f"--log {log}: is there already and is not a record of nemo_rl; choose another place")


def _judge(log: Path, report: Path | None, title: str) -> int:
    entries = list(read_record(log))
    violations = check(entries)
    print(
        f"\nrecord: {log} ({len(entries)} events); "
        + (f"{len(violations)} violations, first: {violations[0]}" if violations else "every invariant holds")
    )
    if report is not None:
        write_report(build_timeline(entries), accounts_if_any(entries), violations, report, title=title)
        print(f"report: {report}")
    return len(violations)


def _print_said(said: Simulated) -> None:
    if len(said.jobs) > 1:
        print_table(said.jobs)
        print()
    print_table(said.ways)
    print()
    for word, meaning in LEGEND:
        print(f"  {word:<14}  {meaning}")
    if said.notes:
        print("\n" + "\n".join(said.notes))


def print_table(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print(
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
        )


def soak(chosen: argparse.Namespace) -> int:
    began, events, bad = time.perf_counter(), 0, 0
    counts: list[int] = []
    decided: Counter[str] = Counter(dict.fromkeys(EXPECTED, 0))
    while (len(counts) < chosen.runs) if chosen.runs is not None else (events < chosen.events):
        batch = min(_SOAK_BATCH, chosen.runs - len(counts)) if chosen.runs is not None else _SOAK_BATCH
        for verdict in run_many(chosen.first + len(counts), batch, chosen.processes):
            events += verdict.events
            counts.append(verdict.events)
            decided.update(verdict.reached)
            if not verdict.clean:
                bad += 1
                print(
                    f"seed {verdict.seed}: "
                    f"{verdict.violations[0] if verdict.violations else f'never ended: {verdict.stuck}'}",
                    flush=True,
                )
        seconds = time.perf_counter() - began
        shown = (
            f"{len(counts)} scenarios, {events:,} events, median {statistics.median(counts):.0f}, {bad} "
            f"bad, {seconds:.0f} s"
        )
        print(f"{shown}, {events / seconds / chosen.processes:,.0f} events/s and process", flush=True)
    print_table([("decision or transition", "times"), *((what, f"{n:,}") for what, n in sorted(decided.items()))])
    missed = [what for what in EXPECTED if not decided[what]]
    if missed and len(counts) >= _ENOUGH_SCENARIOS:
        print(f"never reached: {'; '.join(missed)}")
    return 1 if bad or (missed and len(counts) >= _ENOUGH_SCENARIOS) else 0


def fit(chosen: argparse.Namespace) -> int:
    entries, _ = read_logs(chosen.log, recover=chosen.recover)
    check_outputs(None, chosen.output)
    fitted = fit_scenario(entries)
    chosen.output.write_text(yaml.safe_dump(fitted.scenario.model_dump(mode="json", exclude_unset=True)))
    world = World(fitted.scenario, 0, lambda clock: NullRecord())
    world.run()
    lines = [("job", "measured", "simulated", "ratio")]
    for name, measured in fitted.measured.items():
        run = world.jobs[name]
        seconds = (run.finished_at or world.loop.now) - run.job.arrive_s
        lines.append((name, f"{measured:.1f} s", f"{seconds:.1f} s", f"{seconds / measured:.2f}"))
    print_table(lines)
    off = [name for name, _, _, ratio in lines[1:] if abs(float(ratio) - 1) > _FAR_OFF]
    if off:
        print(
            f"far off: the simulation of {', '.join(off)} differs by more than {_FAR_OFF:.0%} from the run; do not "
            "draw conclusions from differences of that size. Usual causes: a short run, jobs that were drained, "
            "cancelled or restarted, first starts of engines, and a machine with other work on it"
        )
    print(f"{chosen.output}: simulate it, change it, simulate it again")
    return 0
