"""The processes of an engine: what starts them, rendezvous files, their end with their owner, and their last output.

vLLM spawns an engine's process inside Ray actors, and a spawned process imports everything again, a third of an
engine's start on CPUs; here it is forked from its actor, if that has not touched the GPU driver. Sockets and files go
into a folder of the engine. Engine processes watch their actor and exit when it is killed. Invariants: a fork keeps
none of the actor's connections, so Ray sees the actor's end; the folder of a live process is never removed; within
seconds of the owner's end no engine process is left, even during start-up.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import getpass
import multiprocessing
import os
import re
import select
import shutil
import signal
import stat
import sys
import tempfile
import threading
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import psutil

from nemo_rl.distributed.processes import importing
from nemo_rl.models.generation.decisions import Recording
from nemo_rl.utils.directory_lock import abandoned

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

_TITLE = "VLLM::EngineCore"
_DRIVER = "libcuda.so.1"
_NOT_INITIALIZED = 3
_forking = False
_PREFIX = "nemo_rl-sockets-"
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
# One that was made a moment ago may not be locked yet.
_STALE_AFTER_S = 5.0
_held: dict[Path, int] = {}
OWNER_VARIABLE = "NRL_ENGINE_OWNER_PID"
_TAIL_BYTES = 64 << 10
_TAIL_LINES = 25
# `(EngineCore pid=7) ERROR 01-31 12:00:00 [core.py:1]   File ...`; this process's own lines only repeat that the engine
# is gone.
_ENGINE_ERROR = re.compile(
    r"\W*(?:\x1b\[[0-9;]*m)*\((?:EngineCore|Worker)[^)]*\)(?:\x1b\[[0-9;]*m)* ERROR \S+ \S+ \[[^]]*\] ?(.*)"
)


_LEAST_FREE = 0.02
"""Share of a device that must be free where an engine starts that does not measure."""


def measures_nothing(cache_bytes: int) -> dict[str, object]:
    """Keyword arguments of an engine that takes `cache_bytes` for the KV cache of a rank, whatever is free."""
    # vLLM refuses to start where less of the device is free than this, and sizes nothing by it then.
    return {"gpu_memory_utilization": _LEAST_FREE, "kv_cache_memory_bytes": cache_bytes}


@dataclass(frozen=True)
class MemoryShare:
    """An engine's share of a device on which others start at the same time: free memory cannot be measured then, so its
    KV cache is its share minus its other memory.
    """

    share: float  # of the device's memory
    beside: int  # bytes of weights, activations and CUDA graphs

    def cache_bytes(self, device_bytes: int) -> int:
        """Bytes of the KV cache of a rank; negative where nothing is left."""
        return int(self.share * device_bytes) - self.beside


@dataclass(frozen=True)
class EngineSpec:
    """How one engine is started.

    Attributes:
        cuts_to_room: Whether a request's limit is cut to the room left in `max_model_len`, or the request refused.
        has_neighbours: Whether other jobs use the device at the same time, so that its memory tells nothing of this
            engine's.
        run: Name of these engines that no others on the machine have.
    """

    engine_kwargs: dict[str, object]  # keyword arguments of `AsyncEngineArgs`
    env: dict[str, str] = field(default_factory=dict)  # environment variables that must be set before vLLM is imported
    cuda: bool = False  # whether the engine runs on GPUs
    sleep_level: int = 2  # level at which the engine sleeps
    max_model_len: int = 0
    cuts_to_room: bool = True
    seeds_requests: bool = True  # whether each request is drawn from its own seed, or all from the engine's
    stats_interval_s: float | None = None  # seconds between readings of the engine's statistics; None reads none
    engines_per_device: int = 1  # engines that share each device; neighbours in the order of shards
    has_neighbours: bool = False
    recording: Recording | None = None  # recorded decisions; None for none
    engine_records_routes: bool = False  # whether vLLM records routes itself, rather than our extension
    memory_share: MemoryShare | None = None  # its share of the device; None if vLLM measures free memory
    run: str = field(default_factory=lambda: uuid.uuid4().hex)

    def shared_device(self, shard: int) -> str | None:
        """Name on this machine of the device that a shard shares with other engines; None where it has its own."""
        return None if self.engines_per_device == 1 else f"{self.run}-{shard // self.engines_per_device}"

    @property
    def sized(self) -> bool:
        """Whether its KV cache has a set size, so that it does not measure free memory."""
        return self.memory_share is not None or "kv_cache_memory_bytes" in self.engine_kwargs

    def kwargs_of(self, shard: int) -> dict[str, object]:
        """Keyword arguments of one shard's engine: no two draw the same numbers."""
        seed = self.engine_kwargs.get("seed")
        return self.engine_kwargs | ({"seed": seed + shard} if isinstance(seed, int) else {})

    def kwargs_on_device(self, shard: int) -> dict[str, object]:
        """`kwargs_of` where the shard's device can be seen."""
        kwargs = self.kwargs_of(shard)
        if self.memory_share is None:
            return kwargs
        from vllm.platforms import current_platform

        cache = self.memory_share.cache_bytes(current_platform.get_device_total_memory())
        # Without room left vLLM measures, and reports the shortage.
        return kwargs | (measures_nothing(cache) if cache > 0 else {})


def import_engine(engine_kwargs: dict[str, object]) -> None:
    """Imports what an engine needs and lets vLLM inspect the model, which takes seconds the first time; touches no GPU.
    `engine_kwargs`: keyword arguments of `AsyncEngineArgs`; their errors are raised when the engine starts.
    """
    with importing():
        with suppress(Exception):
            engine_config(engine_kwargs)
        import_module("vllm.v1.engine.async_llm")


def engine_config(engine_kwargs: dict[str, object], *, headless: bool = False) -> VllmConfig:
    """vLLM's configuration of an engine (`VllmConfig`).

    Args:
        engine_kwargs: Keyword arguments of `AsyncEngineArgs`.
        headless: For an engine's ranks on a further node.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(**engine_kwargs).create_engine_config(usage_context=_usage(), headless=headless)


def start_engine(engine_kwargs: dict[str, object], stat_loggers: list[object] | None) -> AsyncLLM:
    """Starts an engine (`AsyncLLM`) with the configuration that `engine_config` returns."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(**engine_kwargs), usage_context=_usage(), stat_loggers=stat_loggers
    )


def _usage() -> UsageContext:
    """Usage for which vLLM chooses unset `max_num_seqs` and `max_num_batched_tokens`: offline inference, with many
    requests at once. For an unknown usage it takes 128 and 2,048 on every GPU.
    """
    from vllm.usage.usage_lib import UsageContext

    return UsageContext.LLM_CLASS


def may_fork() -> bool:
    """Whether a fork of this process can use GPUs: the CUDA driver is not there, or has not been touched here."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return True
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == _NOT_INITIALIZED


@contextmanager
def forked_engine() -> Generator[None]:
    """Makes vLLM fork the engine's process, and that its workers, where they `may_fork`, to avoid importing vLLM again.
    Elsewhere vLLM's own rules apply.
    """
    if not may_fork():
        yield
        return
    global _forking  # noqa: PLW0603 - what is registered at fork cannot be taken back
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    own_rules = multiproc_executor.get_mp_context

    def context() -> BaseContext:
        return multiprocessing.get_context("fork") if may_fork() else own_rules()

    _forking = True
    try:
        # The engine's process is made in here and keeps both.
        with (
            patch.object(utils, "get_mp_context", context),
            patch.object(multiproc_executor, "get_mp_context", context),
        ):
            yield
    finally:
        _forking = False


def _become_an_engine() -> None:
    """Closes inherited connections, which otherwise stay open, and sets the process title."""
    if not _forking:
        return
    if (ray := sys.modules.get("ray")) is not None:
        ray._raylet.setproctitle(_TITLE)
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.close(int(name))
        except OSError:
            continue


os.register_at_fork(after_in_child=_become_an_engine)


def set_environment(env: Mapping[str, str]) -> None:
    """Sets the variables that an engine's processes inherit: `env`, their owner's id, and their socket folder."""
    os.environ.update(env)
    os.environ[OWNER_VARIABLE] = str(os.getpid())
    if "VLLM_RPC_BASE_PATH" not in os.environ:
        os.environ["VLLM_RPC_BASE_PATH"] = str(make_socket_folder())


def make_socket_folder() -> Path:
    """The folder of this process, made if it is not there."""
    for folder in _held:
        return folder
    remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    _held[folder] = os.open(folder, os.O_RDONLY)
    fcntl.flock(_held[folder], fcntl.LOCK_EX)
    return folder


@contextmanager
def temporary_files_in(folder: Path | str) -> Generator[None]:
    """Makes processes started inside the block put temporary files into `folder`; torch's cache stays shared."""
    known = {name: os.environ.get(name) for name in ("TMPDIR", _COMPILED)}
    before = tempfile.gettempdir()
    os.environ.setdefault(_COMPILED, f"{before}/torchinductor_{getpass.getuser()}")
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before
        for name, value in known.items():
            os.environ.pop(name, None)
            os.environ.update({name: value} if value is not None else {})


def remove_socket_folder() -> None:
    """Removes the folder of this process. Safe to call twice."""
    while _held:
        folder, descriptor = _held.popitem()
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def remove_abandoned() -> None:
    """Removes the folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with abandoned(folder, stale_after_s=_STALE_AFTER_S) as left:
            if left:
                shutil.rmtree(folder, ignore_errors=True)


def follow_owner() -> None:
    """Ends this process, and those between it and the owner, when the process named by NRL_ENGINE_OWNER_PID is gone."""
    owner = int(os.environ.get(OWNER_VARIABLE, "0"))
    if not owner or owner == os.getpid():
        return
    between: list[int] = []
    for ancestor in psutil.Process().parents():
        if ancestor.pid == owner:
            break
        between.append(ancestor.pid)
    else:
        # Without the owner among the ancestors it has ended already, and these are somebody else's.
        between = []
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_end_with, args=(descriptor, between), name="engine-parent watchdog", daemon=True).start()


def end_without_last_collection() -> None:
    """Skips the garbage collections at an engine's end, vLLM's and that at exit: two seconds each for its objects."""
    # vLLM lets its garbage collection see again what the engine was started with, for engines that are no process.
    gc.unfreeze = lambda: None
    atexit.register(_leave_objects)


def _leave_objects() -> None:
    gc.freeze()
    # Bindings whose objects are still there would report each as a leak, the last thing that the engine's log says.
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())


def _end_with(descriptor: int, between: list[int]) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    for pid in between:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
    os._exit(1)


def last_errors() -> str:
    """The last errors of the engine's processes, from the logs that they share with this process; empty if there are
    none.
    """
    lines: list[str] = []
    for descriptor in (1, 2):
        path = os.path.realpath(f"/proc/self/fd/{descriptor}")
        if os.path.isfile(path):
            with open(path, "rb") as log:
                log.seek(max(0, os.path.getsize(path) - _TAIL_BYTES))
                lines += log.read().decode(errors="replace").splitlines()
    errors = (_ENGINE_ERROR.match(line) for line in lines)
    return "\n".join([error[1] for error in errors if error is not None][-_TAIL_LINES:])
