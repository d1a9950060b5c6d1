"""Whether what a process left on a disk is still its own: whoever lives holds a lock on it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def abandoned(path: str | Path, *, stale_after_s: float) -> Iterator[bool]:
    """Whether nobody who lives holds a lock on `path`; inside the block it is locked here.

    Args:
        path: A file or directory that its owner locks once it has made it.
        stale_after_s: Seconds in which the owner of a new one may still be about to lock it.
    """
    try:
        young = time.time() - os.stat(path).st_ctime < stale_after_s
        descriptor = None if young else os.open(path, os.O_RDONLY)
    except OSError:
        # Gone meanwhile, or another user's.
        descriptor = None
    if descriptor is None:
        yield False
        return
    try:
        yield _locked(descriptor)
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
