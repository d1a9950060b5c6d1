"""A teacher in engines: a frozen model whose shards score the policy's samples as prompts.

Samples go to the shards as requests, so that they are dealt out, and go on elsewhere, like those of generation. A shard
that dies is rebuilt, with the same weights from disk, while its samples wait. Invariant: every sample of a batch is
scored, or the call fails.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Protocol

import torch

from nemo_rl.config import ClusterConfig
from nemo_rl.config.teacher_sections import Teacher
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_calls import WorkerError
from nemo_rl.models.generation.interfaces import (
    GenerationRequest,
    GenerationResult,
    GenerationSamplingParams,
    LikelyNext,
    WakeError,
    request_timeout_s,
)
from nemo_rl.models.generation.vllm.engine_actors import EngineActors, start_engine_actors
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.utils.record import Record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_POLL_S = 0.5
_KEEP_WEIGHTS = 1
# vLLM computes the logits of all prompt tokens of a forward pass at once, beside a KV cache that leaves little room.
_BATCHED_TOKENS = 2048


def start_scoring_actors(
    cluster: RayVirtualCluster, teacher: Teacher, cluster_cfg: ClusterConfig, *, shares: bool, lent: bool = False
) -> EngineActors:
    """Starts the actors of a teacher's engines, which import what they need. `shares`: whether training is on the same
    slots. `lent`: whether a scheduler lends them.
    """
    policy = teacher.policy
    if cluster.accelerator.is_cuda:
        policy.generation.vllm_kwargs.setdefault("max_num_batched_tokens", _BATCHED_TOKENS)
    return start_engine_actors(
        cluster,
        policy,
        cluster_cfg,
        seed=0,
        colocated=shares,
        refits=False,
        lent=lent,
        name_prefix=teacher.name,
    )


def scoring_engines(
    actors: EngineActors, tokenizer: PreTrainedTokenizerBase, record: Record | None = None
) -> VllmGeneration:
    """The engines of a teacher."""
    return VllmGeneration(
        actors,
        pad_token_id=tokenizer.pad_token_id,
        stop_token_ids=[],
        request_timeout_s=request_timeout_s(),
        record=record,
    )


class ServedTeacher(Protocol):
    """A teacher of another job, which this run asks while it holds no accelerators for training."""

    def get_topk_logits(self, batch: BatchedDataDict, k: int) -> BatchedDataDict:
        """See `topk_of_prompts`."""
        ...

    def get_token_logprobs(self, batch: BatchedDataDict) -> torch.Tensor:
        """See `logprobs_of_prompts`."""
        ...

    def kernels(self) -> str:
        """What computes it, in words."""
        ...

    def shutdown(self) -> None:
        """Lets go of it."""
        ...


class EngineTeacher:
    """A teacher whose engines are this run's. `shares`: whether they sleep while they do not score."""

    def __init__(self, actors: EngineActors, tokenizer: PreTrainedTokenizerBase, *, shares: bool) -> None:
        self._generation = scoring_engines(actors, tokenizer)
        self._fleet, self._shares = self._generation.fleet, shares
        self._fleet.enable_rebuilds()

    def wait_until_started(self) -> None:
        """Waits for the engines. Raises WorkerError: one did not start."""
        self._generation.wait_until_started()
        self._fleet.await_rebuild(True)

    def memory_in_use(self) -> int:
        """Bytes in use on the fullest device."""
        return max(max(devices) for devices in self._fleet.call(self._fleet.healthy(), "memory_in_use"))

    def prepare_for_lp_inference(self) -> None:
        """Wakes the engines; one that dies meanwhile is rebuilt when it is used."""
        if self._shares:
            self._move(self._generation.wake_up_partial)

    def offload_to_cpu(self) -> None:
        """Puts the engines to sleep, with their weights on the host."""
        if self._shares:
            self._move(lambda shards: self._fleet.sleep(shards, _KEEP_WEIGHTS))

    def _move(self, move: Callable[[Sequence[int]], object]) -> None:
        for shard in self._fleet.healthy():
            try:
                move([shard])
            except WorkerError as error:
                if isinstance(error.__cause__, WakeError) or shard in self._fleet.healthy():
                    raise

    def get_topk_logits(self, batch: BatchedDataDict, k: int) -> BatchedDataDict:
        """See `topk_of_prompts`; lost shards are rebuilt meanwhile."""
        return topk_of_prompts(self._generation, batch, k, while_waiting=self._rebuild)

    def get_token_logprobs(self, batch: BatchedDataDict) -> torch.Tensor:
        """See `logprobs_of_prompts`; lost shards are rebuilt meanwhile."""
        return logprobs_of_prompts(self._generation, batch, while_waiting=self._rebuild)

    def _rebuild(self) -> None:
        self._fleet.rebuild_in_background(self._fleet.activate)

    def kernels(self) -> str:
        """What computes it, in words."""
        count = self._generation.dp_size
        return f"vLLM, {count} engine{'s' if count > 1 else ''}"

    def shutdown(self) -> None:
        """Ends the engines. Safe to call twice."""
        self._fleet.close()
        self._generation.shutdown()


def topk_of_prompts(
    generation: VllmGeneration,
    batch: BatchedDataDict,
    k: int,
    *,
    while_waiting: Callable[[], object],
    finished: Callable[[], object] = lambda: None,
) -> BatchedDataDict:
    """The k most likely tokens after each position, of the model that engines serve.

    Args:
        batch: `input_ids` [B, S] and `input_lengths` [B].
        while_waiting: Called about twice a second meanwhile.
        finished: Called for every sample that is scored, on a thread that must not wait.

    Returns `topk_indices` and `topk_logits` [B, S, k] as `Policy.get_topk_logits` gives them, at temperature 1; zeros
    from the last token of a row on, after which no token is trained. Raises GenerationError: no shard is left, or none
    answered in time.
    """
    ids_BS, lengths = batch["input_ids"], batch["input_lengths"].tolist()
    # The last token is only a target: without it a sample as long as the context leaves room for the token that an
    # engine has to draw.
    prompts = {row: ids_BS[row, : length - 1].tolist() for row, length in enumerate(lengths) if length > 1}
    indices_BSk = torch.zeros((*ids_BS.shape, k), dtype=torch.int32)
    logprobs_BSk = torch.zeros((*ids_BS.shape, k), dtype=torch.float32)
    for row, likely in _scored(generation, prompts, k, while_waiting, finished).items():
        # What Ray hands over cannot be written to, which torch warns about.
        indices_BSk.numpy()[row, : len(likely.ids)] = likely.ids
        logprobs_BSk.numpy()[row, : len(likely.ids)] = likely.logprobs
    return BatchedDataDict({"topk_logits": logprobs_BSk, "topk_indices": indices_BSk})


def logprobs_of_prompts(
    generation: VllmGeneration,
    batch: BatchedDataDict,
    *,
    while_waiting: Callable[[], object],
    finished: Callable[[], object] = lambda: None,
) -> torch.Tensor:
    """The log-probability [B, S] of each token after those before it, at temperature 1; zero for the first of a row and
    in its padding. Arguments and errors as of `topk_of_prompts`, but that engines need room for one token more than the
    longest sample has.
    """
    ids_BS, lengths = batch["input_ids"], batch["input_lengths"].tolist()
    prompts = {row: ids_BS[row, :length].tolist() for row, length in enumerate(lengths) if length > 1}
    logprobs_BS = torch.zeros(ids_BS.shape)
    for row, likely in _scored(generation, prompts, 0, while_waiting, finished).items():
        logprobs_BS.numpy()[row, 1 : lengths[row]] = likely.given[:-1]
    return logprobs_BS


def _scored(
    generation: VllmGeneration,
    prompts: Mapping[int, list[int]],
    k: int,
    while_waiting: Callable[[], object],
    finished: Callable[[], object] = lambda: None,
) -> dict[int, LikelyNext]:
    """The scores of prompts by row."""
    name = uuid.uuid4().hex[:12]
    requests = {
        row: GenerationRequest(f"{name}-{row}", ids, 1, GenerationSamplingParams(), top_tokens=k)
        for row, ids in prompts.items()
    }

    async def one(request: GenerationRequest) -> GenerationResult:
        result = await generation.generate_one(request)
        finished()
        return result

    async def all_of_them() -> list[GenerationResult]:
        return list(await asyncio.gather(*map(one, requests.values())))

    found: dict[int, LikelyNext] = {}
    for row, result in zip(requests, _watched(generation, all_of_them(), while_waiting), strict=True):
        scored = 0 if result.likely is None else len(result.likely.ids)
        if result.likely is None or scored != len(prompts[row]):
            raise RuntimeError(f"sample {row} was sent {len(prompts[row])} tokens long, and the engine scored {scored}")
        found[row] = result.likely
    return found


def _watched(
    generation: VllmGeneration,
    work: Coroutine[object, object, list[GenerationResult]],
    while_waiting: Callable[[], object],
) -> list[GenerationResult]:
    future: Future[list[GenerationResult]] = generation.start_on_dispatch_loop(work)
    try:
        while not future.done():
            wait([future], timeout=_POLL_S)
            while_waiting()
        return future.result()
    finally:
        future.cancel()
