"""The refit: brings shards to a version of the weights, on accelerators of the run or of a scheduler.

Invariants: the culprits of a failed session are quarantined, and the others are synced again; every session is recorded
with its end.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

from nemo_rl.utils.record import Record
from nemo_rl.utils.record_events import SyncFinished, SyncStarted, VersionPublished
from nemo_rl.utils.timer import Timer
from nemo_rl.weight_sync.cache import CacheError
from nemo_rl.weight_sync.sync_session import SyncOptions, SyncReport, SyncSession, WeightSource

if TYPE_CHECKING:
    from nemo_rl.models.generation.vllm.fleet import EngineFleet, ShardTargets


class Weights(NamedTuple):
    """Source of a refit's weights: the live policy, or a cache, of which a newer version is as good."""

    version: Callable[[], int]  # asked before each session
    source: Callable[[int], WeightSource]  # the source of that version


def refit(
    fleet: EngineFleet,
    living: Callable[[], list[int]],
    weights: Weights,
    options: SyncOptions,
    record: Record,
    *,
    stages: bool = False,
    publishes: bool = False,
    recompute_kv: bool = True,
    spares: Callable[[ShardTargets], bool] = lambda targets: False,
    timer: Timer | None = None,
) -> SyncReport | None:
    """Syncs shards; quarantines the culprits of a failed session and syncs the others again.

    Args:
        living: The shards that are wanted and not quarantined; asked before each session.
        stages: Whether windows are staged beside the live weights, where both fit: for shards that serve.
        publishes: Whether the shards are routed already, so that the version is out with the session.
        recompute_kv: Whether running requests recompute keys and values.
        spares: Asked where all shards failed together: whether none of them is quarantined for it.

    Returns the report of the session that brought the version; None if no shard is left. Raises what the last session
    raised: it failed through no shard's fault, or no shard is left.
    """
    failure: Exception | None = None
    while shards := living():
        version, targets = weights.version(), fleet.targets(shards, recompute_kv=recompute_kv)
        try:
            source = weights.source(version)
            staged = stages and targets.staging_fits(sum(meta.nbytes for meta in source.tensor_metas()))
            report = sync(
                source, targets, version, options, record, staged=staged, recompute_kv=recompute_kv, timer=timer
            )
        except Exception as error:
            if isinstance(error, CacheError) and weights.version() != version:
                # Nothing was loaded yet.
                continue
            lost = targets.culprits
            if not lost or (len(lost) == len(shards) and spares(targets)):
                raise
            fleet.fail(lost)
            failure = error
            continue
        if publishes:
            record.emit(VersionPublished(version, targets.shards))
        return report
    if failure is not None:
        raise failure
    return None


def sync(
    source: WeightSource,
    targets: ShardTargets,
    version: int,
    options: SyncOptions,
    record: Record,
    *,
    staged: bool = False,
    recompute_kv: bool = True,
    timer: Timer | None = None,
) -> SyncReport:
    """Runs one session and records it. Raises as `SyncSession.run`."""
    session = SyncSession(source, targets, version=version, options=options, staged=staged)
    record.emit(SyncStarted(session.session_id, version, targets.shards, options.transport, recompute_kv))
    finished = SyncFinished(session.session_id, version, "failed")
    try:
        with timer.time("prepare_for_generation/transfer_and_update_weights") if timer is not None else nullcontext():
            report = session.run()
        checksums = {str(shard): report.checksum for shard in targets.shards} if report.checksum else {}
        finished = SyncFinished(session.session_id, version, "done", report.nbytes, checksums)
    finally:
        record.emit(finished)
    return report
