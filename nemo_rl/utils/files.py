"""Writes files that are there whole or not at all, and files that their owner alone can read."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


def replace_file(path: Path, content: str | bytes, *, durable: bool = False, mode: int = 0o666) -> None:
    """Puts a file in the place of what was there, in one step: a reader sees the old or the new content.

    Args:
        durable: Whether it is on the disk before it takes the place.
        mode: Access rights, less those that the process masks.

    Raises OSError: the folder cannot be written; what was there stays.
    """
    draft = path.with_name(f"{path.name}.new")
    # Rights are given to a new file only, and a link in the place of a draft must not be followed.
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(draft, path)


@contextmanager
def private_file(path: Path, content: str | bytes) -> Generator[None]:
    """Inside the block a file is there that its owner alone can read: an address, with what it takes to be let in."""
    replace_file(path, content, mode=0o600)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
