"""Advisory file locks, which the system releases when their process ends.

Of two runs with the same directory, on one machine or a file system that shares locks, the second is refused by name
before it writes. Leftovers of killed processes are recognised by their released locks.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from nemo_rl.config.errors import UserError

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
_TAKEN = (errno.EACCES, errno.EAGAIN)


class DirectoryInUse(UserError, RuntimeError):
    """Another run writes there."""


@contextmanager
def locked(directory: Path | str, key: str) -> Generator[None]:
    """Locks a directory for the block; makes it if need be.

    A directory that cannot be made or written is left to those who write there: they name it. `key`: dotted key that
    names it, for messages.

    Raises DirectoryInUse: another run holds it.
    """
    path = Path(directory) / LOCK_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        logger.info("lock=impossible path=%s: %s", path, error)
        yield
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                raise DirectoryInUse(
                    f"{key}={directory}: another run writes there ({_owner(path)}); wait for its end, end it, or give "
                    f"this run another {key}"
                ) from error
            # Some network file systems have no locks.
            logger.warning("lock=unsupported path=%s: %s; start no second run there", path, error)
        else:
            file.truncate(0)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": since}))
            file.flush()
        yield


def _owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "who is not known"
    return f"process {owner['process']} on {owner['host']} since {owner['since']}"


@contextmanager
def abandoned(path: str | Path, *, stale_after_s: float) -> Generator[bool]:
    """Whether no process holds the lock of `path`; inside the block this process holds it.

    Args:
        path: A file or directory that its owner locks after creating it.
        stale_after_s: Age in seconds from which a path without a lock counts as abandoned.
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
