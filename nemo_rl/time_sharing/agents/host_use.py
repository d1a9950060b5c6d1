"""Host memory, open files and disk space of a pool's jobs: measured round by round, and kept within bounds.

A job's processes are those of this Ray node that carry its name in their first environment, and all processes that
they started. Pages that several processes share count for each of them in equal parts. Invariant: a job is ended only
for what was just measured of it, or since the kernel ended it, and on a node that is short of memory one job at a time.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from pydantic import ByteSize, TypeAdapter, ValidationError

from nemo_rl.config.errors import first_line
from nemo_rl.distributed.memory_groups import ended_by_kernel, groups_folder
from nemo_rl.time_sharing.agents.ray_reaper import INCARNATION_VARIABLE, PIPELINE_VARIABLE
from nemo_rl.time_sharing.log.pool_state import HostLimits, HostUse, Submission

logger = logging.getLogger(__name__)

_RAYLET = "RAY_RAYLET_PID"
_GENERATIONS = 64
_ROUND_S, _DISK_ROUND_S = 2.0, 60.0
_PART_OF_TIME = 0.1
"""Measuring takes at most this part of one core's time: the next round waits for longer after a slow one."""
_ANSWER_S = 30.0
_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


class NodeUse(NamedTuple):
    """What the jobs take of one node, by `run_of`. `free`: bytes of host memory that are left there. `cost_s`: seconds
    of a core that measuring took. `ended`: see `ended_by_kernel`. `uncapped`: why the kernel caps no job there.
    """

    node: str
    free: int
    jobs: dict[str, HostUse]
    cost_s: float = 0.0
    ended: Mapping[str, bool] = {}
    uncapped: str = ""


def run_of(pipeline: str, incarnation: object) -> str:
    """One submission of a job: processes of an earlier one may be left while the next has begun."""
    return f"{pipeline}.{incarnation}"


def measure_node(capped: Collection[str] | None = None) -> NodeUse:
    """The jobs on the Ray node of this process. `capped`: the running ones, where the kernel caps jobs."""
    began = time.thread_time()
    found: dict[str, HostUse] = {}
    node, free = socket.gethostname(), free_memory()
    for name, process in _processes_of_jobs():
        with suppress(psutil.NoSuchProcess):
            memory, files = _taken_by(process)
            use = found.get(name, HostUse(node, 0, 0, 0, free))
            found[name] = HostUse(node, use.memory + memory, use.files + files, use.processes + 1, free)
    ended: Mapping[str, bool] = {}
    uncapped = ""
    if capped is not None:
        try:
            ended = ended_by_kernel(groups_folder(), capped)
        except OSError as error:
            uncapped = str(error)
    return NodeUse(node, free, found, time.thread_time() - began, ended, uncapped)


def _processes_of_jobs() -> Iterator[tuple[str, psutil.Process]]:
    ours, processes = os.environ.get(_RAYLET), {process.pid: process for process in psutil.process_iter()}
    names: dict[int, str] = {}
    parents: dict[int, int] = {}
    for pid, process in processes.items():
        with suppress(psutil.Error):
            parents[pid] = process.ppid()
            environment = process.environ()
            # Another pool on this machine may have a job of the same name.
            if environment.get(_RAYLET) == ours and environment.get(PIPELINE_VARIABLE):
                names[pid] = run_of(environment[PIPELINE_VARIABLE], environment.get(INCARNATION_VARIABLE, ""))
    for pid, process in processes.items():
        at = pid
        for _ in range(_GENERATIONS):
            if at in names:
                yield names[at], process
                break
            at = parents.get(at, 0)


def _taken_by(process: psutil.Process) -> tuple[int, int]:
    """Bytes of memory, and open files."""
    try:
        return int(process.memory_full_info().pss), process.num_fds()
    except psutil.AccessDenied:  # a process that hides from others of its user
        return int(process.memory_info().rss), 0


def free_memory(cgroups: Path = _CGROUPS) -> int:
    """Bytes of host memory that processes of this node can still take, also where a container has less than the
    machine.
    """
    free = int(psutil.virtual_memory().available)
    for limit, usage, stat, cached in _CGROUP_FILES:
        with suppress(OSError, ValueError):
            used = int((cgroups / usage).read_text())
            figures = dict(line.split() for line in (cgroups / stat).read_text().splitlines())
            free = min(free, int((cgroups / limit).read_text()) - used + int(figures.get(cached, 0)))
    return max(free, 0)


@cache
def _measuring() -> Any:
    import ray

    return ray.remote(measure_node)


def measure_nodes(capped: Collection[str] | None = None) -> Iterator[NodeUse]:
    """The same on every node of the Ray cluster; one that does not answer is left out."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    answers = [
        _measuring()
        .options(num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(entry["NodeID"], False))
        .remote(capped)
        for entry in ray.nodes()
        if entry["Alive"]
    ]
    ready, _ = ray.wait(answers, num_returns=len(answers), timeout=_ANSWER_S)
    for answer in ready:
        with suppress(ray.exceptions.RayError):
            yield ray.get(answer)


def disk_of(folders: Iterable[str]) -> int:
    """Bytes on the disk of everything in these folders; a file with several names counts once."""
    seen: dict[tuple[int, int], int] = {}
    for folder in folders:
        for at, _, files in os.walk(folder):
            for file in files:
                with suppress(OSError):
                    about = os.lstat(os.path.join(at, file))
                    seen[about.st_dev, about.st_ino] = about.st_blocks * 512
    return sum(seen.values())


def over_limit(use: Iterable[HostUse], disk: int | None, limits: HostLimits) -> str:
    """Why a job is to be ended: it takes more than it may of a node, or of the disk; empty where it does not."""
    for each in use:
        if limits.memory is not None and each.memory > limits.memory:
            used, cap = in_words(each.memory), in_words(limits.memory)
            return f"used {used} of host memory on {each.node}, its cap is {cap}"
        if limits.files is not None and each.files > limits.files:
            return f"had {each.files} files open on {each.node}, its cap is {limits.files}"
    if disk is not None and limits.disk is not None and disk > limits.disk:
        return f"its logs and checkpoints take {in_words(disk)} of disk, its cap is {in_words(limits.disk)}"
    return ""


def _kernels_reason(job: Submission, nodes: Iterable[NodeUse]) -> str:
    for node, above in ((node.node, node.ended.get(run_of(job.name, job.incarnation))) for node in nodes):
        if above is not None:
            why = f"above its cap of {in_words(job.limits.memory or 0)}" if above else "the node had no memory left"
            return f"ended by the kernel on {node}: {why}"
    return ""


def most_over_its_part(node: NodeUse, keep_free: int) -> tuple[str, str]:
    """The job that takes the most of a node, and why it is to be ended: too little memory is free there. Equal parts
    of what the jobs may take together are fair; where even the end of all would not free enough, none is ended.
    """
    name, use = max(node.jobs.items(), key=lambda job: job[1].memory)
    may_take = sum(use.memory for use in node.jobs.values()) + node.free - keep_free
    if node.free >= keep_free or may_take <= 0:
        return name, ""
    part = in_words(may_take // len(node.jobs))
    return name, (
        f"used {in_words(use.memory)} of host memory on {node.node}, which has {in_words(node.free)} free where the "
        f"pool keeps {in_words(keep_free)}; a fair part among {len(node.jobs)} jobs is {part}, and it exceeds its part "
        "by most"
    )


_SIZE = TypeAdapter(ByteSize)


def bytes_of(text: str) -> int:
    """A number of bytes. Raises ValueError: the text is none above 0."""
    with suppress(ValidationError):
        if (number := int(_SIZE.validate_python(re.sub("([KMGT])B?$", r"\1iB", text.upper())))) > 0:
            return number
    raise ValueError(f"{text}: expected a size above 0, as 64G, 500M or 2T")


def in_words(size: int) -> str:
    """A number of bytes for people."""
    return ByteSize(size).human_readable(separator=" ")


class HostWatch:
    """Measures the jobs of a pool in two threads, and has those ended that take too much.

    Args:
        jobs: The jobs that run.
        end: Ends a job for a reason, so that it `is_ending` afterwards.
        nodes: Nodes of the pool; one alone is measured without Ray.
        keep_free: Bytes of host memory that are to stay free on each node; 0 ends no job for that.
        pools_own: Folder of the pool's log, which is no job's.

    Attributes:
        caps: Whether the kernel caps jobs too, or why not; empty before a job has a cap of host memory.
    """

    def __init__(
        self,
        jobs: Callable[[], Sequence[Submission]],
        end: Callable[[Submission, str], None],
        *,
        nodes: int,
        keep_free: int,
        pools_own: str = "",
    ) -> None:
        self._pools_own, self.caps, self._any_capped = pools_own, "", False
        self._jobs, self._end, self._nodes, self._keep_free = jobs, end, nodes, keep_free
        self._hosts: dict[str, tuple[HostUse, ...]] = {}
        self._disk: dict[str, int] = {}
        for work, wait_s in ((self.look_at_hosts, _ROUND_S), (self.look_at_disks, _DISK_ROUND_S)):
            threading.Thread(target=self._run, args=(work, wait_s), name=work.__name__, daemon=True).start()

    def of(self, name: str) -> tuple[tuple[HostUse, ...], int | None]:
        """What a job took of each node, and of the disk, when it was last measured."""
        return self._hosts.get(name, ()), self._disk.get(name)

    def _run(self, work: Callable[[], float], wait_s: float) -> None:
        said = ""
        while True:
            cost_s = 0.0
            try:
                cost_s = work()
                said = ""
            except Exception as error:  # noqa: BLE001 - what fails once is measured in the next round
                if said != (said := first_line(error)):
                    logger.warning("event=hosts_not_measured work=%s reason=%s", work.__name__, said)
            time.sleep(max(wait_s, cost_s / _PART_OF_TIME))

    def look_at_hosts(self) -> float:
        """One round over the processes; the seconds of a core that it took of the node where it took the most."""
        running = self._running()
        # Once more after the last one, whose cgroup goes.
        nodes = self._measured(running) if running or self._hosts else []
        found: dict[str, tuple[HostUse, ...]] = {}
        for node in nodes:
            for run in running.keys() & node.jobs.keys():
                found[running[run].name] = (*found.get(running[run].name, ()), node.jobs[run])
        self._hosts = found
        for job in running.values():
            self._end_for(job, _kernels_reason(job, nodes) or over_limit(found.get(job.name, ()), None, job.limits))
        for node in nodes:
            known = {run: use for run, use in node.jobs.items() if run in running}
            if known and not any(running[run].is_ending for run in known):
                run, why = most_over_its_part(node._replace(jobs=known), self._keep_free)
                if why:
                    self._end_for(running[run], why)
        return max((node.cost_s for node in nodes), default=0.0)

    def _measured(self, running: Mapping[str, Submission]) -> list[NodeUse]:
        self._any_capped = self._any_capped or any(job.limits.memory for job in running.values())
        capped = [*running] if self._any_capped else None
        nodes = [measure_node(capped)] if self._nodes == 1 else list(measure_nodes(capped))
        if capped is not None:
            alone = ", ".join(f"{node.node} ({node.uncapped})" for node in nodes if node.uncapped)
            self.caps = f"host memory: capped by the pool's watch{f' alone on {alone}' if alone else ' and the kernel'}"
        return nodes

    def why_by_kernel(self, job: Submission) -> str:
        """Why the kernel has ended processes of a job, measured now; empty where it has not."""
        return _kernels_reason(job, self._measured(self._running()) if job.limits.memory else ())

    def leave(self) -> None:
        """Removes the cgroups of the jobs, which have ended."""
        if self._any_capped:
            self._measured({})

    def _running(self) -> dict[str, Submission]:
        return {run_of(job.name, job.incarnation): job for job in self._jobs()}

    def look_at_disks(self) -> float:
        """One round over the folders; the seconds that it took."""
        began = time.monotonic()
        jobs = self._jobs()
        # A command logs into the pool's own folder.
        folders = {job.name: {job.log_dir, job.saves_in} - {"", self._pools_own} for job in jobs}
        self._disk = {name: disk_of(own) for name, own in folders.items()}
        for job in jobs:
            self._end_for(job, over_limit((), self._disk[job.name], job.limits))
        return time.monotonic() - began

    def _end_for(self, job: Submission, why: str) -> None:
        if why and not job.is_ending:
            self._end(job, why)
