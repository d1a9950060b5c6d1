"""Client side of the scheduler actor: starts and stops it, and registers pipelines.

The actor is named, is restarted by Ray without limit and goes on from its log. Imports Ray inside functions only, as
importing this module must start nothing and need nothing.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.config.errors import UserError
from nemo_rl.time_sharing.agents.ray_reaper import actors_in
from nemo_rl.time_sharing.agents.scheduler_actor import STOP_S, SchedulerActor
from nemo_rl.time_sharing.log.segments import SEGMENT_LINES
from nemo_rl.time_sharing.protocol.topology import Pool, RegistrationError, Topology, register
from nemo_rl.time_sharing.protocol.types import Answer, Limits, Reply, Status

if TYPE_CHECKING:
    from ray.actor import ActorHandle

CONTROL_NAMESPACE = "nemo_rl_time_sharing"
SCHEDULER_NAME = "scheduler"
POOL_NAME = "pool"
_START_S = 120.0
_ASK_AGAIN_S = 0.5


class SchedulerInUse(UserError, RuntimeError):
    """A scheduler runs already, over another pool or another log than was asked for."""


def start_scheduler(
    log_dir: str | Path,
    pool: Pool,
    limits: Limits | None = None,
    *,
    segment_lines: int = SEGMENT_LINES,
    away: int = 0,
) -> ActorHandle[object]:
    """The scheduler actor, started if it does not run: named, detached, restarted by Ray whenever it dies, until
    `stop_scheduler`.

    log_dir: an existing directory on this node, where the scheduler stays; a log that is there already is gone on with.
    segment_lines: after how many lines the log goes on in a new file, which bounds how long a restart takes (see
    `segments`). away: how many of the last nodes are away at first. Returns the actor's handle. Raises SchedulerInUse
    when one runs already over another pool or log.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    scheduler: Any = (
        ray.remote(SchedulerActor)
        .options(
            name=SCHEDULER_NAME,
            namespace=CONTROL_NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=32,
            num_cpus=0,
            # Its log is on this node, also for the scheduler that Ray starts after it.
            scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
        )
        .remote(str(log_dir), pool.nodes, pool.gpus_per_node, limits, segment_lines, pool.slots_per_gpu, away)
    )
    served_dir, served_pool = ray.get(scheduler.serves.remote(), timeout=_START_S)
    if (served_dir, served_pool) != (str(log_dir), pool):
        raise SchedulerInUse(
            f"a scheduler of {served_pool} with its log in {served_dir} runs on this cluster already; "
            f"stop it with stop_scheduler before starting one of {pool} in {log_dir}"
        )
    return scheduler


def stop_scheduler(scheduler: ActorHandle[object]) -> None:
    """Closes the scheduler's log and ends its actor, so that its name is free. Pipelines notice by their unanswered
    heartbeats only. Raises RayError when it did not close its log by itself in time; its actor is ended all the same.
    """
    import ray

    try:
        ray.get(scheduler.stop.remote(), timeout=2 * STOP_S)
    finally:
        ray.kill(scheduler, no_restart=True)
        deadline = time.monotonic() + STOP_S
        while SCHEDULER_NAME in actors_in(CONTROL_NAMESPACE):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the scheduler actor has not ended within {STOP_S:g} s of being stopped")
            time.sleep(0.05)


def register_at(scheduler: Any, registration: Sequence[object], timeout_s: float) -> Topology:
    """Registers a pipeline, also while Ray restarts the scheduler: a repeated registration changes nothing.

    Args:
        registration: Arguments of `SchedulerActor.register`.
        timeout_s: How long a scheduler that does not answer is asked.

    Raises RegistrationError: see `Scheduler.register`; RayActorError: no scheduler answered in time.
    """
    import ray

    deadline = time.monotonic() + timeout_s
    while True:
        try:
            topology: Topology = ray.get(scheduler.register.remote(*registration), timeout=timeout_s)
            return topology
        except ray.exceptions.RayActorError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_ASK_AGAIN_S)


class RayLink:
    """Sends an agent's statuses and answers to the scheduler actor. Both calls return at once; the reply to a status
    arrives through the callback, or is lost: the next heartbeat says it all again.
    """

    def __init__(self, scheduler: ActorHandle[object]) -> None:
        self._scheduler = scheduler

    def status(self, status: Status, replied: Callable[[Reply], None]) -> None:
        future: Future[Reply] = self._scheduler.status.remote(status).future()
        future.add_done_callback(lambda done: None if done.exception() else replied(done.result()))

    def answer(self, answer: Answer) -> None:
        self._scheduler.answer.remote(answer)


class Orchestrator:
    """Life cycle of pipelines: ids, registration, admission. Stateless but for registrations that are not
    admitted yet.
    """

    def __init__(self, scheduler: ActorHandle[object], pool: Pool) -> None:
        self._scheduler, self._pool = scheduler, pool
        self._registered: dict[str, tuple[str, Mapping[str, int], Mapping[str, Sequence[int]], Mapping[str, Any]]] = {}

    def allocate_pipeline_id(self, pipeline_type: str) -> str:
        """A new id, `<type>_<12 hex digits>`; types are `ft` and `lora`."""
        if pipeline_type not in ("ft", "lora"):
            raise ValueError(f"pipeline type {pipeline_type!r}: allowed are 'ft' (full fine-tuning) and 'lora'")
        return f"{pipeline_type}_{uuid.uuid4().hex[:12]}"

    def register_pipeline(
        self,
        pipeline_id: str,
        ray_namespace: str,
        cluster_tp_configs: Mapping[str, int],
        cluster_device_mappings: Mapping[str, Sequence[int]],
        **options: Any,
    ) -> None:
        """Checks a registration and keeps it until it is admitted. Raises RegistrationError."""
        checked = {key: value for key, value in options.items() if key != "incarnation"}
        register(self._pool, pipeline_id, ray_namespace, cluster_tp_configs, cluster_device_mappings, **checked)
        self._registered[pipeline_id] = (ray_namespace, cluster_tp_configs, cluster_device_mappings, options)

    def admit_pipeline(self, pipeline_id: str) -> ActorHandle[object]:
        """Makes a registered pipeline known to the scheduler; returns the scheduler's handle. Raises
        RegistrationError.
        """
        import ray

        if pipeline_id not in self._registered:
            raise RegistrationError("is not registered; register it before it is admitted", pipeline=pipeline_id)
        ray.get(self._scheduler.register.remote(pipeline_id, *self._registered[pipeline_id]), timeout=60)
        return self._scheduler

    def unregister_pipeline(self, pipeline_id: str) -> None:
        """Ends a pipeline whatever it does, unless it is already leaving by itself; one that is not there is no error.
        Returns at once.
        """
        import ray

        self._registered.pop(pipeline_id, None)
        ray.get(self._scheduler.unregister.remote(pipeline_id), timeout=60)
