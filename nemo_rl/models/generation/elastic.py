"""Resizes generation: shards leave and return with the cache's weights, and serving shards take new weights in place.

Time-shared runs resize only here. Invariants: moves and refreshes are serialised, versions can be built at any time; a
shard returns in the order wake weights, sync, finalise, wake KV, publish, route; one that cannot is put to sleep again
or quarantined, and the others return; the served version is the cache's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nemo_rl.models.generation.interfaces import ShardStateError
from nemo_rl.models.generation.vllm.fleet import Moved, ShardState, Weights, sync
from nemo_rl.utils.record import NullRecord, Record
from nemo_rl.weight_sync.cache import BucketCache, CacheError
from nemo_rl.weight_sync.sync_session import SyncOptions, SyncReport, pause_quantiles

if TYPE_CHECKING:
    from nemo_rl.config import WeightSyncConfig
    from nemo_rl.models.policy.weights import PolicyWeights

logger = logging.getLogger(__name__)

# Every step of a move has a deadline of its own; together they stay below this.
_TURN_S = 900.0


def with_own_cache(policy: PolicyWeights, generation: Any, sync: WeightSyncConfig) -> ElasticGeneration:
    """Engines that get the policy's weights from a cache of their own, for a run whose GPUs are lent to others."""
    from nemo_rl.models.policy.weights import PolicyWeightCache

    cache = PolicyWeightCache(
        policy,
        bucket_bytes=sync.bucket_bytes,
        timeout_s=sync.timeout_s,
        checksums=sync.verify,
        # Ranks wake while others have the training GPUs. A job that names a transport has made room there.
        may_stage=sync.transport in ("cuda_ipc", "nccl"),
    )
    options = SyncOptions(sync.transport, sync.bucket_bytes, sync.verify, sync.timeout_s, keep_group=False)
    return ElasticGeneration(generation, cache, options)


class ElasticGeneration:
    """Resizes `generation`.

    Attributes:
        cache: Weights of one version, on the host.
        recompute_kv: Whether requests that run through a refresh recompute keys and values.
    """

    def __init__(
        self, generation: Any, cache: BucketCache, options: SyncOptions, *, record: Record | None = None
    ) -> None:
        self.generation, self._fleet = generation, generation.fleet
        self.cache = cache
        self._options, self._record = options, record or NullRecord()
        self._turn = threading.Lock()
        self.recompute_kv = True
        self.pauses_s: list[float] = []

    def shrink(self, dp_ranks: Iterable[int]) -> Moved:
        """Puts shards to sleep; their requests continue on other shards, or wait. All shards is legal. Raises
        WorkerError: a shard did not sleep or its memory is not free: the device must not be handed over.
        """
        wanted = sorted(set(dp_ranks))
        with self._alone("shrink"):
            self._fleet.sleep(wanted)
        return Moved([shard for shard in wanted if self._fleet.state(shard) in (ShardState.ASLEEP, ShardState.UNBUILT)])

    def expand(self, dp_ranks: Iterable[int], *, routes: bool = True) -> Moved:
        """Wakes shards with the cache's weights, all in one session. Returns which came back. A shard that could not
        wake sleeps on; one with wrong weights, or that died, is quarantined. `routes`: whether they take requests at
        once, or are only ready to be routed. Raises CacheError: the cache is empty; TransportError, WorkerError: the
        session failed through no shard's fault; they sleep as before.
        """
        self._version()
        with self._alone("expand"):
            wanted = [shard for shard in sorted(set(dp_ranks)) if self._fleet.state(shard) is not ShardState.ACTIVE]
            moved = self._fleet.bring(wanted, self._weights())
            if moved.shards and routes:
                self._fleet.activate(moved.shards)
            elif moved.shards:
                self._fleet.accept(moved.shards)
        for shard, reason in moved.failed.items():
            logger.error("shard=%d expand=failed reason=%s", shard, reason)
        return moved

    def wake_weights(self, dp_ranks: Iterable[int]) -> None:
        """Makes room for the weights of shards, before `expand`. Raises WorkerError: a shard could not wake."""
        with self._alone("wake"):
            self._fleet.wake(dp_ranks, ["weights"])

    def refresh(self, dp_ranks: Iterable[int] | None = None) -> Moved:
        """Brings shards that serve to the cache's version, all of them by default. Returns which have it; the others
        are quarantined. Without a session where none serves. Raises WorkerError, TransportError: the session failed
        through no shard's fault, or on all of them; targets whose weights may be half new are quarantined, the others
        serve their old ones.
        """
        with self._alone("refresh"):
            wanted = self._fleet.having(ShardState.ACTIVE) if dp_ranks is None else sorted(set(dp_ranks))
            if not wanted:
                return Moved([])
            try:
                moved = self._fleet.bring(wanted, self._weights(self.recompute_kv), serving=True)
            except Exception:
                # They stand still until another session brings them whole weights, which may never be asked for.
                half_new = [shard for shard in self._fleet.healthy(wanted) if self._fleet.shards[shard].half_new]
                self._fleet.fail(dict.fromkeys(half_new, "its weights may be half new"))
                raise
            self.pauses_s += moved.sync.pauses_s if moved.sync is not None else []
            return moved

    def sync_selected_workers(self, tgt_dp_ranks: Sequence[int], verify: bool = False) -> SyncReport:
        """Syncs shards that are awake and not routed, and nothing else. Raises WorkerError, TransportError: the session
        failed; no target has the version.
        """
        options = replace(self._options, verify=verify or self._options.verify)
        weights = replace(self._weights(), options=options)
        with self._alone("sync"):
            return sync(weights, self._fleet.targets(sorted(set(tgt_dp_ranks))), self._version())

    def pause_metrics(self) -> dict[str, float]:
        """p50 and p99 of the seconds for which a serving shard stood still per refresh."""
        return pause_quantiles(self.pauses_s)

    @contextmanager
    def _alone(self, what: str) -> Generator[None]:
        if not self._turn.acquire(timeout=_TURN_S):
            raise ShardStateError(f"{what}: another resize is still running after {_TURN_S:.0f} s")
        try:
            yield
        finally:
            self._turn.release()

    def _version(self) -> int:
        version = self.cache.version
        if version is None:
            raise CacheError("the weight cache is empty; build a version before shards are woken or refreshed")
        return version

    def _weights(self, recompute_kv: bool = True) -> Weights:
        return Weights(self._version, self.cache.source, self._options, self._record, recompute_kv)
