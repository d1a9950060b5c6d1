"""Manifest of a checkpoint: `manifest.json`, the size and SHA-256 of each of its files, written after them.

Invariant: a manifest that is there describes files that were on the disk before it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

MANIFEST = "manifest.json"
_VERSION = 1
_THREADS = 8
# For people, and compared key by key: one that was edited must be there, no more.
_EDITABLE = "config.yaml"


def sync_tree(folder: Path) -> None:
    """Waits until a directory and all below it have reached the disk."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Waits until a file or directory has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder: Path) -> None:
    """Describes the files of a finished checkpoint, once they have reached the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    sync_tree(folder)
    with ThreadPoolExecutor(_THREADS) as pool:
        sums = list(pool.map(_sha256, files))
    described = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(files, sums, strict=True)
    }
    (folder / MANIFEST).write_text(json.dumps({"version": _VERSION, "files": described}, indent=1), encoding="utf-8")
    sync(folder / MANIFEST)
    sync(folder)


def damage(folder: Path, below: str = "") -> list[str] | None:
    """Describes damaged files of a checkpoint; None without a manifest. `below`: only files under this path."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["version"] != _VERSION:
            return [f"{MANIFEST}: version {manifest['version']}, this nemo_rl reads version {_VERSION}"]
        described = [
            (name, int(file["bytes"]), str(file["sha256"]))
            for name, file in manifest["files"].items()
            if name.startswith(below)
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return [f"{MANIFEST}: cannot be read ({type(error).__name__}: {error})"]
    with ThreadPoolExecutor(_THREADS) as pool:
        return [problem for problem in pool.map(partial(_problem, folder), described) if problem is not None]


def apply_umask(folder: Path) -> None:
    """Gives everything in a directory the permissions that the process gives to new files: safetensors and atomic
    writers leave 0600.
    """
    mask = _umask()
    for path in [*folder.rglob("*"), folder]:
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | ((0o777 if path.is_dir() else 0o666) & ~mask))


def _umask() -> int:
    # `os.umask` can only be read by setting it, for all threads.
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0o077
    found = re.search(r"^Umask:\s*([0-7]+)", status, re.MULTILINE)
    return int(found[1], 8) if found else 0o077


def _problem(folder: Path, file: tuple[str, int, str]) -> str | None:
    name, size, digest = file
    path = folder / name
    try:
        if not path.is_file():
            return f"{name}: is missing"
        if name == _EDITABLE:
            return None
        if path.stat().st_size != size:
            return f"{name}: has {path.stat().st_size} bytes, {size} were written"
        return None if _sha256(path) == digest else f"{name}: does not hold what was written (SHA-256)"
    except OSError as error:
        return f"{name}: cannot be read ({error.strerror or error})"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
