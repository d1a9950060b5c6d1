"""`python -m nemo_rl.time_sharing`: simulate a scenario, check a log, turn a log into a trace or a report, soak.

Exit status 0 when all is well, 1 when the checker found a violation or jobs did not finish, 2 when the input cannot be
used.
"""

from __future__ import annotations

import argparse
import logging
import math
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
from nemo_rl.time_sharing.arguments import add_page_arguments, add_pool_arguments
from nemo_rl.time_sharing.history.check import INVARIANTS, check, refuse_nothing
from nemo_rl.time_sharing.log import events as _events  # registers the scheduler's event kinds
from nemo_rl.time_sharing.log.comparison import LEGEND, Simulated
from nemo_rl.time_sharing.log.reading import read_logs
from nemo_rl.time_sharing.log.segments import segments_of
from nemo_rl.time_sharing.planning.validator import validate
from nemo_rl.time_sharing.simulation.baselines import OURS, WAYS, way
from nemo_rl.time_sharing.simulation.coverage import EXPECTED
from nemo_rl.time_sharing.simulation.fit import fit
from nemo_rl.time_sharing.simulation.results import AloneTimes, Outcome, run_way, summarise
from nemo_rl.time_sharing.simulation.scenario import Scenario, load_scenario
from nemo_rl.time_sharing.simulation.scenario_page import DEFAULT_PAGE, scenario_page
from nemo_rl.time_sharing.simulation.soak import run_many
from nemo_rl.time_sharing.simulation.tables import simulated
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.time_sharing.viewing.report import write_report
from nemo_rl.time_sharing.viewing.timeline import build_timeline
from nemo_rl.time_sharing.viewing.trace import write_trace
from nemo_rl.utils.record import NullRecord, Record, RecordDamaged, RecordWriter, read_record

logger = logging.getLogger(__name__)

_KINDS = _events.__name__
_SOAK_BATCH = 200
_ENOUGH_SCENARIOS = 1000
_EXAMPLES = """examples:
  python -m nemo_rl.time_sharing simulate examples/time_sharing/two_jobs.yaml --report two.html
  python -m nemo_rl.time_sharing simulate examples/time_sharing/with_faults.yaml --runs 5
  python -m nemo_rl.time_sharing check two.jsonl
  python -m nemo_rl.time_sharing trace two.jsonl
  python -m nemo_rl.time_sharing fit logs/time_sharing/latest/*.jsonl -o mine.yaml
  python -m nemo_rl.time_sharing soak --runs 200
  python -m nemo_rl.time_sharing serve --gpus 8
  python -m nemo_rl.time_sharing page logs/time_sharing/latest

The keys of a scenario: docs/time_sharing_scenarios.md
The rules and the columns of the table: docs/time_sharing_scheduler.md."""


class UsageError(UserError, ValueError):
    """A command cannot be carried out as asked; found before anything is run or written."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    chosen = parser().parse_args(arguments)
    logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
    package = logging.getLogger("nemo_rl")
    before = package.level
    # What a scenario breaks on purpose is counted in the table; each event of it would be told without its way and
    # seed.
    quiet = logging.CRITICAL if chosen.run in (_simulate, _soak) else logging.ERROR
    package.setLevel(logging.INFO if chosen.verbose else quiet)
    try:
        return int(chosen.run(chosen))
    except RecordDamaged as error:
        print(_of_damage(error), file=sys.stderr)
    except UserError as error:
        print(error, file=sys.stderr)
    except BrokenPipeError:
        return 0  # whoever read the output has seen enough
    except OSError as error:
        print(f"{error.filename or 'output'}: {error.strerror}", file=sys.stderr)
    finally:
        package.setLevel(before)
    return 2


def parser() -> argparse.ArgumentParser:
    """All commands with their arguments."""
    about = "Many RL pipelines on one pool of GPUs: share, simulate, check, look."
    whole = argparse.ArgumentParser(
        prog="python -m nemo_rl.time_sharing",
        description=about,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="log what the scheduler does, and every fault (also after the command)",
    )
    commands = whole.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        added.add_argument(
            "-v",
            "--verbose",
            action="store_true",
            default=argparse.SUPPRESS,
            help="log what the scheduler does, and every fault",
        )
        added.set_defaults(run=run)
        return added

    _simulate_arguments(
        command(
            "simulate",
            _simulate,
            "run a scenario on a virtual clock and compare it with other ways of running the same jobs",
        )
    )
    checker = command(
        "check", _check, "prove that a record kept every invariant, or show the first place where it did not"
    )
    _log_arguments(checker)
    checker.add_argument(
        "--running", action="store_true", help="the run is not over, or was cut off: what is open is not missing"
    )
    trace = command("trace", _trace, "write a trace for https://ui.perfetto.dev")
    _log_arguments(trace)
    trace.add_argument("-o", "--output", type=Path, help="the trace (default: beside the first record, .trace.json)")
    report = command(
        "report",
        _report,
        "write a self-contained HTML page: who was on which GPU when, demand, hand-overs, and the checker's word",
    )
    _log_arguments(report)
    report.add_argument("-o", "--output", type=Path, help="the page (default: beside the first record, .html)")
    page = command("page", _page, "serve the page of a pool's log, finished or still growing, until interrupted")
    page.add_argument("log_dir", type=Path, help="where the scheduler wrote, such as logs/time_sharing/latest")
    add_page_arguments(page)
    soak = command("soak", _soak, "run random scenarios with faults and check each of them")
    soak.add_argument(
        "--events",
        type=_events_count,
        default=5e7,
        help="stop after that many simulated events (default: 5e7, about ten minutes on two cores)",
    )
    soak.add_argument("--runs", type=_count, help="stop after that many scenarios instead, at least 1")
    soak.add_argument(
        "--first",
        type=int,
        default=1_000_000,
        help="the first seed; each scenario is drawn from its seed (default: %(default)s)",
    )
    soak.add_argument(
        "--processes", type=_count, default=2, help="processes that simulate at a time (default: %(default)s)"
    )
    _live_commands(command)
    fitting = command("fit", _fit, "make a scenario of a run's own times, and say how well it predicts the run")
    _log_arguments(fitting)
    fitting.add_argument("-o", "--output", type=Path, required=True, help="the scenario file to write")
    keys = command("keys", _keys, "write the page that describes every key of a scenario file")
    keys.add_argument("-o", "--output", type=Path, default=DEFAULT_PAGE, help="the page (default: %(default)s)")
    return whole


def _live_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """The commands on live pools; what they do is imported only when one is given."""

    def live(name: str) -> Callable[[argparse.Namespace], int]:
        def run(chosen: argparse.Namespace) -> int:
            from nemo_rl.time_sharing import launcher

            return launcher.guarded(lambda: getattr(launcher, name)(chosen))

        return run

    serving = command("serve", live("serve"), "open a pool on this machine's GPUs and keep it until interrupted")
    add_pool_arguments(serving)
    add_page_arguments(serving)
    submitting = command("submit", live("submit"), "submit pipelines to the open pool")
    submitting.add_argument("files", nargs="+", metavar="FILE", help="configurations, and key=value for all of them")
    submitting.add_argument("--wait", action="store_true", help="until they have ended; an interrupt cancels them")
    for name in ("status", "list"):
        command(name, live("status"), "show the pipelines of the open pool")
    for name, what in (("drain", "let pipelines go once they gave back what they hold"), ("cancel", "end pipelines")):
        command(name, live(name), what).add_argument("names", nargs="+", metavar="NAME")


def _page(chosen: argparse.Namespace) -> int:
    from nemo_rl.time_sharing.viewing.page_server import PageServer, PoolView

    log_dir = chosen.log_dir if chosen.log_dir.is_dir() else chosen.log_dir.parent
    if not segments_of(log_dir / "scheduler.jsonl"):
        raise UsageError(f"{log_dir}: there is no scheduler.jsonl; give the folder that a pool wrote its log to")
    server = PageServer(PoolView(log_dir), host=chosen.host, port=chosen.port, token=os.environ.get("NRL_POOL_TOKEN"))
    print(server.url, flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
    return 0


def _simulate_arguments(simulate: argparse.ArgumentParser) -> None:
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
        "--runs", type=_count, default=1, help="how many seeds: seed, seed+1, ... (default: %(default)s)"
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


def _log_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, nargs="+", help="the record of a run; several are merged by time")
    parser.add_argument(
        "--recover", action="store_true", help="read a damaged record up to the damage, as a run that did not end"
    )


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _events_count(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1, such as 5e7")
    return number


def _simulate(chosen: argparse.Namespace) -> int:
    scenario = load_scenario(chosen.scenario)
    log = chosen.log or (chosen.report.with_suffix(".jsonl") if chosen.report else None)
    _check_outputs(log, chosen.report)
    alone = AloneTimes(scenario)
    rows: list[tuple[str, list[Outcome]]] = []
    recording = _Recording(log) if log is not None else None
    try:
        for name in (OURS,) if chosen.only_ours else WAYS:
            rows.append((name, []))
            for seed in range(chosen.seed, chosen.seed + chosen.runs):
                logger.info("event=run way=%s seed=%d", name, seed)
                first = recording is not None and name == OURS and seed == chosen.seed
                rows[-1][1].append(
                    recording.run(scenario, seed, alone)
                    if recording is not None and first
                    else run_way(scenario, name, seed, alone)
                )
        said = simulated(scenario, chosen.seed, rows)
        if recording is not None:
            recording.add(said)
    finally:
        if recording is not None:
            recording.close()
    print(
        f"{scenario.name}: {len(scenario.jobs)} jobs, {scenario.gpu_pool.size} GPUs, {chosen.runs} run(s) "
        f"from seed {chosen.seed}\n"
    )
    _print_said(said)
    broken = _judge(log, chosen.report, scenario.name) if log is not None else 0
    return 1 if broken or any(o.unfinished for o in rows[0][1]) else 0


class _Recording:
    """The record of one run, held open until what the simulation says of all its runs is in it too."""

    def __init__(self, log: Path) -> None:
        self._log, self._end = log, 0.0
        self._writer: RecordWriter | None = None

    def run(self, scenario: Scenario, seed: int, alone: AloneTimes) -> Outcome:
        changed, rule = way(scenario, OURS)
        world = World(changed, seed, self._open, rule=rule, validator=validate)
        world.run()
        self._end = world.loop.now
        return summarise(world, scenario, seed, alone)

    def _open(self, clock: Callable[[], float]) -> Record:
        self._log.unlink(missing_ok=True)
        self._writer = RecordWriter(self._log, source="simulation", clock=clock)
        return self._writer

    def add(self, event: object) -> None:
        if self._writer is not None:
            self._writer.bind("simulation", clock=lambda: self._end).emit(event)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _check_outputs(log: Path | None, report: Path | None) -> None:
    """What is to be written can be, and is nothing else already: found before the simulation, not after it."""
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
        write_report(build_timeline(entries), violations, report, title=title)
        print(f"report: {report}")
    return len(violations)


def _print_said(said: Simulated) -> None:
    if len(said.jobs) > 1:
        _print_table(said.jobs)
        print()
    _print_table(said.ways)
    print()
    for word, meaning in LEGEND:
        print(f"  {word:<14}  {meaning}")
    if said.notes:
        print("\n" + "\n".join(said.notes))


def _print_table(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print(
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _of_damage(damage: RecordDamaged) -> str:
    if not damage.intact:
        return f"{damage.path}: is not a record of nemo_rl: line 1 {damage.reason}"
    place = f"{damage.path}: line {damage.line} (byte {damage.offset}) {damage.reason}"
    return (
        f"{place}; the {damage.intact} lines before it are intact: with --recover, check, trace and "
        "report read up to there"
    )


def _check(chosen: argparse.Namespace) -> int:
    began = time.perf_counter()
    entries, whole = read_logs(chosen.log, recover=chosen.recover, say=_say)
    violations = check(entries, first_only=True, ended=whole and not chosen.running)
    if violations:
        print(violations[0])
        return 1
    print(
        f"{', '.join(map(str, chosen.log))}: {len(entries)} events keep all {len(INVARIANTS)} invariants "
        f"({time.perf_counter() - began:.1f} s)"
    )
    return 0


def _trace(chosen: argparse.Namespace) -> int:
    output = chosen.output or chosen.log[0].with_suffix(".trace.json")
    entries = read_logs(chosen.log, recover=chosen.recover, say=_say)[0]
    refuse_nothing(entries)
    count = write_trace(entries, output)
    print(f"{output}: {count} trace events; open it at https://ui.perfetto.dev")
    return 0


def _report(chosen: argparse.Namespace) -> int:
    output = chosen.output or chosen.log[0].with_suffix(".html")
    entries, whole = read_logs(chosen.log, recover=chosen.recover, say=_say)
    # First, as it refuses what no picture can be made of.
    violations = check(entries, ended=whole)
    timeline = build_timeline(entries)
    title = timeline.simulated.scenario if timeline.simulated is not None else chosen.log[0].stem
    write_report(timeline, violations, output, title=title)
    print(f"{output}: {len(entries)} events")
    return 0


def _keys(chosen: argparse.Namespace) -> int:
    chosen.output.write_text(scenario_page(), encoding="utf-8")
    print(f"wrote {chosen.output}")
    return 0


def _fit(chosen: argparse.Namespace) -> int:
    entries, _ = read_logs(chosen.log, recover=chosen.recover, say=_say)
    _check_outputs(None, chosen.output)
    fitted = fit(entries)
    chosen.output.write_text(yaml.safe_dump(fitted.scenario.model_dump(mode="json", exclude_unset=True)))
    world = World(fitted.scenario, 0, lambda clock: NullRecord())
    world.run()
    lines = [("job", "measured", "simulated", "ratio")]
    for name, measured in fitted.measured.items():
        run = world.jobs[name]
        seconds = (run.finished_at or world.loop.now) - run.job.arrive_s
        lines.append((name, f"{measured:.1f} s", f"{seconds:.1f} s", f"{seconds / measured:.2f}"))
    _print_table(lines)
    print(f"{chosen.output}: simulate it, change it, simulate it again")
    return 0


def _soak(chosen: argparse.Namespace) -> int:
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
    _print_table([("decision or transition", "times"), *((what, f"{n:,}") for what, n in sorted(decided.items()))])
    missed = [what for what in EXPECTED if not decided[what]]
    if missed and len(counts) >= _ENOUGH_SCENARIOS:
        print(f"never reached: {'; '.join(missed)}")
    return 1 if bad or (missed and len(counts) >= _ENOUGH_SCENARIOS) else 0
