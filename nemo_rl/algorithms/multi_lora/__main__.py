"""The command line of many adapters: runs a job, and adds, removes and lists adapters of one that runs.

Invariant: a mistake in the base's or an adapter's file is reported before Ray or torch is imported.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl.algorithms.launch import Interrupts, directories_of_its_own, ending_with_ray, interruptible
from nemo_rl.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, log_to_stderr, usage_error
from nemo_rl.config.errors import ConfigError, UserError, in_one_line
from nemo_rl.config.master import MultiLoraMasterConfig
from nemo_rl.config.multi_lora import AdapterConfig, check_adapter, load_adapter, load_base
from nemo_rl.distributed.processes import collect_rarely, importing
from nemo_rl.utils.directory_lock import DirectoryInUse

if TYPE_CHECKING:
    from nemo_rl.algorithms.multi_lora.job import AdapterState

_COMMANDS = ("add", "remove", "list")
_WAIT_S = 0.5


@dataclass(frozen=True)
class Membership:
    """The pool that runs a job.

    Attributes:
        job: The job's name there, which tells its adapters from those of other jobs.
        records: Folder of the pool's log.
        device_bytes: Memory of each GPU for engines and for training, where others use it too.
    """

    job: str
    records: Path
    device_bytes: Sequence[int] | None = None


def main(arguments: Sequence[str], *, prog: str | None = None) -> int:
    """Runs a job of adapters, or one of `add FILE ...`, `remove NAME ...` and `list` on the job of `--log-dir`. Returns
    the exit code: 0 all adapters are done, 1 one failed, 2 a configuration is wrong, 130 interrupted.
    """
    log_to_stderr()
    if arguments and arguments[0] in _COMMANDS:
        return _command(arguments[0], arguments[1:], prog)
    collect_rarely()
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Trains many adapters on one base model; further arguments are overrides of the base's file.",
    )
    parser.add_argument("--config", type=Path, required=True, help="the base's YAML file")
    parser.add_argument("--adapters", type=Path, nargs="*", default=[], help="a YAML file per adapter")
    parser.add_argument("--stay", action="store_true", help="wait for more adapters when all are done, until Ctrl-C")
    parser.add_argument("--job", default="", help="the job's name in the pool that runs it")
    parser.add_argument("--records", type=Path, help="folder of the pool's log, for what happens to the adapters")
    parser.add_argument(
        "--device-bytes", type=int, nargs=2, metavar=("ENGINES", "TRAINING"), help="memory of each GPU in a pool's slot"
    )
    options, overrides = parser.parse_known_args(list(arguments))
    if bool(options.job) != bool(options.records):
        parser.error("--job and --records belong together: a pool passes both")
    # Overrides may follow the files, whose number is free.
    overrides += [str(path) for path in options.adapters if "=" in str(path)]
    options.adapters = [path for path in options.adapters if "=" not in str(path)]
    return interruptible(lambda: _train(options, overrides))


def _train(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    try:
        base, raw = load_base(options.config, overrides)
        adapters = _load_all(base, raw, options.adapters)
        if not adapters and not options.stay:
            raise ConfigError(["--adapters: names no file; name some, or pass --stay and add them later"])
    except (UserError, OSError) as error:
        return usage_error(error)
    try:
        # Two jobs would take each other's requests, logs and checkpoints.
        with directories_of_its_own(base):
            pool = Membership(options.job, options.records, options.device_bytes) if options.job else None
            return run(base, raw, adapters, stay=options.stay, pool=pool)
    except DirectoryInUse as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED


def _load_all(base: MultiLoraMasterConfig, raw: Mapping[str, object], files: Sequence[Path]) -> list[AdapterConfig]:
    adapters: list[AdapterConfig] = []
    for file in files:
        adapter = load_adapter(raw, file)
        check_adapter(base, adapter, adapters)
        adapters.append(adapter)
    if len(adapters) > base.multi_lora.slots:
        raise ConfigError(
            [f"--adapters names {len(adapters)} files, and multi_lora.slots is {base.multi_lora.slots}; raise it"]
        )
    return adapters


def run(
    base: MultiLoraMasterConfig,
    raw: Mapping[str, object],
    adapters: Sequence[AdapterConfig],
    *,
    stay: bool = False,
    pool: Membership | None = None,
) -> int:
    """Runs checked adapters to their end; returns the exit code.

    Args:
        raw: The base's mapping, for adapters that are added later.
        stay: Wait for more adapters when all are done.
        pool: The pool that runs it, if one does.
    """
    from nemo_rl.algorithms.launch import _ray_ahead

    with _ray_ahead(base.cluster):
        with importing():
            from nemo_rl.algorithms.multi_lora.assembly import AdapterRecords, DeviceBytes, shared_parts
            from nemo_rl.algorithms.multi_lora.http import serve
            from nemo_rl.algorithms.multi_lora.job import MultiLoraJob, write_reports
            from nemo_rl.utils.progress import StartPhases

        start = StartPhases()
        device_bytes = DeviceBytes(*pool.device_bytes) if pool is not None and pool.device_bytes is not None else None
        records = AdapterRecords() if pool is None else AdapterRecords(pool.job, pool.records)
        states: list[AdapterState] = []
        reports: Future[list[Path]] | None = None
        code = EXIT_FAILED
        with (
            Interrupts() as interrupts,
            ending_with_ray(lambda: "the same command goes on from the newest checkpoints"),
            ThreadPoolExecutor(1, "reports") as reporting,
        ):
            try:
                with shared_parts(base, start, adapters=adapters, device_bytes=device_bytes) as shared:
                    members = MultiLoraJob(base, shared, records)
                    # It answers until the last adapter has left.
                    with ExitStack() as served:
                        try:
                            # A pool asks the job to leave once it answers: every adapter has joined by then.
                            for adapter in adapters:
                                members.add(adapter)
                            interrupts.save_first(members.end_after_steps)
                            server = serve(members, raw, Path(base.logger.log_dir), base.multi_lora.http_port)
                            start.say(f"add, remove and list adapters at {served.enter_context(server)}")
                            start.done()
                            while (not members.wait(_WAIT_S)) or (stay and not interrupts.save_asked):
                                records.keep([state.plain() for state in members.states()])
                        finally:
                            members.close()
                            states = members.states()
                            records.keep([state.plain() for state in states])
                            # Pictures are drawn while engines and workers end.
                            reports = reporting.submit(write_reports, states)
                failed = any(state.phase.value == "failed" for state in states)
                code = EXIT_INTERRUPTED if interrupts.save_asked else EXIT_FAILED if failed else EXIT_OK
            except KeyboardInterrupt:
                interrupts.ending()
                sys.stderr.write("interrupted: adapters are removed and workers ended\n")
                code = EXIT_INTERRUPTED
            except (UserError, OSError) as error:
                message = in_one_line(error)
                if message is None:
                    raise
                sys.stderr.write(f"{message}\n")
            finally:
                interrupts.ending()
        if states:
            _show(states)
        for path in reports.result() if reports is not None else ():
            sys.stderr.write(f"report: {path}\n")
    return code


def _show(states: Sequence[AdapterState]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="adapters", title_justify="left")
    for column in ("adapter", "state", "steps", "joined in", "logs"):
        table.add_column(column, overflow="fold")
    for state in states:
        joined = "-" if state.joined_in_s is None else f"{state.joined_in_s:.1f} s"
        steps = f"{state.step} of {state.total_steps}"
        table.add_row(state.name, state.phase.value, steps, joined, state.log_dir)
    Console(stderr=True).print(table)
    for state in states:
        if state.reason:
            sys.stderr.write(f"{state.name}: {state.phase.value}: {state.reason}\n")


def _command(command: str, arguments: Sequence[str], prog: str | None) -> int:
    from nemo_rl.algorithms.multi_lora.http import JobUnreachable, call

    parser = argparse.ArgumentParser(prog=f"{prog or ''} {command}".strip())
    parser.add_argument("--log-dir", type=Path, required=True, help="logger.log_dir of the job's base")
    if command == "add":
        parser.add_argument("files", nargs="+", type=Path, help="a YAML file per adapter")
    elif command == "remove":
        parser.add_argument("names", nargs="+", help="adapters")
    options = parser.parse_args(list(arguments))
    try:
        if command == "add":
            answers = [call(options.log_dir, "POST", "/adapters", {"file": str(f.resolve())}) for f in options.files]
        elif command == "remove":
            answers = [call(options.log_dir, "DELETE", f"/adapters/{name}") for name in options.names]
        else:
            answers = [call(options.log_dir, "GET", "/adapters")]
    except JobUnreachable as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED
    for answer in answers:
        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
