"""What every process of a run does first.

A Ray worker enters the directory where the command was typed, so that relative paths in a configuration mean the same
in every process: Ray runs workers where its node was started, which is elsewhere when a run joins a cluster. All
processes search for garbage less often, and not at all while they import torch, transformers and vLLM, which make a
million objects that are no garbage: it was a sixth of the processor time of importing them.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

WORKING_DIRECTORY = "NRL_WORKING_DIRECTORY"
# Ray's setup hook of worker processes, by name.
HOOK = f"{__name__}.begin_worker"
# More objects than Python's 700, 10, 10. What holds device memory is freed when it is let go, not by this search.
_OBJECTS, _YOUNG, _MIDDLE = 50_000, 20, 100


def begin_worker() -> None:
    """What a Ray worker does first."""
    collect_rarely()
    enter_working_directory()


def collect_rarely() -> None:
    """Makes this process search for cycles of objects less often."""
    gc.set_threshold(_OBJECTS, _YOUNG, _MIDDLE)


@contextmanager
def importing() -> Iterator[None]:
    """Inside the block this process does not search for cycles of objects, nor among those of the block later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def enter_working_directory() -> None:
    """Enters the driver's directory; a node that has no such directory keeps its own."""
    directory = os.environ.get(WORKING_DIRECTORY)
    if directory and os.path.isdir(directory):
        os.chdir(directory)
