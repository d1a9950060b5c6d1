"""Ends the Ray actors of a pipeline and shows that their processes are gone, children included.

A GPU may be given on only when nobody holds memory on it any more, and Ray forgets an actor as soon as it has asked for its end: a process that hangs,
or was stopped, keeps its memory. So each process is killed by its number on its own node, and waited for. Knows no plans and no leases.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import psutil

from nemo_rl.distributed.processes import kill_and_wait

logger = logging.getLogger(__name__)

_TITLE = "ray::"


def agent_namespace(pipeline: str) -> str:
    """The Ray namespace that holds a pipeline's actors."""
    return f"pipeline_{pipeline}_NS"


def rank_actor_name(rank: int, incarnation: int) -> str:
    """The name of the actor that leads one generation rank, where engines are actors of their own."""
    return f"rank_{rank}.{incarnation}"


def led_by_rank_actors(pipeline: str, incarnation: int) -> bool:
    """Whether the engines of a pipeline are actors of their own, so that one rank can be ended without the others."""
    return any(name.startswith("rank_") and name.endswith(f".{incarnation}") for name in actors_in(agent_namespace(pipeline)))


def end_actors(pipeline: str, incarnation: int, rank: int, *, timeout_s: float) -> bool:
    """Ends the named actors of one incarnation, or the one that leads a rank; returns whether all their processes are gone within timeout_s.

    A pipeline without rank actors runs its engines in its own processes: nothing less than ending all of them frees a rank's memory.
    """
    import ray

    namespace, deadline = agent_namespace(pipeline), time.monotonic() + timeout_s
    wanted = {name for name in actors_in(namespace) if name.endswith(f".{incarnation}")}
    if rank >= 0 and led_by_rank_actors(pipeline, incarnation):
        wanted &= {rank_actor_name(rank, incarnation)}
    handles = []
    for name in wanted:
        try:
            handles.append(ray.get_actor(name, namespace=namespace))
        except ValueError:
            continue
    gone = _end_on_their_nodes([handle._actor_id.hex() for handle in handles], timeout_s)
    for handle in handles:
        ray.kill(handle, no_restart=True)
    while wanted & actors_in(namespace):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return gone


def actors_in(namespace: str) -> set[str]:
    """Names of the actors that Ray knows in a namespace."""
    import ray

    return {entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True) if entry["namespace"] == namespace}


def _end_on_their_nodes(actor_ids: Sequence[str], timeout_s: float) -> bool:
    import ray
    from ray._private.state import actors
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    by_node: dict[str, list[int]] = {}
    for actor_id in actor_ids:
        entry: dict[str, Any] = actors(actor_id)
        if entry and entry["Pid"] and entry["State"] != "DEAD":
            by_node.setdefault(entry["Address"]["NodeID"], []).append(entry["Pid"])
    here = ray.get_runtime_context().get_node_id()
    elsewhere = [
        ray.remote(end_processes)
        .options(num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(pids, timeout_s)
        for node, pids in by_node.items()
        if node != here
    ]
    gone = end_processes(by_node.get(here, []), timeout_s)
    try:
        return all([gone, *ray.get(elsewhere, timeout=timeout_s)])
    except (ray.exceptions.RayError, TimeoutError) as error:
        # A node that cannot be asked cannot show that its memory is free.
        logger.warning("event=processes_not_ended nodes=%s error=%r", sorted(by_node), error)
        return False


def end_processes(pids: Sequence[int], timeout_s: float) -> bool:
    """Kills Ray workers of this node by their process numbers, with all their children, and waits; returns whether all of them are gone."""
    family: list[psutil.Process] = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            # A number may have been given to another process since Ray noted it.
            if pid != os.getpid() and " ".join(process.cmdline()).startswith(_TITLE):
                family += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return kill_and_wait(family, timeout_s)
