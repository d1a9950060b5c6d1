"""A teacher that several jobs of a pool share: engines only, which come and go with their model.

`TeacherPipeline` serves the teacher of a configuration, or of several the one that names it: its engines are awake
while samples wait for scores, and lent to others otherwise. `PooledTeacher` is a student's side. Invariants: demand
stands exactly while samples are open; a teacher ends by itself once every job that named it has ended.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, cast

from nemo_rl.config import MasterConfig
from nemo_rl.config.teacher_sections import pooled_teacher
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.time_sharing.agents.runtime import AgentRuntime, Dismissed
from nemo_rl.time_sharing.agents.standing_demand import OpenSamples
from nemo_rl.time_sharing.log.pool_state import Outcome, Progress
from nemo_rl.time_sharing.pipelines.grpo import LentPipeline, PoolHandles
from nemo_rl.time_sharing.pipelines.job import Job
from nemo_rl.time_sharing.pipelines.lent import RequestsOnly
from nemo_rl.time_sharing.pipelines.pooled_teacher import Served, TeacherLeft, ask_pool
from nemo_rl.time_sharing.pipelines.vllm_engine import EngineSlot

if TYPE_CHECKING:
    from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration

_START_S = 300.0
_POLL_S = 1.0
_LINGER_S = 10.0


class TeacherPipeline(LentPipeline):
    """The teacher of a configuration, for every job that names this one."""

    def __init__(self, job: Job, handles: PoolHandles, incarnation: int) -> None:
        super().__init__(job, handles, incarnation)
        self._config = cast("MasterConfig", job.config)
        self._teacher = pooled_teacher(self._config, job.name)
        self._generation: VllmGeneration | None = None
        self._serving = threading.Event()
        self._demand: OpenSamples | None = None
        self._samples = self._batches = 0

    def progress(self) -> Progress:
        """Batches scored so far, as steps."""
        if self._generation is None:
            phase = "starting"
        else:
            phase = "scoring" if self._demand else "waiting for samples" if self._serving.is_set() else "leaving"
        return Progress(phase, self._batches, 0, self._handles.log_dir)

    def drain(self) -> str:
        """Scores what is open and leaves."""
        super().drain()
        return "scores the samples that it has, and leaves"

    def live(self) -> Outcome:
        from nemo_rl.algorithms.distillation.teachers import scoring_engines, start_scoring_actors
        from nemo_rl.data.tokenizer import get_tokenizer

        job, teacher, engines = self._job, self._teacher, EngineSlot(self.engine_built)
        tokenizer = get_tokenizer(teacher.policy.tokenizer, trust_remote_code=teacher.policy.trust_remote_code)
        record = self.open_record()
        runtime = self.join(engines, record)
        self._demand = OpenSamples(runtime.set_demand)
        cluster = self.cluster(job.infer, leads_ranks=True)
        actors = start_scoring_actors(cluster, teacher, self._config.cluster, shares=False, lent=True)
        requests = RequestsOnly(record.bind(f"{job.name}/generation"))
        self._generation = generation = scoring_engines(actors, tokenizer, requests)
        try:
            engines.put(generation.fleet, fixed=True)
            generation.fleet.on_failure(lambda rank, reason: runtime.rank_broken_soon(rank))
            self._serving.set()
            self._until_nobody_needs_it(runtime)
            self._serving.clear()
            runtime.leave()
        finally:
            generation.shutdown()
        kind = "drained" if self._draining.is_set() else "done"
        return Outcome(kind, f"{self._samples} samples scored", steps=self._batches)

    def _until_nobody_needs_it(self, runtime: AgentRuntime) -> None:
        needed_at, had_students = time.monotonic(), False
        while not (self._draining.is_set() and not self._demand):
            if runtime.closed.wait(_POLL_S):
                raise Dismissed(f"{self._job.name}: incarnation {self._incarnation} is no longer registered")
            if self._demand or ask_pool("students", self._job.name):
                needed_at, had_students = time.monotonic(), True
            # Jobs that are submitted one after the other find the same teacher.
            elif had_students and time.monotonic() - needed_at > _LINGER_S:
                return

    # -- from students ------------------------------------------------------------------------------------------------

    def teaches(self) -> Served:
        """What it serves."""
        policy, (topk, _) = self._teacher.policy, self._teacher.asked(self._config)
        return Served(policy.model_name, topk, policy.generation.vllm_cfg.max_model_len)

    def score(self, batch: BatchedDataDict, k: int) -> BatchedDataDict:
        """See `teachers.scores_of_prompts`. Raises TeacherLeft: it is leaving; GenerationError: no engine scores
        them.
        """
        from nemo_rl.algorithms.distillation.teachers import scores_of_prompts

        serves = self._serving.wait(_START_S) and not self._draining.is_set()
        demand = self._demand
        if not serves or self._generation is None or demand is None:
            raise TeacherLeft(f"{self._job.name} takes no samples: it is leaving")
        with demand.batch(batch.size) as finished:
            found = scores_of_prompts(self._generation, batch, k, while_waiting=demand.report, finished=finished)
        self._samples, self._batches = self._samples + batch.size, self._batches + 1
        return found
