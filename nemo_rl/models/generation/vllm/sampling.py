"""How vLLM is asked to draw one response, or to score a prompt, and how its scores are read.

Invariant: a response comes once, whole, with the log-probability of each of its tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, LikelyNext

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput


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
    return SamplingParams(
        temperature=drawn.temperature,
        top_p=1.0 if greedy else drawn.top_p,
        top_k=1 if greedy else (drawn.top_k or -1),
        max_tokens=limit,
        logprobs=request.top_tokens or 0,
        prompt_logprobs=request.top_tokens,
        flat_logprobs=True,  # one list per request, not an object per token: half the cost of a token here
        seed=request.seed if seeded else None,
        stop_token_ids=stop_token_ids,
        ignore_eos=True,
        stop=list(request.stop_strings) or None,
        include_stop_str_in_output=True,
        bad_words=bad_words,
        extra_args=extra_args,
        detokenize=bool(request.stop_strings),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


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
    found = LikelyNext(ids.reshape(-1, k + 1)[:, 1:], logprobs.reshape(-1, k + 1)[:, 1:])
    return replace(result, likely=found)
