"""Runs on accelerators that the scheduler lends: where they are, and when a run may use them.

`LentPlacement` builds the policy under a grant and lets engines be built when their ranks wake, or before.
`LentAccelerators` asks for the training GPUs step by step and gives them back: the cache is built while the weights are
resident, a checkpoint that is due is snapshot, training moves to the host and drops its communicators, ranks that serve
take the new weights, the version is published, the GPUs go back with the next demand in the same status. `LentTraining`
is for a run that generates nothing, `LentEngines` for one that trains nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nemo_rl.algorithms.accelerators import Accelerators, DemandKind, ReportProgress
from nemo_rl.algorithms.distillation.teachers import ServedTeacher
from nemo_rl.algorithms.placement import Clusters, RunConfig
from nemo_rl.algorithms.training_loop import TrainingRun
from nemo_rl.config import MasterConfig
from nemo_rl.config.teacher_sections import Teacher
from nemo_rl.distributed.accelerator_slots import Accelerator
from nemo_rl.experience.collector import Collector
from nemo_rl.models.generation.elastic import ElasticGeneration, with_own_cache
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.time_sharing.agents.runtime import AgentRuntime
from nemo_rl.time_sharing.agents.standing_demand import standing_demand
from nemo_rl.time_sharing.pipelines.pooled_teacher import PooledTeacher
from nemo_rl.time_sharing.pipelines.residents import SlotMemory
from nemo_rl.time_sharing.pipelines.vllm_engine import EngineSlot
from nemo_rl.time_sharing.protocol.types import ACTOR_TRAIN, Priority
from nemo_rl.utils.record import NullRecord, Record
from nemo_rl.utils.record_events import EngineOutgrown, RequestFinished, RequestSubmitted

_NO_ENGINE = 0.0

ReportMemory = Callable[[Sequence[SlotMemory], Sequence[int]], None]
"""Takes memory and needs (bytes) by training rank."""


@dataclass(frozen=True)
class TurnRules:
    """How a pipeline takes its turns on a pool.

    Attributes:
        wait_s: How long a grant may take.
        samples: Samples, or answers, of a prompt.
        measures_batch: Whether the scheduler hears how many samples an engine runs at once at good speed.
        wanted: Whether another job waits for the GPUs of a run that generates nothing.
        slice_s: How long such a run keeps them all the same: moving to the host and back takes seconds.
        longest_s: When it gives them back even if no other job wants them.
    """

    wait_s: float
    samples: int = 1
    measures_batch: bool = False
    wanted: Callable[[], bool] = lambda: False
    slice_s: float = 0.0
    longest_s: float = math.inf


class RequestsOnly(NullRecord):
    """A record of requests, and of engines that keep too much; the agent records what else happens to shards."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def emit(self, event: object) -> None:
        """Passes these on."""
        if isinstance(event, RequestSubmitted | RequestFinished | EngineOutgrown):
            self._record.emit(event)


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

    def release(self, *, target: int | None = 0, done: int = 0, unit: int = 1) -> None:
        """Gives them back and sets the demand for generation; see `AgentRuntime.release`."""
        self._runtime.release(ACTOR_TRAIN, target=target, done=done, unit=unit)
        self.held = None


class LentPlacement:
    """Slots of a shared pool: of training, of generation, or of both.

    Args:
        clusters: The slots of the registration.
        runtime: The pipeline's agent, registered and started.
        engines: Where the agent finds the engines, once they can be built.
        rules: How the pipeline takes its turns.
        report_memory: Takes what stays on each training GPU, and what the pipeline needs there when it is awake; raises
            where that does not fit.
        record: Of requests; by default the run's.

    Attributes:
        grants: The grants of the training GPUs.
        answered: Prompts answered by engines that nothing trains, and how many there are.
    """

    def __init__(
        self,
        pipeline: str,
        clusters: Clusters,
        accelerator: Accelerator,
        runtime: AgentRuntime,
        engines: EngineSlot,
        rules: TurnRules,
        *,
        report_memory: ReportMemory,
        record: Record | None = None,
    ) -> None:
        self.lends_shards, self.record_prefix = clusters.generation is not None, f"{pipeline}/"
        self._pipeline, self.clusters, self._record = pipeline, clusters, record
        self._runtime, self._engines, self._rules = runtime, engines, rules
        self._report_memory, self._accelerator = report_memory, accelerator
        self.grants = Grants(runtime, rules.wait_s)
        self.answered = (0, 0)

    def connect(self, config: RunConfig) -> Accelerator:
        """The pool's kind of accelerator; the pipeline's process is part of its Ray cluster already."""
        return self._accelerator

    def disconnect(self) -> None:
        """The Ray cluster is the pool's."""

    def reserve(self, config: RunConfig, accelerator: Accelerator) -> Clusters:
        """The slots of the registration."""
        return self.clusters

    def served_teacher(self, teacher: Teacher, config: MasterConfig) -> ServedTeacher:
        """A job of the same pool."""
        return PooledTeacher(self._pipeline, teacher, *teacher.asked(config), wait_s=self._rules.wait_s)

    def shard_record(self, record: Record) -> Record:
        """Without what the agent tells."""
        return RequestsOnly((self._record or record).bind(f"{self.record_prefix}generation"))

    def generation_prepared(self, generation: VllmGeneration) -> None:
        """Engines may be built from here on, on idle GPUs, beside the policy."""
        self._engines.put(generation.fleet)
        self._runtime.builds_ahead()

    @contextmanager
    def building(self) -> Generator[None]:
        """Under a grant for initialisation, which a run that generates nothing goes on with. A failure keeps it: the
        GPUs are free only when the processes are gone.
        """
        if self.lends_shards:
            self._runtime.acquire(ACTOR_TRAIN, Priority.INITIALIZATION, -1, self._rules.wait_s)
            yield
            self._runtime.release(ACTOR_TRAIN)
        else:
            self.grants.acquire(Priority.INITIALIZATION, -1)
            yield

    def engines_alone(self, generation: VllmGeneration) -> Accelerators:
        """The GPUs of engines whose weights never change."""
        self._engines.put(generation.fleet, fixed=True)
        generation.fleet.on_failure(lambda rank, reason: self._runtime.rank_broken_soon(rank))
        return LentEngines(self._runtime, generation, self._rules.samples, self._show)

    def _show(self, done: int, of: int) -> None:
        self.answered = (done, of)

    def accelerators(self, run: TrainingRun[Any]) -> Accelerators:
        """Packs the first weights, moves training off the GPUs and hands the engines to the agent. Raises CacheError:
        two copies of the weights do not fit into host memory; PoolFull: what stays on the GPUs while the run is away
        leaves too little for everybody.
        """
        if run.generation is None:
            if self.lends_shards:
                raise ValueError("a pipeline on a shared pool generates; grpo.rollout_replay leaves nothing to share")
            leave_and_report_memory(run.policy, self._accelerator, self._report_memory, _NO_ENGINE)
            return LentTraining(self.grants, run, self._accelerator, self._rules)
        elastic = with_own_cache(run.policy, run.generation, run.config.weight_sync)
        self._engines.put(run.generation.fleet, elastic)
        run.generation.fleet.on_failure(lambda rank, reason: self._runtime.rank_broken_soon(rank))
        elastic.cache.build(run.state.step)
        self._runtime.begin_at(run.state.step)
        share = run.config.policy.generation.vllm_cfg.gpu_memory_utilization
        leave_and_report_memory(run.policy, self._accelerator, self._report_memory, share)
        return LentAccelerators(self._runtime, self.grants, run, elastic, self._accelerator, self._rules)

    def leave(self, policy: Policy) -> None:
        """The run is over: training GPUs that it still holds go back, its ranks are put to sleep, and the registration
        ends. Raises TimeoutError: the scheduler did not let the pipeline go in time.
        """
        if self.grants.held is not None:
            leave_accelerators(policy, self._accelerator)
            self.grants.release()
        self._runtime.leave()


def leave_accelerators(policy: Policy, accelerator: Accelerator) -> None:
    """Training state to the host, communicators of the device dropped, memory given back."""
    policy.offload_to_cpu()
    if accelerator.is_cuda:
        policy.destroy_nccl_groups()


def leave_and_report_memory(
    policy: Policy, accelerator: Accelerator, report_memory: ReportMemory, share: float
) -> None:
    """Leaves the GPUs for the first time, and has what stays there entered into the ledger.

    Args:
        report_memory: See `LentPlacement`; by training rank.
        share: Of a GPU's memory, what an engine there will take.

    Raises PoolFull: what stays and what is needed do not fit together.
    """
    if not accelerator.is_cuda:
        leave_accelerators(policy, accelerator)
        return
    resident = policy.worker_group.run("memory_in_use")
    leave_accelerators(policy, accelerator)
    used, free = policy.worker_group.run("memory_in_use"), policy.worker_group.run("free_memory")
    measured = [SlotMemory(stays, stays + rest) for stays, rest in zip(used, free, strict=True)]
    needs = [
        max(before - memory.used, int(share * memory.total)) for before, memory in zip(resident, measured, strict=True)
    ]
    report_memory(measured, needs)


class LentAccelerators(Accelerators):
    """Accelerators of a run that generates and trains, lent by the scheduler.

    Args:
        run: Built but for its accelerators and its source.
        elastic: Its engines, and the cache of its weights.
    """

    saves_before_publish = True

    def __init__(
        self,
        runtime: AgentRuntime,
        grants: Grants,
        run: TrainingRun[Any],
        elastic: ElasticGeneration,
        accelerator: Accelerator,
        rules: TurnRules,
    ) -> None:
        self._runtime, self._grants, self._rules, self._accelerator = runtime, grants, rules, accelerator
        self._policy, self._cache, self._elastic = run.policy, elastic.cache, elastic
        self._timer, self._phase = run.timer, run.progress.phase

    def start(self, collector: Collector | None, version: int) -> None:
        """Generation begins with the first demand: ranks wake with the cached weights."""
        self._elastic.recompute_kv = collector is None or collector.tasks.refits.recompute_kv
        self._check_served(version)

    def serve(self, version: int) -> None:
        """Every rank that is awake or wakes has that version."""
        self._check_served(version)

    def _check_served(self, version: int) -> None:
        if self._cache.version != version:
            raise RuntimeError(f"the weight cache serves version {self._cache.version}, the run is at {version}")

    @contextmanager
    def demand(self, step: int, groups: int, ready: int, kind: DemandKind = "training") -> Generator[ReportProgress]:
        """The scheduler hears what is waited for before the wait begins, and of whatever changes."""
        batch = self._elastic.generation.good_batch() if self._rules.measures_batch else None
        if batch is not None:
            self._runtime.batch_measured(batch)
        # Validation answers a prompt once.
        with standing_demand(
            self._runtime.set_demand,
            lambda: self._elastic.generation.requests_under_way,
            self._rules.samples if kind == "training" else 1,
        ) as report:
            report(ready, groups)
            yield report

    def lend_training(self, step: int) -> None:
        """Waits for the training GPUs. Raises TimeoutError: they were not granted in time; Dismissed: the scheduler
        ended this pipeline.
        """
        if self._grants.held is not None:
            return
        self._phase("waiting for training GPUs")
        with self._timer.time("idle/training_grant"):
            self._grants.acquire(Priority.ACTOR_TRAINING, step)

    def yield_training(self, step: int) -> None:
        """Gives the training GPUs back while the open step waits for rollouts, with its gradients on the host.

        Communicators stay, because an open step needs them again; the next hand-over after the step drops them.
        """
        if self._grants.held is not None:
            self._phase("waiting for rollouts")
            self._policy.offload_to_cpu()
            self._grants.release(target=None)

    def lend_saving(self, step: int) -> None:
        """GPUs that were given back are asked for once more, and the run's end gives them back; see `lend_training`."""
        self.lend_training(step)

    def weights_ready(self, step: int) -> None:
        """Packs the new weights into the cache; ranks that wake from now on get them."""
        with self._timer.time("weight_sync/cache"):
            self._cache.build(step + 1)
            self._runtime.cache_built(step + 1)

    def publish(self, step: int, waited_for: Callable[[], tuple[int, int]]) -> None:
        """Training leaves the GPUs, ranks that serve are refreshed, and the GPUs go back with the next demand. Raises
        TimeoutError: the version did not reach the serving ranks in time.
        """
        self._phase("hand-over")
        with self._timer.time("weight_sync"):
            with self._timer.time("weight_sync/offload"):
                leave_accelerators(self._policy, self._accelerator)
            self._runtime.publish(step + 1, self._rules.wait_s, recompute_kv=self._elastic.recompute_kv)
            groups, ready = waited_for()
            self._grants.release(target=groups, done=ready, unit=self._rules.samples)

    def stop(self) -> None:
        """No demand is left."""
        if not self._runtime.closed.is_set():
            self._runtime.set_demand(0)

    def metrics(self) -> Mapping[str, float]:
        """Pauses of ranks that were refreshed while they served."""
        return self._elastic.pause_metrics()


class LentTraining(Accelerators):
    """Training GPUs that belong to the scheduler, of a run that generates nothing."""

    def __init__(self, grants: Grants, run: TrainingRun[Any], accelerator: Accelerator, rules: TurnRules) -> None:
        self._grants, self._run, self._accelerator, self._rules = grants, run, accelerator, rules

    def lend_training(self, step: int) -> None:
        """Waits for the GPUs, unless they are held, and moves the policy there. For errors see `Grants.acquire`."""
        if self._grants.held is Priority.ACTOR_TRAINING:
            return
        self._run.progress.phase("waiting for training GPUs")
        with self._run.timer.time("idle/training_grant"):
            self._grants.acquire(Priority.ACTOR_TRAINING, step)
        self._run.policy.prepare_for_training()

    def yield_training(self, step: int) -> None:
        """Gives the GPUs back at the end of a slice, where another job waits for them."""
        if self._grants.held is None:
            return
        seconds = self._grants.seconds()
        if seconds > self._rules.longest_s or (seconds > self._rules.slice_s and self._rules.wanted()):
            self._run.progress.phase("hand-over")
            leave_accelerators(self._run.policy, self._accelerator)
            self._grants.release()


class LentEngines(Accelerators):
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
        with standing_demand(
            self._runtime.set_demand, lambda: self._generation.requests_under_way, self._answers
        ) as report:

            def tell(done: int, of: int) -> None:
                self._show(done, of)
                report(done, of)

            tell(ready, groups)
            yield tell
        self._runtime.leave()
