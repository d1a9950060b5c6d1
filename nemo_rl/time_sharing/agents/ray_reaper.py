"""Ends the Ray actors of a pipeline and shows that their processes are gone, children included.

A GPU may be given on only when no process holds memory on it, and Ray forgets an actor as soon as it has asked for
its end: a process that hangs, or was stopped, keeps its memory. So each process is killed by its number on its own
node, and waited for.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from nemo_rl.distributed.processes import kill_and_wait, remove_files_of
from nemo_rl.utils.files import replace_file

logger = logging.getLogger(__name__)

_TITLE = "ray::"


_NAMESPACE = "pipeline_"
_AGENT = "agent."
PIPELINE_VARIABLE, NAMESPACE_VARIABLE = "PIPELINE_ID", "ROLL_RAY_NAMESPACE"
INCARNATION_VARIABLE = "NRL_INCARNATION"
_OURS = re.compile(r"(agent|rank_\d+)\.\d+")
_FOREIGN = re.compile(r"pipeline_.+_NS$|rlix|roll", re.IGNORECASE)
"""Ray namespaces that control planes of this kind use. Their pipelines' are ours, too."""


def agent_namespace(pipeline: str) -> str:
    """The Ray namespace that holds a pipeline's actors."""
    return f"{_NAMESPACE}{pipeline}_NS"


def agent_variables(pipeline: str) -> dict[str, str]:
    """Variables that say to the processes of a pipeline which one they belong to, and its Ray namespace."""
    return {PIPELINE_VARIABLE: pipeline, NAMESPACE_VARIABLE: agent_namespace(pipeline)}


def agent_actor_name(incarnation: int) -> str:
    """The name of a pipeline's agent. Every actor of a pipeline ends in its incarnation, so that ending one never ends
    its successor.
    """
    return f"{_AGENT}{incarnation}"


def end_agents() -> None:
    """Ends the agents of all pipelines, and with them the actors that they have started."""
    import ray

    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"].startswith(_NAMESPACE) and entry["name"].startswith(_AGENT):
            try:
                ray.kill(ray.get_actor(entry["name"], namespace=entry["namespace"]), no_restart=True)
            except ValueError:
                continue  # it ended meanwhile


def foreign_actors() -> list[str]:
    """Named actors of other control planes on this Ray cluster, as `namespace/name`."""
    import ray

    named = [(entry["namespace"], entry["name"]) for entry in ray.util.list_named_actors(all_namespaces=True)]
    return sorted(
        f"{namespace}/{name}" for namespace, name in named if _FOREIGN.match(namespace) and not _OURS.fullmatch(name)
    )


def rank_actor_name(rank: int, incarnation: int) -> str:
    """The name of the actor that leads one generation rank, where engines are actors of their own."""
    return f"rank_{rank}.{incarnation}"


class SurvivingProcess(NamedTuple):
    """A killed process that is not known to be gone. `started`: seconds since the epoch, 0 if unknown;
    its number may be another's later.
    """

    node: str
    pid: int
    started: float


class Reaper:
    """Ends the processes of pipelines, and remembers those that were not gone: Ray has forgotten them when it is tried
    again.

    memory: a file that keeps them for a restarted reaper, made when there is something to keep.
    """

    def __init__(self, memory: Path | None = None) -> None:
        self._memory, self._lock = memory, threading.Lock()
        self._left = _recalled(memory) if memory is not None and memory.exists() else {}
        self._led_by_ranks = {key[:2] for key in self._left if key[2] >= 0}

    def ends_single_ranks(self, pipeline: str, incarnation: int) -> bool:
        """Whether the engines of a pipeline are, or were, actors of their own, so that one rank can be ended without
        the others.
        """
        if (pipeline, incarnation) not in self._led_by_ranks:
            namespace = agent_namespace(pipeline)
            # An engine that died may have been the only one.
            names = actors_in(namespace) | dead_actors_in(namespace)
            if any(name.startswith("rank_") and name.endswith(f".{incarnation}") for name in names):
                self._led_by_ranks.add((pipeline, incarnation))
        return (pipeline, incarnation) in self._led_by_ranks

    def end(self, pipeline: str, incarnation: int, rank: int, *, timeout_s: float) -> bool:
        """Ends the named actors of one incarnation, or the one that leads a rank; returns whether all their processes
        are gone within timeout_s.

        A pipeline without rank actors runs its engines in its own processes: nothing less than ending all of them frees
        a rank's memory.
        """
        import ray

        namespace, deadline = agent_namespace(pipeline), time.monotonic() + timeout_s
        wanted = {name for name in actors_in(namespace) if name.endswith(f".{incarnation}")}
        earlier = [key for key in list(self._left) if key[:2] == (pipeline, incarnation)]
        if rank >= 0 and self.ends_single_ranks(pipeline, incarnation):
            wanted &= {rank_actor_name(rank, incarnation)}
            earlier = [key for key in earlier if key[2] == rank]
        handles = []
        for name in wanted:
            try:
                handles.append(ray.get_actor(name, namespace=namespace))
            except ValueError:
                continue
        to_end = {left for key in earlier for left in self._left[key]} | _processes_of(
            [handle._actor_id.hex() for handle in handles]
        )
        left = _end_on_their_nodes(to_end, timeout_s)
        self._remember(earlier, (pipeline, incarnation, rank), left)
        for handle in handles:
            ray.kill(handle, no_restart=True)
        while wanted & actors_in(namespace):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return not left

    def _remember(
        self, earlier: Sequence[tuple[str, int, int]], whose: tuple[str, int, int], left: set[SurvivingProcess]
    ) -> None:
        """Replaces the processes left by `earlier` with those of `whose`; on the disk before Ray forgets them."""
        with self._lock:
            for key in earlier:
                self._left.pop(key, None)
            if left:
                self._left[whose] = left
            if self._memory is not None and (left or earlier):
                left_over = [[*key, sorted(processes)] for key, processes in self._left.items()]
                replace_file(self._memory, json.dumps(left_over), durable=True)


def _recalled(memory: Path) -> dict[tuple[str, int, int], set[SurvivingProcess]]:
    try:
        return {
            (name, incarnation, rank): {SurvivingProcess(*left) for left in processes}
            for name, incarnation, rank, processes in json.loads(memory.read_text())
        }
    except (ValueError, TypeError) as error:
        # Only a machine that was lost leaves half a file, and it has taken the processes along.
        logger.error("event=left_processes_unreadable path=%s reason=%s", memory, error)
        return {}


def actors_in(namespace: str) -> set[str]:
    """Names of the actors that Ray knows in a namespace."""
    import ray

    return {
        entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True) if entry["namespace"] == namespace
    }


def dead_actors_in(namespace: str) -> set[str]:
    """Names of the actors of a namespace that have ended, as far as Ray remembers them."""
    from ray._private.state import state
    from ray.core.generated import gcs_pb2

    table = state._connect_and_get_accessor().get_actor_table(None, "DEAD")
    read = gcs_pb2.ActorTableData.FromString  # pyrefly: ignore[missing-attribute]  # it is generated
    entries = [read(entry) for entry in table]
    return {entry.name for entry in entries if entry.ray_namespace == namespace and entry.name}


def _processes_of(actor_ids: Sequence[str]) -> set[SurvivingProcess]:
    from ray._private.state import actors

    entries: list[dict[str, Any]] = [actors(actor_id) for actor_id in actor_ids]
    return {
        SurvivingProcess(entry["Address"]["NodeID"], entry["Pid"], 0.0)
        for entry in entries
        if entry and entry["Pid"] and entry["State"] != "DEAD"
    }


def _end_on_their_nodes(processes: Set[SurvivingProcess], timeout_s: float) -> set[SurvivingProcess]:
    """Ends processes where they are; those that are not known to be gone."""
    if not processes:
        return set()
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # A node that is gone has taken its processes along.
    nodes = {entry["NodeID"] for entry in ray.nodes() if entry["Alive"]}
    by_node = {
        node: [(left.pid, left.started) for left in processes if left.node == node]
        for node in nodes & {left.node for left in processes}
    }
    here = ray.get_runtime_context().get_node_id()
    elsewhere = {
        node: ray.remote(end_processes)
        .options(num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(numbers, timeout_s)
        for node, numbers in by_node.items()
        if node != here
    }
    left = {SurvivingProcess(here, *number) for number in end_processes(by_node.get(here, []), timeout_s)}
    for node, answer in elsewhere.items():
        try:
            left |= {SurvivingProcess(node, *number) for number in ray.get(answer, timeout=timeout_s)}
        except (ray.exceptions.RayError, TimeoutError) as error:
            # A node that cannot be asked cannot show that its memory is free.
            logger.warning("event=processes_not_ended node=%s error=%r", node, error)
            left |= {SurvivingProcess(node, *number) for number in by_node[node]}
    return left


def end_processes(numbers: Sequence[tuple[int, float]], timeout_s: float) -> list[tuple[int, float]]:
    """Kills processes of this node with all their children, waits, and removes their segments of shared memory and
    socket folders; returns those that are not gone.

    numbers: (process number, when it was started), 0 for a Ray worker of which that is not known.
    """
    family: list[psutil.Process] = []
    for pid, started in numbers:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            # A number may have been given to another process since it was noted.
            same = process.create_time() == started if started else " ".join(process.cmdline()).startswith(_TITLE)
            if pid != os.getpid() and same:
                family += [process, *process.children(recursive=True)]
    surviving = kill_and_wait(family, timeout_s)
    remove_files_of({process.pid for process in family} - {process.pid for process in surviving})
    left = []
    for process in surviving:
        with suppress(psutil.NoSuchProcess):
            left.append((process.pid, process.create_time()))
    return left
