"""Where an engine's processes meet: a folder of their own for sockets and files of a rendezvous, which vLLM would leave
in the temporary folder when it is killed.

Each process that starts engines has one and holds a lock on it; whoever makes one removes those whose processes were
killed. Invariant: the folder of a living process is never touched.
"""

from __future__ import annotations

import fcntl
import getpass
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_rl.utils.directory_lock import abandoned

_PREFIX = "nemo_rl-sockets-"
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
# One that was made a moment ago may not be locked yet.
_STALE_AFTER_S = 5.0

_held: dict[Path, int] = {}


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
def temporary_files_in(folder: Path | str) -> Iterator[None]:
    """Processes that are started inside the block, forked or not, put temporary files into `folder`; what torch
    compiles stays where later processes look for it.
    """
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
