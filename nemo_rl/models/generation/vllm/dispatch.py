"""Carries requests from an event loop to shards and results back.

Requests for one shard that arrive in the same moment travel in one call, and one long poll per shard brings results
back, so that the cost per sample is small. Owns the router's bookings. Invariants: a booking is taken off exactly once,
when its request finished or failed; a shard that dies fails its requests at once, by name.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError

from nemo_rl.models.generation.interfaces import GenerationError, GenerationRequest, GenerationResult
from nemo_rl.models.generation.router import Router

_POLL_S = 20.0


@dataclass
class _Pending:
    """A request under way."""

    answer: asyncio.Future[GenerationResult]
    shard: int
    tokens: int


class Dispatcher:
    """Runs on one event loop; every method must be called there.

    Args:
        workers: Generation actors, one per shard.
        router: Chooses shards; owned by this dispatcher.
        names: Shard names for error messages.
    """

    def __init__(self, workers: Sequence[ActorHandle[Any]], router: Router, names: Sequence[str]) -> None:
        self._workers = workers
        self._router = router
        self._names = names
        self._client = uuid.uuid4().hex
        self._pending: dict[str, _Pending] = {}
        self._outgoing: dict[int, list[GenerationRequest]] = {}
        self._pollers: dict[int, asyncio.Task[None]] = {}

    async def run(self, request: GenerationRequest, timeout_s: float) -> GenerationResult:
        """Serves one request on some active shard.

        Raises:
            GenerationError: The shard failed or died, or gave no result within `timeout_s`.
            ValueError: A request of this id is under way.
        """
        if request.request_id in self._pending:
            raise ValueError(f"request {request.request_id} is already under way; ids are unique within a run")
        tokens = len(request.prompt_ids) + request.max_new_tokens
        shard = self._router.book(tokens)
        answer: asyncio.Future[GenerationResult] = asyncio.get_running_loop().create_future()
        self._pending[request.request_id] = _Pending(answer, shard, tokens)
        if shard not in self._outgoing:
            self._outgoing[shard] = []
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self._send(shard)))
        self._outgoing[shard].append(request)
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError as error:
            raise GenerationError(f"{self._names[shard]}: request {request.request_id} has no result after {timeout_s:.0f} s") from error
        finally:
            self._pending.pop(request.request_id, None)
            self._router.finish(shard, tokens)

    async def _send(self, shard: int) -> None:
        requests = self._outgoing.pop(shard)
        if shard not in self._pollers or self._pollers[shard].done():
            self._pollers[shard] = asyncio.create_task(self._poll(shard))
        try:
            await self._workers[shard].submit.remote(self._client, requests)
        except RayError as error:
            self._fail(shard, error)

    async def _poll(self, shard: int) -> None:
        while any(pending.shard == shard for pending in self._pending.values()):
            try:
                results = await self._workers[shard].collect.remote(self._client, _POLL_S)
            except RayError as error:
                self._fail(shard, error)
                return
            for result in results:
                self._deliver(shard, result)

    def _deliver(self, shard: int, result: GenerationResult | tuple[str, str]) -> None:
        request_id = result[0] if isinstance(result, tuple) else result.request_id
        # Taken out here rather than when the waiter wakes, so that the poller sees at once whether anything is left.
        pending = self._pending.pop(request_id, None)
        if pending is None or pending.answer.done():
            return
        if isinstance(result, tuple):
            pending.answer.set_exception(GenerationError(f"{self._names[shard]}: request {request_id} failed: {result[1]}"))
        else:
            pending.answer.set_result(result)

    def _fail(self, shard: int, error: RayError) -> None:
        for request_id, pending in self._pending.items():
            if pending.shard == shard and not pending.answer.done():
                pending.answer.set_exception(GenerationError(f"{self._names[shard]} is gone while request {request_id} ran: {error}"))

    async def close(self) -> None:
        """Stops polling and fails what is still under way."""
        for task in self._pollers.values():
            task.cancel()
        await asyncio.gather(*self._pollers.values(), return_exceptions=True)
        for request_id, pending in self._pending.items():
            if not pending.answer.done():
                pending.answer.set_exception(GenerationError(f"generation was shut down while request {request_id} ran"))
