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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nemo_rl.distributed.worker_calls import WorkerError
from nemo_rl.models.generation.interfaces import ShardStateError
from nemo_rl.models.generation.vllm.shards import ShardState
from nemo_rl.utils.record import NullRecord, Record
from nemo_rl.utils.record_events import SyncStarted, VersionPublished
from nemo_rl.weight_sync.cache import CacheError
from nemo_rl.weight_sync.session import SyncOptions, SyncReport, SyncSession, finished_event, pause_quantiles

if TYPE_CHECKING:
    from nemo_rl.models.policy.weights import PolicyWeightCache

logger = logging.getLogger(__name__)

# Every step of a move has a deadline of its own; together they stay below this.
_TURN_S = 900.0


@dataclass
class Resize:
    """What became of a resize."""

    shards: list[int]  # those that made the move
    failed: dict[int, str] = field(default_factory=dict)  # those that did not, and why
    sync: SyncReport | None = None  # the session that brought weights, if one was needed


class ElasticGeneration:
    """Resizes one generation backend. `recompute_kv`: whether requests that run through a refresh recompute keys and
    values.
    """

    def __init__(
        self, generation: Any, cache: PolicyWeightCache, options: SyncOptions, *, record: Record | None = None
    ) -> None:
        self._generation = generation
        self._cache = cache
        self._options = options
        self._record: Record = record or NullRecord()
        self._turn = threading.Lock()
        self.recompute_kv = True
        self.pauses_s: list[float] = []

    def shrink(self, dp_ranks: Iterable[int]) -> Resize:
        """Puts shards to sleep; their requests continue on other shards, or wait. All shards is legal. Raises
        WorkerError: a shard did not sleep or its memory is not free: the device must not be handed over.
        """
        wanted = sorted(set(dp_ranks))
        with self._alone("shrink"):
            self._generation.sleep_partial(wanted)
        return Resize([shard for shard in wanted if self._generation.shards.state(shard) is ShardState.ASLEEP])

    def expand(self, dp_ranks: Iterable[int]) -> Resize:
        """Wakes shards with the cache's weights and routes them. Returns which came back. A shard that could not wake
        sleeps on; one with wrong weights, or that died, is quarantined. Raises CacheError: the cache is empty;
        TransportError, WorkerError: the session failed through no shard's fault; they sleep as before.
        """
        self._served()
        failed: dict[int, str] = {}
        with self._alone("expand"):
            state = self._generation.shards.state
            wanted = [shard for shard in sorted(set(dp_ranks)) if state(shard) is not ShardState.ACTIVE]
            self._wake(wanted, failed, "weights")
            report = self._sync_all(wanted, failed)
            self._wake(wanted, failed, "kv_cache")
            if wanted:
                self._generation.activate_dp_ranks(wanted)
        for shard, reason in failed.items():
            logger.error("shard=%d expand=failed reason=%s", shard, reason)
        return Resize(wanted, failed, report)

    def resize_infer(self, dp_ranks_to_remove: Iterable[int], dp_ranks_to_add: Iterable[int]) -> tuple[Resize, Resize]:
        """`shrink` and then `expand`, for a control plane that moves shards both ways at once. Returns what became of
        those to remove, and of those to add. Raises ValueError: a shard is to be removed and added; nothing has moved;
        CacheError, TransportError, WorkerError: as for `shrink` and `expand`; what was removed sleeps.
        """
        removed, added = set(dp_ranks_to_remove), set(dp_ranks_to_add)
        if removed & added:
            raise ValueError(f"shards {sorted(removed & added)} are to be removed and added: name each on one side")
        return self.shrink(removed), self.expand(added)

    def wake_weights(self, dp_ranks: Iterable[int]) -> None:
        """Builds missing engines and wakes the weights of the others: the first half of `expand`. Raises WorkerError: a
        shard could not wake, or its engine did not start.
        """
        wanted = sorted(set(dp_ranks))
        # Building takes a minute and moves no other shard: it needs no lock.
        self._generation.shards.build(wanted)
        with self._alone("wake"):
            self._generation.wake_up_partial(wanted, skip_activate=True, tags=["weights"])

    def load(self, dp_ranks: Iterable[int]) -> Resize:
        """Brings the cache's version to shards that woke, in one session, and makes them ready to be routed: the second
        half of `expand`. Returns which are ready; the others are quarantined. Raises CacheError: the cache is empty;
        TransportError, WorkerError: the session failed through no shard's fault; all of them sleep.
        """
        self._served()
        failed: dict[int, str] = {}
        wanted = sorted(set(dp_ranks))
        with self._alone("load"):
            report = self._sync_all(wanted, failed)
            self._wake(wanted, failed, "kv_cache")
            if wanted:
                self._generation.shards.accept(wanted)
        return Resize(wanted, failed, report)

    def refresh(self, dp_ranks: Iterable[int] | None = None) -> Resize:
        """Brings shards that serve to the cache's version, all of them by default. Returns which have it; the others
        are quarantined. Without a session where none serves. Raises WorkerError, TransportError: the session failed
        through no shard's fault, or on all of them; targets that staged serve their old weights, others are
        quarantined.
        """
        with self._alone("refresh"):
            active = self._generation.shards.having(ShardState.ACTIVE)
            wanted = active if dp_ranks is None else sorted(set(dp_ranks))
            return self._refresh(wanted) if wanted else Resize([])

    def _refresh(self, wanted: list[int]) -> Resize:
        failed: dict[int, str] = {}
        half_new = False
        while True:
            version, recompute_kv, staged = self._served(), self.recompute_kv, True
            targets = self._generation.get_model_update_receiver(wanted, recompute_kv=recompute_kv)
            try:
                source = self._cache.source(version)
                staged = targets.staging_fits(sum(meta.nbytes for meta in source.tensor_metas()))
                report = self._run(source, targets, version, staged=staged, recompute_kv=recompute_kv)
            except Exception as error:
                if isinstance(error, CacheError) and self._served() != version:
                    # Nothing was loaded yet. A newer version that was built meanwhile is as good.
                    continue
                # Without staging the engines stand still over weights that may be half new, whatever it was that
                # failed, until another session brings them whole ones.
                half_new |= not staged
                lost = targets.culprits
                again = bool(lost) and len(lost) < len(wanted)
                if half_new and not again:
                    lost = dict.fromkeys(wanted, "its weights may be half new")
                if lost:
                    self._generation.quarantine(list(lost), "; ".join(sorted(set(lost.values()))))
                if not again:
                    raise
                failed |= lost
                wanted = [shard for shard in wanted if shard not in lost]
                continue
            self.pauses_s += report.pauses_s
            self._record.emit(VersionPublished(version, tuple(wanted)))
            return Resize(wanted, failed, report)

    def sync_selected_workers(self, tgt_dp_ranks: Sequence[int], verify: bool = False) -> SyncReport:
        """Syncs shards that are awake and not routed, and nothing else. Raises WorkerError, TransportError: the session
        failed; no target has the version.
        """
        options = replace(self._options, verify=verify or self._options.verify)
        with self._alone("sync"):
            version = self._served()
            return self._run(
                self._cache.source(version),
                self._generation.get_model_update_receiver(tgt_dp_ranks),
                version,
                options=options,
            )

    def requests_under_way(self) -> int:
        """Requests that run, or wait for a shard."""
        return self._generation.requests_under_way

    def good_batch(self) -> int | None:
        """How many requests a rank runs at once at good speed, as measured; None before that is known."""
        return self._generation.good_batch()

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

    def _served(self) -> int:
        version = self._cache.version
        if version is None:
            raise CacheError("the weight cache is empty; build a version before shards are woken or refreshed")
        return version

    def _wake(self, wanted: list[int], failed: dict[int, str], tag: str) -> None:
        """Wakes one tag on all shards; those that cannot leave `wanted`."""
        if not wanted:
            return
        try:
            self._generation.wake_up_partial(wanted, skip_activate=True, tags=[tag])
        except WorkerError as error:
            state = self._generation.shards.state
            lost = [shard for shard in wanted if state(shard) in (ShardState.ASLEEP, ShardState.FAILED)]
            if not lost:
                raise
            failed |= dict.fromkeys(lost, f"{tag} did not wake: {error}")
            wanted[:] = [shard for shard in wanted if shard not in lost]

    def _sync_all(self, wanted: list[int], failed: dict[int, str]) -> SyncReport | None:
        while wanted:
            version = self._served()
            targets = self._generation.get_model_update_receiver(wanted)
            try:
                return self._run(self._cache.source(version), targets, version)
            except Exception as error:
                if isinstance(error, CacheError) and self._served() != version:
                    # A newer version was built before the session could read this one.
                    continue
                if not targets.culprits:
                    self._generation.sleep_partial(wanted)
                    raise
                self._generation.quarantine(list(targets.culprits), "; ".join(sorted(set(targets.culprits.values()))))
                failed |= targets.culprits
                wanted[:] = [shard for shard in wanted if shard not in targets.culprits]
        return None

    def _run(
        self,
        source: Any,
        targets: Any,
        version: int,
        *,
        staged: bool = False,
        options: SyncOptions | None = None,
        recompute_kv: bool = True,
    ) -> SyncReport:
        session = SyncSession(source, targets, version=version, options=options or self._options, staged=staged)
        transport = self._options.transport
        self._record.emit(SyncStarted(session.session_id, version, targets.shards, transport, recompute_kv))
        report = None
        try:
            report = session.run()
            return report
        finally:
            self._record.emit(finished_event(session, targets.shards, report))
