"""Brings what an engine recorded of its decisions to the results of its requests.

Where vLLM records routes itself (on GPUs), its own are taken; elsewhere those of our recorder in its worker, as are
sampling masks everywhere. Invariant: a result has the routes of all of its tokens that the engine computed and the mask
of each token it drew, or the request fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_rl.models.generation.decisions import TokenRoutes, route_dtype
from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult
from nemo_rl.models.generation.recording import RecordedDecisionsError, Recording
from nemo_rl.models.generation.vllm.recorder import REQUEST, Taken, unpacked

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

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
        """The result with what was recorded of it. `completion`: the engine's own. Raises RecordedDecisionsError: the
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
