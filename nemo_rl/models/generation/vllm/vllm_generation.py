"""vLLM generation as drivers see it: one engine per data-parallel shard, behind the router.

Places one actor per shard on the cluster, serves batches and single requests through one dispatcher, and offers the
shards as targets of a sync session. It decides nothing about when to generate. Invariants: all requests pass the
router; engines that sleep at level 2 serve again only after a sync.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

import ray

from nemo_rl.config import ClusterConfig, PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, cores_per_slot
from nemo_rl.distributed.worker_calls import wait_for_workers
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.models.generation.interfaces import (
    GenerationInterface,
    GenerationRequest,
    GenerationResult,
    GenerationSamplingParams,
    results_to_batch,
)
from nemo_rl.models.generation.router import Router
from nemo_rl.models.generation.vllm.dispatch import Dispatcher
from nemo_rl.models.generation.vllm.engine_args import engine_spec

logger = logging.getLogger(__name__)
T = TypeVar("T")

_WORKER = "nemo_rl.models.generation.vllm.worker.VllmGenerationWorker"
_START_TIMEOUT_S = 900.0
_TRANSITION_TIMEOUT_S = 180.0


class VllmGeneration(GenerationInterface):
    """Generation on the slots of a cluster.

    Args:
        cluster: Slots; tensor x pipeline parallel size of them form one shard, inside one node.
        policy: The policy section, generation below it.
        cluster_cfg: Accelerator budget of CPU slots.
        pad_token_id: Padding of batch outputs.
        stop_token_ids: Tokens that end a response.
        seed: Base seed of the engines.
        colocated: Whether the slots are shared with training, so that engines must sleep.
        refits: Whether training sends its weights.
        request_timeout_s: Deadline of one request.
        name_prefix: Name in messages.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        policy: PolicyConfig,
        cluster_cfg: ClusterConfig,
        *,
        pad_token_id: int,
        stop_token_ids: list[int],
        seed: int,
        colocated: bool,
        refits: bool = True,
        request_timeout_s: float = 900.0,
        name_prefix: str = "vllm",
    ) -> None:
        self.cfg = policy.generation
        self.cluster = cluster
        self.colocated = colocated
        self._pad_token_id = pad_token_id
        self._request_timeout_s = request_timeout_s
        width = policy.generation.vllm_cfg.tensor_parallel_size * policy.generation.vllm_cfg.pipeline_parallel_size
        shards = _tie_bundles(cluster, width)
        cuda = cluster.accelerator.is_cuda
        spec = engine_spec(
            policy,
            cuda=cuda,
            seed=seed,
            sleeps=colocated,
            refits=refits,
            cpu_slot_memory_gb=cluster_cfg.cpu_slot_memory_gb,
            threads=cores_per_slot(cluster.world_size() // cluster.node_count()),
        )
        builder = RayWorkerBuilder(_WORKER, spec, stop_token_ids, policy.generation.bad_words)
        self.group = RayWorkerGroup(cluster, builder, name_prefix=name_prefix, bundle_indices_list=shards, env_vars=spec.env, max_concurrency=4096)
        self._starting = self.group.run_all_workers_single_data("start")
        self._workers: list[dict[str, Any]] | None = None
        self.router = Router(len(shards), policy.generation.router)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="generation-dispatch", daemon=True)
        self._thread.start()
        self._dispatcher = Dispatcher(self.group.workers, self.router, [str(identity) for identity in self.group.identities])
        self.weights_resident = True

    def wait_until_started(self) -> None:
        """Waits for every engine; engines start while the caller builds other things.

        Raises:
            WorkerError: An engine failed to start.
        """
        if self._workers is None:
            answers = self.group.get_all_worker_results(self._starting, timeout_s=_START_TIMEOUT_S)
            self._workers = [worker for shard in answers for worker in shard]

    @property
    def dp_size(self) -> int:
        """Number of shards."""
        return self.group.world_size

    def default_sampling(self, *, greedy: bool = False) -> GenerationSamplingParams:
        """The training sampling parameters of the configuration."""
        sampling = GenerationSamplingParams(self.cfg.temperature, self.cfg.top_p, self.cfg.top_k)
        return sampling.greedy() if greedy else sampling

    async def generate_one(self, request: GenerationRequest) -> GenerationResult:
        """Continues one prompt; may be awaited on any event loop."""
        future = asyncio.run_coroutine_threadsafe(self._dispatcher.run(request, self._request_timeout_s), self._loop)
        return await asyncio.wrap_future(future)

    def run_on_dispatch_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the dispatcher's own loop and waits: rollouts that live there skip a thread hop per request."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _requests(self, data: BatchedDataDict[Any], greedy: bool) -> list[GenerationRequest]:
        sampling = self.default_sampling(greedy=greedy)
        lengths = data["input_lengths"].tolist()
        stops = data.get("stop_strings") or [None] * len(lengths)
        seeds = data["seeds"].tolist() if "seeds" in data else [None] * len(lengths)
        batch = uuid.uuid4().hex[:12]
        configured = tuple(self.cfg.stop_strings or ())
        return [
            GenerationRequest(
                f"{batch}-{row}",
                ids[:length].tolist(),
                self.cfg.max_new_tokens,
                sampling,
                seed,
                configured + tuple(s for s in (stop or ()) if s not in configured),
            )
            for row, (ids, length, stop, seed) in enumerate(zip(data["input_ids"], lengths, stops, seeds, strict=True))
        ]

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """Continues a right-padded batch; see `results_to_batch` for what is returned."""
        requests = self._requests(data, greedy)

        async def all_of_them() -> list[GenerationResult]:
            return list(await asyncio.gather(*(self._dispatcher.run(request, self._request_timeout_s) for request in requests)))

        return results_to_batch([request.prompt_ids for request in requests], self.run_on_dispatch_loop(all_of_them()), self._pad_token_id)

    async def generate_async(self, data: BatchedDataDict[Any], greedy: bool = False) -> AsyncIterator[tuple[int, BatchedDataDict[Any]]]:
        """Yields (row, one-row batch) in the order in which rows finish."""

        async def one(row: int, request: GenerationRequest) -> tuple[int, BatchedDataDict[Any]]:
            return row, results_to_batch([request.prompt_ids], [await self.generate_one(request)], self._pad_token_id)

        for finished in asyncio.as_completed([one(row, request) for row, request in enumerate(self._requests(data, greedy))]):
            yield await finished

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> bool:
        """Makes weights and KV cache (or one of them) resident on every shard."""
        self.group.run("wake_up", tags=list(tags or ("weights", "kv_cache")), timeout_s=_TRANSITION_TIMEOUT_S)
        return True

    def finish_generation(self, release_gpu: bool = True) -> bool:
        """Puts colocated engines to sleep; others only forget cached prefixes."""
        if self.colocated and release_gpu:
            self.sleep()
        else:
            self.group.run("reset_prefix_cache", timeout_s=_TRANSITION_TIMEOUT_S)
        return True

    def sleep(self) -> list[dict[str, int]]:
        """Sleeps every shard; bytes in use before and after, per shard."""
        report = self.group.run("sleep", timeout_s=_TRANSITION_TIMEOUT_S)
        if self.cfg.vllm_cfg.sleep_level == 2:
            self.weights_resident = False
        return report

    def invalidate_kv_cache(self) -> None:
        """Forgets cached prefixes on every shard."""
        self.group.run("reset_prefix_cache", timeout_s=_TRANSITION_TIMEOUT_S)

    # -- targets of a sync session ------------------------------------------------------------------------------------

    def devices(self) -> list[str]:
        """Device identity of every engine rank, shard by shard."""
        self.wait_until_started()
        return [worker["device"] for worker in self._workers or []]

    def begin(self, session: dict[str, Any], first_nccl_rank: int, timeout_s: float) -> None:
        """Opens a sync session on every shard."""
        width = len(self._workers or []) // self.dp_size
        first = [first_nccl_rank + shard * width for shard in range(self.dp_size)]
        future = self.group.run_all_workers_multiple_data("begin_sync", {"session": session, "timeout_s": timeout_s}, first_nccl_rank=first)
        self.group.get_all_worker_results(future, timeout_s=timeout_s)

    def receive_window(self, window: dict[str, Any], timeout_s: float) -> None:
        """Loads a window on every shard."""
        self._run_timed("receive_window", timeout_s, window=window)

    def finish(self, version: int, timeout_s: float) -> None:
        """Finalises every shard."""
        self._run_timed("finish_sync", timeout_s, version=version)
        self.weights_resident = True

    def abort(self) -> None:
        """Ends the session on every shard that still answers."""
        refs: list[Any] = [worker.abort_sync.remote() for worker in self.group.workers]
        ray.wait(refs, num_returns=len(refs), timeout=30.0)

    def _run_timed(self, method: str, timeout_s: float, **kwargs: Any) -> None:
        refs = [getattr(worker, method).remote(timeout_s=timeout_s, **kwargs) for worker in self.group.workers]
        wait_for_workers(refs, self.group.identities, what=f"{self.group.name_prefix}.{method}", timeout_s=timeout_s)

    def shutdown(self) -> bool:
        """Ends every engine and the dispatcher's thread."""
        if self._thread.is_alive():
            self.run_on_dispatch_loop(self._dispatcher.close())
        clean = self.group.shutdown(cleanup_method="shutdown")
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10.0)
        return clean


def _tie_bundles(cluster: RayVirtualCluster, width: int) -> list[tuple[int, list[int]]]:
    """Groups of `width` neighbouring slots inside one node.

    Raises:
        ValueError: A node's slots do not divide into groups.
    """
    tied: list[tuple[int, list[int]]] = []
    by_node: dict[int, list[int]] = {}
    for slot in cluster.slots():
        by_node.setdefault(slot.node_rank, []).append(slot.bundle_index)
    for node, bundles in by_node.items():
        if len(bundles) % width:
            raise ValueError(
                f"policy.generation.vllm_cfg: tensor x pipeline parallel size {width} does not divide the {len(bundles)} slots of node {node}; "
                "an engine lies inside one node"
            )
        tied += [(node, bundles[start : start + width]) for start in range(0, len(bundles), width)]
    return tied
