"""vLLM generation as drivers see it: one engine per data-parallel shard, behind the router.

Places one actor per shard on the cluster, serves batches and single requests through one dispatcher, and offers the
shards as targets of a sync session. It decides nothing about when to generate. Invariants: all requests pass the
router; engines that sleep at level 2 serve again only after a sync.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from nemo_rl.config.errors import first_line
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import ResourceInsufficientError
from nemo_rl.distributed.worker_groups import MultiWorkerFuture, WorkerError
from nemo_rl.models.generation.interfaces import (
    GenerationError,
    GenerationInterface,
    GenerationRequest,
    GenerationResult,
    GenerationSamplingParams,
    OnTokens,
    results_to_batch,
)
from nemo_rl.models.generation.vllm.dispatch import (
    LOOP_TIMEOUT_S,
    DetachedGenerator,
    Dispatcher,
    Router,
    ServingShard,
    wait_on_loop,
)
from nemo_rl.models.generation.vllm.engine_actors import EngineActors, Rendezvous
from nemo_rl.models.generation.vllm.engine_processes import remove_abandoned
from nemo_rl.models.generation.vllm.engine_stats import EngineSample, generation_metrics
from nemo_rl.models.generation.vllm.fleet import EngineFleet, ShardTargets
from nemo_rl.utils.record import Record

T = TypeVar("T")

_TRANSITION_TIMEOUT_S = 180.0
START_TIMEOUT_S = 600.0
_STATS_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 30.0
_PROFILE_TIMEOUT_S = 60.0


class VllmGeneration(GenerationInterface):
    """Generation by the engines of a group of actors.

    Args:
        actors: One per shard; their engines are started here.
        stop_token_ids: Tokens that end a response.
        request_timeout_s: Deadline of one request. Where shards are lent, requests wait for shards without one.
    """

    def __init__(
        self,
        actors: EngineActors,
        *,
        pad_token_id: int,
        stop_token_ids: list[int],
        request_timeout_s: float = 900.0,
        record: Record | None = None,
    ) -> None:
        self.cfg, self.group, self._nodes = actors.cfg, actors.group, actors.nodes
        self.colocated, self.lent = actors.colocated, actors.lent
        self._pad_token_id, self._stop_token_ids = pad_token_id, stop_token_ids
        self._request_timeout_s = request_timeout_s
        shards, lent = self.group.workers, actors.lent
        self._starting: MultiWorkerFuture | None = None
        # Engines on lent slots are built one by one, by order.
        if not lent:
            places = [self._rendezvous(shard) for shard in range(len(shards))]
            self._starting = self.group.run_all_workers_multiple_data(
                "start", common_kwargs={"stop_token_ids": stop_token_ids}, rendezvous=places
            )
        self.router = Router(len(shards), self.cfg.router)
        if lent:
            self.router.set_active(())
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="generation-dispatch", daemon=True)
        self._thread.start()
        names = [str(identity) for identity in self.group.identities]
        self._dispatcher = Dispatcher(
            self.group.workers, self.router, names, on_preempt=self.cfg.on_preempt, record=record
        )
        self._dispatcher.lends_shards = lent
        self.fleet = EngineFleet(
            self.group.workers,
            self.group.identities,
            self._dispatcher,
            # A move waits for the shard to leave and then for its results.
            lambda work: self.run_on_dispatch_loop(work, 3 * _TRANSITION_TIMEOUT_S),
            self.start_on_dispatch_loop,
            start=self._start_engine,
            end=self._end_engine,
            sleep_level=self.cfg.vllm_cfg.sleep_level,
            timeout_s=_TRANSITION_TIMEOUT_S,
            growth_bytes=int(self.cfg.vllm_cfg.asleep_growth_gib * (1 << 30)),
            built=not lent,
        )
        self.dp_openai_server_base_urls: list[str] = []  # of the run's endpoint, one per engine; empty without one

    def wait_until_started(self) -> None:
        """Waits for every engine; engines start while the caller builds other things. Raises WorkerError: an engine
        failed to start.
        """
        starting, self._starting = self._starting, None
        if starting is not None:
            for shard, answer in enumerate(self.group.get_all_worker_results(starting)):
                self.fleet.started(shard, answer)

    def _rendezvous(self, shard: int) -> Rendezvous | None:
        return None if self._nodes is None else self._nodes.rendezvous(shard)

    def _start_engine(self, shard: int, restart: bool) -> list[dict[str, Any]]:
        if restart:
            if self._nodes is not None:
                self._nodes.restart(shard)
            self.group.start_worker(shard)
        try:
            rendezvous = self._rendezvous(shard)
        except (RayError, ResourceInsufficientError) as error:
            raise WorkerError(f"shard {shard}: no place where its ranks could meet: {first_line(error)}") from error
        start = {"stop_token_ids": self._stop_token_ids, "rendezvous": rendezvous}
        ranks: list[dict[str, Any]] = self.fleet.call([shard], "start", timeout_s=START_TIMEOUT_S, **start)[0]
        return ranks

    def _end_engine(self, shard: int) -> None:
        # Its engine notices that its actor is gone.
        ray.kill(self.group.workers[shard])
        if self._nodes is not None:
            self._nodes.end(shard)

    @property
    def dp_size(self) -> int:
        """Number of shards."""
        return self.group.world_size

    def profile(self, on: bool) -> None:
        """Starts or stops recording in the shards that run under Nsight Systems; stopping writes the profile. Raises
        WorkerError: a shard failed.
        """
        shards = [shard for shard in self.fleet.healthy() if shard in self.group.profiled]
        self.fleet.call(shards, "profile", timeout_s=_PROFILE_TIMEOUT_S, on=on)

    def default_sampling(self, *, greedy: bool = False) -> GenerationSamplingParams:
        """The training sampling parameters of the configuration."""
        sampling = GenerationSamplingParams(self.cfg.temperature, self.cfg.top_p, self.cfg.top_k)
        return sampling.greedy() if greedy else sampling

    @property
    def requests_under_way(self) -> int:
        """Requests that run, or wait for a shard."""
        return self._dispatcher.under_way

    def good_batch(self) -> int | None:
        """Measured number of requests that a shard runs at once at good speed; None before it is known."""
        return self._dispatcher.meter.good_batch()

    async def generate_one(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> GenerationResult:
        """Continues one prompt; may be awaited on any event loop, where `on_tokens` is called as well. See
        `Dispatcher.run`.
        """
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return await self._dispatcher.run(request, self._request_timeout_s, on_tokens)

        def pass_on(token_ids: list[int], logprobs: list[float]) -> None:
            if on_tokens is not None:
                loop.call_soon_threadsafe(on_tokens, token_ids, logprobs)

        work = self._dispatcher.run(request, self._request_timeout_s, None if on_tokens is None else pass_on)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def run_on_dispatch_loop(self, work: Coroutine[object, object, T], timeout_s: float = LOOP_TIMEOUT_S) -> T:
        """Runs a coroutine on the dispatcher's loop and waits, which saves a thread switch per request. Raises
        GenerationError: it did not end within `timeout_s`.
        """
        return wait_on_loop(work, self._loop, timeout_s)

    def start_on_dispatch_loop(self, work: Coroutine[object, object, T]) -> Future[T]:
        """Starts a coroutine on the dispatcher's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def serving(self) -> dict[int, ServingShard]:
        """The shards that take requests, for another process that sends some."""
        return {
            shard: ServingShard(self.fleet.shards[shard].starts, self.group.workers[shard])
            for shard in sorted(self.router.active)
        }

    def for_other_process(self, record: Record) -> DetachedGenerator:
        """Picklable client with which another process sends requests to these shards. `record`: takes the events of its
        requests.
        """
        names = [str(identity) for identity in self.group.identities]
        return DetachedGenerator(
            self.serving(), names, self.cfg.router, self._request_timeout_s, self.cfg.on_preempt, record
        )

    def _requests(self, data: BatchedDataDict, greedy: bool) -> list[GenerationRequest]:
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

    def generate(self, data: BatchedDataDict, greedy: bool = False) -> BatchedDataDict:
        """Continues a right-padded batch; see `results_to_batch` for the result."""
        requests = self._requests(data, greedy)

        async def all_of_them() -> list[GenerationResult]:
            return list(
                await asyncio.gather(*(self._dispatcher.run(request, self._request_timeout_s) for request in requests))
            )

        return results_to_batch(
            [request.prompt_ids for request in requests], self.run_on_dispatch_loop(all_of_them()), self._pad_token_id
        )

    async def generate_async(
        self, data: BatchedDataDict, greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict]]:
        """Yields (row, one-row batch) in the order in which rows finish."""

        async def one(row: int, request: GenerationRequest) -> tuple[int, BatchedDataDict]:
            return row, results_to_batch([request.prompt_ids], [await self.generate_one(request)], self._pad_token_id)

        for finished in asyncio.as_completed(
            [one(row, request) for row, request in enumerate(self._requests(data, greedy))]
        ):
            yield await finished

    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> bool:
        """Makes weights and KV cache (or one of them) resident on every shard that is not quarantined."""
        self.fleet.wake(self.fleet.healthy(), tags or ("weights", "kv_cache"), in_place=True)
        return True

    def finish_generation(self, release_gpu: bool = True) -> bool:
        """Puts colocated engines to sleep; others only forget cached prefixes."""
        if self.colocated and release_gpu:
            self.sleep()
        else:
            self.invalidate_kv_cache()
        return True

    def sleep(self) -> None:
        """Sleeps all shards that are not quarantined, none of which may run requests."""
        self.fleet.sleep(self.fleet.healthy(), in_place=True)

    def released_bytes(self) -> int:
        """Bytes that the fullest accelerator got back when its engines last slept."""
        freed: Counter[int] = Counter()
        for shard, known in self.fleet.shards.items():
            freed[shard // self.cfg.vllm_cfg.engines_per_gpu] += known.freed
        return max(freed.values(), default=0)

    def invalidate_kv_cache(self) -> None:
        """Drops cached prefixes on every shard."""
        self.fleet.call_healthy("reset_prefix_cache")

    def engine_metrics(self) -> dict[str, float]:
        """The `generation_metrics/` since the last call; empty if `vllm_cfg.enable_vllm_metrics_logger` is off. Engines
        that do not answer at once are skipped.
        """
        if not self.cfg.vllm_cfg.enable_vllm_metrics_logger:
            return {}
        refs = [self.group.workers[shard].take_stats.remote() for shard in self.fleet.healthy()]
        answered, _ = ray.wait(refs, num_returns=len(refs), timeout=_STATS_TIMEOUT_S) if refs else ([], [])
        samples: list[EngineSample] = []
        for ref in refs:
            if ref in answered:
                with contextlib.suppress(RayError):
                    sample: Any = ray.get(ref)
                    samples.append(sample)
        return generation_metrics(samples)

    def ask_memory_use(self) -> list[Any]:
        """Asks every shard for its memory, without waiting: references to `MemoryUse`."""
        return [self.group.workers[shard].memory_use.remote() for shard in self.fleet.healthy()]

    # -- some shards only ---------------------------------------------------------------------------------------------

    def sleep_partial(self, dp_ranks: Sequence[int], level: int | None = None) -> dict[int, dict[str, int]]:
        """Takes shards away, all of them is legal; see `EngineFleet.sleep`."""
        return self.fleet.sleep(dp_ranks, level)

    def wake_up_partial(
        self, dp_ranks: Sequence[int], skip_activate: bool = False, tags: Sequence[str] | None = None
    ) -> None:
        """Makes shards resident again, and routes them unless `skip_activate`: shards that slept at level 2 must be
        synced first. See `EngineFleet.wake` and `activate`.
        """
        self.fleet.wake(dp_ranks, tags or ("weights", "kv_cache"))
        if not skip_activate:
            self.activate_dp_ranks(dp_ranks)

    def mark_dp_ranks_inactive(self, dp_ranks: Sequence[int]) -> int:
        """Shards take no new request, and theirs go on elsewhere; the router's generation number."""
        return self.fleet.drain(dp_ranks)

    def activate_dp_ranks(self, dp_ranks: Sequence[int]) -> int:
        """Shards take requests again; the router's generation number."""
        return self.fleet.activate(dp_ranks)

    def get_model_update_receiver(
        self, dp_ranks: Sequence[int] | None = None, *, recompute_kv: bool = True
    ) -> ShardTargets:
        """Shards as the targets of a sync session; by default all that are not quarantined. `recompute_kv`: whether
        running requests recompute keys and values.
        """
        self.wait_until_started()
        wanted = self.fleet.healthy() if dp_ranks is None else sorted(set(dp_ranks))
        return self.fleet.targets(wanted, recompute_kv=recompute_kv)

    def finalize_weight_update(self, dp_ranks: Sequence[int], version: int | None = None) -> None:
        """Finalises weights that a sync service loaded by the receiver's own methods; the shards may be activated.
        `version`: what tokens carry from here on; by default one more than before.
        """
        self.fleet.call(list(dp_ranks), "rlix_model_update_rpc", name="finalize_weight_update", version=version)
        self.fleet.set_version(dp_ranks, version)

    def shutdown(self) -> bool:
        """Ends every engine and the dispatcher's thread."""
        if self._thread.is_alive():
            with contextlib.suppress(GenerationError):
                self.run_on_dispatch_loop(self._dispatcher.close(), _CLOSE_TIMEOUT_S)
        clean = self.group.shutdown(cleanup_method="shutdown")
        if self._nodes is not None:
            self._nodes.shutdown()
        remove_abandoned()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10.0)
        return clean
