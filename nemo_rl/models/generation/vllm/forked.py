"""Starts an engine's process as a fork of its actor, which has imported vLLM already.

vLLM spawns it inside Ray actors, and a spawned process imports everything once more: a third of an engine's start on
CPUs. Knows processes and descriptors, no engine. Invariant: the fork keeps none of the actor's connections, so that Ray
sees the actor's end when it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

_forking = False


@contextmanager
def forked_engine() -> Iterator[None]:
    """Inside the block vLLM forks the engine's process; the processes of that one start by vLLM's own rules.

    Only for engines without CUDA: a process must not be forked once it has touched a GPU.
    """
    global _forking  # noqa: PLW0603 - what is registered at fork cannot be taken back
    from vllm.v1.engine import utils

    _forking = True
    try:
        with patch.object(utils, "get_mp_context", lambda: multiprocessing.get_context("fork")):
            yield
    finally:
        _forking = False


def _let_go_of_connections() -> None:
    """A connection ends only when nobody holds it."""
    if not _forking:
        return
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.close(int(name))
        except OSError:
            continue


os.register_at_fork(after_in_child=_let_go_of_connections)
