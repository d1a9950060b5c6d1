"""A pipeline of a shared pool as one Ray actor: the run, and its agent.

`LentPipeline` registers, hands on what the scheduler says and tells how the run ended; a `TrainingPipeline` is driven
with the step loop that every run uses, and `NemoRLFullFinetunePipeline` is GRPO's. Messages of the scheduler arrive on
threads of their own. Invariants: nothing of the run touches a GPU outside a grant; how it ended is always reported.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from nemo_rl.config import ClusterConfig, MasterConfig
from nemo_rl.config.master import RootConfig
from nemo_rl.time_sharing.agents.actors import RayLink
from nemo_rl.time_sharing.agents.runtime import AgentRuntime, Dismissed, EngineError
from nemo_rl.time_sharing.log.pool_state import Outcome, Progress
from nemo_rl.time_sharing.pipelines.command_config import CommandConfig
from nemo_rl.time_sharing.pipelines.job import Job
from nemo_rl.time_sharing.protocol.topology import Pool, Topology
from nemo_rl.time_sharing.protocol.types import Command, Limits, Reply
from nemo_rl.utils.record import RecordWriter
from nemo_rl.utils.record_events import EngineBuilt

if TYPE_CHECKING:
    from nemo_rl.algorithms.grpo.run import GRPORun
    from nemo_rl.algorithms.training_loop import TrainingRun
    from nemo_rl.time_sharing.agents.external import ExternalJob
    from nemo_rl.time_sharing.pipelines.lent import LentPlacement
    from nemo_rl.time_sharing.pipelines.residents import Part, SlotBytes, SlotMemory
    from nemo_rl.time_sharing.pipelines.shared_cluster import SharedCluster
    from nemo_rl.time_sharing.pipelines.vllm_engine import EngineSlot, FirstSleep

logger = logging.getLogger(__name__)

Run = TypeVar("Run", bound="TrainingRun[Any]")

_REGISTER_S = _ANSWER_S = 60.0


@dataclass(frozen=True)
class PoolHandles:
    """What a pipeline needs of its pool. `memory`: device memory of a slot, which is that of the smallest GPU where a
    slot is a whole one; None on CPU slots, or where no GPU is here to be asked.
    """

    scheduler: Any
    pool: Pool
    accelerator: str  # `cuda` or `cpu`
    limits: Limits
    log_dir: str  # where the scheduler's log is, and the agents' records
    memory: SlotBytes | None = None
    name: str = ""  # of the pool, for people

    @property
    def slot_bytes(self) -> SlotBytes | None:
        """Device memory that a job must keep to; None where a slot is a whole accelerator, or on CPU slots."""
        return self.memory if self.pool.slots_per_gpu > 1 else None

    @property
    def unit(self) -> str:
        """What a slot is, in words."""
        return "GPU" if self.accelerator == "cuda" else "CPU slot"


class LentPipeline:
    """What every kind of pipeline is to its pool. `incarnation`: number of this start of the pipeline; larger than any
    before.
    """

    def __init__(self, job: Job, handles: PoolHandles, incarnation: int) -> None:
        # Ray gives actors a working directory of their own.
        os.chdir(job.folder)
        self._job, self._handles, self._incarnation = job, handles, incarnation
        self._runtime: AgentRuntime | ExternalJob | None = None
        self._ready = threading.Event()
        self._engines: EngineSlot | None = None
        self._record: RecordWriter | None = None
        self._over = threading.Event()
        self._starting, self._started = threading.Lock(), False
        self._draining = threading.Event()
        self._outcome = Outcome("failed", "it was never started")

    def pid(self) -> int:
        """The process."""
        return os.getpid()

    # -- from the scheduler -------------------------------------------------------------------------------------------

    def command(self, command: Command) -> None:
        if self._ready.wait(_REGISTER_S) and self._runtime is not None:
            self._runtime.command(command)

    def heard(self, reply: Reply) -> None:
        if self._runtime is not None:
            self._runtime.heard(reply)

    def rank_ended(self, rank: int) -> None:
        """The scheduler had the processes of a rank ended."""
        if self._engines is not None:
            self._engines.ended(rank)
        if self._runtime is not None:
            self._runtime.rank_ended(rank)

    # -- the run ------------------------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        """What the pipeline is doing now."""
        raise NotImplementedError

    def drain(self) -> str:
        """Asks the pipeline to leave at the next place from which it can go on; what it does first, in words."""
        self._draining.set()
        return "runs to its end, as it saves nothing before"

    def _left_early(self, step: int, of: int, *, saves: bool, waited_s: float) -> Outcome:
        if not self._draining.is_set() or step >= of:
            return Outcome("done", steps=step, waited_s=waited_s)
        how = "saved; the same file goes on from there" if saves else "not saved, as checkpointing.enabled is false"
        return Outcome("drained", f"after step {step} of {of}, {how}", step, waited_s)

    def live(self) -> Outcome:
        """Registers, runs to the end and leaves. Raises UserError, Dismissed, NothingToDo: it ended before; other
        errors are defects, and shown with their tracebacks.
        """
        raise NotImplementedError

    def start(self) -> None:
        """Begins the run, which outlives the caller, and returns at once. Does nothing if it has begun."""
        with self._starting:
            if not self._started:
                self._started = True
                threading.Thread(target=self._run_to_the_end, name="run", daemon=True).start()

    def outcome(self) -> Outcome:
        """Waits for the end of the run, and says how it was; may be asked again."""
        self._over.wait()
        return self._outcome

    def _run_to_the_end(self) -> None:
        try:
            self._outcome = self.run()
        except Exception:
            logger.exception("pipeline=%s outcome=failed", self._job.name)
            self._outcome = Outcome("failed", traceback.format_exc())
        finally:
            self._over.set()

    def run(self) -> Outcome:
        """Runs the pipeline to its end; a defect of the code is raised, everything else is an outcome."""
        from nemo_rl.algorithms.resume import NothingToDo
        from nemo_rl.config.errors import UserError

        try:
            return self.live()
        except NothingToDo as nothing:
            return Outcome("done", str(nothing), self.progress().step)
        except Dismissed as error:
            return Outcome("dismissed", str(error), self.progress().step)
        except UserError as error:
            logger.debug("pipeline failed", exc_info=True)
            return Outcome("failed", f"{type(error).__name__}: {error}", self.progress().step)

    def register(self) -> Topology:
        """Makes the pipeline known to the scheduler; its topology. `join` must follow at once: no heartbeats are sent
        before.
        """
        from nemo_rl.time_sharing.agents.actors import register_at
        from nemo_rl.time_sharing.agents.ray_reaper import agent_namespace

        job, pool = self._job, self._handles.pool
        options = dict(job.options) | {"incarnation": self._incarnation}
        registration = (job.name, agent_namespace(job.name), job.widths(pool), job.mappings(pool), options)
        return register_at(self._handles.scheduler, registration, _REGISTER_S)

    def open_record(self) -> RecordWriter:
        """Where the agent writes, beside the scheduler's log."""
        path = Path(self._handles.log_dir) / f"{self._job.name}.{self._incarnation}.jsonl"
        return RecordWriter(path, source=f"{self._job.name}/agent", flush_interval_s=0.0)

    def join(self, engines: EngineSlot, record: RecordWriter) -> AgentRuntime:
        """Registers and starts the agent."""
        self._engines, self._record = engines, record
        topology, link = self.register(), RayLink(self._handles.scheduler)
        self._runtime = runtime = AgentRuntime(topology, self._incarnation, engines, link, record, self._handles.limits)
        runtime.start()
        self._ready.set()
        return runtime

    def placed(self, samples: int = 1) -> LentPlacement:
        """Registers, starts the agent, and gives the run its slots: those of the job's training, of its engines, or of
        both. `samples`: of a prompt.
        """
        from nemo_rl.algorithms.placement import Clusters
        from nemo_rl.time_sharing.pipelines.lent import LentPlacement, TurnRules
        from nemo_rl.time_sharing.pipelines.vllm_engine import EngineSlot

        job, limits, record = self._job, self._handles.limits, self.open_record()
        engines = EngineSlot(self.engine_built)
        runtime = self.join(engines, record)
        training = self.cluster(job.train, leads_ranks=False) if job.train else None
        # The ranks of a run that generates nothing are never woken.
        generation = self.cluster(job.infer, leads_ranks=True) if job.engines is not None else None
        slots = training or generation
        if slots is None:
            raise TypeError(f"{job.name}: {type(job.config).__name__} has no training and, by `engines_of`, no engines")
        return LentPlacement(
            job.name,
            Clusters(slots, generation),
            slots.accelerator,
            runtime,
            engines,
            TurnRules(limits.request_s, samples, job.measures_batch, self._wanted, job.slice_s, limits.max_hold_s / 2),
            report_memory=self.report_memory,
            # A run that trains has a record of its own.
            record=None if training else record,
        )

    def _wanted(self) -> bool:
        import ray

        wanted: bool = ray.get(self._handles.scheduler.wanted.remote(self._job.name), timeout=_ANSWER_S)
        return wanted

    def report_memory(self, measured: Sequence[SlotMemory], needs: Sequence[int]) -> None:
        """Enters what stays on the training GPUs into the pool's ledger. Raises PoolFull: it does not fit."""
        from nemo_rl.time_sharing.pipelines.residents import Part

        self._enter(Part.TRAINER, self._job.train, measured, needs)

    def engine_built(self, rank: int, built: FirstSleep) -> None:
        """Enters what a new engine leaves on its GPUs while it sleeps into the pool's ledger. Raises EngineError: it
        does not fit; the pool ends this pipeline.
        """
        from nemo_rl.time_sharing.pipelines.residents import Part, PoolFull

        left = tuple(memory.used for memory in built.measured)
        logger.info("event=engine_built rank=%d seconds=%.1f left_bytes=%s", rank, built.seconds, left)
        if self._record is not None:
            self._record.emit(EngineBuilt(rank, built.seconds, left))
        if self._handles.accelerator != "cuda":
            return
        width = self._job.rank_width
        gpus = self._job.infer[rank * width : (rank + 1) * width]
        try:
            self._enter(Part.ENGINES, gpus, built.measured, built.needs)
        except PoolFull as full:
            raise EngineError(str(full)) from full

    def _enter(self, part: Part, gpus: Sequence[int], measured: Sequence[SlotMemory], needs: Sequence[int]) -> None:
        import ray

        from nemo_rl.time_sharing.pipelines.pooled_teacher import ask_pool
        from nemo_rl.time_sharing.pipelines.residents import PoolFull

        if self._handles.slot_bytes is not None:
            # Neighbours use the GPU at the same time, so that nothing can be measured there; each keeps to its budget.
            return
        entered = (dict(zip(gpus, measured, strict=True)), dict(zip(gpus, needs, strict=True)))
        try:
            ask_pool("report_memory", self._job.name, *entered, part)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, PoolFull):
                raise error.cause from error
            raise

    def cluster(self, gpus: Sequence[int], *, leads_ranks: bool) -> SharedCluster:
        """Some GPUs of the pool as slots of this pipeline."""
        from nemo_rl.distributed.accelerator_slots import CPU, CUDA
        from nemo_rl.time_sharing.pipelines.shared_cluster import SharedCluster

        handles, config = self._handles, self._job.config
        # A command's ranks are no process group of ours.
        cluster = ClusterConfig() if isinstance(config, CommandConfig) else config.cluster
        return SharedCluster(
            handles.pool,
            gpus,
            CUDA if handles.accelerator == "cuda" else CPU,
            pipeline=self._job.name,
            incarnation=self._incarnation,
            leads_ranks=leads_ranks,
            ports=(cluster.master_port_range_low, cluster.master_port_range_high),
            slot_bytes=None if self._job.column is None else handles.slot_bytes,
        )


class TrainingPipeline(LentPipeline, Generic[Run]):
    """A run that trains: its policy under grants, and its engines, if it has any, rank by rank."""

    def __init__(self, job: Job, handles: PoolHandles, incarnation: int) -> None:
        super().__init__(job, handles, incarnation)
        self._run: Run | None = None
        self._placement: LentPlacement | None = None

    def setup(self, placement: LentPlacement) -> Run:
        """The run, ready to train; its configuration is of the kind that `job.PIPELINES` has this class for."""
        raise NotImplementedError

    def drive(self, run: Run) -> None:
        """Trains to the end."""
        raise NotImplementedError

    def progress(self) -> Progress:
        """What the run is doing now."""
        run = self._run
        if run is None:
            return Progress("starting", 0, 0, "")
        shown, left_s = run.progress, run.progress.seconds_left() or None
        # A pipeline's process may have another working directory than the reader's.
        folder = str(Path(run.config.logger.log_dir).absolute())
        so_far = (shown.current_phase, run.state.step, shown.total_steps, folder, self._waited_s())
        return Progress(*so_far, shown.newest_figures(), left_s)

    def drain(self) -> str:
        """Finishes its step, saves and leaves."""
        super().drain()
        if self._run is not None:
            self._run.timeout.end_after_step()
        return "finishes its step, saves and leaves"

    def _waited_s(self) -> float:
        return self._placement.grants.waited_s if self._placement is not None else 0.0

    def live(self) -> Outcome:
        from nemo_rl.algorithms.launch import directories_of_its_own

        config = cast("RootConfig", self._job.config)
        with directories_of_its_own(config):
            samples = config.grpo.num_generations_per_prompt if isinstance(config, MasterConfig) else 1
            self._placement = placement = self.placed(samples)
            self._run = run = self.setup(placement)
            if isinstance(run.record, RecordWriter):
                # It is found beside the scheduler's log, so that all records are checked together.
                link = Path(self._handles.log_dir) / f"{self._job.name}.{self._incarnation}.run.jsonl"
                link.symlink_to((Path(run.config.logger.log_dir) / "record.jsonl").absolute())
            if self._draining.is_set():
                run.timeout.end_after_step()
            try:
                with run.progress:
                    self.drive(run)
                placement.leave(run.policy)
            finally:
                run.close()
        of, saves = run.progress.total_steps, config.checkpointing.enabled
        return self._left_early(run.state.step, of, saves=saves, waited_s=self._waited_s())


class NemoRLFullFinetunePipeline(TrainingPipeline["GRPORun"]):
    """A GRPO run, or a distillation."""

    def setup(self, placement: LentPlacement) -> GRPORun:
        from nemo_rl.algorithms.grpo.assembly import setup

        return setup(cast("MasterConfig", self._job.config), placement=placement)

    def drive(self, run: GRPORun) -> None:
        from nemo_rl.algorithms.grpo.loop import drive

        drive(run)
