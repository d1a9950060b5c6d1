"""Runs pipelines on a pool from a command line: on one made for them, or on one that is open.

`run_together` opens a pool, runs some files side by side, shows who does what, and ends; `serve`, `submit` and their
kind work with a pool that outlives them; `run_under_control_plane` is what `RLIX_CONTROL_PLANE=rlix` makes of
`examples/run_*.py`. Knows no scheduling. Invariant: a mistake in a file or a mapping is reported before Ray starts.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.config.errors import UserError
from nemo_rl.time_sharing.arguments import DEFAULT_PORT, add_page_arguments, add_pool_arguments
from nemo_rl.time_sharing.mps import multi_process_service
from nemo_rl.time_sharing.pipelines.job import Job, read_jobs
from nemo_rl.time_sharing.pool import (
    LIVE_LIMITS,
    POOL_NAME,
    PoolError,
    Standing,
    close_pool,
    open_pool,
)
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.viewing.standings_table import StandingsTable

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
_ANSWER_S = 60.0
_POLL_S = 1.0
_HOUR_S = 3600.0


def run_together(arguments: Sequence[str]) -> int:
    """`examples/run_time_sharing.py`: some pipelines on a pool made for them; the exit code.

    Returns:
        0 when every pipeline is done and the record keeps every invariant, 1 otherwise, 2 for a wrong command line or
        configuration, 130 when interrupted.
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
    parser.add_argument(
        "--pipelines", nargs="+", required=True, metavar="FILE", help="configurations, and overrides for all of them"
    )
    add_pool_arguments(parser)
    add_page_arguments(parser)
    return parser


def guarded(work: Callable[[], int]) -> int:
    """Runs a command; what a user can put right becomes one line, an interrupt exit code 130."""
    level = os.environ.get("NRL_LOG_LEVEL", "WARNING").upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return work()
    except UserError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: every pipeline was ended; their last finished checkpoints are complete\n")
        return EXIT_INTERRUPTED


def _run_together(chosen: argparse.Namespace, overrides: Sequence[str]) -> int:
    pool = _pool_of(chosen)
    files, own = _files_and_overrides(chosen.pipelines)
    jobs = read_jobs(files, pool, [*own, *overrides])
    log_dir = _new_log_dir(chosen.log_dir)
    with _pool(pool, chosen, log_dir) as actor, _page(actor, log_dir, chosen.host, chosen.port):
        _submit_all(actor, jobs)
        standings = _watch(actor, [job.name for job in jobs])
    ok = all(standing.outcome is not None and standing.outcome.kind == "done" for standing in standings)
    return EXIT_OK if _checked(log_dir) and ok else EXIT_FAILED


def _pool_of(chosen: argparse.Namespace) -> Pool:
    """The pool that the command line describes.

    Raises:
        PoolError: There is no such pool.
    """
    try:
        return Pool(chosen.nodes, chosen.gpus, chosen.slots_per_gpu)
    except ValueError as error:
        raise PoolError(str(error)) from error


@contextmanager
def _pool(pool: Pool, chosen: argparse.Namespace, log_dir: Path) -> Iterator[ActorHandle[object]]:
    """The pool is open inside the block, with its Ray cluster where this process started it."""
    from nemo_rl.distributed.ray_runtime import shutdown_ray

    with multi_process_service(chosen.mps == "on"):
        try:
            actor = _open(pool, chosen, log_dir)
            try:
                yield actor
            finally:
                close_pool(actor)
        finally:
            shutdown_ray()


def _files_and_overrides(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Overrides that follow a list of files belong to the list, as far as the command line's parser knows."""
    overrides = [argument for argument in arguments if "=" in argument and not Path(argument).exists()]
    return [Path(argument) for argument in arguments if argument not in overrides], overrides


def _open(pool: Pool, chosen: argparse.Namespace, log_dir: Path) -> ActorHandle[object]:
    from nemo_rl.distributed.ray_runtime import init_ray

    accelerator = init_ray(device=chosen.device, cpu_slots=pool.gpus)
    limits = LIVE_LIMITS if chosen.quarantine is None else replace(LIVE_LIMITS, quarantine_s=chosen.quarantine)
    return open_pool(pool, accelerator, log_dir, limits)


@contextmanager
def _page(actor: ActorHandle[object], log_dir: Path, host: str, port: int) -> Iterator[None]:
    """The pool's page is served inside the block; where the default port is another pool's, on a free one."""
    import ray

    from nemo_rl.time_sharing.viewing.page_server import PageError, PageServer, PoolView

    def standings() -> Sequence[Standing]:
        everybody: Sequence[Standing] = ray.get(actor.standings.remote(), timeout=_ANSWER_S)
        return everybody

    view, token = PoolView(log_dir, standings), os.environ.get("NRL_POOL_TOKEN")
    try:
        server = PageServer(view, host=host, port=port, token=token)
    except PageError:
        if port != DEFAULT_PORT:
            raise
        server = PageServer(view, host=host, port=0, token=token)
    sys.stderr.write(f"page: {server.url}\n")
    try:
        yield
    finally:
        server.close()


def _new_log_dir(root: Path) -> Path:
    from nemo_rl.utils.logger import get_next_experiment_dir

    return Path(get_next_experiment_dir(str(root))).absolute()


def _submit_all(actor: ActorHandle[object], jobs: Sequence[Job]) -> None:
    for job in jobs:
        _ask(actor.submit.remote(job))


def _ask(answer: ObjectRef[object]) -> Any:
    """The pool's answer; its refusal is the user's to read, without the trace of the actor."""
    import ray

    try:
        return ray.get(answer, timeout=_ANSWER_S)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise PoolError(str(error.cause)) from error
        raise


def _watch(actor: ActorHandle[object], names: Sequence[str]) -> list[Standing]:
    """Shows the pipelines until all of them have ended; how they stand then."""
    import ray

    with StandingsTable() as table:
        while True:
            everybody: list[Standing] = ray.get(actor.standings.remote(), timeout=_ANSWER_S)
            ours = [standing for standing in everybody if standing.name in names]
            table.show(ours)
            if all(standing.outcome is not None for standing in ours):
                return ours
            time.sleep(_POLL_S)


def _checked(log_dir: Path) -> bool:
    """Whether the records of the scheduler and of all pipelines together keep every invariant; says what does not."""
    from nemo_rl.time_sharing.history.check import check
    from nemo_rl.time_sharing.log.merged import merge_by_machine_time

    violations = check(merge_by_machine_time(sorted(log_dir.glob("*.jsonl"))))
    for violation in violations:
        sys.stderr.write(f"{violation}\n")
    if not violations:
        sys.stderr.write(f"record kept every invariant: {log_dir}\n")
    return not violations


# -- a pool that stays ------------------------------------------------------------------------------------------------


def serve(chosen: argparse.Namespace) -> int:
    """Opens a pool and keeps it until it is interrupted."""
    pool = _pool_of(chosen)
    log_dir = _new_log_dir(chosen.log_dir)
    with _pool(pool, chosen, log_dir) as actor:
        sys.stderr.write(
            f"pool: {pool.slots} slots, log in {log_dir}; submit with python -m nemo_rl.time_sharing submit FILE\n"
        )
        with _page(actor, log_dir, chosen.host, chosen.port):
            while True:
                time.sleep(_HOUR_S)


def submit(chosen: argparse.Namespace) -> int:
    """Submits files to the open pool; with `--wait`, until they have ended."""
    actor, pool = _join()
    files, overrides = _files_and_overrides(chosen.files)
    jobs = read_jobs(files, pool, overrides)
    _submit_all(actor, jobs)
    names = [job.name for job in jobs]
    sys.stdout.write("".join(f"{name}\n" for name in names))
    if not chosen.wait:
        return EXIT_OK
    return _follow(actor, names)


def _follow(actor: ActorHandle[object], names: Sequence[str]) -> int:
    import ray

    try:
        standings = _watch(actor, names)
    except KeyboardInterrupt:
        for name in names:
            ray.get(actor.cancel.remote(name), timeout=_ANSWER_S)
        raise
    return EXIT_OK if all(s.outcome is not None and s.outcome.kind == "done" for s in standings) else EXIT_FAILED


def status(chosen: argparse.Namespace) -> int:
    """Shows every pipeline of the open pool."""
    import ray

    actor, _ = _join()
    with StandingsTable() as table:
        table.show(ray.get(actor.standings.remote(), timeout=_ANSWER_S))
    return EXIT_OK


def drain(chosen: argparse.Namespace) -> int:
    """Lets pipelines go once they have given back what they hold."""
    return _each(chosen.names, "drain")


def cancel(chosen: argparse.Namespace) -> int:
    """Ends pipelines whatever they do."""
    return _each(chosen.names, "cancel")


def _each(names: Sequence[str], method: str) -> int:
    actor, _ = _join()
    for name in names:
        _ask(getattr(actor, method).remote(name))
    return EXIT_OK


def _join() -> tuple[ActorHandle[object], Pool]:
    """The pool of the Ray cluster that RAY_ADDRESS names, or that runs on this machine.

    Raises:
        PoolError: No cluster answers, or no pool is open on it.
    """
    from nemo_rl.distributed.ray_runtime import running_cluster

    address = running_cluster()
    if address is None:
        raise PoolError(
            "no Ray cluster runs on this machine and RAY_ADDRESS names none; open a pool with "
            "python -m nemo_rl.time_sharing serve --gpus N"
        )
    import ray

    ray.init(address=address, log_to_driver=False, configure_logging=False)
    try:
        actor = ray.get_actor(POOL_NAME, namespace="nemo_rl_time_sharing")
    except ValueError as error:
        raise PoolError(
            f"no pool is open on the Ray cluster {address}; open one with python -m nemo_rl.time_sharing serve --gpus N"
        ) from error
    pool, _ = ray.get(actor.shape.remote(), timeout=_ANSWER_S)
    return actor, pool


def run_under_control_plane(arguments: Sequence[str], *, default_config: Path) -> int:
    """What `RLIX_CONTROL_PLANE=rlix` makes of the scripts under `examples`: the run is submitted to the open pool, and
    followed to its end.
    """
    parser = argparse.ArgumentParser(description="Runs on a shared pool.")
    parser.add_argument("--config", type=Path, default=default_config, help="YAML file")
    chosen, overrides = parser.parse_known_args(list(arguments))

    def work() -> int:
        actor, pool = _join()
        jobs = read_jobs([chosen.config], pool, overrides)
        _submit_all(actor, jobs)
        return _follow(actor, [job.name for job in jobs])

    return guarded(work)
