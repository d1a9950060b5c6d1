"""Opens and closes a pool on the Ray cluster that this process is connected to.

Invariant: a pool that is closed leaves no process, no reservation and no open log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.time_sharing.agents.actors import (
    CONTROL_NAMESPACE,
    POOL_NAME,
    SCHEDULER_NAME,
    SchedulerInUse,
    start_scheduler,
    stop_scheduler,
)
from nemo_rl.time_sharing.agents.ray_reaper import end_agents, foreign_actors
from nemo_rl.time_sharing.log.pool_state import Outcome, Standing
from nemo_rl.time_sharing.pipelines.grpo import PoolHandles
from nemo_rl.time_sharing.pipelines.residents import SlotBytes, slot_bytes
from nemo_rl.time_sharing.pool import PoolActor
from nemo_rl.time_sharing.pool_jobs import ACTOR_THREADS, NOTHING_MORE, PoolOptions
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import Limits
from nemo_rl.time_sharing.team import Team

if TYPE_CHECKING:
    from nemo_rl.distributed.accelerator_slots import Accelerator

logger = logging.getLogger(__name__)

LIVE_LIMITS = Limits(
    heartbeat_s=2.0,
    lease_s=60.0,
    isolation_s=300.0,
    wake_s=900.0,
    drain_s=180.0,
    sleep_s=180.0,
    sync_s=300.0,
    grant_s=60.0,
    min_hold_s=5.0,
)
"""Bounds for live engines: a first wake builds one."""
_ANSWER_S = 30.0
_START_S = 300.0
_POLL_S = 0.5
_NOTICES_S = 15.0


def open_pool(
    pool: Pool,
    accelerator: Accelerator,
    log_dir: Path,
    limits: Limits = LIVE_LIMITS,
    pool_class: type[PoolActor] = PoolActor,
    name: str = "",
    team: Team | None = None,
    options: PoolOptions = NOTHING_MORE,
) -> Any:
    """Reserves the slots, starts the scheduler and the pool's actor; the actor's handle. Ray must be initialised.

    Args:
        log_dir: Existing directory for the scheduler's log and the agents' records.
        name: For people; by default that of its log's folder.
        team: Who may use the pool; None for whom Ray lets in.
        options: What it does beside scheduling, and how many of the last nodes are away at first.

    Raises ResourceInsufficientError: the Ray cluster does not have the slots; SchedulerInUse: a pool, or another
    control plane, is on this Ray cluster already.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from nemo_rl.time_sharing.pipelines.shared_cluster import reserve_pool

    _check_alone()
    with ExitStack() as undo:
        scheduler = start_scheduler(log_dir, pool, limits, away=options.away)
        undo.callback(stop_scheduler, scheduler)
        reserve_pool(pool, accelerator, pool.nodes - options.away)
        undo.callback(_remove_reservation)
        memory = _memory(pool) if accelerator.is_cuda else None
        undo.pop_all()
    handles = PoolHandles(scheduler, pool, accelerator.kind, limits, str(log_dir), memory, name or log_dir.name)
    actor: Any = (
        ray.remote(pool_class)
        .options(
            name=POOL_NAME,
            namespace=CONTROL_NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            # Its state is on this node, which cannot leave the pool.
            scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
            max_concurrency=ACTOR_THREADS,
            max_restarts=-1,
            # What is asked of it is asked again of the next one.
            max_task_retries=-1,
        )
        .remote(handles, team, options)
    )
    ray.get(actor.handles.remote(), timeout=_START_S)
    return actor


def _check_alone() -> None:
    """Raises SchedulerInUse: the Ray cluster has a control plane, which would lend the same GPUs."""
    import ray

    address = ray.get_runtime_context().gcs_address
    elsewhere = "or open this one on a Ray cluster of its own (RAY_ADDRESS=local)"
    try:
        other: Any = ray.get_actor(POOL_NAME, namespace=CONTROL_NAMESPACE)
    except ValueError:
        pass
    else:
        about = ray.get(other.about.remote(), timeout=_ANSWER_S)
        raise SchedulerInUse(
            f"the pool {about.name} is open on the Ray cluster {address} already, with its log in {about.log_dir}: "
            f"submit to it (python -m nemo_rl.time_sharing submit FILE), close it, {elsewhere}"
        )
    if foreign := foreign_actors():
        raise SchedulerInUse(
            f"another control plane lends the GPUs of the Ray cluster {address}: it has the actors "
            f"{', '.join(foreign)}; end it, {elsewhere}"
        )


def _memory(pool: Pool) -> SlotBytes | None:
    """Device memory of each slot, the same on every node; None where no GPU is here to be asked."""
    from nemo_rl.distributed.accelerator_slots import least_device_bytes, resolve_accelerator

    if pool.slots_per_gpu > 1:
        return slot_bytes(least_device_bytes(), pool.slots_per_gpu)
    whole = least_device_bytes() if resolve_accelerator("auto").is_cuda else None
    return None if whole is None else SlotBytes(whole, whole)


def close_pool(actor: Any) -> None:
    """Ends the pool: its pipelines, the scheduler and the reservation, each whatever became of the others."""
    import ray

    with ExitStack() as parts:
        parts.callback(_remove_reservation)
        parts.callback(_end_scheduler)
        parts.callback(end_agents)
        parts.callback(ray.kill, actor, no_restart=True)
        try:
            handles: PoolHandles = ray.get(actor.handles.remote(), timeout=_ANSWER_S)
            standings = ray.get(actor.standings.remote(), timeout=_ANSWER_S)
            # Those that wait would begin as the others end.
            for standing in sorted(standings, key=lambda one: not one.waits):
                if standing.outcome is None:
                    ray.get(actor.end.remote(standing.name), timeout=_ANSWER_S)
            wait_for_pipelines(actor, timeout_s=handles.limits.reap_s, but_waiting=True)
            _wait_until_reaped(handles)
            if not ray.get(actor.settle_notices.remote(_NOTICES_S), timeout=_ANSWER_S + _NOTICES_S):
                logger.error("pool=%s close=ends_not_posted after_s=%g", POOL_NAME, _NOTICES_S)
            ray.get(actor.leave_hosts.remote(), timeout=_ANSWER_S + _NOTICES_S)
        except ray.exceptions.RayError as error:
            logger.error("pool=%s close=not_answered reason=%s", POOL_NAME, str(error).partition("\n")[0])


def _wait_until_reaped(handles: PoolHandles) -> None:
    """Waits until the scheduler has recorded that the processes of all pipelines are gone: a log that is closed earlier
    leaves GPUs with fenced pipelines.
    """
    import ray

    deadline = time.monotonic() + handles.limits.reap_s
    while time.monotonic() < deadline:
        if not ray.get(handles.scheduler.describe.remote(), timeout=_ANSWER_S)["pipelines"]:
            return
        time.sleep(0.1)
    logger.error("pool=%s close=not_reaped after_s=%g", POOL_NAME, handles.limits.reap_s)


def _end_scheduler() -> None:
    import ray

    try:
        scheduler = ray.get_actor(SCHEDULER_NAME, namespace=CONTROL_NAMESPACE)
    except ValueError:
        return
    try:
        stop_scheduler(scheduler)
    except ray.exceptions.RayError as error:
        logger.error("scheduler=ended reason=%s", str(error).partition("\n")[0])


def _remove_reservation() -> None:
    from ray.util.placement_group import get_placement_group, placement_group_table, remove_placement_group

    from nemo_rl.time_sharing.pipelines.shared_cluster import RESERVATION

    for entry in placement_group_table().values():
        if entry["name"].startswith(RESERVATION) and entry["state"] != "REMOVED":
            remove_placement_group(get_placement_group(entry["name"]))


def wait_for_pipelines(actor: Any, *, timeout_s: float, but_waiting: bool = False) -> Mapping[str, Outcome]:
    """Waits until every pipeline has ended, or `timeout_s` has passed; the outcomes so far. `but_waiting`: those that
    wait for their turn are left out.
    """
    import ray

    deadline = time.monotonic() + timeout_s
    while True:
        standings: Sequence[Standing] = ray.get(actor.standings.remote(), timeout=_ANSWER_S)
        outcomes = {standing.name: standing.outcome for standing in standings if standing.outcome is not None}
        waiting = sum(bool(standing.waits) for standing in standings) if but_waiting else 0
        if len(outcomes) + waiting == len(standings) or time.monotonic() > deadline:
            return outcomes
        time.sleep(_POLL_S)
