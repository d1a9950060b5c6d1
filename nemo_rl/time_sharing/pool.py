"""A pool of GPUs that pipelines are submitted to: the scheduler, the reserved slots, and who runs there.

`PoolActor` outlives whoever submits; it starts each pipeline as an actor of its own and notes how it ended. Killed, it
is started anew by Ray and goes on with the pipelines, which do not notice. Knows no run from the inside. Invariants: a
pipeline that ended in any way is unregistered, so that its GPUs are verified free and given on; its outcome is kept for
whoever asks.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.config.errors import UserError
from nemo_rl.time_sharing.agents.actors import (
    CONTROL_NAMESPACE,
    SCHEDULER_NAME,
    Orchestrator,
    start_scheduler,
    stop_scheduler,
)
from nemo_rl.time_sharing.agents.ray_reaper import agent_actor_name, agent_namespace, end_agents
from nemo_rl.time_sharing.log.log_tail import LogTail
from nemo_rl.time_sharing.log.sharing import Sharing, SharingWatch
from nemo_rl.time_sharing.pipelines.grpo import POOL_NAME, LentPipeline, PoolHandles, Progress
from nemo_rl.time_sharing.pipelines.job import Job, Kind
from nemo_rl.time_sharing.pipelines.pool_book import Life, Outcome, PoolBook
from nemo_rl.time_sharing.pipelines.residents import Part, PoolFull, Residents, SlotMemory, slot_bytes
from nemo_rl.time_sharing.planning.placement import Mapped
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import Limits

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
_THREADS = 32


class PoolError(UserError, RuntimeError):
    """There is no such pool or pipeline, or the pool cannot take it."""


@dataclass(frozen=True)
class Standing:
    """One pipeline of the pool.

    Attributes:
        name: Its id.
        train: Its training GPUs.
        infer: Its generation GPUs.
        submitted_at: Seconds since the epoch.
        ended_at: The same; None while it runs.
        progress: What it was doing when last asked.
        outcome: How it ended; None while it runs.
        sharing: What it gets and loses by sharing; None before its registration.
    """

    name: str
    train: tuple[int, ...]
    infer: tuple[int, ...]
    submitted_at: float
    ended_at: float | None = None
    progress: Progress | None = None
    outcome: Outcome | None = None
    sharing: Sharing | None = None


class PoolActor(Orchestrator):
    """Runs pipelines on a pool, inside Ray.

    Args:
        handles: The pool.
    """

    def __init__(self, handles: PoolHandles) -> None:
        super().__init__(handles.scheduler, handles.pool)
        self._handles = handles
        self._lock = threading.Lock()
        self._path = Path(handles.log_dir) / "pool.json"
        book = PoolBook.read(self._path)
        self._lives = {life.name: life for life in book.lives}
        self._residents = Residents(book.residents)
        self._actors: dict[str, Any] = {}
        self._log = LogTail(Path(handles.log_dir) / "scheduler.jsonl")
        self._sharing = SharingWatch()
        for life in book.lives:
            if life.outcome is None:
                self._go_on_with(life)

    def _go_on_with(self, life: Life) -> None:
        """Watches a pipeline that a killed actor of this pool has started."""
        import ray

        try:
            self._actors[life.name] = ray.get_actor(
                agent_actor_name(life.incarnation), namespace=agent_namespace(life.name)
            )
        except ValueError:
            self._note_end(life, Outcome("died", "its process was gone when the pool's actor was started anew"))
        else:
            # What the killed actor asked of a process that was not up yet died with it.
            self._actors[life.name].start.remote()
            self._begin_watch(life)

    def _begin_watch(self, life: Life) -> None:
        threading.Thread(target=self._watch, args=(life,), name=f"watch-{life.name}", daemon=True).start()

    def _keep(self) -> None:
        PoolBook(list(self._lives.values()), self._residents.entries()).write(self._path)

    def pid(self) -> int:
        """The process."""
        return os.getpid()

    def settle(
        self, name: str, measured: Mapping[int, SlotMemory], needs: Mapping[int, int], part: Part = Part.TRAINER
    ) -> None:
        """See `Residents.admit`; a pipeline that does not fit is ended.

        Raises:
            PoolFull: It does not fit.
        """
        try:
            with self._lock:
                self._residents.admit(name, measured, needs, part)
                self._keep()
        except PoolFull as full:
            life = self._lives.get(name)
            if life is not None and part is Part.ENGINES:
                # Its run goes on with other engines, or waits for this one: it does not end by itself.
                life.refused = f"{type(full).__name__}: {full}"
                self.unregister_pipeline(name)
            raise

    def shape(self) -> tuple[Pool, str]:
        """The pool's shape, and where its logs are."""
        return self._handles.pool, self._handles.log_dir

    def handles(self) -> PoolHandles:
        """What a pipeline needs of the pool."""
        return self._handles

    def submit(self, job: Job) -> str:
        """Starts a pipeline, on the training GPUs on which the least goes on where it may train anywhere; its name.

        Raises:
            PoolError: A pipeline of this name runs already.
            RegistrationError: It does not fit the pool.
        """
        with self._lock:
            running = [
                Mapped(life.train, life.infer, life.column) for life in self._lives.values() if life.outcome is None
            ]
            job = job.placed(self._handles.pool, running)
            job.topology(self._handles.pool)
            known = self._lives.get(job.name)
            if known is not None and known.outcome is None:
                raise PoolError(f"a pipeline {job.name!r} runs already; cancel it, or submit under another name")
            # Larger than any before, also those of an earlier pool over the same log.
            incarnation = max(int(time.time()), known.incarnation + 1 if known else 0)
            life = Life(job.name, incarnation, job.train, job.infer, time.time(), column=job.column)
            self._lives[job.name] = life
            self._keep()  # first, so that whoever comes after a kill knows of every pipeline that may be there
            try:
                self._actors[job.name] = self.create_pipeline_actor(job, incarnation)
            except Exception as error:
                life.outcome, life.ended_at = Outcome("failed", f"{type(error).__name__}: {error}"), time.time()
                self._keep()
                raise
        self._begin_watch(life)
        return job.name

    def create_pipeline_actor(self, job: Job, incarnation: int) -> Any:
        """Starts a job's process under the name and in the namespace by which its GPUs can be taken back; its handle.

        Args:
            job: What to run.
            incarnation: Larger than that of any earlier life of this pipeline.
        """
        import ray

        pipeline: Any = ray.remote(self.pipeline_class(job))
        actor = pipeline.options(
            name=agent_actor_name(incarnation),
            namespace=agent_namespace(job.name),
            lifetime="detached",
            num_cpus=0,
            max_concurrency=_THREADS,
        ).remote(job, self._handles, incarnation)
        actor.start.remote()
        return actor

    def pipeline_class(self, job: Job) -> type[LentPipeline]:
        """What runs a job."""
        return _pipeline_class(job.kind)

    def _watch(self, life: Life) -> None:
        import ray

        actor = self._actors[life.name]
        try:
            outcome: Outcome = ray.get(actor.outcome.remote())
        except ray.exceptions.RayError as error:
            outcome = Outcome("died", str(error).partition("\n")[0])
        if life.refused and outcome.kind != "done":
            outcome = Outcome("failed", life.refused, outcome.steps, outcome.waited_s)
        self._note_end(life, outcome)
        if outcome.kind == "done":
            ray.kill(actor, no_restart=True)

    def _note_end(self, life: Life, outcome: Outcome) -> None:
        if outcome.kind != "done":
            logger.error("pipeline=%s outcome=%s reason=%s", life.name, outcome.kind, outcome.reason)
            # Its processes are ended and its GPUs verified free before anybody else gets them.
            self.unregister_pipeline(life.name)
        with self._lock:
            life.outcome, life.ended_at = outcome, time.time()
            self._residents.leave(life.name)
            self._keep()

    def standings(self) -> list[Standing]:
        """Every pipeline that was submitted, in order."""
        import ray

        with self._lock:
            lives = dict(self._lives)
            actors = dict(self._actors)
        asked = {name: actors[name].progress.remote() for name, life in lives.items() if life.outcome is None}
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=1.0) if asked else ([], [])
        answers: dict[str, Progress] = {}
        for name, ref in asked.items():
            if ref in ready:
                try:
                    answers[name] = ray.get(ref)
                except ray.exceptions.RayError:
                    continue
        sharing = self._sharing_so_far()
        return [
            Standing(
                name,
                life.train,
                life.infer,
                life.submitted_at,
                life.ended_at,
                answers.get(name),
                life.outcome,
                sharing.get(name),
            )
            for name, life in lives.items()
        ]

    def _sharing_so_far(self) -> dict[str, Sharing]:
        with self._lock:
            for entry in self._log.new():
                self._sharing.take(entry.time, entry.event)
            return self._sharing.so_far(time.time())

    def cancel(self, name: str) -> None:
        """Ends a pipeline whatever it does; its checkpoints stay.

        Raises:
            PoolError: There is none of this name.
        """
        self._known(name)
        self.unregister_pipeline(name)

    def drain(self, name: str) -> None:
        """Gives a pipeline nothing more and lets it go when it has given back what it holds.

        Raises:
            PoolError: There is none of this name.
        """
        self._known(name)
        self.drain_pipeline(name)

    def _known(self, name: str) -> None:
        if name not in self._lives:
            raise PoolError(f"there is no pipeline {name!r}; there are {sorted(self._lives)}")


def _pipeline_class(kind: Kind) -> type[LentPipeline]:
    if kind is Kind.SFT:
        from nemo_rl.time_sharing.pipelines.sft import SFTPipeline

        return SFTPipeline
    if kind is Kind.EVALUATION:
        from nemo_rl.time_sharing.pipelines.evaluation import EvaluationPipeline

        return EvaluationPipeline
    if kind is Kind.EXTERNAL:
        from nemo_rl.time_sharing.pipelines.command import CommandPipeline

        return CommandPipeline
    from nemo_rl.time_sharing.pipelines.grpo import NemoRLFullFinetunePipeline

    return NemoRLFullFinetunePipeline


def open_pool(
    pool: Pool,
    accelerator: Any,
    log_dir: Path,
    limits: Limits = LIVE_LIMITS,
    pool_class: type[PoolActor] = PoolActor,
) -> Any:
    """Reserves the slots, starts the scheduler and the pool's actor; the actor's handle. Ray must be initialised.

    Args:
        pool: The shape.
        accelerator: Kind of slot.
        log_dir: Existing directory for the scheduler's log and the agents' records.
        limits: The scheduler's.
        pool_class: Starts the pipelines.

    Raises:
        ResourceInsufficientError: The Ray cluster does not have the slots.
        SchedulerInUse: A pool is open on this Ray cluster already.
    """
    import ray

    from nemo_rl.time_sharing.pipelines.shared_cluster import reserve_pool

    scheduler = start_scheduler(log_dir, pool, limits)
    try:
        groups = reserve_pool(pool, accelerator)
    except BaseException:
        stop_scheduler(scheduler)
        raise
    try:
        memory = _slot_bytes(pool) if accelerator.is_cuda else None
    except BaseException:
        _remove_reservation()
        stop_scheduler(scheduler)
        raise
    handles = PoolHandles(scheduler, pool, accelerator.kind, tuple(groups), limits, str(log_dir), memory)
    actor: Any = (
        ray.remote(pool_class)
        .options(
            name=POOL_NAME,
            namespace=CONTROL_NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_concurrency=_THREADS,
            max_restarts=-1,
            # What is asked of it is asked again of the next one.
            max_task_retries=-1,
        )
        .remote(handles)
    )
    ray.get(actor.shape.remote(), timeout=_START_S)
    return actor


def _slot_bytes(pool: Pool) -> int | None:
    """Device memory of each slot, the same on every node; None where a slot is a whole GPU."""
    from nemo_rl.distributed.accelerators import least_device_bytes

    return slot_bytes(least_device_bytes(), pool.slots_per_gpu) if pool.slots_per_gpu > 1 else None


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
            for standing in ray.get(actor.standings.remote(), timeout=_ANSWER_S):
                if standing.outcome is None:
                    ray.get(actor.cancel.remote(standing.name), timeout=_ANSWER_S)
            wait_for_pipelines(actor, timeout_s=handles.limits.reap_s)
        except ray.exceptions.RayError as error:
            logger.error("pool=%s close=not_answered reason=%s", POOL_NAME, str(error).partition("\n")[0])


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


def wait_for_pipelines(actor: Any, *, timeout_s: float, poll_s: float = 0.5) -> Mapping[str, Outcome]:
    """Waits until every pipeline has ended, or `timeout_s` has passed; the outcomes so far."""
    import ray

    deadline = time.monotonic() + timeout_s
    while True:
        standings: Sequence[Standing] = ray.get(actor.standings.remote(), timeout=_ANSWER_S)
        outcomes = {standing.name: standing.outcome for standing in standings if standing.outcome is not None}
        if len(outcomes) == len(standings) or time.monotonic() > deadline:
            return outcomes
        time.sleep(poll_s)
