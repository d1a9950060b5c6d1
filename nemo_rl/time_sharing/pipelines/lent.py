"""A GRPO run on accelerators that the scheduler lends: where they are, and when it may use them.

`LentPlacement` builds the policy under a grant and lets engines be built when their ranks wake, or before;
`LentAccelerators` asks for the training GPUs step by step and gives them back. Order after a step: the cache is built
while the weights are resident, a checkpoint that is due is snapshot, training moves to the host and drops its
communicators, ranks that serve take the new weights, the version is published, the GPUs go back with the next demand in
the same status.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

from nemo_rl.algorithms.distillation.engine_teacher import ServedTeacher
from nemo_rl.algorithms.grpo.placement import Built
from nemo_rl.algorithms.placement import Clusters, DemandKind, ReportProgress
from nemo_rl.config import MasterConfig
from nemo_rl.config.teacher_sections import Teacher
from nemo_rl.distributed.accelerator_slots import Accelerator
from nemo_rl.experience.collector import Collector
from nemo_rl.models.generation.elastic import ElasticGeneration, with_own_cache
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.weights import PolicyWeightCache
from nemo_rl.time_sharing.agents.runtime import AgentRuntime
from nemo_rl.time_sharing.agents.standing_demand import standing_demand
from nemo_rl.time_sharing.pipelines.pooled_teacher import PooledTeacher
from nemo_rl.time_sharing.pipelines.residents import SlotMemory
from nemo_rl.time_sharing.pipelines.shared_cluster import SharedCluster
from nemo_rl.time_sharing.pipelines.vllm_engine import BuildableEngines, EngineSlot, FirstSlept, VllmEngine
from nemo_rl.time_sharing.protocol.types import ACTOR_TRAIN, Priority
from nemo_rl.utils.record import Record
from nemo_rl.utils.record_events import EngineOutgrown, RequestFinished, RequestSubmitted

logger = logging.getLogger(__name__)


ReportMemory = Callable[[Sequence[SlotMemory], Sequence[int]], None]
"""Takes memory and needs (bytes) by training rank."""


class RequestsOnly:
    """A record of requests, and of engines that keep too much; the agent records what else happens to shards."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def emit(self, event: object) -> None:
        """Passes these on."""
        if isinstance(event, RequestSubmitted | RequestFinished | EngineOutgrown):
            self._record.emit(event)

    def bind(self, source: str, *, clock: Callable[[], float] | None = None) -> Record:
        """The same under another source name."""
        return RequestsOnly(self._record.bind(source, clock=clock))

    def flush(self) -> None:
        """Flushes what is behind it."""
        self._record.flush()


class LentSlots:
    """Base of placements on a shared pool. `clusters`: the slots of the registration."""

    def __init__(self, clusters: Clusters, accelerator: Accelerator) -> None:
        self.clusters, self._accelerator = clusters, accelerator

    def connect(self, config: object) -> Accelerator:
        """The pool's kind of accelerator; the pipeline's process is part of its Ray cluster already."""
        return self._accelerator

    def disconnect(self) -> None:
        """The Ray cluster is the pool's."""

    def reserve(self, config: object, accelerator: Accelerator) -> Clusters:
        """The slots of the registration."""
        return self.clusters


class LentPlacement(LentSlots):
    """Places one pipeline on a shared pool.

    Args:
        generation: Its generation slots, of which the training slots are a part.
        runtime: Its agent, registered and started.
        engines: Where the agent finds the engines, once they can be built.
        wait_s: How long a grant may take.
        measures_batch: Whether the scheduler hears how many samples an engine runs at once at good speed.
        report_memory: Takes what stays on each training GPU, and what the pipeline needs there when it is awake; raises
            where that does not fit.
        on_first_sleep: See `build_engine`.
    """

    lends_shards = True

    def __init__(
        self,
        pipeline: str,
        training: SharedCluster,
        generation: SharedCluster,
        runtime: AgentRuntime,
        engines: EngineSlot,
        *,
        wait_s: float,
        measures_batch: bool,
        report_memory: ReportMemory,
        on_first_sleep: FirstSlept,
    ) -> None:
        self._report_memory, self._on_first_sleep = report_memory, on_first_sleep
        self._measures_batch = measures_batch
        self.record_prefix = f"{pipeline}/"
        super().__init__(Clusters(training, generation), training.accelerator)
        self._runtime, self._engines, self._wait_s = runtime, engines, wait_s

    def served_teacher(self, teacher: Teacher, config: MasterConfig) -> ServedTeacher:
        """A job of the same pool."""
        return PooledTeacher(self.record_prefix.rstrip("/"), teacher, *teacher.asked(config), wait_s=self._wait_s)

    def shard_record(self, record: Record) -> Record:
        """Without what the agent tells."""
        return RequestsOnly(record.bind(f"{self.record_prefix}generation"))

    def generation_prepared(self, generation: VllmGeneration) -> None:
        """Engines may be built from here on, on idle GPUs, beside the policy."""
        self._engines.put(BuildableEngines(generation.fleet, self._on_first_sleep))
        self._runtime.builds_ahead()

    @contextmanager
    def building(self) -> Generator[None]:
        """Under a grant for initialisation. A failure keeps it: the GPUs are free only when the processes are gone."""
        self._runtime.acquire(ACTOR_TRAIN, Priority.INITIALIZATION, -1, self._wait_s)
        yield
        self._runtime.release(ACTOR_TRAIN)

    def accelerators(self, parts: Built) -> LentAccelerators:
        """Packs the first weights, moves training off the GPUs and hands the engines to the agent. Raises CacheError:
        two copies of the weights do not fit into host memory.
        """
        if parts.generation is None:
            raise ValueError("a pipeline on a shared pool generates; grpo.rollout_replay leaves nothing to share")
        cache, elastic = with_own_cache(parts.policy, parts.generation, parts.config.weight_sync)
        engine = VllmEngine(parts.generation.fleet, elastic, lambda: cache.version, self._on_first_sleep)
        self._engines.put(engine)
        parts.generation.fleet.on_failure(lambda rank, reason: self._runtime.rank_broken_soon(rank))
        cache.build(parts.version)
        self._runtime.begin_at(parts.version)
        share = parts.config.policy.generation.vllm_cfg.gpu_memory_utilization
        leave_and_report_memory(parts.policy, self._accelerator, self._report_memory, share)
        samples = parts.config.grpo.num_generations_per_prompt
        return LentAccelerators(
            self._runtime,
            parts,
            cache,
            elastic,
            self._accelerator,
            samples=samples,
            measures_batch=self._measures_batch,
            wait_s=self._wait_s,
        )


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


class LentAccelerators:
    """Accelerators of a GRPO run that belong to the scheduler.

    Args:
        built: Policy and what watches the run.
        cache: Weights of every version, on the host.
        samples: Samples of a prompt group.
        measures_batch: Whether the scheduler hears how many samples an engine runs at once at good speed.
        wait_s: How long a grant may take.

    Attributes:
        waited_s: Seconds for which the run has waited for training GPUs so far.
    """

    saves_before_publish = True

    def __init__(
        self,
        runtime: AgentRuntime,
        built: Built,
        cache: PolicyWeightCache,
        elastic: ElasticGeneration,
        accelerator: Accelerator,
        *,
        samples: int,
        measures_batch: bool,
        wait_s: float,
    ) -> None:
        self._accelerator, self._measures_batch = accelerator, measures_batch
        self._runtime, self._policy, self._cache, self._elastic = runtime, built.policy, cache, elastic
        self._timer, self._phase = built.timer, built.progress.phase
        self._samples, self._wait_s = samples, wait_s
        self._holds = False
        self.waited_s = 0.0

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
        batch = self._elastic.generation.good_batch() if self._measures_batch else None
        if batch is not None:
            self._runtime.batch_measured(batch)
        # Validation answers a prompt once.
        with standing_demand(
            self._runtime,
            lambda: self._elastic.generation.requests_under_way,
            self._samples if kind == "training" else 1,
        ) as report:
            report(ready, groups)
            yield report

    def lend_training(self, step: int) -> None:
        """Waits for the training GPUs. Raises TimeoutError: they were not granted in time; Dismissed: the scheduler
        ended this pipeline.
        """
        if self._holds:
            return
        self._phase("waiting for training GPUs")
        began = time.monotonic()
        with self._timer.time("idle/training_grant"):
            self._runtime.acquire(ACTOR_TRAIN, Priority.ACTOR_TRAINING, step, self._wait_s)
        self.waited_s += time.monotonic() - began
        self._holds = True

    def yield_training(self, step: int) -> None:
        """Gives the training GPUs back while the open step waits for rollouts, with its gradients on the host.

        Communicators stay, because an open step needs them again; the next hand-over after the step drops them.
        """
        if self._holds:
            self._phase("waiting for rollouts")
            self._policy.offload_to_cpu()
            self._runtime.release_for_now(ACTOR_TRAIN)
            self._holds = False

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
            self._runtime.publish(step + 1, self._wait_s, recompute_kv=self._elastic.recompute_kv)
            groups, ready = waited_for()
            self._runtime.release(ACTOR_TRAIN, target=groups, done=ready, unit=self._samples)
        self._holds = False

    def stop(self) -> None:
        """No demand is left."""
        if not self._runtime.closed.is_set():
            self._runtime.end_progress()

    def leave(self) -> None:
        """The run is over: training GPUs that were asked for once more go back, the ranks are put to sleep, and the
        registration ends. Raises TimeoutError: the scheduler did not let the pipeline go in time.
        """
        if self._holds:
            leave_accelerators(self._policy, self._accelerator)
            self._runtime.release(ACTOR_TRAIN)
            self._holds = False
        self._runtime.leave()

    def metrics(self) -> Mapping[str, float]:
        """Pauses of ranks that were refreshed while they served."""
        return self._elastic.pause_metrics()
