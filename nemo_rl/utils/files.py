"""Files that are there whole or not at all, files and a directory that their owner alone can read, and YAML."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Collection, Generator
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
    """Others can enter a directory, or read or write a file, that must be the user's own."""


def users_directory(parent: str | None = None, group: int | None = None) -> Path:
    """This user's directory `nemo_rl_<uid>`, which is made and which no other user can enter.

    Args:
        parent: Where it is; the temporary directory if None.
        group: Id of a Unix group whose users may enter, but not list, the directory, `nemo_rl_<uid>_g<gid>` then.

    Raises NotPrivate: something else is there, or others can enter it.
    """
    mode, name = (0o700, "") if group is None else (0o710, f"_g{group}")
    path = Path(parent or tempfile.gettempdir()) / f"nemo_rl_{os.getuid()}{name}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & ~mode & 0o077:
        raise NotPrivate(
            f"{path}: must be a directory that belongs to you and that no other user can enter (mode {mode:04o}), "
            "since it holds tokens; remove it, or set TMPDIR to another place"
        )
    if group is not None:
        os.chown(path, -1, group)
        path.chmod(mode)
    return path


def read_trusted(path: Path, forbidden: int, owners: Collection[int] | None, must: str) -> str:
    """The text of a file that its owner vouches for.

    Args:
        forbidden: Access rights that it must not have.
        owners: Ids of the users whose it may be; None for any.
        must: The rule in words, such as "must belong to you", with the remedy.

    Raises FileNotFoundError: there is none; NotPrivate: the rule is broken, or it cannot be read.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
            about = os.fstat(file.fileno())
            strange = owners is not None and about.st_uid not in owners
            if strange or not stat.S_ISREG(about.st_mode) or stat.S_IMODE(about.st_mode) & forbidden:
                raise NotPrivate(f"{path}: {must}")
            return file.read().decode()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise NotPrivate(f"{path}: cannot be read ({error.strerror}); {must}") from error
    except UnicodeDecodeError as error:
        raise NotPrivate(f"{path}: is no text; {must}") from error


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
def private_file(path: Path, content: str | bytes, group: int | None = None) -> Generator[None]:
    """Writes a file with an address and its token, which only its owner can read, and the users of a Unix group where
    one is given; removes it when the block ends.
    """
    replace_file(path, content, mode=0o600)
    try:
        if group is not None:
            os.chown(path, -1, group)
            path.chmod(0o640)
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
