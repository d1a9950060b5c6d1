"""The generation interface: requests in, token ids with log-probabilities out.

Holds request and result values, the seed of every request, NeMo-RL's batch form, and the backend interface. Invariants:
a result's token ids and log-probabilities have equal length; every token is in one version span; a run draws the same
tokens whatever the order of arrival, the number of shards, or restarts.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_rl.config.errors import UserError
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.lazy import names_of
from nemo_rl.models.generation.decisions import SamplingMasks, TokenRoutes

FinishReason = Literal["stop", "length", "abort", "no_room"]

REQUEST_TIMEOUT_VARIABLE = "NRL_VLLM_ASYNC_TIMEOUT_SECONDS"
VALIDATION_STEP_OFFSET = 1 << 40


class GenerationError(UserError, RuntimeError):
    """The engine could not serve a request; the message names the shard."""


class ShardPreemptedError(GenerationError):
    """The shard of a request was taken away before it answered; the request continues on another."""


class ShardStateError(GenerationError):
    """A shard's state does not allow the operation, such as a sync while it sleeps."""


class MemoryNotFreedError(GenerationError):
    """A shard slept, but its memory did not come back."""


class WakeError(GenerationError):
    """A shard could not make its memory resident again; it stays asleep, and the others are unaffected."""


class StaleVersionError(GenerationError):
    """The offered weights are older than the shard's."""


def request_timeout_s() -> float:
    """Seconds that a generation request may wait while its shard finishes no other: `NRL_VLLM_ASYNC_TIMEOUT_SECONDS`,
    by default a quarter of an hour.
    """
    return float(os.environ.get(REQUEST_TIMEOUT_VARIABLE, "900"))


@dataclass(frozen=True)
class GenerationSamplingParams:
    """How tokens are drawn: temperature (0 is greedy), nucleus mass, and the k most likely (None: all)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None

    def greedy(self) -> GenerationSamplingParams:
        """The same with the most likely token always taken."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=None)


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue."""

    request_id: str
    prompt_ids: list[int]  # token ids, never text, so that nothing is tokenised twice
    max_new_tokens: int
    sampling: GenerationSamplingParams = field(default_factory=GenerationSamplingParams)
    seed: int | None = None  # seed of this request's draws; None leaves it to the engine
    stop_strings: tuple[str, ...] = ()  # end the response when one appears; it is kept in the response
    sample_id: str = ""  # whose turn this is, for the run record; the request itself by default
    record_from: int | None = None  # first position whose routes are wanted; None if no decision is to be recorded
    streams: bool = False  # whether its tokens are wanted as they are drawn
    top_tokens: int | None = None  # scores the prompt: how many likely tokens are wanted after each position, from 0
    adapter: str = ""  # name of the adapter that it is drawn with; empty for the model alone


@dataclass(frozen=True, eq=False)
class LikelyNext:
    """The k most likely tokens after each of P positions, most likely first, before temperature and filters."""

    ids: NDArray[np.int32]  # [P, k]
    logprobs: NDArray[np.float32]  # [P, k], over the whole vocabulary
    given: NDArray[np.float32]  # [P], of the token that follows; of the drawn one after the last position


@dataclass(frozen=True)
class VersionSpan:
    """Tokens `[start, end)` of a response came from weights `version`; `mixed_kv` when they attended to KV of older
    weights. `adapter`: whose version it is; empty for the model's own.
    """

    version: int
    start: int
    end: int
    mixed_kv: bool = False
    adapter: str = ""


@dataclass(frozen=True)
class GenerationResult:
    """Result of a generation request."""

    request_id: str
    token_ids: list[int]  # response tokens, the stop token included
    logprobs: list[float]  # log-probability of each as drawn, after temperature and filters
    finish_reason: FinishReason  # `stop`, `length` (limit reached), `abort`, or `no_room` (the prompt left no room)
    spans: tuple[VersionSpan, ...] = ()  # which weights produced which tokens
    shard: int = 0  # data-parallel shard that served it
    routes: TokenRoutes | None = None  # experts of prompt and response from the request's `record_from` on
    masks: SamplingMasks | None = None  # what each response token was drawn from
    likely: LikelyNext | None = None  # of every position of the prompt, where the request's `top_tokens` asks for it

    @property
    def truncated(self) -> bool:
        """Whether the response ended by its length limit."""
        return self.finish_reason == "length"

    def first(self, count: int) -> GenerationResult:
        """The same with its first `count` tokens only."""
        if count >= len(self.token_ids):
            return self
        spans = tuple(replace(span, end=min(span.end, count)) for span in self.spans if span.start < count)
        dropped = len(self.token_ids) - count
        return replace(
            self,
            token_ids=self.token_ids[:count],
            logprobs=self.logprobs[:count],
            spans=spans,
            routes=self.routes.until(self.routes.end - dropped) if self.routes is not None else None,
            masks=self.masks.first(count) if self.masks is not None else None,
        )


@dataclass(frozen=True)
class NewTokens:
    """Tokens of a response that is still being drawn."""

    request_id: str
    token_ids: list[int]  # those that were not passed on before
    logprobs: list[float]
    spans: tuple[VersionSpan, ...]  # over all tokens so far


OnTokens = Callable[[list[int], list[float]], None]
"""Takes token ids of a response and their log-probabilities as they are drawn, each once and in order."""


def verify_right_padding(
    data: BatchedDataDict, pad_value: int, *, ids_key: str = "input_ids", lengths_key: str = "input_lengths"
) -> tuple[bool, str | None]:
    """Whether every row is padded on the right with `pad_value` after its length; the first fault as text otherwise."""
    ids_BS, lengths_B = data[ids_key], data[lengths_key]
    positions_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
    bad_BS = (positions_S[None, :] >= lengths_B[:, None].to(ids_BS.device)) & (ids_BS != pad_value)
    if bool((lengths_B > ids_BS.shape[1]).any()):
        return False, f"{lengths_key} exceeds the width {ids_BS.shape[1]} of {ids_key}"
    if bool(bad_BS.any()):
        row, column = (int(i) for i in bad_BS.nonzero()[0])
        return (
            False,
            f"row {row} has {int(ids_BS[row, column])} at position {column}, after its length "
            f"{int(lengths_B[row])}; pad on the right with {pad_value}",
        )
    return True, None


def results_to_batch(
    prompts: Sequence[Sequence[int]], results: Sequence[GenerationResult], pad_token_id: int
) -> BatchedDataDict:
    """GenerationOutputSpec of a batch. Returns `output_ids [B,S]` prompt and response, right-padded; `logprobs [B,S]`,
    0 on prompt and padding; `generation_lengths [B]`, `unpadded_sequence_lengths [B]`, `truncated [B]`.
    """
    rows = [[*prompt, *result.token_ids] for prompt, result in zip(prompts, results, strict=True)]
    width = max((len(row) for row in rows), default=0)
    output_ids = torch.full((len(rows), width), pad_token_id, dtype=torch.long)
    logprobs = torch.zeros((len(rows), width), dtype=torch.float32)
    for index, (row, prompt, result) in enumerate(zip(rows, prompts, results, strict=True)):
        output_ids[index, : len(row)] = torch.tensor(row, dtype=torch.long)
        logprobs[index, len(prompt) : len(row)] = torch.tensor(result.logprobs, dtype=torch.float32)
    return BatchedDataDict(
        {
            "output_ids": output_ids,
            "logprobs": logprobs,
            "generation_lengths": torch.tensor([len(result.token_ids) for result in results]),
            "unpadded_sequence_lengths": torch.tensor([len(row) for row in rows]),
            "truncated": torch.tensor([result.truncated for result in results]),
        }
    )


def request_seed(run_seed: int, step: int, prompt: int, sample: int, turn: int = 0) -> int:
    """A 31-bit seed for one request.

    Args:
        run_seed: `grpo.seed`.
        step: RL step, from 0; validation adds `VALIDATION_STEP_OFFSET` so that it never shares a draw with training.
        prompt: Number of the prompt inside the step, counting refills of dynamic sampling.
        sample: Number of the sample inside its prompt group.
        turn: Turn of a multi-turn rollout.
    """
    text = f"{run_seed}/{step}/{prompt}/{sample}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & 0x7FFFFFFF


class GenerationInterface(ABC):
    """A generation backend as drivers and rollouts see it."""

    @abstractmethod
    def generate(self, data: BatchedDataDict, greedy: bool = False) -> BatchedDataDict:
        """Continues a right-padded batch (`input_ids [B,S]`, `input_lengths [B]`, optional `stop_strings`, optional
        `seeds`).
        """

    @abstractmethod
    async def generate_one(self, request: GenerationRequest) -> GenerationResult:
        """Continues one prompt."""

    @abstractmethod
    def generate_async(self, data: BatchedDataDict, greedy: bool = False) -> AsyncIterator[tuple[int, BatchedDataDict]]:
        """Continues a batch and yields (row, one-row batch) as rows finish."""

    @abstractmethod
    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> bool:
        """Makes the memory behind `tags` (`weights`, `kv_cache`; both by default) resident again."""

    @abstractmethod
    def finish_generation(self, release_gpu: bool = True) -> bool:
        """Ends a phase of generation; gives its device memory back where the slots are shared."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Ends every engine. Safe to call twice."""


# NeMo-RL's names besides.
__getattr__, __dir__ = names_of(__name__)
