"""A fleet whose workers are objects of the test's process: states and moves are the product's, calls are plain ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nemo_rl.distributed.worker_groups import WorkerError, WorkerIdentity
from nemo_rl.models.generation.interfaces import WakeError
from nemo_rl.models.generation.vllm.dispatch import Dispatcher, Router
from nemo_rl.models.generation.vllm.fleet import EngineFleet
from nemo_rl.utils.record import Record


class LocalFleet(EngineFleet):
    """Writes down moves. `workers`: one per shard; what they raise is a `WorkerError`. `start`, `end`: as of
    `EngineFleet`, for rebuilds.
    """

    def __init__(
        self,
        workers: Sequence[Any],
        *,
        record: Record | None = None,
        start: Callable[[int], None] = lambda shard: None,
        end: Callable[[int], None] = lambda shard: None,
    ) -> None:
        def started(shard: int, restart: bool) -> list[dict[str, Any]]:
            start(shard)
            return []

        names = [f"shard {shard}" for shard in range(len(workers))]
        dispatcher = Dispatcher(workers, Router(len(workers)), names, record=record)
        identities = [WorkerIdentity("vllm", shard, "") for shard in range(len(workers))]
        super().__init__(workers, identities, dispatcher, asyncio.run, asyncio.run, start=started, end=end)
        self.happened: list[str] = []

    def _begin(self, shards: Iterable[int], method: str, kwargs: Mapping[str, object]) -> Any:
        return {shard: lambda shard=shard: getattr(self.workers[shard], method)(**kwargs) for shard in shards}

    def _wait(self, refs: Mapping[int, Any], method: str, timeout_s: float) -> list[Any]:
        return [ref() for ref in refs.values()]

    async def _leave(self, shard: int) -> None:
        self.workers[shard].leave()

    def fail(self, reasons: Mapping[int, str]) -> None:
        if reasons:
            self.happened.append(f"quarantine {sorted(reasons)}")
        super().fail(reasons)

    def sleep(
        self, shards: Iterable[int], level: int | None = None, *, in_place: bool = False
    ) -> dict[int, dict[str, int]]:
        self.happened.append("sleep" if in_place else f"sleep {list(shards)}")
        return super().sleep(shards, level, in_place=in_place)

    def wake(
        self, shards: Iterable[int], tags: Sequence[str] = ("weights", "kv_cache"), *, in_place: bool = False
    ) -> None:
        if wanted := list(shards):
            self.happened.append(f"wake {' '.join(tags)}" + ("" if in_place else f" {wanted}"))
        super().wake(wanted, tags, in_place=in_place)

    def activate(self, shards: Iterable[int]) -> int:
        self.happened.append(f"route {sorted(shards)}")
        return super().activate(shards)


class LocalWorker:
    """A worker that can be put to sleep and woken; `no_memory`: the tags that it has no memory for."""

    def __init__(self) -> None:
        self.no_memory: set[str] = set()
        self.version = 0

    def leave(self) -> None: ...

    def sleep(self, level: int) -> dict[str, int]:
        return {"before": 100, "after": 10}

    def wake_up(self, tags: list[str]) -> None:
        if self.no_memory & set(tags):
            raise WorkerError("planted: no memory") from WakeError("planted: no memory")

    def accept(self) -> int:
        return self.version
