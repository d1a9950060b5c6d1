"""Generation requests from another process than the one that owns the engines.

Holds what a dispatcher needs (the shards' actors and their names) and starts one at its first request. It sees no
changes of the active set, so it serves runs whose shards all stay awake while they generate. Invariant: pickling one
never starts anything.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult
from nemo_rl.models.generation.router import Router, RouterPolicy
from nemo_rl.models.generation.vllm.dispatch import Dispatcher

T = TypeVar("T")


class DetachedGenerator:
    """Continues prompts on shards that another process started.

    Args:
        workers: Generation actors, one per shard.
        names: Their names, for messages.
        policy: How shards are chosen.
        request_timeout_s: Deadline of one request.
    """

    def __init__(
        self, workers: Sequence[Any], names: Sequence[str], policy: RouterPolicy, request_timeout_s: float
    ) -> None:
        self._workers = list(workers)
        self._names = list(names)
        self._policy = policy
        self._request_timeout_s = request_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dispatcher: Dispatcher | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loop": None, "_dispatcher": None}

    def _started(self) -> tuple[asyncio.AbstractEventLoop, Dispatcher]:
        if self._loop is None or self._dispatcher is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="generation-dispatch", daemon=True).start()
            self._dispatcher = Dispatcher(self._workers, Router(len(self._workers), self._policy), self._names)
        return self._loop, self._dispatcher

    async def generate_one(self, request: GenerationRequest) -> GenerationResult:
        """Continues one prompt; may be awaited on any event loop."""
        loop, dispatcher = self._started()
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(dispatcher.run(request, self._request_timeout_s), loop)
        )

    def run_on_dispatch_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the dispatcher's loop and waits."""
        loop, _ = self._started()
        return asyncio.run_coroutine_threadsafe(work, loop).result()
