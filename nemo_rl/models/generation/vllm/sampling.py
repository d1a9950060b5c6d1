"""How vLLM is asked to draw one response, or to score a prompt, and how its scores are read.

Invariant: a response comes once, whole (or as far as it is drawn, where its tokens are streamed), with the
log-probability of each of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, LikelyNext

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.outputs import LogprobsTensors


def sampling_params(
    request: GenerationRequest,
    limit: int,
    *,
    seeded: bool,
    stop_token_ids: list[int],
    bad_words: list[str] | None,
    extra_args: dict[str, str] | None = None,
) -> SamplingParams:
    """vLLM's parameters.

    Args:
        limit: Tokens of the response, at most.
        seeded: Whether it is drawn from the request's own seed, rather than the engine's.
        stop_token_ids: Tokens that end a response.
        bad_words: Strings that are never generated.
        extra_args: What vLLM keeps with the request and does not read itself.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    drawn = request.sampling
    greedy = drawn.temperature == 0
    params = SamplingParams(
        temperature=drawn.temperature,
        top_p=1.0 if greedy else drawn.top_p,
        top_k=1 if greedy else (drawn.top_k or -1),
        max_tokens=limit,
        logprobs=request.top_tokens or 0,
        prompt_logprobs=request.top_tokens,
        flat_logprobs=True,  # one list per request, not an object per token: half the cost of a token here
        seed=request.seed if seeded else None,
        stop_token_ids=list(stop_token_ids),
        ignore_eos=True,
        stop=list(request.stop_strings) or None,
        include_stop_str_in_output=True,
        bad_words=bad_words,
        extra_args=extra_args,
        detokenize=bool(request.stop_strings),
        output_kind=RequestOutputKind.CUMULATIVE if request.streams else RequestOutputKind.FINAL_ONLY,
    )
    if hasattr(params, "skip_clone"):
        # Made for this request alone: vLLM's deep copy is most of what it costs to add one.
        params.skip_clone = True
    return params


class PromptScores:
    """Scores of a prompt as its engine sent them, under the names of vLLM's `FlatLogprobs`."""

    def __init__(self) -> None:
        self._ids: list[NDArray[np.int32]] = []
        self._logprobs: list[NDArray[np.float32]] = []

    def add(self, part: LogprobsTensors) -> None:
        """Takes the next positions."""
        self._ids.append(part.logprob_token_ids.numpy().astype(np.int32, copy=False).ravel())
        self._logprobs.append(part.logprobs.numpy().astype(np.float32, copy=False).ravel())

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Of all positions, one after the other."""
        return np.concatenate([np.empty(0, np.int32), *self._ids])

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """One for each of `token_ids`."""
        return np.concatenate([np.empty(0, np.float32), *self._logprobs])


def keeping_arrays(engine: AsyncLLM) -> AsyncLLM:
    """The engine, whose scores of prompts stay arrays. vLLM makes lists of them, number by number, which takes 100 ms
    and more for a prompt of 1,024 tokens with 64 scores each; the process that reads outputs does nothing else
    meanwhile.
    """
    processor = engine.output_processor
    add_request: Callable[..., None] = processor.add_request

    def add(request: EngineCoreRequest, *arguments: object, **options: object) -> None:
        add_request(request, *arguments, **options)
        asked = request.sampling_params
        if asked is not None and asked.prompt_logprobs is not None:
            scores, state = PromptScores(), processor.request_states[request.request_id]
            state.logprobs_processor.prompt_logprobs = scores
            state.logprobs_processor._update_prompt_logprobs = scores.add

    processor.add_request = add
    return engine


def scored(result: GenerationResult, output: RequestOutput, k: int) -> GenerationResult:
    """The result with the k most likely tokens after every position of its prompt; an aborted one keeps nothing, so
    that the prompt is scored again elsewhere.
    """
    if result.finish_reason == "abort":
        return result.first(0)
    # vLLM has no entry for the first token, and puts the token that is there before the k most likely ones.
    parts = [part for part in (output.prompt_logprobs, output.outputs[0].logprobs) if part is not None]
    ids = np.concatenate([np.asarray(part.token_ids, np.int32) for part in parts])
    logprobs = np.concatenate([np.asarray(part.logprobs, np.float32) for part in parts])
    ids, logprobs = ids.reshape(-1, k + 1), logprobs.reshape(-1, k + 1)
    return replace(result, likely=LikelyNext(ids[:, 1:], logprobs[:, 1:], logprobs[:, 0]))
