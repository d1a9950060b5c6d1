"""Registry of this user's open pools: one file per pool, written by the process that keeps the pool open.

A file holds the pool's Ray address and token, so the directory and the files are readable by their owner alone, and
anything else is refused. The pool of a team has one more, beside the team's file, which a Unix group may read. A file
whose process is gone is stale: it is removed when it is found, and reported.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from pydantic import TypeAdapter, ValidationError

from nemo_rl.config.errors import UserError
from nemo_rl.distributed.processes import has_ended
from nemo_rl.utils.files import private_file, read_trusted, users_directory

_OPEN_ONE = "open a pool with python -m nemo_rl.time_sharing serve --gpus N"


class NoOpenPool(UserError, RuntimeError):
    """No open pool of this user can be used."""


def versions() -> str:
    """Versions that a process must share with a pool to talk to it."""
    try:
        ours = version("nemo-rl")
    except PackageNotFoundError:
        ours = f"in {Path(__file__).parents[2]}"  # a checkout that was put on the path without being installed
    return f"nemo-rl {ours}, ray {version('ray')}, Python {platform.python_version()}"


@dataclass(frozen=True)
class OpenPool:
    """How a pool is reached. `started`: when that process started, seconds since the epoch: its number may be another's
    later.
    """

    name: str  # for people, and for `--pool`
    address: str
    auth_mode: str  # of that cluster, as in `RAY_AUTH_MODE`
    token: str = field(repr=False)  # of that cluster; empty where it asks for none
    page: str = field(repr=False)  # address of its web page, with the page's token
    log_dir: str
    host: str = field(default_factory=socket.gethostname)  # the machine of the process that keeps it open
    pid: int = field(default_factory=os.getpid)
    started: float = field(default_factory=lambda: psutil.Process().create_time())
    versions: str = field(default_factory=versions)  # see `versions`

    @property
    def is_open(self) -> bool:
        """Whether its process runs, as far as can be seen from here: that of another machine is believed to."""
        if self.host != socket.gethostname():
            return True
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.started) < 1.0 and not has_ended(process)
        except psutil.NoSuchProcess:
            return False


_FILE = TypeAdapter(OpenPool)


def announced(pool: OpenPool) -> AbstractContextManager[None]:
    """Inside the block the pool can be found."""
    return private_file(users_directory() / f"pool_{pool.pid}.json", _FILE.dump_json(pool))


_SUFFIX = ".pool"


def announced_to_team(team: Path, pool: OpenPool, group: int) -> AbstractContextManager[None]:
    """Inside the block the users of a Unix group can reach the pool by the file beside the team's."""
    return private_file(team_pool_file(team), _FILE.dump_json(replace(pool, page=pool.page.partition("?")[0])), group)


def team_pool_file(team: Path) -> Path:
    """Where a pool with this team file has its address. Raises NoOpenPool: another open pool has it there."""
    path = team.with_suffix(_SUFFIX)
    with suppress(FileNotFoundError):
        pool = _read_team_pool(path)
        if pool.is_open and pool.pid != os.getpid():
            raise NoOpenPool(
                f"--team {team}: the pool {pool.name} is open with it already (process {pool.pid} on {pool.host})"
            )
    return path


def team_group(team: Path) -> int:
    """Id of the Unix group whose users may read the address of a pool with this team file: that of its folder, where
    this process's user is in it.
    """
    group = team.parent.stat().st_gid
    return group if os.geteuid() == 0 or group in os.getgroups() else os.getegid()


def _read_team_pool(path: Path) -> OpenPool:
    """Raises NoOpenPool, NotPrivate: the file may be another's than the pool's user's; FileNotFoundError."""
    must = "the address of a team's pool must be writable by its owner alone; ask who opened the pool"
    return _parsed(path, read_trusted(path, 0o022, None, must))


def open_pools(say: Callable[[str], object]) -> list[OpenPool]:
    """This user's open pools, by name; stale files are removed, and said. Raises NoOpenPool: a file cannot be trusted
    or read; NotPrivate: others can enter the directory.
    """
    found = []
    for path in sorted(users_directory().glob("pool_*.json")):
        try:
            must = "must belong to you and be readable by you alone (mode 0600); remove it"
            pool = _parsed(path, read_trusted(path, 0o077, {os.getuid()}, must))
        except FileNotFoundError:  # closed meanwhile
            continue
        if pool.is_open:
            found.append(pool)
        else:
            path.unlink(missing_ok=True)
            say(f"the pool {pool.name} ended without being closed: its process {pool.pid} is gone; log: {pool.log_dir}")
    return sorted(found, key=lambda pool: (pool.name, pool.pid))


def _parsed(path: Path, text: str) -> OpenPool:
    try:
        return _FILE.validate_json(text)
    except ValidationError as error:
        raise NoOpenPool(f"{path}: is not the address of a pool; remove it ({error.errors()[0]['msg']})") from error


def the_open_pool(name: str | None, say: Callable[[str], object]) -> OpenPool | None:
    """The pool that a command means; None where no pool is open.

    Args:
        name: Its name, the number of its process or the path of a team's pool file; may be None where only one is open.
        say: See `open_pools`.

    Raises NoOpenPool: none has that name, several are open, or it runs other versions.
    """
    if name is not None and (name.endswith(_SUFFIX) or os.sep in name):
        return _of_team(Path(name))
    everything = open_pools(say)
    chosen = [pool for pool in everything if name is None or name in (pool.name, str(pool.pid))]
    named = ", ".join(f"{pool.name} (process {pool.pid})" for pool in everything)
    if name is not None and not chosen:
        raise NoOpenPool(f"--pool {name}: there is no such pool; open: {named or 'none'}; {_OPEN_ONE}")
    if len(chosen) > 1:
        raise NoOpenPool(f"several pools are open: {named}; choose one with --pool NAME")
    if not chosen:
        return None
    return _of_these_versions(chosen[0])


def _of_team(path: Path) -> OpenPool:
    try:
        pool = _read_team_pool(path)
    except FileNotFoundError as error:
        raise NoOpenPool(f"--pool {path}: there is no such file; a pool that serve --team opened has one") from error
    if not pool.is_open:
        raise NoOpenPool(f"--pool {path}: the pool {pool.name} ended without being closed; log: {pool.log_dir}")
    return _of_these_versions(pool)


def _of_these_versions(pool: OpenPool) -> OpenPool:
    if pool.versions != versions():
        raise NoOpenPool(
            f"the pool {pool.name} runs {pool.versions}, this command {versions()}; use the environment that opened it"
        )
    return pool
