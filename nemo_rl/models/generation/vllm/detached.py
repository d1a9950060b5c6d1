"""Generation requests from another process than the one that owns the engines.

Starts a dispatcher over the shards' actors at its first request. Before a batch of rollouts the owner sends the serving
shards; afterwards this returns the shards that it found dead. Pickling starts nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult
from nemo_rl.models.generation.vllm.dispatch import LOOP_TIMEOUT_S, Dispatcher, Router, RouterPolicy, wait_on_loop
from nemo_rl.models.generation.vllm.request_state import OnPreempt
from nemo_rl.utils.record import Record

if TYPE_CHECKING:
    from ray.actor import ActorHandle

T = TypeVar("T")

_FOLLOW_S = 60.0


class ServingShard(NamedTuple):
    """A shard that takes requests: how often its engine was started, and its actor."""

    started: int
    worker: ActorHandle[object]


class DetachedGenerator:
    """Continues prompts on shards that another process started. `record`: pickled with this, so events are collected
    where it runs.
    """

    def __init__(
        self,
        serving: Mapping[int, ServingShard],
        names: Sequence[str],
        policy: RouterPolicy,
        request_timeout_s: float,
        on_preempt: OnPreempt = "continue",
        record: Record | None = None,
    ) -> None:
        self._serving = dict(serving)
        self._workers: list[Any] = [serving[shard].worker if shard in serving else None for shard in range(len(names))]
        self._names = list(names)
        self._policy = policy
        self._request_timeout_s = request_timeout_s
        self._on_preempt: OnPreempt = on_preempt
        self._record = record
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dispatcher: Dispatcher | None = None

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_loop": None, "_dispatcher": None}

    def _started(self) -> tuple[asyncio.AbstractEventLoop, Dispatcher]:
        if self._loop is None or self._dispatcher is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="generation-dispatch", daemon=True).start()
            router = Router(len(self._workers), self._policy)
            router.set_active(self._serving)
            self._dispatcher = Dispatcher(
                self._workers, router, self._names, on_preempt=self._on_preempt, record=self._record
            )
        return self._loop, self._dispatcher

    def follow(self, serving: Mapping[int, ServingShard]) -> None:
        """Restricts requests to these shards; a rebuilt one is used again."""
        loop, dispatcher = self._started()
        known = self._serving
        changed = [shard for shard, now in serving.items() if shard not in known or known[shard].started != now.started]

        async def change() -> None:
            for shard in changed:
                self._workers[shard] = serving[shard].worker
                dispatcher.revive(shard)
            dispatcher.unroute([shard for shard in range(len(self._workers)) if shard not in serving])
            dispatcher.route([shard for shard in serving if shard not in dispatcher.failed])

        wait_on_loop(change(), loop, _FOLLOW_S)
        self._serving |= serving

    def lost(self) -> dict[int, str]:
        """The shards that were found dead here, and why."""
        return dict(self._dispatcher.failed) if self._dispatcher is not None else {}

    async def generate_one(self, request: GenerationRequest) -> GenerationResult:
        """Continues one prompt; may be awaited on any event loop."""
        loop, dispatcher = self._started()
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(dispatcher.run(request, self._request_timeout_s), loop)
        )

    def run_on_dispatch_loop(self, work: Coroutine[object, object, T]) -> T:
        """Runs a coroutine on the dispatcher's loop and waits. Raises GenerationError: it hangs."""
        loop, _ = self._started()
        return wait_on_loop(work, loop, LOOP_TIMEOUT_S)
