"""An SFT run on a shared pool: whole GPUs, asked for like any training, and given back between steps.

It registers no generation of its own: its ranks are never woken. Invariants: training touches its GPUs only while they
are granted; between two slices everything of it lies on the host.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from nemo_rl.algorithms.sft.driver import SFTRun
from nemo_rl.config import SFTMasterConfig
from nemo_rl.distributed.accelerators import Accelerator
from nemo_rl.time_sharing.agents.runtime import AgentRuntime, EngineError
from nemo_rl.time_sharing.log.pool_state import Outcome, Progress
from nemo_rl.time_sharing.pipelines.grpo import LentPipeline, PoolHandles, progress_of
from nemo_rl.time_sharing.pipelines.job import Job
from nemo_rl.time_sharing.pipelines.lent import ReportMemory, leave_accelerators, leave_and_report_memory
from nemo_rl.time_sharing.pipelines.shared_cluster import SharedCluster
from nemo_rl.time_sharing.protocol.types import ACTOR_TRAIN, Priority

logger = logging.getLogger(__name__)

_NO_ENGINE = 0.0
_LEAVE_S = 300.0
_ANSWER_S = 60.0


class LentTraining:
    """The placement of an SFT run whose GPUs belong to the scheduler.

    Args:
        runtime: Its agent, registered and started.
        wanted: Whether somebody else waits for the GPUs.
        report_memory: See `LentPlacement`.
        slice_s: How long they are kept all the same: moving to the host and back takes seconds.
        longest_s: When they are given back even if no other job wants them.
        wait_s: How long a grant may take.

    Attributes:
        waited_s: Seconds for which the run has waited for GPUs so far.
    """

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
        self._cluster, self._runtime, self._wanted, self._report_memory = cluster, runtime, wanted, report_memory
        self._memory_reported = False
        self._slice_s, self._longest_s, self._wait_s = slice_s, longest_s, wait_s
        self._held: Priority | None = None
        self._since = 0.0
        self.waited_s = 0.0

    def connect(self, config: SFTMasterConfig) -> Accelerator:
        """The pool's kind of accelerator; the pipeline's process is part of its Ray cluster already."""
        return self._cluster.accelerator

    def disconnect(self) -> None:
        """The Ray cluster is the pool's."""

    def reserve(self, config: SFTMasterConfig, accelerator: Accelerator) -> SharedCluster:
        """The slots of the registration."""
        return self._cluster

    @contextmanager
    def building(self) -> Generator[None]:
        """Under a grant for initialisation, which the first step goes on with."""
        self._acquire(Priority.INITIALIZATION, -1)
        yield

    def lend(self, run: SFTRun) -> None:
        """Waits for the GPUs, unless they are held. Raises TimeoutError: they were not granted in time; Dismissed: the
        scheduler ended this pipeline; PoolFull: what stays on the GPUs while the run is away leaves too little for
        everybody.
        """
        if self._held is Priority.ACTOR_TRAINING:
            return
        if not self._memory_reported:
            leave_and_report_memory(run.policy, self._cluster.accelerator, self._report_memory, _NO_ENGINE)
            self._memory_reported = True
        run.progress.phase("waiting for training GPUs")
        with run.timer.time("idle/training_grant"):
            self._acquire(Priority.ACTOR_TRAINING, run.state.step)
        run.policy.prepare_for_training()

    def _acquire(self, priority: Priority, step: int) -> None:
        began = time.monotonic()
        self._runtime.acquire(ACTOR_TRAIN, priority, step, self._wait_s)
        now = time.monotonic()
        self.waited_s += now - began
        if self._held is None:
            self._since = now
        self._held = priority

    def step_done(self, run: SFTRun) -> None:
        """Gives the GPUs back at the end of a slice, where somebody else waits for them."""
        seconds = time.monotonic() - self._since
        if seconds > self._longest_s or (seconds > self._slice_s and self._wanted()):
            run.progress.phase("hand-over")
            self.give_back(run)

    def give_back(self, run: SFTRun) -> None:
        """Moves everything of the run to the host and releases the GPUs, where they are held."""
        if self._held is not None:
            leave_accelerators(run.policy, self._cluster.accelerator)
            self._runtime.release(ACTOR_TRAIN)
            self._held = None


class NoRanks:
    """The generation ranks of a run that generates nothing: it has no demand, so they get no commands."""

    def _refuse(self) -> EngineError:
        return EngineError("this pipeline generates nothing")

    def drain(self, rank: int) -> None:
        """There is none."""
        raise self._refuse()

    def sleep(self, rank: int) -> None:
        """There is none."""
        raise self._refuse()

    def wake(self, rank: int) -> None:
        """There is none."""
        raise self._refuse()

    def load(self, rank: int, version: int) -> int:
        """There is none."""
        raise self._refuse()

    def set_routable(self, rank: int, active: bool) -> None:
        """There is none."""

    def ended(self, rank: int) -> None:
        """There is none."""


class SFTPipeline(LentPipeline):
    """An SFT run."""

    def __init__(self, job: Job, handles: PoolHandles, incarnation: int) -> None:
        super().__init__(job, handles, incarnation)
        self._run: SFTRun | None = None
        self._placement: LentTraining | None = None

    def progress(self) -> Progress:
        """What the run is doing now."""
        run, placement = self._run, self._placement
        if run is None or placement is None:
            return Progress("starting", 0, 0, "")
        return progress_of(run.progress, run.state.step, run.config.logger.log_dir, placement.waited_s)

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
            runtime = self.join(NoRanks(), self.open_record())
            self._placement = placement = LentTraining(
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
                placement.give_back(run)
                runtime.leave(_LEAVE_S)
            finally:
                close(run)
        saves = config.checkpointing.enabled
        of = run.progress.total_steps
        return self._left_early(run.state.step, of, saves=saves, waited_s=placement.waited_s)

    def _wanted(self) -> bool:
        import ray

        wanted: bool = ray.get(self._handles.scheduler.wanted.remote(self._job.name), timeout=_ANSWER_S)
        return wanted
