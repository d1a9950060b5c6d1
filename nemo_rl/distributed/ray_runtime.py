"""Joins or starts Ray, and ends it.

Decides whether a running cluster is joined or a local one is started, and with which accelerator slots. Invariant: a
cluster that this process started is ended by this process, one that it joined is left alone.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar
from unittest.mock import patch

import psutil
import ray
from ray._private import node, services
from ray._private.node import Node
from ray._raylet import GcsClient  # pyrefly: ignore[missing-module-attribute]  # it is compiled
from ray.exceptions import RayError

from nemo_rl.distributed import idle_agent
from nemo_rl.distributed.accelerator_slots import CPU_SLOT_RESOURCE, Accelerator, resolve_accelerator
from nemo_rl.distributed.processes import HOOK, WORKING_DIRECTORY, has_ended, kill_and_wait, remove_files_of
from nemo_rl.distributed.ray_joining import (
    LOCAL,
    RayStartError,
    do_nothing,
    probe,
    running_cluster,
    without_errors_of_others,
)
from nemo_rl.distributed.ray_signals import RayWatch, first_processes, in_groups_of_their_own, keeping_sigterm
from nemo_rl.utils.files import users_directory

logger = logging.getLogger(__name__)

# Launchers leave variables behind that make libraries inside workers believe they are part of an MPI or Slurm job step.
_LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "OMPI_", "MPI_", "SLURM_")
# Actors here do little Ray work of their own; the default pools grow with the cores, to hundreds of threads.
_RAY_PROCESS_ENV = {
    "RAY_num_server_call_thread": "4",
    "RAY_core_worker_num_server_call_thread": "1",
    "RAY_worker_num_grpc_internal_threads": "4",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
NODE_ENV = {
    # Ray would run its workers at the lowest priority but four; here they are the work, and whatever else runs on the
    # machine starves them.
    "RAY_worker_niceness": "0",
    # Workers started ahead are never used: every actor has an environment of its own.
    "RAY_prestart_worker_first_driver": "0",
    # What Ray knows of actors that have ended; it keeps 100,000 of them, and a pool makes some with every job.
    "RAY_maximum_gcs_destroyed_actor_cached_count": "1000",
}
"""What every node of a cluster starts Ray with: clusters of a run's own, `ray.sub` and the files for KubeRay."""
_LOCAL_CLUSTER_ENV = {
    **NODE_ENV,
    # One machine's calls and objects: these pools, too, grow with the cores.
    **dict.fromkeys(
        (
            "RAY_gcs_server_rpc_server_thread_num",
            "RAY_gcs_server_rpc_client_thread_num",
            "RAY_object_manager_rpc_threads_num",
        ),
        "2",
    ),
    # Ray would keep a record of each call of an actor, 100,000 of them, for a dashboard that does not run here.
    "RAY_task_events_report_interval_ms": "0",
    # How often Ray asks its first process, once a second, before it gives up; it stops at once if that has ended.
    "RAY_gcs_server_port_wait_time_s": "180",
}

# Processes of Ray that a cluster of one run does without: what reports usage where there is no dashboard, what asks a
# cloud for more nodes, and what echoes the workers' output. Together they take two seconds of a start on two cores.
_UNUSED = ("start_api_server", "start_monitor")
_ECHOES = "start_log_monitor"
# The raylet starts this one and ends without it.
_AGENT = "--dashboard_agent_command="

_START_ATTEMPTS = 3
_START_S = 180.0
"""How long a cluster of this machine may take to start, all attempts together."""
_LONGEST_DIRECTORY = 35
_POLL_S, _LIVENESS_POLL_S = 0.02, 1.0
# The processes of a local cluster end with the thread that started them, so it lasts as long as this process.
Started = TypeVar("Started")

_STARTER = ThreadPoolExecutor(1, thread_name_prefix="ray-start")
_END_TIMEOUT_S = 10.0


def init_ray(
    *, device: str = "auto", cpu_slots: int = 2, log_to_driver: bool | None = None, log_dir: str | None = None
) -> Accelerator:
    """Joins the cluster named by RAY_ADDRESS, or the one that `ray start` started on this machine, or starts one here.

    With RAY_ADDRESS=local no cluster is joined, whatever runs.

    Args:
        device: `cluster.device`.
        cpu_slots: Accelerator slots that a local cluster without GPUs offers.
        log_to_driver: Whether workers' output is echoed here; by default only with NRL_LOG_LEVEL=DEBUG.
        log_dir: Directory for Ray's session files of a local cluster; by default one that no other user can enter.

    On the main thread, which signals interrupt, another thread does it: a process that half a start of Ray is left in
    crashes at its end.

    Returns the accelerator kind of the cluster. Raises RayStartError: the address does not answer;
    DeviceUnavailableError: `cuda` was asked for and the cluster has none.
    """
    if threading.current_thread() is threading.main_thread() and not ray.is_initialized():
        start = partial(init_ray, device=device, cpu_slots=cpu_slots, log_to_driver=log_to_driver, log_dir=log_dir)
        return _finished(_beside(start))
    # A local cluster guards its ports with a token; Ray says so at every start, and when it joins one.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    echo = log_to_driver if log_to_driver is not None else os.environ.get("NRL_LOG_LEVEL", "").upper() == "DEBUG"
    worker_env = {name: os.environ.get(name, value) for name, value in _RAY_PROCESS_ENV.items()}
    for key in [k for k in os.environ if k.startswith(_LAUNCHER_PREFIXES)]:
        worker_env[key] = ""
    runtime_env = {
        "env_vars": worker_env | {WORKING_DIRECTORY: str(Path.cwd())},
        "worker_process_setup_hook": HOOK,
    }
    if ray.is_initialized():
        return _accelerator_of_cluster(device)
    if _joined(echo, runtime_env):
        return _accelerator_of_cluster(device)
    accelerator = resolve_accelerator(device)
    resources: dict[str, float] = {} if accelerator.is_cuda else {CPU_SLOT_RESOURCE: float(cpu_slots)}
    for name, value in _LOCAL_CLUSTER_ENV.items():
        os.environ.setdefault(name, value)
    _start_local(
        address=LOCAL,
        # Logical CPUs only count concurrently placed helper actors here; slots are what limits real work.
        num_cpus=max(os.cpu_count() or 1, 64),
        resources=resources,
        include_dashboard=False,
        log_to_driver=echo,
        configure_logging=False,
        runtime_env=runtime_env,
        object_store_memory=int(os.environ.get("NRL_OBJECT_STORE_BYTES", "0")) or None,
        _temp_dir=log_dir or session_directory(),
    )
    logger.info("ray=started slots=%s", resources or f"GPU:{ray.cluster_resources().get('GPU', 0):.0f}")
    return accelerator


def session_directory(group: int | None = None) -> str:
    """Folder for a local cluster's logs, sockets and workers' code, which Ray makes readable and writable for
    everybody: no other user can enter it, but for those of `group`.
    """
    wanted = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    folder = users_directory(wanted, group) / "ray"
    # The path of a Unix socket has 107 bytes at most, and Ray appends so many.
    return str(folder if len(str(folder)) <= _LONGEST_DIRECTORY else users_directory("/tmp", group) / "ray")


def open_session(folder: str) -> None:
    """Lets others who can enter `folder` join the local cluster whose session is below it: Ray makes its sockets for
    its own user. A cluster that this process has joined stays as it is.
    """
    node_of_ray: Node | None = ray._private.worker._global_node
    session = Path(node_of_ray.get_session_dir_path()) if node_of_ray is not None else Path()
    if not session.is_relative_to(folder):
        return
    logs = [path for path in (session / "logs").iterdir() if path.is_dir()]
    for path in (*logs, *(session / "sockets").iterdir()):
        path.chmod(0o777)


def _accelerator_of_cluster(device: str) -> Accelerator:
    return resolve_accelerator(device, cluster_gpus=ray.cluster_resources().get("GPU", 0.0))


def _joined(echo: bool, runtime_env: Mapping[str, object]) -> bool:
    """Joins a cluster where one is named or runs. Raises RayStartError: the named one does not answer."""
    named, address = os.environ.get("RAY_ADDRESS"), running_cluster()
    if address is None:
        return False
    if named:
        probe(named)
    try:
        # Ray takes the token of this machine's clusters only where it finds the cluster itself.
        with keeping_sigterm(), nullcontext() if echo else without_errors_of_others():
            ray.init(address=named or "auto", log_to_driver=echo, runtime_env=runtime_env, configure_logging=False)
    except (ConnectionError, RuntimeError, RayError) as error:
        if named:
            raise RayStartError(
                f"RAY_ADDRESS={address} does not answer: {error}; start the cluster or unset RAY_ADDRESS"
            ) from error
        logger.warning("ray=not_joined address=%s reason=%s", address, error)
        ray.shutdown()
        return False
    if not named:
        logger.warning(
            "ray=joined address=%s: it runs on this machine; RAY_ADDRESS=local starts a cluster of the run's own",
            address,
        )
    return True


def accelerator_here(device: str) -> Accelerator | None:
    """The accelerator of a run that will start a cluster on this machine or is connected to one; None for a run that
    still has to join one.

    Args:
        device: `cluster.device`.

    Raises DeviceUnavailableError: `cuda` was asked for and there is none.
    """
    if ray.is_initialized():
        return _accelerator_of_cluster(device)
    return resolve_accelerator(device) if running_cluster() is None else None


def _start_local(**options: Any) -> None:
    """Starts a cluster on this machine. It waits while Ray's processes run, and starts them again if one has ended.
    Raises RayStartError: they are not up within `_START_S`, or one ended in each attempt.
    """
    began = time.monotonic()
    for attempt in range(1, _START_ATTEMPTS + 1):
        before = set(psutil.Process().children(recursive=True))
        try:
            with ExitStack() as stack:
                stack.enter_context(_without(*_UNUSED))
                stack.enter_context(keeping_sigterm())
                stack.enter_context(_with_idle_agent())
                stack.enter_context(in_groups_of_their_own())
                stack.enter_context(_waiting_until(began + _START_S, before))
                if not options["log_to_driver"]:
                    stack.enter_context(_without(_ECHOES))
                    stack.enter_context(without_errors_of_others())
                ray.init(**options)
            RayWatch.begin(first_processes(but=before))
            return
        except Exception as error:
            if not isinstance(error, _NotUp) and "timed out during startup" not in str(error):
                raise
            _end_half_started(before)
            seconds = time.monotonic() - began
            if attempt == _START_ATTEMPTS or seconds >= _START_S:
                logs = Path(options["_temp_dir"]) / "session_latest" / "logs"
                raise RayStartError(
                    f"Ray did not start within {seconds:.0f} s, attempts: {attempt}. {error}. The load average is "
                    f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores: is this machine overloaded? End other work "
                    f"on it, or see {logs}"
                ) from error
            logger.warning("ray=start_failed attempt=%d reason=%s", attempt, error)


class _NotUp(Exception):
    """A process of a local cluster did not come up."""


@contextmanager
def _without(*starters: str) -> Generator[None]:
    """Inside the block Ray leaves out those of its processes that these methods of its node start."""
    with ExitStack() as stack:
        for starter in starters:
            if hasattr(Node, starter):
                stack.enter_context(patch.object(Node, starter, do_nothing))
        yield


@contextmanager
def _with_idle_agent() -> Generator[None]:
    """Inside the block a raylet starts `idle_agent` as its dashboard agent: without a dashboard nothing asks it."""
    start = services.start_ray_process

    def start_with_idle_agent(command: list[str], *args: Any, **kwargs: object) -> object:
        options = dict(part.removeprefix("--").split("=", 1) for part in command if "=" in part)
        if {"session_dir", "node_id"} <= options.keys():
            idle = [sys.executable, "-I", "-S", idle_agent.__file__, options["session_dir"], options["node_id"]]
            agent = _AGENT + subprocess.list2cmdline(idle)
            command = [agent if part.startswith(_AGENT) else part for part in command]
        return start(command, *args, **kwargs)

    with patch.object(services, "start_ray_process", start_with_idle_agent):
        yield


@contextmanager
def _waiting_until(deadline: float, before: set[psutil.Process]) -> Generator[None]:
    """Makes Ray wait for its processes until a deadline, instead of 30 s for each, and see its node at once, instead of
    once a second. It raises _NotUp as soon as one of them has ended.

    Args:
        deadline: By the monotonic clock.
        before: Children of this process that are not Ray's.
    """
    get_node, read_port = services.get_node, node.wait_for_persisted_port

    def port(*args: object, **kwargs: object) -> object:
        slices = dict(kwargs, timeout_ms=int(1000 * _LIVENESS_POLL_S))

        def written() -> object:
            try:
                return read_port(*args, **slices)
            except RuntimeError:  # not within this slice
                return None

        return wait_for("gcs_server to listen", written)

    def once_there(gcs_address: str, node_id: str) -> object:
        client = GcsClient(address=gcs_address)

        def registered() -> object:
            try:
                return client.get_all_node_info()
            except RayError:  # it takes too long to answer
                return None

        wait_for("raylet to register", registered)
        return get_node(gcs_address, node_id)

    def wait_for(what: str, there: Callable[[], object]) -> Any:
        look_at = 0.0
        while not (found := there()):
            now = time.monotonic()
            if now >= look_at:
                if ended := _ended(before):
                    raise _NotUp(f"{' and '.join(ended)} ended while Ray waited for {what}")
                look_at = now + _LIVENESS_POLL_S
            if now >= deadline:
                raise _NotUp(f"Ray waited for {what}")
            time.sleep(_POLL_S)
        return found

    with (
        patch.object(services, "get_node", once_there),
        patch.object(node, "wait_for_persisted_port", port),
    ):
        yield


def _ended(before: set[psutil.Process]) -> list[str]:
    """Which of Ray's first processes have ended."""
    names: list[str] = []
    for process in first_processes(but=before):
        with suppress(psutil.NoSuchProcess):
            if has_ended(process):
                names.append(process.name())
    return names


def _end_half_started(before: set[psutil.Process]) -> None:
    """Ends the processes of a cluster that did not come up; Ray itself would leave them running until this process
    ends.
    """
    ray.shutdown()
    kill_and_wait(
        [process for process in psutil.Process().children(recursive=True) if process not in before], _END_TIMEOUT_S
    )


def _finished(started: Future[Started]) -> Started:
    """The result of a start, which is waited for also where a signal interrupts the wait."""
    try:
        return started.result()
    except KeyboardInterrupt:
        wait([started])
        raise


class RayStart(Generic[Started]):
    """A start of Ray, and of actors on it, that runs in parallel with other work.

    Args:
        start: Joins Ray and starts actors. It leaves on its stack what ends them, also where it fails.
        disconnect: Leaves Ray.
    """

    def __init__(self, start: Callable[[ExitStack], Started], disconnect: Callable[[], None]) -> None:
        self._ending = ExitStack()
        self._ending.callback(disconnect)
        self._after_actors = self._ending.enter_context(ExitStack())
        self._started = _beside(partial(start, self._ending.enter_context(ExitStack())))

    def result(self) -> Started:
        """Waits until it is up. Raises RayStartError, DeviceUnavailableError: see `init_ray`."""
        return self._started.result()

    def after_actors(self, act: Callable[[], object]) -> None:
        """Registers `act` to be called by `close` between the end of the actors and leaving Ray."""
        self._after_actors.callback(act)

    def close(self) -> None:
        """Once it is known whether it came up, ends what did and leaves Ray."""
        wait([self._started])
        self._ending.close()


def _beside(start: Callable[[], Started]) -> Future[Started]:
    # Ray tells every thread but the main one that it leaves signals alone.
    logging.getLogger("ray._private.worker").setLevel(logging.ERROR)
    return _STARTER.submit(start)


def shutdown_ray() -> None:
    """Leaves the cluster; ends it when this process started it, with what its processes left. Safe to call twice."""
    RayWatch.end()
    if ray.is_initialized():
        children = psutil.Process().children(recursive=True)
        ray.shutdown()
        remove_files_of(process.pid for process in children)


class _StartAhead:
    """The start of Ray in progress, if any."""

    accelerator: ClassVar[Future[Accelerator] | None] = None


@contextmanager
def starting_ahead(*, device: str, cpu_slots: int) -> Generator[None]:
    """Starts Ray in parallel with the block until a `RayConnection` in it takes it over; stops it if none did. For
    arguments see `init_ray`.
    """
    if not ray.is_initialized():
        _StartAhead.accelerator = _beside(lambda: init_ray(device=device, cpu_slots=cpu_slots))
    try:
        yield
    finally:
        started, _StartAhead.accelerator = _StartAhead.accelerator, None
        if started is not None:
            wait([started])
            shutdown_ray()


class RayConnection:
    """A run's connection to its Ray cluster; where its process is connected already, the run is a guest."""

    def __init__(self) -> None:
        self._owned = False

    def open(self, *, device: str, cpu_slots: int) -> Accelerator:
        started, _StartAhead.accelerator = _StartAhead.accelerator, None
        self._owned = started is not None or not ray.is_initialized()
        return _finished(started) if started is not None else init_ray(device=device, cpu_slots=cpu_slots)

    def close(self) -> None:
        """Leaves the cluster; ends it where `open` started it. Safe to call twice."""
        owned, self._owned = self._owned, False
        if owned:
            shutdown_ray()
