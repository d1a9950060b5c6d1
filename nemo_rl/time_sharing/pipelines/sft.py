"""An SFT run on a shared pool: whole GPUs, asked for like any training, and given back between steps.

It registers no generation of its own: its ranks are never woken. Invariants: training touches its GPUs only while they
are granted; between two slices everything of it lies on the host.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from nemo_rl.algorithms.placement import Clusters, KeptAccelerators
from nemo_rl.algorithms.sft.driver import SFTRun, Trainer
from nemo_rl.config import SFTMasterConfig
from nemo_rl.distributed.accelerator_slots import Accelerator
from nemo_rl.time_sharing.agents.runtime import AgentRuntime
from nemo_rl.time_sharing.log.pool_state import Outcome, Progress
from nemo_rl.time_sharing.pipelines.grpo import LentPipeline, PoolHandles, progress_of
from nemo_rl.time_sharing.pipelines.job import Job
from nemo_rl.time_sharing.pipelines.lent import LentSlots, ReportMemory, leave_accelerators, leave_and_report_memory
from nemo_rl.time_sharing.pipelines.shared_cluster import SharedCluster
from nemo_rl.time_sharing.pipelines.vllm_engine import EngineSlot
from nemo_rl.time_sharing.protocol.types import ACTOR_TRAIN, Priority
from nemo_rl.utils.record import Record

logger = logging.getLogger(__name__)

_NO_ENGINE = 0.0
_ANSWER_S = 60.0


class LentPlacement(LentSlots):
    """Places an SFT run on GPUs of a shared pool.

    Args:
        runtime: Its agent, registered and started.
        wanted: Whether another job waits for the GPUs.
        report_memory: See `lent.LentPlacement`.
        slice_s: How long they are kept all the same: moving to the host and back takes seconds.
        longest_s: When they are given back even if no other job wants them.
        wait_s: How long a grant may take.

    Attributes:
        grants: The grants of the GPUs.
    """

    lends_shards = False
    record_prefix = ""

    def __init__(
        self,
        cluster: SharedCluster,
        runtime: AgentRuntime,
        wanted: Callable[[], bool],
        report_memory: ReportMemory,
        *,
        slice_s: float,
        longest_s: float,
        wait_s: float,
    ) -> None:
        super().__init__(Clusters(cluster, None), cluster.accelerator)
        self._wanted, self._report_memory = wanted, report_memory
        self._slice_s, self._longest_s = slice_s, longest_s
        self.grants = Grants(runtime, wait_s)

    def shard_record(self, record: Record) -> Record:
        """It has no shards."""
        return record

    @contextmanager
    def building(self) -> Generator[None]:
        """Under a grant for initialisation, which the first step goes on with."""
        self.grants.acquire(Priority.INITIALIZATION, -1)
        yield

    def accelerators(self, parts: Trainer) -> LentTraining:
        """The GPUs of the steps. Raises PoolFull: what stays on them while the run is away leaves too little for
        everybody.
        """
        leave_and_report_memory(parts.policy, self._accelerator, self._report_memory, _NO_ENGINE)
        return LentTraining(
            self.grants, parts, self._accelerator, self._wanted, slice_s=self._slice_s, longest_s=self._longest_s
        )


class Grants:
    """The grants of a run's training GPUs.

    Attributes:
        held: The priority that they are held under; None if they are not.
        waited_s: Seconds for which the run has waited for them so far.
    """

    def __init__(self, runtime: AgentRuntime, wait_s: float) -> None:
        self._runtime, self._wait_s = runtime, wait_s
        self._since = 0.0
        self.held: Priority | None = None
        self.waited_s = 0.0

    def acquire(self, priority: Priority, step: int) -> None:
        """Waits for the GPUs. Raises TimeoutError: they were not granted in time; Dismissed: the scheduler ended this
        pipeline.
        """
        began = time.monotonic()
        self._runtime.acquire(ACTOR_TRAIN, priority, step, self._wait_s)
        now = time.monotonic()
        self.waited_s += now - began
        if self.held is None:
            self._since = now
        self.held = priority

    def seconds(self) -> float:
        """For how long they have been held."""
        return time.monotonic() - self._since

    def release(self) -> None:
        """Gives them back."""
        self._runtime.release(ACTOR_TRAIN)
        self.held = None


class LentTraining(KeptAccelerators):
    """Training GPUs that belong to the scheduler, of a run that generates nothing. For the arguments see
    `LentPlacement`.
    """

    def __init__(
        self,
        grants: Grants,
        trainer: Trainer,
        accelerator: Accelerator,
        wanted: Callable[[], bool],
        *,
        slice_s: float,
        longest_s: float,
    ) -> None:
        self._grants, self._trainer, self._accelerator, self._wanted = grants, trainer, accelerator, wanted
        self._slice_s, self._longest_s = slice_s, longest_s

    def lend_training(self, step: int) -> None:
        """Waits for the GPUs, unless they are held. For errors see `Grants.acquire`."""
        if self._grants.held is Priority.ACTOR_TRAINING:
            return
        self._trainer.progress.phase("waiting for training GPUs")
        with self._trainer.timer.time("idle/training_grant"):
            self._grants.acquire(Priority.ACTOR_TRAINING, step)
        self._trainer.policy.prepare_for_training()

    def yield_training(self, step: int) -> None:
        """Gives the GPUs back at the end of a slice, where another job waits for them."""
        seconds = self._grants.seconds()
        if seconds > self._longest_s or (seconds > self._slice_s and self._wanted()):
            self._trainer.progress.phase("hand-over")
            self.give_back()

    def give_back(self) -> None:
        """Moves everything of the run to the host and releases the GPUs, where they are held."""
        if self._grants.held is not None:
            leave_accelerators(self._trainer.policy, self._accelerator)
            self._grants.release()


class SFTPipeline(LentPipeline):
    """An SFT run."""

    def __init__(self, job: Job, handles: PoolHandles, incarnation: int) -> None:
        super().__init__(job, handles, incarnation)
        self._run: SFTRun | None = None
        self._placement: LentPlacement | None = None

    def progress(self) -> Progress:
        """What the run is doing now."""
        run, placement = self._run, self._placement
        if run is None or placement is None:
            return Progress("starting", 0, 0, "")
        return progress_of(run.progress, run.state.step, run.config.logger.log_dir, placement.grants.waited_s)

    def drain(self) -> str:
        """Finishes its step, saves and leaves."""
        super().drain()
        if self._run is not None:
            self._run.timeout.end_after_step()
        return "finishes its step, saves and leaves"

    def live(self) -> Outcome:
        from nemo_rl.algorithms.launch import directories_of_its_own
        from nemo_rl.algorithms.sft.assembly import close, setup
        from nemo_rl.algorithms.sft.driver import sft_train

        job, config, limits = self._job, self._job.config, self._handles.limits
        if not isinstance(config, SFTMasterConfig):
            raise TypeError(f"{job.name}: {type(config).__name__} is no configuration of SFT")
        with directories_of_its_own(config):
            # A run that generates nothing has no demand, so its ranks get no commands.
            runtime = self.join(EngineSlot(), self.open_record())
            self._placement = placement = LentPlacement(
                self.cluster(job.train, leads_ranks=False),
                runtime,
                self._wanted,
                self.report_memory,
                slice_s=job.slice_s,
                longest_s=limits.max_hold_s / 2,
                wait_s=limits.request_s,
            )
            self._run = run = setup(config, placement=placement)
            if self._draining.is_set():
                run.timeout.end_after_step()
            try:
                with run.progress:
                    sft_train(run)
                if isinstance(run.accelerators, LentTraining):
                    run.accelerators.give_back()
                runtime.leave()
            finally:
                close(run)
        saves = config.checkpointing.enabled
        of = run.progress.total_steps
        return self._left_early(run.state.step, of, saves=saves, waited_s=placement.grants.waited_s)

    def _wanted(self) -> bool:
        import ray

        wanted: bool = ray.get(self._handles.scheduler.wanted.remote(self._job.name), timeout=_ANSWER_S)
        return wanted
