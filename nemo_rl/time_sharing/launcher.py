"""Opens pools from a command line.

`run_together` opens one, runs some files side by side, shows their standings, and ends; `serve` keeps one open.
Invariants: a mistake in a file or a mapping is reported before Ray starts; while a pool is open its address is in a
file, so that `pool_commands` finds it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from nemo_rl.config.errors import UserError, did_you_mean
from nemo_rl.config.master import RootConfig
from nemo_rl.distributed.unix_users import why_not_root
from nemo_rl.time_sharing.arguments import (
    AUTO,
    DEFAULT_PORT,
    ON_END_VARIABLE,
    add_host_arguments,
    add_page_arguments,
    add_pool_arguments,
    check_variables,
    seconds_or_none,
)
from nemo_rl.time_sharing.job_queue import JobLimits
from nemo_rl.time_sharing.log.pool_state import HostLimits, PoolState, Standing
from nemo_rl.time_sharing.mps import multi_process_service
from nemo_rl.time_sharing.open_pools import (
    OpenPool,
    announced,
    announced_to_team,
    open_pools,
    team_group,
    team_pool_file,
)
from nemo_rl.time_sharing.opening import LIVE_LIMITS, close_pool, open_pool, wait_for_pipelines
from nemo_rl.time_sharing.pipelines.job import Job, in_folders, read_jobs
from nemo_rl.time_sharing.pipelines.slot_choice import choose_slots
from nemo_rl.time_sharing.pool import check_unix_users, log_trouble
from nemo_rl.time_sharing.pool_commands import (
    ask,
    check_code,
    files_and_overrides,
    guarded,
    submit_all,
    submitters_env,
    watch,
)
from nemo_rl.time_sharing.pool_jobs import PoolError, PoolOptions, WaitingJobs
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import Limits
from nemo_rl.time_sharing.shipped_scenarios import ALL, SCALE, fitted, shipped_scenarios
from nemo_rl.time_sharing.team import TOKEN_VARIABLE, Rights, Team, read_team
from nemo_rl.time_sharing.viewing.standings_table import ScenarioResult, print_scenarios, result_of
from nemo_rl.time_sharing.viewing.timeline import build_timeline

if TYPE_CHECKING:
    from ray.actor import ActorHandle

ENDED = "interrupted: every pipeline was ended; their last finished checkpoints are complete"
_TROUBLE_S = 15.0
_SMALL_MODELS = "results/scenarios/"
_OWN = ("jobs", "checkpoints")
"""Folders below a scenario's log directory for logs and checkpoints of its jobs."""


def run_together(arguments: Sequence[str], *, prog: str | None = None) -> int:
    """`examples/run_time_sharing.py`: some pipelines on a pool made for them; the exit code. Returns 0 when every
    pipeline is done and the record keeps every invariant, 1 otherwise, 2 for a wrong command line or configuration, 130
    when interrupted.
    """
    chosen, overrides = launcher_parser(prog).parse_known_args(list(arguments))
    return guarded(lambda: _run_together(chosen, overrides), ENDED)


def launcher_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The arguments of `examples/run_time_sharing.py`."""
    parser = argparse.ArgumentParser(
        prog=prog or "run_time_sharing.py",
        description="Runs GRPO, SFT, evaluations and commands side by side on one pool of GPUs; further arguments are "
        "overrides for all that have the key.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--pipelines", nargs="+", metavar="FILE", help="configurations, and overrides for all of them")
    what.add_argument(
        "--config_name",
        "--config-name",
        metavar="NAME[,NAME]",
        help="the same by their names without .yaml, in the folder of --config_path",
    )
    what.add_argument(
        "--scenario",
        type=scenario_letter,
        metavar="LETTER",
        help="the files examples/time_sharing/pipelines/scenario_LETTER*.yaml, for four GPUs, or all: each scenario in "
        "its turn. Logs and checkpoints are below --log-dir. With --device cpu a small model takes the place of theirs "
        "(make scenarios makes it)",
    )
    parser.add_argument(
        "--config_path", "--config-path", type=Path, metavar="DIR", help="folder of --config_name (default: this one)"
    )
    parser.add_argument(
        SCALE,
        action="store_true",
        help="run wrapper files that name more or fewer GPUs on those of the pool: several of theirs become one, or "
        "one becomes several",
    )
    parser.add_argument(
        "--admit-delay-s",
        type=seconds_or_none,
        default=0.0,
        metavar="SECONDS",
        help="each pipeline is submitted when the one before it has made its first step, or after so many seconds "
        "(default: all at once)",
    )
    add_pool_arguments(parser, knows_jobs=True)
    add_page_arguments(parser)
    add_host_arguments(parser)
    return parser


def scenario_letter(text: str) -> str:
    """The letter of an example scenario in capitals, or `all`."""
    known = sorted(shipped_scenarios())
    if text.lower() == ALL or text.upper() in known:
        return ALL if text.lower() == ALL else text.upper()
    there = f"there are {', '.join(known)}, and {ALL}" if known else "they are beside a checkout's nemo_rl only"
    raise argparse.ArgumentTypeError(f"{text}: no such scenario; {there}")


def _run_together(chosen: argparse.Namespace, overrides: Sequence[str]) -> int:
    pool = _pool_of(chosen)
    _take_secrets(chosen)
    if chosen.config_path is not None and chosen.config_name is None:
        raise PoolError(f"--config_path {chosen.config_path}: give --config_name with names of files in it")
    with tempfile.TemporaryDirectory(prefix="nemo_rl_") as folder:
        if chosen.scenario is not None:
            return _run_scenarios(chosen, pool, overrides, Path(folder))
        files, own = files_and_overrides(chosen.pipelines or _named_files(chosen.config_path, chosen.config_name))
        files = fitted(files, pool, Path(folder), scale=chosen.scale)
        pool, jobs = _jobs_of(chosen, pool, files, [*own, *overrides])
        result = _run(chosen, pool, jobs, _new_log_dir(chosen.log_dir))
    return EXIT_FAILED if result.why else EXIT_OK


def _named_files(folder: Path | None, names: str) -> list[str]:
    """The files of a comma list of names. Raises PoolError: there is none of a name."""
    folder = Path() if folder is None else folder
    files = [folder / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml") for name in names.split(",")]
    for file in files:
        if not file.is_file():
            hint = did_you_mean(file.stem, [path.stem for path in folder.glob("*.yaml")])
            raise PoolError(f"--config_name {file.stem}: there is no {file}.{hint}")
    return [str(file) for file in files]


def _run_scenarios(chosen: argparse.Namespace, pool: Pool, overrides: Sequence[str], folder: Path) -> int:
    """The scenario of a letter, or each in its turn on a pool of its own; prints the table."""
    known = shipped_scenarios()
    letters = sorted(known) if chosen.scenario == ALL else [chosen.scenario]
    jobs: dict[str, tuple[Pool, list[Job]]] = {}
    for letter in letters:
        files = fitted(known[letter], pool, folder / letter, scale=chosen.scale, on_cpu=chosen.device == "cpu")
        jobs[letter] = _jobs_of(chosen, pool, files, overrides)
    _check_small_models(job for _, together in jobs.values() for job in together)
    results: list[ScenarioResult] = []
    try:
        for letter in letters:
            sys.stderr.write(f"scenario {letter}\n")
            log_dir = _new_log_dir(chosen.log_dir / f"scenario_{letter.lower()}")
            its_pool, together = jobs[letter]
            # No run goes on from an earlier one's checkpoints.
            own = [
                replace(job, config=in_folders(job.config, *(f"{log_dir}/{kind}/{job.name}" for kind in _OWN)))
                for job in together
            ]
            try:
                result = _run(chosen, its_pool, own, log_dir)
            except UserError as error:
                result = ScenarioResult(letter, why=f"{type(error).__name__}: {error}")
            results.append(replace(result, name=letter))
    finally:
        print_scenarios(results, "slot" if chosen.device == "cpu" else "GPU")
    return EXIT_FAILED if any(result.why for result in results) else EXIT_OK


def _check_small_models(jobs: Iterable[Job]) -> None:
    """Raises PoolError: the small models that scenarios train on CPU slots were not made."""
    named = {job.config.policy.model_name for job in jobs if isinstance(job.config, RootConfig)}
    for name in sorted(named):
        if name.startswith(_SMALL_MODELS) and not Path(name, "config.json").is_file():
            family = name.removeprefix(_SMALL_MODELS)
            raise PoolError(
                f"--scenario on CPU slots trains the small model {name}, which is not there; `make scenarios` makes "
                f"it, or `python examples/make_tiny_model.py {name} --layers 2 --hidden 128 --family {family}` here"
            )


def _jobs_of(
    chosen: argparse.Namespace, pool: Pool, files: Sequence[Path], overrides: Sequence[str]
) -> tuple[Pool, list[Job]]:
    """Jobs to run together, and the pool with as many slots as they need."""
    jobs = read_jobs(files, pool, overrides)
    check_code(jobs)
    if chosen.slots_per_gpu == AUTO:
        choice = choose_slots(jobs, pool, _device_bytes(chosen.device))
        sys.stderr.write(f"slots of each GPU: {choice.slots} ({choice.why})\n")
        pool = replace(pool, slots_per_gpu=choice.slots)
        jobs = read_jobs(files, pool, overrides)
    return pool, jobs


def _run(chosen: argparse.Namespace, pool: Pool, jobs: Sequence[Job], log_dir: Path) -> ScenarioResult:
    with _pool(pool, chosen, log_dir) as actor:
        names = submit_all(actor, jobs, submitters_env(), admit_delay_s=chosen.admit_delay_s)
        standings = watch(actor, names)
    return _checked(log_dir, standings)


def _pool_of(chosen: argparse.Namespace) -> Pool:
    """The pool that the command line describes. Raises PoolError: there is no such pool; ForeignVariable: a variable
    asks for something else.
    """
    check_variables(os.environ)
    nodes = getattr(chosen, "max_nodes", None) or chosen.nodes
    if nodes < chosen.nodes:
        raise PoolError(f"--max-nodes {nodes}: the pool begins with --nodes {chosen.nodes}; give at least as many")
    try:
        return Pool(nodes, chosen.gpus, 1 if chosen.slots_per_gpu == AUTO else chosen.slots_per_gpu)
    except ValueError as error:
        raise PoolError(str(error)) from error


def _take_secrets(chosen: argparse.Namespace) -> None:
    """Takes the pool's secrets out of the environment, which Ray's processes inherit, and everybody's jobs with them;
    the page's token goes to `chosen`.
    """
    os.environ.pop(ON_END_VARIABLE, None)
    chosen.token = os.environ.pop(TOKEN_VARIABLE, None)


def _device_bytes(device: str) -> int | None:
    """Memory of the smallest GPU; None where slots are of the CPU. Raises PoolError: the pool's GPUs are not here."""
    from nemo_rl.distributed.accelerator_slots import least_device_bytes, resolve_accelerator

    if os.environ.get("RAY_ADDRESS", "local") != "local" and device != "cpu":
        raise PoolError("--slots-per-gpu auto: the GPUs of RAY_ADDRESS's Ray cluster are not here; give a number")
    return least_device_bytes() if resolve_accelerator(device).is_cuda else None


def limits_of(chosen: argparse.Namespace) -> Limits:
    """The scheduler's limits that the command line describes."""
    limits = replace(LIVE_LIMITS, max_initialising=chosen.max_initialising, measure_s=chosen.measure_every)
    return limits if chosen.quarantine is None else replace(limits, quarantine_s=chosen.quarantine)


def options_of(chosen: argparse.Namespace) -> PoolOptions:
    """What the pool does beside scheduling, by the command line."""
    limits = HostLimits(chosen.job_memory, chosen.job_files, chosen.job_disk)
    queue = JobLimits(chosen.max_jobs or None, chosen.max_waiting)
    away = (getattr(chosen, "max_nodes", None) or chosen.nodes) - chosen.nodes
    as_user = getattr(chosen, "run_as_submitter", False)
    return PoolOptions(chosen.on_end, limits, chosen.keep_free, queue, as_user, away)


@contextmanager
def _pool(
    pool: Pool,
    chosen: argparse.Namespace,
    log_dir: Path,
    team: Team | None = None,
    end: Callable[[], None] | None = None,
) -> Generator[ActorHandle[object]]:
    """The pool is open inside the block, with its page and its Ray cluster where this process started it. The first
    signal calls `end`, where that is given.
    """
    from nemo_rl.algorithms.launch import Interrupts, ending_with_ray
    from nemo_rl.distributed.ray_runtime import shutdown_ray

    several = pool.slots_per_gpu > 1 and chosen.device != "cpu"
    left = "the last finished checkpoints of its pipelines are complete"
    with (
        multi_process_service(chosen.mps, several=several),
        Interrupts() as interrupts,
        ending_with_ray(lambda: left),
    ):
        try:
            actor = _open(pool, chosen, log_dir, team)
            try:
                with _page(actor, chosen, log_dir, team) as page, _announced(actor, page, team):
                    if end is not None:
                        interrupts.save_first(end)
                    yield actor
            finally:
                interrupts.ending()
                close_pool(actor)
        finally:
            shutdown_ray()


@contextmanager
def _announced(actor: ActorHandle[object], page: str, team: Team | None) -> Generator[None]:
    """Inside the block the pool's address is where `commands` looks for it, and where those of a team do."""
    import ray

    from nemo_rl.distributed.ray_joining import credentials

    about = ask(actor.about.remote())
    mode, token = credentials()
    address = ray.get_runtime_context().gcs_address
    found = OpenPool(about.name, address, mode, token, page, about.log_dir)
    with ExitStack() as files:
        files.enter_context(announced(found))
        if team is not None:
            source = Path(team.source)
            files.enter_context(announced_to_team(source, found, team_group(source)))
        yield


def _open(pool: Pool, chosen: argparse.Namespace, log_dir: Path, team: Team | None) -> ActorHandle[object]:
    from nemo_rl.distributed.ray_runtime import init_ray, open_session, session_directory

    folder = None if team is None else session_directory(team_group(Path(team.source)))
    accelerator = init_ray(device=chosen.device, cpu_slots=pool.gpus_per_node * chosen.nodes, log_dir=folder)
    if folder is not None:
        open_session(folder)
    name = chosen.name or f"{log_dir.parent.name}-{log_dir.name}"
    options = options_of(chosen)
    return open_pool(pool, accelerator, log_dir, limits_of(chosen), name=name, team=team, options=options)


@contextmanager
def _page(actor: ActorHandle[object], chosen: argparse.Namespace, log_dir: Path, team: Team | None) -> Generator[str]:
    """The pool's page is served inside the block, at the address that it gets; where the default port is another
    pool's, on a free one.
    """
    from nemo_rl.time_sharing.viewing.page_server import PageServer, PoolView, TeamAccess
    from nemo_rl.utils.http_server import PageError

    def asked(method: str) -> Callable[..., Any]:
        def answer(*arguments: object) -> object:
            return ask(getattr(actor, method).remote(*arguments))

        return answer

    def rights(token: str) -> Rights | None:
        with suppress(PoolError):
            found: Rights = asked("rights")(token)
            return found
        return None

    access = None if team is None else TeamAccess(rights, asked("see_logs"), options_of(chosen).run_as_submitter)
    serve_at = partial(
        PageServer,
        PoolView(log_dir, asked("standings")),
        host=chosen.host,
        token=chosen.token,
        act=lambda what, name, token: asked(what)(name, token),
        team=access,
    )
    try:
        server = serve_at(port=chosen.port)
    except PageError:
        if chosen.port != DEFAULT_PORT:
            raise
        server = serve_at(port=0)
    sys.stderr.write(f"page: {server.url}{'' if team is None else '?token=, and behind it the token of a user'}\n")
    try:
        yield server.url
    finally:
        server.close()


def _new_log_dir(root: Path) -> Path:
    from nemo_rl.utils.logger import get_next_experiment_dir

    return Path(get_next_experiment_dir(str(root))).absolute()


def _checked(log_dir: Path, standings: Sequence[Standing]) -> ScenarioResult:
    """How the pipelines ended, and whether the records of the scheduler and of all of them together keep every
    invariant; says what does not.
    """
    from nemo_rl.time_sharing.history.checker import check
    from nemo_rl.time_sharing.log.reading import Reread, merge_by_machine_time

    paths = sorted(log_dir.glob("*.jsonl"))
    entries = Reread(lambda: merge_by_machine_time(paths))
    violations = check(entries)
    for violation in violations:
        sys.stderr.write(f"{violation}\n")
    if not violations:
        sys.stderr.write(f"record kept every invariant: {log_dir}\n")
    return result_of("", standings, build_timeline(entries), violations)


def _check_run_as_submitter(chosen: argparse.Namespace) -> None:
    """Raises PoolError: jobs cannot run as their submitters."""
    if chosen.team is None:
        raise PoolError("--run-as-submitter: give --team FILE, which says who submits, and as which Unix user")
    if why := why_not_root():
        raise PoolError(f"--run-as-submitter: {why}; without it all jobs run as the pool's user")
    if chosen.mps == "on":
        raise PoolError("--run-as-submitter: --mps on serves the processes of one Unix user at a time; leave it out")
    chosen.mps = "off"


def _open_to_submitters(chosen: argparse.Namespace, team: Team, log_dir: Path) -> None:
    """Lets the team's Unix users write files of their own beside the pool's, where jobs are theirs. Raises
    TeamFileError: see `check_unix_users`.
    """
    if chosen.run_as_submitter:
        os.chown(log_dir, -1, team_group(Path(team.source)))
        # Not for everybody, since Linux then follows none of their links there, for root neither.
        log_dir.chmod(0o1775)
    check_unix_users(team, str(log_dir), run_as_submitter=chosen.run_as_submitter)


def serve(chosen: argparse.Namespace) -> int:
    """Opens a pool and keeps it until it is interrupted."""
    if chosen.slots_per_gpu == AUTO:
        raise PoolError("--slots-per-gpu auto: a pool that stays does not know its jobs; give a number")
    pool = _pool_of(chosen)
    _take_secrets(chosen)
    team, shared = None, ""
    if chosen.run_as_submitter:
        _check_run_as_submitter(chosen)
    if chosen.team is not None:
        team = read_team(chosen.team)
        shared = f" --pool {team_pool_file(Path(team.source))}"
    log_dir = _new_log_dir(chosen.log_dir)
    if team is not None:
        _open_to_submitters(chosen, team, log_dir)
    left = None if chosen.continue_from is None else _left_by(chosen.continue_from)
    asked = threading.Event()
    with _pool(pool, chosen, log_dir, team, None if chosen.grace is None else asked.set) as actor:
        sys.stderr.write(
            f"pool: {pool.slots} slots, log in {log_dir}; submit with python -m nemo_rl.time_sharing submit{shared} "
            "FILE\n"
        )
        for job in left or ():
            sys.stderr.write(f"{_taken_over(actor, job)}\n")
        said = ""
        while not asked.wait(_TROUBLE_S):
            if (trouble := log_trouble(log_dir)) != said:
                sys.stderr.write(f"{trouble or 'the log can be written again'}\n")
                said = trouble
        for line in ask(actor.suspend.remote()):
            sys.stderr.write(f"{line}\n")
        wait_for_pipelines(actor, timeout_s=chosen.grace or 0.0, but_waiting=True)
        sys.stderr.write(f"the next pool goes on with serve --continue-from {log_dir}\n")
    return EXIT_INTERRUPTED


def _left_by(log_dir: Path) -> list[Job]:
    """The jobs that the pool with this log had not ended, in the order of their submission; those that cannot be read
    are named on stderr. Raises PoolError: there was none, or it is still open.
    """
    if not (log_dir / "pool.json").is_file():
        raise PoolError(f"--continue-from {log_dir}: there is no pool.json; give the folder of a pool's log")
    for known in open_pools(lambda line: sys.stderr.write(f"{line}\n")):
        if Path(known.log_dir).resolve() == log_dir.resolve():
            raise PoolError(f"--continue-from {log_dir}: that pool, {known.name}, is still open; end it first")
    kept, jobs, left = PoolState.read(log_dir / "pool.json").submissions, WaitingJobs(log_dir / "waiting"), list[Job]()
    for name in (one.name for one in sorted(kept, key=lambda one: one.submitted_at) if one.outcome is None):
        try:
            left.append(jobs.read(name))
        except OSError as error:  # it had ended, and the disk was too full to say so
            sys.stderr.write(f"{name}: not continued: {error}\n")
    return left


def _taken_over(actor: ActorHandle[object], job: Job) -> str:
    try:
        ask(actor.take_over.remote(job))
    except PoolError as error:
        return f"{job.name}: not continued: {error}"
    return f"{job.name}: " + ("continues" if job.resumes else "begins again from its start, as it saves nothing")
