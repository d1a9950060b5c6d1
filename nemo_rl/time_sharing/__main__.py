"""`python -m nemo_rl.time_sharing`: simulate a scenario, check a log, turn a log into a trace or a report, soak.

Exit status 0 when all is well, 1 when the checker found a violation or jobs did not finish, 2 when the input cannot be
used.
"""

from __future__ import annotations

import argparse
import csv
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from nemo_rl.cli import EXIT_USAGE, usage_error
from nemo_rl.config.errors import UserError
from nemo_rl.time_sharing.arguments import (
    add_host_arguments,
    add_page_arguments,
    add_pool_arguments,
    count,
    events_count,
    from_now,
    seconds,
)
from nemo_rl.time_sharing.history.checker import INVARIANTS, check, survey
from nemo_rl.time_sharing.log.accounts import BY, accounts_if_any, accounts_of, in_whole_seconds, statement
from nemo_rl.time_sharing.log.pool_state import PoolState
from nemo_rl.time_sharing.log.reading import read_logs
from nemo_rl.time_sharing.log.segments import segments_of
from nemo_rl.time_sharing.simulation.simulation_commands import (
    UsageError,
    add_simulate_arguments,
    fit,
    print_table,
    simulate,
    soak,
)
from nemo_rl.time_sharing.team import TOKEN_VARIABLE, hash_of, new_token
from nemo_rl.time_sharing.viewing.pool_report import write_report
from nemo_rl.time_sharing.viewing.timeline import build_timeline
from nemo_rl.time_sharing.viewing.trace import write_trace
from nemo_rl.utils.record import RecordDamaged

_DRAIN_S = 900.0
_EXAMPLES = """examples:
  python -m nemo_rl.time_sharing simulate examples/time_sharing/two_jobs.yaml --report two.html
  python -m nemo_rl.time_sharing simulate examples/time_sharing/with_faults.yaml --runs 5
  python -m nemo_rl.time_sharing check two.jsonl
  python -m nemo_rl.time_sharing trace two.jsonl
  python -m nemo_rl.time_sharing account logs/time_sharing/latest --by job
  python -m nemo_rl.time_sharing fit logs/time_sharing/latest -o mine.yaml
  python -m nemo_rl.time_sharing soak --runs 200
  python -m nemo_rl.time_sharing serve --gpus 8
  python -m nemo_rl.time_sharing page logs/time_sharing/latest

The keys of a scenario: docs/time_sharing_scenarios.md
The rules and the columns of the table: docs/time_sharing_scheduler.md."""


def main(arguments: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Runs one command; returns the exit status."""
    chosen = parser(prog).parse_args(arguments)
    logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
    package = logging.getLogger("nemo_rl")
    before = package.level
    # What a scenario breaks on purpose is counted in the table; each event of it would be listed without its way and
    # seed.
    quiet = logging.CRITICAL if chosen.run in (simulate, soak) else logging.ERROR
    package.setLevel(logging.INFO if getattr(chosen, "verbose", False) else quiet)
    try:
        return int(chosen.run(chosen))
    except RecordDamaged as error:
        print(_of_damage(error), file=sys.stderr)
    except UserError as error:
        return usage_error(error)
    except BrokenPipeError:
        return 0  # the reader of the output closed the pipe
    except OSError as error:
        print(f"{error.filename or 'output'}: {error.strerror}", file=sys.stderr)
    finally:
        package.setLevel(before)
    return EXIT_USAGE


def parser(prog: str | None = None) -> argparse.ArgumentParser:
    """All commands with their arguments."""
    verbose = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    said = "log what the scheduler does, and every fault (also after the command)"
    verbose.add_argument("-v", "--verbose", action="store_true", help=said)
    whole = argparse.ArgumentParser(
        parents=[verbose],
        prog=prog or "python -m nemo_rl.time_sharing",
        description="Many RL pipelines on one pool of GPUs: share, simulate, check, look.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = whole.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        about = summary[0].upper() + summary[1:] + "."
        added = commands.add_parser(name, parents=[verbose], help=summary, description=about)
        added.set_defaults(run=run)
        return added

    def of_records(name: str, run: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        added = command(name, run, summary)
        added.add_argument("log", type=Path, nargs="+", help="a record, or the folder of a pool's; several are merged")
        recovers = "read a damaged record up to the damage, as a run that did not end"
        added.add_argument("--recover", action="store_true", help=recovers)
        return added

    add_simulate_arguments(
        command(
            "simulate",
            simulate,
            "run a scenario on a virtual clock and compare it with other ways of running the same jobs",
        )
    )
    checker = of_records(
        "check", _check, "prove that a record kept every invariant, or show the first place where it did not"
    )
    checker.add_argument(
        "--running", action="store_true", help="the run is not over, or was cut off: what is open is not missing"
    )
    trace = of_records("trace", _trace, "write a trace for https://ui.perfetto.dev")
    trace.add_argument("-o", "--output", type=Path, help="the trace (default: beside the first record, .trace.json)")
    report = of_records(
        "report",
        _report,
        "write a self-contained HTML page: who was on which GPU when, demand, hand-overs, and the checker's word",
    )
    report.add_argument("-o", "--output", type=Path, help="the page (default: beside the first record, .html)")
    account = of_records(
        "account",
        _account,
        "say who had the GPUs for what, in GPU-seconds, and what came of it; sums are the pool's time",
    )
    account.add_argument("--by", choices=BY, default="job", help="a row for each (default: job)")
    account.add_argument("--csv", action="store_true", help="for programs")
    page = command("page", _page, "serve the page of a pool's log, finished or still growing, until interrupted")
    page.add_argument("log_dir", type=Path, help="where the scheduler wrote, such as logs/time_sharing/latest")
    add_page_arguments(page)
    soaking = command("soak", soak, "run random scenarios with faults and check each of them")
    soaking.add_argument(
        "--events",
        type=events_count,
        default=5e7,
        help="stop after that many simulated events (default: 5e7, about ten minutes on two cores)",
    )
    soaking.add_argument("--runs", type=count, help="stop after that many scenarios instead, at least 1")
    soaking.add_argument(
        "--first",
        type=int,
        default=1_000_000,
        help="the first seed; each scenario is drawn from its seed (default: %(default)s)",
    )
    soaking.add_argument(
        "--processes", type=count, default=2, help="processes that simulate at a time (default: %(default)s)"
    )
    _live_commands(command)
    fitting = of_records("fit", fit, "make a scenario of a run's own times, and say how well it predicts the run")
    fitting.add_argument("-o", "--output", type=Path, required=True, help="the scenario file to write")
    return whole


def _live_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Commands on live pools; the code behind a command is imported when it is used."""

    def live(name: str) -> Callable[[argparse.Namespace], int]:
        def run(chosen: argparse.Namespace) -> int:
            from nemo_rl.time_sharing import launcher, pool_commands

            if name == "serve":
                return pool_commands.guarded(lambda: launcher.serve(chosen), launcher.ENDED)
            return pool_commands.guarded(lambda: getattr(pool_commands, name)(chosen))

        return run

    def of_open_pool(name: str, summary: str, function: str = "") -> argparse.ArgumentParser:
        added = command(name, live(function or name.replace("-", "_")), summary)
        added.add_argument(
            "--pool",
            metavar="NAME",
            help="which of your open pools, by its name or process, or the path of the pool file of a team's (default: "
            "what NRL_POOL says, else the only one)",
        )
        return added

    serving = command("serve", live("serve"), "open a pool on this machine's GPUs and keep it until interrupted")
    add_pool_arguments(serving)
    add_page_arguments(serving)
    serving.add_argument(
        "--team",
        type=Path,
        metavar="FILE",
        help="users, with their tokens and roles, who may use the pool, and their groups (docs/team_pool.md)",
    )
    serving.add_argument(
        "--run-as-submitter",
        action="store_true",
        help="with --team, as root: a job's processes run as the Unix user of its submitter, and its files are that "
        "user's (default: as the pool's Unix user)",
    )
    serving.add_argument(
        "--max-nodes",
        type=count,
        metavar="N",
        help="nodes that the pool may have, those that join later by add-node counted in (default: --nodes)",
    )
    serving.add_argument(
        "--continue-from",
        type=Path,
        metavar="LOG",
        help="submit again, with their checkpoints, the jobs that the pool with its log in this folder had not ended",
    )
    serving.add_argument(
        "--grace",
        type=seconds,
        metavar="SECONDS",
        help="at the first SIGTERM or interrupt let jobs save, for so long, and keep those that have not ended for "
        "--continue-from (default: they are ended at once)",
    )
    add_host_arguments(serving)
    submitting = of_open_pool("submit", "submit pipelines to the open pool")
    submitting.add_argument("files", nargs="+", metavar="FILE", help="configurations, and key=value for all of them")
    submitting.add_argument("--wait", action="store_true", help="until they have ended; an interrupt cancels them")
    submitting.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a variable that the pipelines get, as it is here or with this value; PYTHONPATH and the working "
        "directory are always taken along",
    )
    for name in ("status", "list"):
        showing = of_open_pool(name, "show the pipelines of the open pool", "status")
        showing.add_argument("--json", action="store_true", help="for programs")
    draining = of_open_pool("drain", "let pipelines finish their step, save and leave")
    draining.add_argument("names", nargs="+", metavar="NAME")
    draining.add_argument(
        "--deadline",
        type=seconds,
        default=_DRAIN_S,
        metavar="SECONDS",
        help="how long to wait for that before this command says what has not ended (default: %(default)g)",
    )
    cancelling = of_open_pool("cancel", "end pipelines at once; their last finished checkpoints stay")
    cancelling.add_argument("names", nargs="+", metavar="NAME")
    adapting = of_open_pool("adapters", "add, remove or list adapters of a job of many adapters")
    adapting.add_argument("what", choices=("add", "remove", "list"))
    adapting.add_argument("name", metavar="NAME", help="the job")
    adapting.add_argument("values", nargs="*", metavar="FILE|ADAPTER", help="files to add, or adapters to remove")
    of_open_pool("reload", "have the open pool read its team file again, and say what that changes")
    leaving = of_open_pool("drain-node", "clear a node: jobs move off it, and it is given back")
    leaving.add_argument("node", metavar="NAME", help="its number or host name, or how its Ray id begins (see status)")
    giving = of_open_pool("give-back", "clear as many nodes as have so many GPUs, those on which the least trains")
    giving.add_argument("gpus", type=count, metavar="K")
    for added in (leaving, giving):
        added.add_argument(
            "--by",
            type=from_now,
            required=added is giving,
            metavar="TIME",
            help="when it has to be clear, as 18:30, or in how long, as 10m: what still trains there then is ended",
        )
        added.add_argument("--no-wait", action="store_true", help="return at once, and not when it is clear")
    coming = of_open_pool("add-node", "take a node in that was drained, or that has joined the pool's Ray cluster")
    coming.add_argument("node", metavar="NAME", help="as of drain-node")
    command("token", _token, "make a token for a user of a team, and what the team file holds of it")
    explaining = of_open_pool("explain", "say who has each GPU and why")
    explaining.add_argument("names", nargs="*", metavar="NAME", help="only what concerns these pipelines")
    explaining.add_argument("--log-dir", type=Path, help="of a pool that is closed, such as logs/time_sharing/latest")


def _token(chosen: argparse.Namespace) -> int:
    token = new_token()
    print(f"token: {token}")  # it is written nowhere
    print(f"token_sha256: {hash_of(token)}")
    return 0


def _page(chosen: argparse.Namespace) -> int:
    from nemo_rl.time_sharing.viewing.page_server import PageServer, PoolView

    log_dir = chosen.log_dir if chosen.log_dir.is_dir() else chosen.log_dir.parent
    if not segments_of(log_dir / "scheduler.jsonl"):
        raise UsageError(f"{log_dir}: there is no scheduler.jsonl; give the folder that a pool wrote its log to")
    server = PageServer(PoolView(log_dir), host=chosen.host, port=chosen.port, token=os.environ.get(TOKEN_VARIABLE))
    print(server.url, flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
    return 0


def _of_damage(damage: RecordDamaged) -> str:
    if not damage.intact:
        return f"{damage.path}: is not a record of nemo_rl: line 1 {damage.reason}"
    before = f"the {damage.intact} lines before it are intact: with --recover, check, trace and report read up to there"
    return f"{damage.path}: line {damage.line} (byte {damage.offset}) {damage.reason}; {before}"


def _check(chosen: argparse.Namespace) -> int:
    began = time.perf_counter()
    entries, whole = read_logs(chosen.log, recover=chosen.recover)
    violations = check(entries, first_only=True, ended=whole and not chosen.running)
    if violations:
        print(violations[0])
        return 1
    read = f"{len(entries)} events" if whole else f"the {len(entries)} events before the damage, and no others,"
    print(
        f"{', '.join(map(str, chosen.log))}: {read} keep all {len(INVARIANTS)} invariants "
        f"({time.perf_counter() - began:.1f} s)"
    )
    if chosen.running or not whole:
        last = entries[-1]
        # A log has the machine's clock, a simulation its own from 0.
        when = (
            datetime.fromtimestamp(last.time, UTC).isoformat(" ", "seconds") if last.time > 1e9 else f"{last.time:g} s"
        )
        print(
            f"judged up to entry {last.seq} of {last.source}, {when}; lines that are missing behind it cannot be seen"
        )
    return 0


def _trace(chosen: argparse.Namespace) -> int:
    output = chosen.output or chosen.log[0].with_suffix(".trace.json")
    entries = read_logs(chosen.log, recover=chosen.recover)[0]
    survey(entries)
    kept = PoolState.read(chosen.log[0].parent / "pool.json")
    count = write_trace(entries, output, pool=kept.name, unit=kept.unit)
    print(f"{output}: {count} trace events; open it at https://ui.perfetto.dev")
    return 0


def _account(chosen: argparse.Namespace) -> int:
    rows = statement(accounts_of(read_logs(chosen.log, recover=chosen.recover)[0]), chosen.by)
    if chosen.csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows(rows)
    else:
        print_table(in_whole_seconds(rows))
    return 0


def _report(chosen: argparse.Namespace) -> int:
    output = chosen.output or chosen.log[0].with_suffix(".html")
    entries, whole = read_logs(chosen.log, recover=chosen.recover)
    # First, as it refuses what no picture can be made of.
    violations = check(entries, ended=whole)
    timeline = build_timeline(entries)
    pool = PoolState.read(chosen.log[0].parent / "pool.json")
    title = timeline.simulated.scenario if timeline.simulated is not None else pool.name or chosen.log[0].stem
    write_report(timeline, accounts_if_any(entries), violations, output, title=title, unit=pool.unit)
    print(f"{output}: {len(entries)} events")
    return 0


if __name__ == "__main__":
    sys.exit(main())
