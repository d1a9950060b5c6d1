"""Starts an engine's process as a fork of its actor, which has imported vLLM already.

vLLM spawns it inside Ray actors, and a spawned process imports everything once more: a third of an engine's start on
CPUs. A fork can use GPUs only if its parent has left their driver alone, as an actor that only imports does. Knows
processes and descriptors, no engine. Invariant: the fork keeps none of the actor's connections, so that Ray sees the
actor's end when it ends.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any
from unittest.mock import patch

from nemo_rl.distributed.worker_start import importing

_TITLE = "VLLM::EngineCore"
_DRIVER = "libcuda.so.1"
_NOT_INITIALIZED = 3
_forking = False


def import_engine(engine_kwargs: dict[str, Any]) -> None:
    """Imports what an engine needs and has vLLM look the model up, which takes seconds the first time; touches no GPU.

    Args:
        engine_kwargs: Keyword arguments of `AsyncEngineArgs`. What is wrong with them is said when the engine starts.
    """
    with importing():
        from vllm.engine.arg_utils import AsyncEngineArgs

        with suppress(Exception):
            AsyncEngineArgs(**engine_kwargs).create_engine_config()
        import_module("vllm.v1.engine.async_llm")


def may_fork() -> bool:
    """Whether a fork of this process can use GPUs: the CUDA driver is not there, or has not been touched here."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return True
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == _NOT_INITIALIZED


@contextmanager
def forked_engine() -> Iterator[None]:
    """Inside the block vLLM forks the engine's process, where that `may_fork`; the processes of that one, and it itself
    elsewhere, start by vLLM's own rules.
    """
    if not may_fork():
        yield
        return
    global _forking  # noqa: PLW0603 - what is registered at fork cannot be taken back
    from vllm.v1.engine import utils

    _forking = True
    try:
        with patch.object(utils, "get_mp_context", lambda: multiprocessing.get_context("fork")):
            yield
    finally:
        _forking = False


def _become_an_engine() -> None:
    """A connection ends only when nobody holds it; the title that Ray gave the actor can be changed by Ray alone."""
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
