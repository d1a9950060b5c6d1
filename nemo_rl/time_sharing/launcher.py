"""Opens pools from a command line.

`run_together` opens one, runs some files side by side, shows who does what, and ends; `serve` keeps one open.
Invariants: a mistake in a file or a mapping is reported before Ray starts; while a pool is open its address is in a
file, so that `commands` finds it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.time_sharing.arguments import (
    AUTO,
    DEFAULT_PORT,
    add_page_arguments,
    add_pool_arguments,
    check_variables,
    seconds_or_none,
)
from nemo_rl.time_sharing.commands import (
    EXIT_FAILED,
    EXIT_OK,
    ask,
    check_code,
    files_and_overrides,
    guarded,
    submit_all,
    submitters_env,
    watch,
)
from nemo_rl.time_sharing.log.pool_state import Standing
from nemo_rl.time_sharing.mps import multi_process_service
from nemo_rl.time_sharing.open_pools import OpenPool, announced
from nemo_rl.time_sharing.opening import LIVE_LIMITS, close_pool, open_pool
from nemo_rl.time_sharing.pipelines.job import read_jobs
from nemo_rl.time_sharing.pipelines.slot_choice import choose_slots
from nemo_rl.time_sharing.pool import PoolError
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import Limits

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

_ANSWER_S = 60.0
_SCENARIOS = Path(__file__).resolve().parents[2] / "examples" / "time_sharing" / "pipelines"
_HOUR_S = 3600.0


def run_together(arguments: Sequence[str]) -> int:
    """`examples/run_time_sharing.py`: some pipelines on a pool made for them; the exit code. Returns 0 when every
    pipeline is done and the record keeps every invariant, 1 otherwise, 2 for a wrong command line or configuration, 130
    when interrupted.
    """
    chosen, overrides = launcher_parser().parse_known_args(list(arguments))
    return guarded(lambda: _run_together(chosen, overrides))


def launcher_parser() -> argparse.ArgumentParser:
    """The arguments of `examples/run_time_sharing.py`."""
    parser = argparse.ArgumentParser(
        prog="run_time_sharing.py",
        description="Runs GRPO, SFT, evaluations and commands side by side on one pool of GPUs; further arguments are "
        "overrides for all that have the key.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--pipelines", nargs="+", metavar="FILE", help="configurations, and overrides for all of them")
    what.add_argument(
        "--scenario",
        type=scenario_files,
        dest="pipelines",
        metavar="LETTER",
        help="the files examples/time_sharing/pipelines/scenario_LETTER*.yaml, for four GPUs",
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
    return parser


def scenario_files(letter: str) -> list[str]:
    """The files of an example scenario."""
    named = {file: file.stem.split("_")[1].upper() for file in sorted(_SCENARIOS.glob("scenario_*.yaml"))}
    files = [str(file) for file, of in named.items() if of == letter.upper()]
    if not files:
        known = f"there are {', '.join(sorted(set(named.values())))}" if named else f"{_SCENARIOS} has none"
        raise argparse.ArgumentTypeError(f"{letter}: no such scenario; {known}")
    return files


def _run_together(chosen: argparse.Namespace, overrides: Sequence[str]) -> int:
    pool = _pool_of(chosen)
    files, own = files_and_overrides(chosen.pipelines)
    jobs = read_jobs(files, pool, [*own, *overrides])
    check_code(jobs)
    if chosen.slots_per_gpu == AUTO:
        choice = choose_slots(jobs, pool, _device_bytes(chosen.device))
        sys.stderr.write(f"slots of each GPU: {choice.slots} ({choice.why})\n")
        pool = replace(pool, slots_per_gpu=choice.slots)
        jobs = read_jobs(files, pool, [*own, *overrides])
    log_dir = _new_log_dir(chosen.log_dir)
    with _pool(pool, chosen, log_dir) as actor:
        standings = watch(actor, submit_all(actor, jobs, submitters_env(), admit_delay_s=chosen.admit_delay_s))
    ok = all(standing.outcome is not None and standing.outcome.kind == "done" for standing in standings)
    return EXIT_OK if _checked(log_dir) and ok else EXIT_FAILED


def _pool_of(chosen: argparse.Namespace) -> Pool:
    """The pool that the command line describes. Raises PoolError: there is no such pool; ForeignVariable: a variable
    asks for something else.
    """
    check_variables(os.environ)
    try:
        return Pool(chosen.nodes, chosen.gpus, 1 if chosen.slots_per_gpu == AUTO else chosen.slots_per_gpu)
    except ValueError as error:
        raise PoolError(str(error)) from error


def _device_bytes(device: str) -> int | None:
    """Memory of the smallest GPU; None where slots are of the CPU. Raises PoolError: the pool's GPUs are not here."""
    from nemo_rl.distributed.accelerators import least_device_bytes, resolve_accelerator

    if os.environ.get("RAY_ADDRESS", "local") != "local" and device != "cpu":
        raise PoolError("--slots-per-gpu auto: the GPUs of RAY_ADDRESS's Ray cluster are not here; give a number")
    return least_device_bytes() if resolve_accelerator(device).is_cuda else None


def limits_of(chosen: argparse.Namespace) -> Limits:
    """The scheduler's limits that the command line describes."""
    limits = replace(LIVE_LIMITS, max_initialising=chosen.max_initialising, measure_s=chosen.measure_every)
    return limits if chosen.quarantine is None else replace(limits, quarantine_s=chosen.quarantine)


@contextmanager
def _pool(pool: Pool, chosen: argparse.Namespace, log_dir: Path) -> Generator[ActorHandle[object]]:
    """The pool is open inside the block, with its page and its Ray cluster where this process started it."""
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
            actor = _open(pool, chosen, log_dir)
            try:
                with _page(actor, log_dir, chosen.host, chosen.port) as page, _announced(actor, page):
                    yield actor
            finally:
                interrupts.ending()
                close_pool(actor)
        finally:
            shutdown_ray()


def _announced(actor: ActorHandle[object], page: str) -> AbstractContextManager[None]:
    """Inside the block the pool's address is where `commands` looks for it."""
    import ray

    from nemo_rl.distributed.ray_joining import credentials

    about: Any = ray.get(actor.about.remote(), timeout=_ANSWER_S)
    mode, token = credentials()
    address = ray.get_runtime_context().gcs_address
    return announced(OpenPool(about.name, address, mode, token, page, about.log_dir))


def _open(pool: Pool, chosen: argparse.Namespace, log_dir: Path) -> ActorHandle[object]:
    from nemo_rl.distributed.ray_runtime import init_ray

    accelerator = init_ray(device=chosen.device, cpu_slots=pool.gpus)
    return open_pool(
        pool, accelerator, log_dir, limits_of(chosen), name=chosen.name or f"{log_dir.parent.name}-{log_dir.name}"
    )


@contextmanager
def _page(actor: ActorHandle[object], log_dir: Path, host: str, port: int) -> Generator[str]:
    """The pool's page is served inside the block, at the address that it gets; where the default port is another
    pool's, on a free one.
    """
    import ray

    from nemo_rl.time_sharing.viewing.page_server import PageServer, PoolView
    from nemo_rl.utils.http_server import PageError

    def standings() -> Sequence[Standing]:
        everybody: Sequence[Standing] = ray.get(actor.standings.remote(), timeout=_ANSWER_S)
        return everybody

    def act(what: str, name: str) -> str:
        said: str = ask({"drain": actor.drain, "cancel": actor.cancel}[what].remote(name))
        return said

    view, token = PoolView(log_dir, standings), os.environ.get("NRL_POOL_TOKEN")
    try:
        server = PageServer(view, host=host, port=port, token=token, act=act)
    except PageError:
        if port != DEFAULT_PORT:
            raise
        server = PageServer(view, host=host, port=0, token=token, act=act)
    sys.stderr.write(f"page: {server.url}\n")
    try:
        yield server.url
    finally:
        server.close()


def _new_log_dir(root: Path) -> Path:
    from nemo_rl.utils.logger import get_next_experiment_dir

    return Path(get_next_experiment_dir(str(root))).absolute()


def _checked(log_dir: Path) -> bool:
    """Whether the records of the scheduler and of all pipelines together keep every invariant; says what does not."""
    from nemo_rl.time_sharing.history.check import check
    from nemo_rl.time_sharing.log.reading import merge_by_machine_time

    violations = check(merge_by_machine_time(sorted(log_dir.glob("*.jsonl"))))
    for violation in violations:
        sys.stderr.write(f"{violation}\n")
    if not violations:
        sys.stderr.write(f"record kept every invariant: {log_dir}\n")
    return not violations


def serve(chosen: argparse.Namespace) -> int:
    """Opens a pool and keeps it until it is interrupted."""
    if chosen.slots_per_gpu == AUTO:
        raise PoolError("--slots-per-gpu auto: a pool that stays does not know its jobs; give a number")
    pool = _pool_of(chosen)
    log_dir = _new_log_dir(chosen.log_dir)
    with _pool(pool, chosen, log_dir):
        sys.stderr.write(
            f"pool: {pool.slots} slots, log in {log_dir}; submit with python -m nemo_rl.time_sharing submit FILE\n"
        )
        while True:
            time.sleep(_HOUR_S)
