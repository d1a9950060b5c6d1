"""Rebuilds quarantined shards of a run without scheduler.

Kills the rest of a shard as soon as it is quarantined, so that its memory is free, and starts a new engine in parallel
with the run. It stays quarantined until the next refit gives it weights. Invariants: one build at a time per shard; an
engine that does not start is tried a few times and then given up, and the run continues with the others.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from nemo_rl.config.errors import first_line
from nemo_rl.distributed.worker_calls import WorkerError
from nemo_rl.models.generation.vllm.shards import ShardState

if TYPE_CHECKING:
    from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration

logger = logging.getLogger(__name__)

_ATTEMPTS = 3


class ShardRepair:
    """Repairs one generation backend. `attempts`: how often an engine that does not start is tried."""

    def __init__(self, generation: VllmGeneration, *, attempts: int = _ATTEMPTS) -> None:
        self._generation = generation
        self._attempts = attempts
        self._pool: ThreadPoolExecutor | None = None
        self._building: dict[int, Future[None]] = {}
        self._failed: dict[int, int] = {}
        generation.on_failure(lambda shard, reason: generation.end_shard(shard))

    def lost(self) -> list[int]:
        """Quarantined shards that are not given up."""
        return [
            shard
            for shard in self._generation.shards.having(ShardState.FAILED)
            if self._failed.get(shard, 0) < self._attempts
        ]

    def begin(self) -> None:
        """Starts an engine for every lost shard that has none under way."""
        for shard in self.lost():
            if shard in self._building:
                continue
            if self._pool is None:
                self._pool = ThreadPoolExecutor(thread_name_prefix="shard-repair")
            logger.warning("shard=%d rebuild=begun", shard)
            self._building[shard] = self._pool.submit(self._generation.start_shard, shard)

    def finish(self, timeout_s: float) -> None:
        """Waits until no engine is under way; one that is after `timeout_s` stays so."""
        wait(self._building.values(), timeout=timeout_s)

    def take_back(self) -> list[int]:
        """The shards whose new engines are up: awake, without weights, not routed."""
        back: list[int] = []
        for shard, built in [(shard, built) for shard, built in self._building.items() if built.done()]:
            del self._building[shard]
            error = built.exception()
            if error is None:
                self._failed.pop(shard, None)
                self._generation.shards.rebuilt(shard)
                back.append(shard)
                logger.warning("shard=%d rebuild=done", shard)
                continue
            if not isinstance(error, WorkerError):
                raise error
            tries = self._failed[shard] = self._failed.get(shard, 0) + 1
            logger.error(
                "shard=%d rebuild=failed attempt=%d of=%d%s reason=%s",
                shard,
                tries,
                self._attempts,
                "" if tries < self._attempts else " given_up=true",
                first_line(error),
            )
        return back

    def close(self) -> None:
        """Begins nothing more."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
