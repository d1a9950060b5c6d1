"""Files that are there whole or not at all, files and a directory that their owner alone can read, and YAML."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.config.errors import UserError, why_not_written

PAGE_ADDRESS, ADAPTERS_ADDRESS = "page.json", "adapters.json"
ADDRESS_FILES = (PAGE_ADDRESS, ADAPTERS_ADDRESS)
"""Files of a log directory with a token in them, which no page shows."""


def adapter_states(folder: Path, job: str) -> Path:
    """The file in a pool's log where a job of adapters says how far each of them is."""
    return folder / f"{job}.adapters.json"


_PAGE = 4096
"""Bytes; fewer may fit into a page that a full disk has given out already."""


class NotPrivate(UserError, RuntimeError):
    """A directory that must be the user's own can be entered by others."""


def users_directory(parent: str | None = None) -> Path:
    """This user's directory `nemo_rl_<uid>`, which is made and which no other user can enter.

    Args:
        parent: Where it is; the temporary directory if None.

    Raises NotPrivate: something else is there, or others can enter it.
    """
    path = Path(parent or tempfile.gettempdir()) / f"nemo_rl_{os.getuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise NotPrivate(
            f"{path}: must be a directory that belongs to you and that no other user can enter (mode 0700), since it "
            "holds tokens; remove it, or set TMPDIR to another place"
        )
    return path


def replace_file(path: Path, content: str | bytes, *, durable: bool = False, mode: int = 0o666) -> None:
    """Replaces a file atomically: a reader sees the old or the new content.

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


def why_unwritable(folder: Path) -> str:
    """Why a file in a folder cannot be written now, in a few words; empty where it can be."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PAGE))
    except OSError as error:
        return why_not_written(error)
    return ""


@contextmanager
def private_file(path: Path, content: str | bytes) -> Generator[None]:
    """Writes an owner-only file with an address and its token; removes it when the block ends."""
    replace_file(path, content, mode=0o600)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


# libyaml is several times as fast as Python, where PyYAML was built with it.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def load_yaml(text: str) -> Any:
    """The value of a document. Raises yaml.YAMLError: it is none."""
    return yaml.load(text, Loader=_Loader)


def dump_yaml(value: object, **options: Any) -> str:
    """The document of a value of plain types, with its keys in their order. `options`: those of `yaml.dump`."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, **options))
