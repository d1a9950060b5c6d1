"""Caps of jobs' host memory by the kernel: a cgroup v2 of each job on each node, behind the pool's own watch.

A cgroup with processes cannot limit those below it, so the pool's own ones move to `nrl-pool`, beside the jobs' groups.
Invariants: no process is moved out of a cgroup that was not handed over as a whole. A worker enters its job's group
before it imports anything of the job, since memory stays charged to the group that used it first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from errno import EBUSY, ENODEV, ENOENT
from pathlib import Path

import psutil

MEMORY_GROUP = "NRL_MEMORY_GROUP"
"""Of a worker: the bytes of its node at which the kernel ends its job, a space, and which run of the job it is."""
_POOL, _JOB = "nrl-pool", "nrl."
_SYSTEMD = Path("/run/systemd/system")
_TRIES = 100


def groups_folder(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Path:
    """The cgroup for those of this node's jobs, made ready. Raises OSError: this process may not have it."""
    at = root / next((line[4:] for line in own.read_text().splitlines() if line.startswith("0::/")), "")
    base = at.parent if at.name == _POOL else at
    controllers, limited = base / "cgroup.controllers", base / "cgroup.subtree_control"
    if not controllers.exists() or "memory" not in controllers.read_text():
        raise OSError("there is no memory controller of cgroup v2")
    if not os.access(limited, os.W_OK):
        raise OSError(f"{base} cannot be written")
    for _ in range(_TRIES):
        if "memory" in limited.read_text():
            return base
        # The root of the machine has no type, and may keep its processes.
        if (base / "cgroup.type").exists():
            _move_processes(base, root)
        try:
            limited.write_text("+memory")
        except OSError as error:
            if error.errno != EBUSY:  # it is, where a process was started since
                raise
    raise OSError(f"processes start in {base} faster than they can be moved")


def _move_processes(base: Path, root: Path) -> None:
    """Raises OSError: some of the processes in `base` may be another's."""
    # A container has its root for itself, systemd marks what it delegates, and elsewhere a user owns what was.
    delegated = {"trusted.delegate", "user.delegate"}.intersection(os.listxattr(base))
    owned = not _SYSTEMD.exists() and base.stat().st_uid == os.geteuid() != 0
    pids = (base / "cgroup.procs").read_text().split()
    if not (base == root or delegated or owned) or "0" in pids or base.name.startswith(_JOB):
        raise OSError(f"{base} was not delegated to the pool")
    (base / _POOL).mkdir(exist_ok=True)
    for pid in pids:
        with suppress(ProcessLookupError):
            (base / _POOL / "cgroup.procs").write_text(pid)


def _group_of(run: str) -> str:
    return f"{_JOB}{os.environ.get('RAY_RAYLET_PID', '0')}.{run[-200:]}"


def enter_memory_group() -> None:
    """Moves this worker into the group that its variables name. Where it may not, the watch alone caps its job."""
    limit, _, run = os.environ.get(MEMORY_GROUP, "").partition(" ")
    for _ in range(_TRIES if run else 0):
        try:
            group = groups_folder() / _group_of(run)
            group.mkdir(exist_ok=True)
            (group / "memory.oom.group").write_text("1")
            (group / "memory.max").write_text(limit)
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            if error.errno in (ENOENT, ENODEV):  # a round that began before the job did has removed it
                continue
        return


def ended_by_kernel(base: Path, runs: Iterable[str]) -> dict[str, bool]:
    """The jobs of this Ray node of which the kernel has ended processes, by run: whether for the limit of their group,
    or since the node had no memory left. Removes the groups of other jobs, and those of Ray nodes that are gone.
    """
    known = {_group_of(run): run for run in runs}
    found: dict[str, bool] = {}
    for group in base.glob(f"{_JOB}*"):
        with suppress(OSError):  # a process that is about to end keeps its group until a later round
            if run := known.get(group.name):
                events = dict(line.split() for line in (group / "memory.events").read_text().splitlines())
                if int(events["oom_kill"]):
                    found[run] = int(events["oom"]) > 0
            elif group.name.startswith(_group_of("")) or not psutil.pid_exists(int(group.name.split(".")[1])):
                group.rmdir()
    return found
