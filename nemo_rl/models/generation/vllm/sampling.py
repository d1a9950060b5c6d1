"""How vLLM is asked to draw one response, or to score a prompt, and how its scores and recorded decisions are read.

Where vLLM records routes itself (on GPUs), its own are taken; elsewhere those of our recorder in its worker, as are
sampling masks everywhere. Invariants: a response comes once, whole (or as far as it is drawn, where its tokens are
streamed), with the log-probability of each of its tokens; a result has the routes of all of its tokens that the engine
computed and the mask of each token it drew, or the request fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_rl.models.generation.decisions import RecordedDecisionsError, Recording, TokenRoutes, route_dtype
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, LikelyNext
from nemo_rl.models.generation.vllm.recorder import REQUEST, Taken, unpacked

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput
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
        extra_args: Arguments that vLLM keeps with the request and does not read itself.
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
        # Made for this request alone: vLLM's deep copy is most of the cost of adding one.
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


Rpc = Callable[..., Awaitable[list[Any]]]
_Ended = tuple[str, int, int, int]


def engine_arguments(recording: Recording, *, by_engine: bool) -> dict[str, object]:
    """Arguments of vLLM's engine that have it record routes itself."""
    return {"enable_return_routed_experts": True} if recording.layers and by_engine else {}


class DecisionReader:
    """Of one engine.

    Args:
        rpc: Calls a method of the engine's workers.
        by_engine: Whether vLLM records the routes itself.
    """

    def __init__(self, rpc: Rpc, recording: Recording, *, by_engine: bool) -> None:
        self._rpc = rpc
        self._recording = recording
        self._own_routes = bool(recording.layers) and not by_engine
        self._by_engine = bool(recording.layers) and by_engine
        self._ended: list[tuple[_Ended, asyncio.Future[Taken]]] = []
        self._forgotten: list[str] = []
        self._reading: asyncio.Task[None] | None = None

    @property
    def _reads(self) -> bool:
        return self._own_routes or self._recording.masks

    async def start(self) -> None:
        """Begins to record."""
        if self._reads:
            await self._rpc("nrl_record_decisions", self._own_routes, self._recording.masks)

    def arguments(self, request: GenerationRequest) -> dict[str, str] | None:
        """Extra arguments of a request's sampling parameters, by which its records are found."""
        return {REQUEST: request.request_id} if request.record_from is not None and self._reads else None

    def forget(self, request_id: str) -> None:
        """A request ended without a result."""
        if self._reads:
            self._forgotten.append(request_id)

    async def complete(
        self, request: GenerationRequest, result: GenerationResult, completion: CompletionOutput
    ) -> GenerationResult:
        """The result with its recorded decisions. `completion`: the engine's own. Raises RecordedDecisionsError: the
        engine recorded nothing.
        """
        if request.record_from is None:
            return result
        prompt, tokens = len(request.prompt_ids), len(result.token_ids)
        routes, masks = None, None
        if self._reads:
            routes, masks = unpacked(await self._take((request.request_id, request.record_from, prompt, tokens)))
        if self._by_engine:
            routes = self._engines_own(completion, request.record_from, prompt + tokens)
        if tokens and self._recording.layers and routes is None:
            raise RecordedDecisionsError(
                f"the engine returned no routes for the {tokens} tokens of request {request.request_id}; "
                "policy.router_replay.enabled needs an engine that records them"
            )
        if tokens and self._recording.masks and masks is None:
            raise RecordedDecisionsError(
                f"the engine recorded no sampling masks for the {tokens} tokens of request {request.request_id}; "
                "policy.sampling_mask_replay needs samples that are drawn, not greedy ones"
            )
        return replace(result, routes=routes, masks=masks)

    def _engines_own(self, completion: CompletionOutput, start: int, end: int) -> TokenRoutes | None:
        """vLLM's routes [tokens, decoder layers, K], of prompt and response; the last token has none."""
        given = getattr(completion, "routed_experts", None)
        if given is None:
            return None
        given = np.asarray(given)
        layers = list(self._recording.layers)
        if given.ndim != 3 or given.shape[1] <= max(layers) or len(given) > end:
            raise RecordedDecisionsError(
                f"the engine returned routes {list(given.shape)} for {end} tokens; expected [tokens - 1, decoder "
                "layers, experts per token]"
            )
        experts = np.zeros((end - start, len(layers), given.shape[2]), route_dtype(self._recording.experts))
        computed = given[start : end - 1, layers]
        experts[: len(computed)] = computed
        valid = np.zeros(end - start, np.bool_)
        valid[: len(computed)] = True
        return TokenRoutes(start, experts, valid)

    async def _take(self, ended: _Ended) -> Taken:
        # Requests end in bursts, one engine step at a time: one call takes all that ended while the last one ran.
        taken: asyncio.Future[Taken] = asyncio.get_running_loop().create_future()
        self._ended.append((ended, taken))
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        return await taken

    async def _read(self) -> None:
        await asyncio.sleep(0)
        while self._ended:
            ended, forgotten = list(self._ended), list(self._forgotten)
            self._ended.clear()
            self._forgotten.clear()
            try:
                answers = await self._rpc("nrl_take_decisions", [list(request) for request, _ in ended], forgotten)
            except Exception as error:  # noqa: BLE001 - each of the requests raises it
                for _, waiting in ended:
                    if not waiting.done():
                        waiting.set_exception(error)
                continue
            for (_, waiting), taken in zip(ended, answers[0], strict=True):
                if not waiting.done():
                    waiting.set_result(taken)
