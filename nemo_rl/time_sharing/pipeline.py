"""A GRPO pipeline of a shared pool as one Ray actor: the run, and its agent.

Registers, builds the run through `LentPlacement`, drives it with the step loop that every run uses, and leaves.
Messages of the scheduler arrive on threads of their own. Invariants: nothing of the run touches a GPU outside a grant;
how it ended is always told.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.time_sharing.actors import RayLink
from nemo_rl.time_sharing.job import Job
from nemo_rl.time_sharing.runtime import AgentRuntime, Dismissed
from nemo_rl.time_sharing.topology import Pool
from nemo_rl.time_sharing.types import Command, Limits, Reply
from nemo_rl.utils.record import RecordWriter

if TYPE_CHECKING:
    from nemo_rl.algorithms.grpo.run import GRPORun

logger = logging.getLogger(__name__)

_REGISTER_S = 60.0


@dataclass(frozen=True)
class PoolHandles:
    """What a pipeline needs of its pool.

    Attributes:
        scheduler: The scheduler actor.
        pool: The pool's shape.
        accelerator: `cuda` or `cpu`.
        groups: Placement groups, one per node, one bundle per GPU.
        limits: The scheduler's.
        log_dir: Where the scheduler's log is, and the agents' records.
    """

    scheduler: Any
    pool: Pool
    accelerator: str
    groups: Sequence[Any]
    limits: Limits
    log_dir: str


@dataclass(frozen=True)
class Outcome:
    """How a pipeline ended: `done`, `failed`, `dismissed` or `died`; why, where it is not `done`; its completed steps,
    and the seconds for which it waited for training GPUs.
    """

    kind: str
    reason: str = ""
    steps: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True)
class Progress:
    """What a pipeline is doing."""

    phase: str
    step: int
    of: int
    log_dir: str
    waited_s: float = 0.0


class NemoRLFullFinetunePipeline:
    """One pipeline.

    Args:
        job: What to run.
        handles: The pool.
        incarnation: Which life of the pipeline this is; larger than any before.
    """

    def __init__(self, job: Job, handles: PoolHandles, incarnation: int) -> None:
        # Ray gives actors a working directory of their own.
        os.chdir(job.folder)
        self._job, self._handles, self._incarnation = job, handles, incarnation
        self._runtime: AgentRuntime | None = None
        self._ready = threading.Event()
        self._run: GRPORun | None = None
        self._engines: Any = None

    def pid(self) -> int:
        """The process."""
        return os.getpid()

    # -- from the scheduler -------------------------------------------------------------------------------------------

    def command(self, command: Command) -> None:
        """See `AgentRuntime.command`."""
        if self._ready.wait(_REGISTER_S) and self._runtime is not None:
            self._runtime.command(command)

    def heard(self, reply: Reply) -> None:
        """See `AgentRuntime.heard`."""
        if self._runtime is not None:
            self._runtime.heard(reply)

    def rank_ended(self, rank: int) -> None:
        """The scheduler had the processes of a rank ended."""
        if self._runtime is not None:
            self._engines.ended(rank)
            self._runtime.rank_ended(rank)

    # -- the run ------------------------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        """What the pipeline is doing now."""
        run = self._run
        if run is None:
            return Progress("starting", 0, 0, "")
        phase = run.progress.current_phase
        return Progress(phase, run.state.step, run.total_steps, run.config.logger.log_dir, self._waited_s())

    def run(self) -> Outcome:
        """Runs the pipeline to its end; a defect of the code is raised, everything else is an outcome."""
        from nemo_rl.algorithms.resume import NothingToDo
        from nemo_rl.config.errors import UserError

        try:
            return self._live()
        except NothingToDo as nothing:
            return Outcome("done", str(nothing), self._steps())
        except Dismissed as error:
            return Outcome("dismissed", str(error), self._steps())
        except UserError as error:
            logger.debug("pipeline failed", exc_info=True)
            return Outcome("failed", f"{type(error).__name__}: {error}", self._steps())

    def _steps(self) -> int:
        return self._run.state.step if self._run is not None else 0

    def _waited_s(self) -> float:
        from nemo_rl.time_sharing.lent import LentAccelerators

        control = self._run.control if self._run is not None else None
        return control.waited_s if isinstance(control, LentAccelerators) else 0.0

    def _live(self) -> Outcome:
        from nemo_rl.algorithms.grpo.assembly import close, setup
        from nemo_rl.algorithms.grpo.loop import drive
        from nemo_rl.algorithms.launch import directories_of_its_own
        from nemo_rl.time_sharing.lent import LentAccelerators

        with directories_of_its_own(self._job.config):
            self._run = run = setup(self._job.config, placement=self._register())
            self._show_record(run)
            try:
                with run.progress:
                    drive(run)
                if isinstance(run.control, LentAccelerators):
                    run.control.leave()
            finally:
                close(run)
        return Outcome("done", steps=run.state.step, waited_s=self._waited_s())

    def _register(self) -> Any:
        import ray

        from nemo_rl.distributed.devices import CPU, CUDA
        from nemo_rl.time_sharing.lent import LentPlacement
        from nemo_rl.time_sharing.ray_reaper import agent_namespace
        from nemo_rl.time_sharing.shared_cluster import SharedCluster
        from nemo_rl.time_sharing.vllm_engine import EngineSlot

        job, handles = self._job, self._handles
        self._engines = engines = EngineSlot()
        options = dict(job.options) | {"incarnation": self._incarnation}
        topology = ray.get(
            handles.scheduler.register.remote(
                job.name, agent_namespace(job.name), job.widths(), job.mappings(), options
            ),
            timeout=_REGISTER_S,
        )
        record = RecordWriter(
            Path(handles.log_dir) / f"{job.name}.{self._incarnation}.jsonl",
            source=f"{job.name}/agent",
            flush_interval_s=0.0,
        )
        self._runtime = AgentRuntime(
            topology, self._incarnation, engines, RayLink(handles.scheduler), record, handles.limits
        )
        self._runtime.start()
        self._ready.set()
        accelerator = CUDA if handles.accelerator == "cuda" else CPU
        common: dict[str, Any] = {"pipeline": job.name, "incarnation": self._incarnation}

        def cluster(gpus: Sequence[int], *, leads_ranks: bool) -> SharedCluster:
            return SharedCluster(handles.groups, handles.pool, gpus, accelerator, leads_ranks=leads_ranks, **common)

        return LentPlacement(
            job.name,
            cluster(job.train, leads_ranks=False),
            cluster(job.infer, leads_ranks=True),
            self._runtime,
            engines,
            wait_s=handles.limits.request_s,
        )

    def _show_record(self, run: GRPORun) -> None:
        """The run's record is found beside the scheduler's log, so that all of them are checked together."""
        link = Path(self._handles.log_dir) / f"{self._job.name}.{self._incarnation}.run.jsonl"
        link.symlink_to((Path(run.config.logger.log_dir) / "record.jsonl").absolute())
