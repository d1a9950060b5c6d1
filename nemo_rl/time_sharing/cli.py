"""`python -m nemo_rl.time_sharing`: simulate a scenario, check a log, turn a log into a trace or a report, soak.

Exit status 0 when all is well, 1 when the checker found a violation or jobs did not finish, 2 when the input cannot be used.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nemo_rl.time_sharing import events as _events  # registers the scheduler's event kinds
from nemo_rl.time_sharing.history.check import INVARIANTS, check
from nemo_rl.time_sharing.report import write_report
from nemo_rl.time_sharing.scenario import Scenario, ScenarioError, load_scenario
from nemo_rl.time_sharing.simulation.baselines import OURS, WAYS, way
from nemo_rl.time_sharing.simulation.results import AloneTimes, Outcome, run_way, summarise, table
from nemo_rl.time_sharing.simulation.soak import run_many
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.time_sharing.timeline import build_timeline
from nemo_rl.time_sharing.trace import write_trace
from nemo_rl.time_sharing.validator import validate
from nemo_rl.utils.record import Entry, Record, RecordError, RecordWriter, merge_records, read_record

_KINDS = _events.__name__
_SOAK_BATCH = 200


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    chosen = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO if chosen.verbose else logging.ERROR, format="%(levelname)s %(name)s %(message)s")
    try:
        return int(chosen.run(chosen))
    except (ScenarioError, RecordError) as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nemo_rl.time_sharing", description="Many RL pipelines on one pool of GPUs: simulate, check, look.")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what the scheduler does")
    commands = parser.add_subparsers(required=True)
    simulate = commands.add_parser("simulate", help="run a scenario on a virtual clock and compare it with other ways of running it")
    simulate.add_argument("scenario", type=Path)
    simulate.add_argument("--seed", type=int, default=0)
    simulate.add_argument("--runs", type=int, default=1, help="seeds seed, seed+1, ...")
    simulate.add_argument("--log", type=Path, help="write the record of the first run here")
    simulate.add_argument("--report", type=Path, help="write the HTML report of the first run here")
    simulate.add_argument("--only-ours", action="store_true", help="leave the baselines out")
    simulate.set_defaults(run=_simulate)
    checker = commands.add_parser("check", help="prove that a record kept every invariant, or show the first place where it did not")
    checker.add_argument("log", type=Path, nargs="+", help="the record of a run; several are merged by time")
    checker.add_argument("--recover", action="store_true", help="read a damaged record up to the damage")
    checker.add_argument("--running", action="store_true", help="the run is not over: what is open is not missing")
    checker.set_defaults(run=_check)
    trace = commands.add_parser("trace", help="write a trace for ui.perfetto.dev")
    trace.add_argument("log", type=Path, nargs="+", help="the record of a run; several are merged by time")
    trace.add_argument("-o", "--output", type=Path)
    trace.set_defaults(run=_trace)
    report = commands.add_parser("report", help="write a self-contained HTML page")
    report.add_argument("log", type=Path, nargs="+", help="the record of a run; several are merged by time")
    report.add_argument("-o", "--output", type=Path)
    report.set_defaults(run=_report)
    soak = commands.add_parser("soak", help="run random scenarios with faults and check each of them")
    soak.add_argument("--events", type=float, default=5e7, help="stop after that many simulated events")
    soak.add_argument("--runs", type=int, help="stop after that many scenarios instead")
    soak.add_argument("--first", type=int, default=1_000_000, help="the first seed")
    soak.add_argument("--processes", type=int, default=2)
    soak.set_defaults(run=_soak)
    return parser


def _simulate(chosen: argparse.Namespace) -> int:
    scenario = load_scenario(chosen.scenario)
    alone = AloneTimes(scenario)
    ways = (OURS,) if chosen.only_ours else WAYS
    rows: list[tuple[str, list[Outcome]]] = []
    broken = 0
    log = chosen.log or (chosen.report.with_suffix(".jsonl") if chosen.report else None)
    for name in ways:
        outcomes = []
        for seed in range(chosen.seed, chosen.seed + chosen.runs):
            first = name == OURS and seed == chosen.seed
            outcomes.append(_recorded_run(scenario, seed, alone, log) if first and log is not None else run_way(scenario, name, seed, alone))
        rows.append((name, outcomes))
    print(f"{scenario.name}: {len(scenario.jobs)} jobs, {scenario.gpu_pool.size} GPUs, {chosen.runs} run(s) from seed {chosen.seed}\n")
    _print_jobs(scenario, rows)
    _print_table(table(rows))
    if log is not None:
        entries = list(read_record(log))
        violations = check(entries)
        broken = len(violations)
        print(f"\nrecord: {log} ({len(entries)} events); " + (f"{broken} violations, first: {violations[0]}" if broken else "every invariant holds"))
        if chosen.report is not None:
            write_report(build_timeline(entries), violations, chosen.report, title=scenario.name)
            print(f"report: {chosen.report}")
    unfinished = sum(len(o.unfinished) for o in rows[0][1])
    return 1 if broken or unfinished else 0


def _recorded_run(scenario: Scenario, seed: int, alone: AloneTimes, log: Path) -> Outcome:
    log.unlink(missing_ok=True)
    writers: list[RecordWriter] = []

    def open_record(clock: Callable[[], float]) -> Record:
        writers.append(RecordWriter(log, source="simulation", clock=clock))
        return writers[0]

    changed, rule = way(scenario, OURS)
    world = World(changed, seed, open_record, rule=rule, validator=validate)
    try:
        world.run()
    finally:
        writers[0].close()
    return summarise(world, scenario, seed, alone)


def _print_jobs(scenario: Scenario, rows: Sequence[tuple[str, Sequence[Outcome]]]) -> None:
    if len(scenario.jobs) > 20:
        return
    lines = [["job", *[f"{name} s (slowdown)" for name, _ in rows]]]
    for job in scenario.jobs:
        cells = []
        for _, outcomes in rows:
            seconds = sum(o.seconds[job.name] for o in outcomes) / len(outcomes)
            slow = [o.slowdown[job.name] for o in outcomes if job.name in o.slowdown]
            cells.append(f"{seconds:.0f} ({sum(slow) / len(slow):.2f})" if slow else f"{seconds:.0f}")
        lines.append([job.name, *cells])
    _print_table(lines)
    print()


def _print_table(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths, strict=True))))


def _entries(logs: Sequence[Path], *, recover: bool = False) -> list[Entry]:
    """Every process of a real run writes a record of its own; a simulation writes one."""
    return list(merge_records(logs, recover=recover) if len(logs) > 1 else read_record(logs[0], recover=recover))


def _check(chosen: argparse.Namespace) -> int:
    began = time.perf_counter()
    entries = _entries(chosen.log, recover=chosen.recover)
    violations = check(entries, first_only=True, ended=not chosen.running)
    if violations:
        print(violations[0])
        return 1
    print(f"{', '.join(map(str, chosen.log))}: {len(entries)} events keep all {len(INVARIANTS)} invariants ({time.perf_counter() - began:.1f} s)")
    return 0


def _trace(chosen: argparse.Namespace) -> int:
    output = chosen.output or chosen.log[0].with_suffix(".trace.json")
    count = write_trace(_entries(chosen.log), output)
    print(f"{output}: {count} trace events; open it at https://ui.perfetto.dev")
    return 0


def _report(chosen: argparse.Namespace) -> int:
    output = chosen.output or chosen.log[0].with_suffix(".html")
    entries = _entries(chosen.log)
    write_report(build_timeline(entries), check(entries), output, title=chosen.log[0].stem)
    print(f"{output}: {len(entries)} events")
    return 0


def _soak(chosen: argparse.Namespace) -> int:
    began, events, bad = time.perf_counter(), 0, 0
    counts: list[int] = []
    while (len(counts) < chosen.runs) if chosen.runs else (events < chosen.events):
        batch = min(_SOAK_BATCH, chosen.runs - len(counts)) if chosen.runs else _SOAK_BATCH
        for verdict in run_many(chosen.first + len(counts), batch, chosen.processes):
            events += verdict.events
            counts.append(verdict.events)
            if not verdict.clean:
                bad += 1
                print(f"seed {verdict.seed}: {verdict.violations[0] if verdict.violations else f'never ended: {verdict.stuck}'}", flush=True)
        seconds = time.perf_counter() - began
        shown = f"{len(counts)} scenarios, {events:,} events, median {statistics.median(counts):.0f}, {bad} bad, {seconds:.0f} s"
        print(f"{shown}, {events / seconds / chosen.processes:,.0f} events/s and process", flush=True)
    return 1 if bad else 0
