"""Unix users as whom root has some work done: what they lack for it, and how a process becomes one of them.

Invariant: a worker that is to become a user and cannot raises, so that nothing of a job runs as root in the user's
place. It becomes one before it has imported anything of the job.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_rl.config.errors import UserError

RUN_AS = "NRL_RUN_AS"
"""Names the Unix user of a worker that root starts."""
_NEEDED = {"CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7, "CAP_SYS_PTRACE": 19}
_ROOTS_OWN = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME")
_PR_SET_DUMPABLE = 4
_CHECK_S = 60.0
# Prints what the user who runs it cannot enter (the first folder) or write (the others, or where they would be made).
_CHECK = """
import os, sys, nemo_rl, psutil
for number, folder in enumerate(sys.argv[1:]):
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.access(folder, os.W_OK | os.X_OK if number else os.X_OK):
        print(folder, "cannot be", "written" if number else "entered")
"""


class UnixUserError(UserError, RuntimeError):
    """A process cannot become the Unix user that it is to work as."""


def why_not_root(status: Path = Path("/proc/self/status")) -> str:
    """Why this process cannot have work done as other users, watch it and end it; empty where it can."""
    if os.geteuid() != 0:
        return f"it takes root, and this process runs as the Unix user with the id {os.geteuid()}"
    (held,) = (int(line.split()[1], 16) for line in status.read_text().splitlines() if line.startswith("CapEff:"))
    lacks = [name for name, bit in _NEEDED.items() if not held >> bit & 1]
    return f"root has no {', '.join(lacks)} here; give its container that" if lacks else ""


def why_unusable(name: str, enters: str = "/", writes: Sequence[str] = ()) -> str:
    """Why work cannot be done as a Unix user of this machine, with the remedy; empty where it can.

    Args:
        enters: Absolute path of a folder that the user must be able to enter.
        writes: Those that the user must be able to write, or to make.
    """
    try:
        user = pwd.getpwnam(name)
    except KeyError:
        return f"there is no Unix user {name!r} on this machine; make one, or name another"
    if user.pw_uid == 0:
        return f"{name!r} is root; name a user without its rights"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CHECK, enters, *writes],
            user=user.pw_uid,
            group=user.pw_gid,
            extra_groups=os.getgrouplist(name, user.pw_gid),
            env=os.environ | {"HOME": user.pw_dir},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=_CHECK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the Unix user {name!r} cannot run {sys.executable} ({error}); install it where every user can"
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return (
            f"the Unix user {name!r} cannot use nemo_rl by {sys.executable} ({said}); install it where every user can"
        )
    found = ", ".join(done.stdout.splitlines())
    return f"{found} by the Unix user {name!r}; give it the right, or name another folder" if found else ""


def become_user() -> None:
    """Makes this worker the process of the user whom its variables name, for good; does nothing where they name none.
    Raises UnixUserError: it cannot.
    """
    name = os.environ.get(RUN_AS)
    if not name:
        return
    try:
        user = pwd.getpwnam(name)
        os.initgroups(name, user.pw_gid)
        os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
        os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
    except KeyError as error:
        raise UnixUserError(f"there is no Unix user {name!r} on the node {os.uname().nodename}; make one") from error
    except PermissionError as error:
        raise UnixUserError(
            f"Ray on the node {os.uname().nodename} runs as the Unix user with the id {os.geteuid()}, which cannot "
            f"become {name!r}; start it as root"
        ) from error
    # Linux closes what has changed its user to itself and to its siblings, which share GPU memory with it.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    for variable in _ROOTS_OWN:
        os.environ.pop(variable, None)
    os.environ |= {"HOME": user.pw_dir, "USER": name, "LOGNAME": name}
