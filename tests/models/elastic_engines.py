"""Several real engines, a weight cache of many versions of one model, and that model itself to recompute every token
with.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nemo_rl.config import load_master_config
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.generation.elastic import ElasticGeneration
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult
from nemo_rl.models.generation.vllm.engine_actors import start_engine_actors
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.utils.record import MemoryRecord
from nemo_rl.weight_sync.cache import BucketCache, CacheBuilder, CacheManifest
from nemo_rl.weight_sync.layout import TensorMeta
from nemo_rl.weight_sync.sync_session import SyncOptions

_CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"
CPU = torch.device("cpu")
_ROWS = 64


class Versions:
    """Weights of every version: a random model, changed anew for each so that neighbours differ in every tensor."""

    def __init__(self, model: Path, change: float = 0.4) -> None:
        from transformers import AutoModelForCausalLM

        self._base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._change = change
        self._loaded: int | None = None

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        """Named tensors of a version."""
        draw = torch.Generator().manual_seed(version)
        named = {}
        for name, tensor in self._base.named_parameters():
            noise = torch.randn(tensor.shape, generator=draw)
            named[name] = tensor.detach() + self._change * float(tensor.std() if tensor.numel() > 1 else 0.0) * noise
        return named

    @torch.no_grad()
    def logprobs(self, version: int, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of every token of each row but the first under a version, all of its context under the
        same.
        """
        if self._loaded != version:
            weights = self.weights(version)
            for name, parameter in self._model.named_parameters():
                parameter.copy_(weights[name])
            self._loaded = version
        found = []
        for first in range(0, len(rows), _ROWS):
            some = [torch.tensor(list(row)) for row in rows[first : first + _ROWS]]
            # Padding on the right is seen by no token before it.
            ids = torch.nn.utils.rnn.pad_sequence(some, batch_first=True)
            logprobs = (
                self._model(input_ids=ids).logits[:, :-1].log_softmax(dim=-1).gather(2, ids[:, 1:, None])[:, :, 0]
            )
            found += [row[: len(tokens) - 1].tolist() for row, tokens in zip(logprobs, some, strict=True)]
        return found


@dataclass
class Elastic:
    """Engines that come and go."""

    generation: VllmGeneration
    elastic: ElasticGeneration
    cache: BucketCache
    versions: Versions
    record: MemoryRecord
    tokenizer: Any
    counter: list[int] = field(default_factory=lambda: [0])

    def requests(self, count: int, tokens: int = 20, greedy: bool = False) -> list[GenerationRequest]:
        """Requests of ids that were never used."""
        sampling = self.generation.default_sampling(greedy=greedy)
        made = []
        for _ in range(count):
            number = self.counter[0]
            self.counter[0] += 1
            made.append(
                GenerationRequest(
                    f"q{number}",
                    self.tokenizer(f"{number % 97}+{number % 13}=")["input_ids"],
                    tokens,
                    sampling,
                    seed=number,
                )
            )
        return made

    async def run(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Results in the order of the requests."""
        return list(await asyncio.gather(*(self.generation.generate_one(request) for request in requests)))

    async def while_running(
        self, requests: Sequence[GenerationRequest], action: Any, after_s: float = 0.15
    ) -> list[GenerationResult]:
        """Results of requests that may be running or over when `action` (a blocking call) happens."""
        running = asyncio.ensure_future(self.run(requests))
        await asyncio.sleep(after_s)
        await asyncio.to_thread(action)
        return await running

    async def under_load(
        self, action: Any, lanes: int = 24, tokens: int = 48
    ) -> tuple[list[GenerationRequest], list[GenerationResult]]:
        """Requests and their results where every lane has one running from before `action` (a blocking call) begins
        until it is over.
        """
        requests: list[GenerationRequest] = []
        results: list[GenerationResult] = []
        warm, over = asyncio.Event(), asyncio.Event()

        async def lane(number: int) -> None:
            while not over.is_set():
                # Lanes of different lengths never begin and end together.
                (request,) = self.requests(1, tokens=tokens - number % 8)
                result = await self.generation.generate_one(request)
                requests.append(request)
                results.append(result)
                if len(results) >= lanes:
                    warm.set()

        async def act() -> None:
            try:
                await asyncio.wait_for(warm.wait(), 60.0)
                await asyncio.to_thread(action)
            finally:
                over.set()

        await asyncio.gather(act(), *(lane(number) for number in range(lanes)))
        return requests, results

    def refresh(self, version: int, *, recompute_kv: bool = True) -> Any:
        """All shards that serve get a version."""
        self.cache.build(version)
        self.elastic.recompute_kv = recompute_kv
        return self.elastic.refresh().sync

    def worst(self, requests: Sequence[GenerationRequest], results: Sequence[GenerationResult]) -> float:
        """Largest difference between a token's log-probability and its recomputation under the version it is labelled
        with.
        """
        return max(self.differences(requests, results), default=0.0)

    def differences(
        self, requests: Sequence[GenerationRequest], results: Sequence[GenerationResult], shift: int = 0
    ) -> list[float]:
        """Difference of every token; `shift` relabels all tokens by so many versions."""
        found = []
        by_version: dict[int, list[tuple[list[int], int, int, list[float]]]] = {}
        for request, result in zip(requests, results, strict=True):
            assert len(result.token_ids) == len(result.logprobs)
            assert [span.start for span in result.spans] == [0, *[span.end for span in result.spans[:-1]]][
                : len(result.spans)
            ]
            assert sum(span.end - span.start for span in result.spans) == len(result.token_ids)
            ids = [*request.prompt_ids, *result.token_ids]
            for span in result.spans:
                drawn = result.logprobs[span.start : span.end]
                by_version.setdefault(span.version + shift, []).append(
                    (ids, len(request.prompt_ids) + span.start, len(drawn), drawn)
                )
        for version, parts in sorted(by_version.items()):
            again = self.versions.logprobs(version, [ids[: start + count] for ids, start, count, _ in parts])
            for (_, start, _, drawn), row in zip(parts, again, strict=True):
                found += [abs(a - b) for a, b in zip(row[start - 1 :], drawn, strict=True)]
        assert all(math.isfinite(value) for value in found)
        return found


@contextmanager
def elastic_engines(model: Path, shards: int, *overrides: str, change: float = 0.4) -> Iterator[Elastic]:
    """Starts the engines with version 0 and ends them. `change`: see `Versions`."""
    base = [f"policy.model_name={model}", "policy.generation.max_new_tokens=20", "cluster.cpu_slots=4"]
    limits = [
        "policy.generation.vllm_cfg.max_model_len=64",
        "policy.max_total_sequence_length=64",
        "policy.generation.vllm_kwargs.kv_cache_memory_bytes=33554432",
    ]
    config = load_master_config(_CONFIG, [*base, *limits, *overrides])
    tokenizer = get_tokenizer(config.policy.tokenizer)
    on_gpus = config.cluster.device == "cuda"
    cluster = RayVirtualCluster([shards], use_gpus=on_gpus, num_gpus_per_node=shards, name="elastic")
    record = MemoryRecord(source="elastic/driver")
    generation = VllmGeneration(
        start_engine_actors(cluster, config.policy, config.cluster, seed=1, colocated=False, sleeps=True),
        pad_token_id=tokenizer.pad_token_id,
        stop_token_ids=[tokenizer.eos_token_id],
        request_timeout_s=120.0,
        record=record,
    )
    builder = CacheBuilder(1 << 20, CPU)
    try:
        versions = Versions(model, change)

        def build(version: int, served: str | None) -> CacheManifest:
            weights = versions.weights(version)
            metas = [TensorMeta(name, tuple(tensor.shape), "float32") for name, tensor in weights.items()]
            return builder.build(version, metas, weights.items(), served=served)

        cache = BucketCache(build)
        options = SyncOptions(bucket_bytes=1 << 20, verify=True, timeout_s=60.0)
        generation.wait_until_started()
        engines = Elastic(
            generation, ElasticGeneration(generation, cache, options, record=record), cache, versions, record, tokenizer
        )
        engines.refresh(0)
        yield engines
    finally:
        generation.shutdown()
        cluster.shutdown()
        builder.close()
