"""An evaluation on a shared pool: engines only, which come and go with their model.

Its weights never change: an engine that leaves keeps them on the host and serves again as soon as it is awake.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from nemo_rl.algorithms.placement import Clusters, DemandKind, KeptAccelerators, ReportProgress
from nemo_rl.config import EvalMasterConfig
from nemo_rl.models.generation.vllm.fleet import EngineFleet
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.time_sharing.agents.runtime import AgentRuntime
from nemo_rl.time_sharing.agents.standing_demand import standing_demand
from nemo_rl.time_sharing.log.pool_state import Outcome, Progress
from nemo_rl.time_sharing.pipelines.grpo import LentPipeline, PoolHandles
from nemo_rl.time_sharing.pipelines.job import Job
from nemo_rl.time_sharing.pipelines.lent import LentSlots, RequestsOnly
from nemo_rl.time_sharing.pipelines.shared_cluster import SharedCluster
from nemo_rl.time_sharing.pipelines.vllm_engine import (
    BuildableEngines,
    EngineSlot,
    FirstSlept,
    build_engine,
    engine_errors,
)
from nemo_rl.utils.record import Record

logger = logging.getLogger(__name__)

_KEEP_WEIGHTS = 1


class FixedWeights(BuildableEngines):
    """Implements `runtime.Engine` over shards that loaded their model from disk, and keep it on the host while they
    sleep. `on_first_sleep`: see `build_engine`.
    """

    def __init__(self, fleet: EngineFleet, on_first_sleep: FirstSlept) -> None:
        super().__init__(fleet, on_first_sleep, _KEEP_WEIGHTS)

    def wake(self, rank: int) -> None:
        """Wakes the rank's engine, or builds one where none stands."""
        with engine_errors(f"wake of rank {rank}"):
            build_engine(self._fleet, rank, self._on_first_sleep, _KEEP_WEIGHTS)
            self._fleet.wake([rank])

    def load(self, rank: int, version: int) -> int:
        """Its weights came with it."""
        with engine_errors(f"load of rank {rank}"):
            self._fleet.accept([rank])
        return version


class LentPlacement(LentSlots):
    """Places an evaluation on GPUs of a shared pool.

    Args:
        runtime: Its agent, registered and started.
        engines: Where the agent finds the engines.
        record: For the requests.
        answers: Answers to a problem.
        on_first_sleep: See `build_engine`.

    Attributes:
        done: Problems that are answered.
        of: All problems; 0 before the first is asked.
    """

    lends_shards = True
    record_prefix = ""

    def __init__(
        self,
        cluster: SharedCluster,
        runtime: AgentRuntime,
        engines: EngineSlot,
        record: Record,
        answers: int,
        on_first_sleep: FirstSlept,
    ) -> None:
        super().__init__(Clusters(cluster, cluster), cluster.accelerator)
        self._runtime, self._engines, self._record, self._on_first_sleep = runtime, engines, record, on_first_sleep
        self._answers = answers
        self.done, self.of = 0, 0

    def shard_record(self, record: Record) -> Record:
        """That of the pipeline."""
        return self._record

    def building(self) -> AbstractContextManager[object]:
        """Does nothing: there is no policy."""
        return nullcontext()

    def accelerators(self, parts: VllmGeneration) -> LentEngines:
        """The GPUs of the engines."""
        self._engines.put(FixedWeights(parts.fleet, self._on_first_sleep))
        parts.fleet.on_failure(lambda rank, reason: self._runtime.rank_broken_soon(rank))
        return LentEngines(self._runtime, parts, self._answers, self._show)

    def _show(self, done: int, of: int) -> None:
        self.done, self.of = done, of


class LentEngines(KeptAccelerators):
    """GPUs that belong to the scheduler, of a run that trains nothing.

    Args:
        answers: Answers to a problem.
        show: Hears of every report, too.
    """

    def __init__(self, runtime: AgentRuntime, generation: VllmGeneration, answers: int, show: ReportProgress) -> None:
        self._runtime, self._generation, self._answers, self._show = runtime, generation, answers, show

    @contextmanager
    def demand(self, step: int, groups: int, ready: int, kind: DemandKind = "training") -> Generator[ReportProgress]:
        """The demand stands while problems are open; afterwards the ranks go to sleep and the registration ends."""
        with standing_demand(self._runtime, lambda: self._generation.requests_under_way, self._answers) as report:

            def tell(done: int, of: int) -> None:
                self._show(done, of)
                report(done, of)

            tell(ready, groups)
            yield tell
        self._runtime.leave()


class EvaluationPipeline(LentPipeline):
    """An evaluation."""

    def __init__(self, job: Job, handles: PoolHandles, incarnation: int) -> None:
        super().__init__(job, handles, incarnation)
        self._placement: LentPlacement | None = None

    def progress(self) -> Progress:
        """Problems answered so far, as steps."""
        placement = self._placement
        if placement is None or placement.of == 0:
            return Progress("starting", 0, 0, "")
        config = self._job.config
        saved = config.eval.save_path if isinstance(config, EvalMasterConfig) else None
        folder = str(Path(saved).absolute()) if saved else ""
        return Progress("evaluation", placement.done, placement.of, folder)

    def live(self) -> Outcome:
        """See `LentPipeline.live`; the score is the outcome's reason."""
        from nemo_rl.algorithms.evaluation import evaluate

        job, config, engines = self._job, self._job.config, EngineSlot()
        if not isinstance(config, EvalMasterConfig):
            raise TypeError(f"{job.name}: {type(config).__name__} is no configuration of an evaluation")
        record = self.open_record()
        runtime = self.join(engines, record)
        self._placement = LentPlacement(
            self.cluster(job.infer, leads_ranks=True),
            runtime,
            engines,
            RequestsOnly(record.bind(f"{job.name}/generation")),
            config.eval.num_tests_per_prompt,
            self.engine_built,
        )
        score = evaluate(config, self._placement)
        said = f"{score.metric} {score.value:.4f} on {score.problems} problems"
        return Outcome("done", said, steps=score.problems)
