"""Refits generation: brings it to the policy's weight version.

It compares versions, so validation and the next step share one refit. If both share their devices, a refit wakes the
engine's weights, sends the new ones, moves training state to the host where memory requires it, and wakes the KV cache.
Shards that fail are left out; rebuilt shards join. Invariant: after `bring_to` every shard that takes requests serves
exactly that version.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from nemo_rl.config import WeightSyncConfig
from nemo_rl.distributed.worker_calls import WorkerError
from nemo_rl.models.generation.interfaces import GenerationError, ShardStateError
from nemo_rl.models.generation.vllm.repair import ShardRepair
from nemo_rl.utils.record import Record
from nemo_rl.utils.record_events import SyncStarted, VersionPublished
from nemo_rl.utils.timer import Timer
from nemo_rl.weight_sync.session import SyncOptions, SyncReport, SyncSession, finished_event, pause_quantiles

logger = logging.getLogger(__name__)

_MEMORY_MARGIN = 1.1
_REBUILD_S = 660.0


class Refitter:
    """Refits one generation backend from one policy.

    Args:
        cfg: `weight_sync.*`.
        colocated: Whether both share their slots.
        slept: Memory reports of the shards if they were put to sleep before their first use; empty if they are awake.
        repair: Rebuilds failed shards; None leaves them out.
    """

    def __init__(
        self,
        policy: Any,
        generation: Any,
        cfg: WeightSyncConfig,
        *,
        colocated: bool,
        cuda: bool,
        record: Record,
        slept: Sequence[Mapping[str, int]] = (),
        repair: ShardRepair | None = None,
    ) -> None:
        self._policy = policy
        self._generation = generation
        self._options = SyncOptions(cfg.transport, cfg.bucket_bytes, cfg.verify, cfg.timeout_s)
        self._colocated = colocated
        self._cuda = cuda
        self._record = record
        self._repair = repair
        self._released_bytes = _most_released(slept)
        self._asleep = bool(slept)
        self._offloaded = False
        self.version: int | None = None
        self.last_report: SyncReport | None = None
        self.pauses_s: list[float] = []

    def bring_to(self, version: int, timer: Timer | None = None, *, recompute_kv: bool = True) -> None:
        """Makes generation serve `version`, awake. Running requests pause once and continue with the new weights.

        Args:
            timer: Records the time of the transfer.
            recompute_kv: Whether running requests recompute their KV cache and cached prefixes are dropped.

        Raises WorkerError: a worker of the policy failed, or no shard is left; TransportError: the weights could not be
        sent within the deadline.
        """
        current = self.version == version and self._generation.weights_resident
        if current and not self._asleep:
            return
        rebuilt = self._take_back()
        offload = self._colocated and (self._must_offload() or (bool(rebuilt) and self._cuda))
        if offload:
            self._policy.offload_before_refit()
        if self._asleep:
            self._generation.prepare_for_generation(tags=["weights"])
        if not current or rebuilt:
            rebuilt += self._sync_living(version, timer, recompute_kv)
        if offload:
            self._policy.offload_after_refit()
            self._offloaded = True
        if self._asleep:
            self._generation.prepare_for_generation(tags=["kv_cache"])
        if rebuilt:
            self._generation.activate_healthy(rebuilt)
        if self._repair is not None and not self._colocated:
            self._repair.begin()
        self._asleep = False
        self.version = version

    @property
    def rebuilds(self) -> bool:
        """Whether `revive` can rebuild shards: only if they have slots of their own."""
        return self._repair is not None and not self._colocated

    def await_rebuild(self, rebuilds: bool) -> None:
        """Whether requests wait while all shards have failed. The caller must then call `revive` from time to time."""
        if self.rebuilds:
            self._generation.shards.await_rebuild(rebuilds)

    def revive(self, version: int) -> None:
        """If all shards have failed, rebuilds them and sends them the policy's `version`. Raises GenerationError: none
        of them could be built; WorkerError, TransportError: see `bring_to`.
        """
        if self.rebuilds and not self._generation.shards.healthy():
            self.version = None
            self.bring_to(version)

    def _rebuild_all(self, repair: ShardRepair) -> list[int]:
        """Waits until at least one shard is rebuilt."""
        logger.warning("shards=all_lost rebuild=awaited")
        deadline = time.monotonic() + _REBUILD_S
        while repair.lost() and time.monotonic() < deadline:
            repair.begin()
            repair.finish(_REBUILD_S)
            if back := repair.take_back():
                return back
        raise GenerationError("every generation shard is lost and none could be restarted; the log says why")

    def _take_back(self) -> list[int]:
        """The rebuilt shards, which take part in this refit.

        Engines with slots of their own are rebuilt in the background. Colocated engines need the device, so the run
        waits for them.
        """
        if self._repair is None:
            return []
        if not self._colocated:
            return self._repair.take_back()
        if not self._repair.lost():
            return []
        if self._cuda:
            # An engine takes its share of the memory that is free while it starts.
            self._policy.offload_after_refit()
        self._repair.begin()
        self._repair.finish(_REBUILD_S)
        back = self._repair.take_back()
        if back and self._asleep:
            self._generation.sleep(back)
        if self._cuda:
            self._policy.prepare_for_lp_inference()
        return back

    def _sync_living(self, version: int, timer: Timer | None, recompute_kv: bool) -> list[int]:
        """Syncs all shards. Quarantines those that fail and syncs the others again. If all have failed, waits until
        some are rebuilt. Returns the rebuilt shards.
        """
        rebuilt: list[int] = []
        while True:
            if self._repair is not None and self.rebuilds and not self._generation.shards.healthy():
                rebuilt += self._rebuild_all(self._repair)
            targets = self._generation.get_model_update_receiver(recompute_kv=recompute_kv)
            try:
                self._sync(targets, version, timer, recompute_kv)
                return rebuilt
            except (WorkerError, ShardStateError):
                all_failed = len(targets.culprits) == len(targets.shards)
                # Engines that the refit itself ends would be built for ever.
                if not targets.culprits or (all_failed and not (self.rebuilds and targets.died and not rebuilt)):
                    raise
                for shard, reason in targets.culprits.items():
                    self._generation.quarantine([shard], reason)

    def _sync(self, targets: Any, version: int, timer: Timer | None, recompute_kv: bool) -> None:
        # Engines of their own serve on while the windows arrive, where both copies of the weights fit.
        staged = not self._colocated and targets.staging_fits(sum(meta.nbytes for meta in self._policy.tensor_metas()))
        session = SyncSession(self._policy, targets, version=version, options=self._options, staged=staged)
        shards = targets.shards
        self._record.emit(SyncStarted(session.session_id, version, shards, self._options.transport, recompute_kv))
        # Until it is done, targets may hold some of the new weights: after a failure every version must be sent again.
        self.version = report = None
        try:
            with (
                timer.time("prepare_for_generation/transfer_and_update_weights") if timer is not None else nullcontext()
            ):
                report = session.run()
        finally:
            self._record.emit(finished_event(session, shards, report))
        self._generation.weights_resident = True
        self.last_report = report
        self.pauses_s += report.pauses_s
        self._record.emit(VersionPublished(version, shards))

    def release_device(self) -> None:
        """Puts colocated generation to sleep to free its devices for training."""
        if not self._colocated or self._asleep:
            return
        self._released_bytes = _most_released(self._generation.sleep())
        self._asleep = True
        self._offloaded = False

    def make_room(self) -> None:
        """Puts colocated generation to sleep if training state is on the host because of it."""
        if self._offloaded:
            self.release_device()

    def close(self) -> None:
        """Stops rebuilding shards."""
        if self._repair is not None:
            self._repair.close()

    def _must_offload(self) -> bool:
        # Training state may stay where it is when the engine's memory fits beside it: moving it costs seconds per step.
        if not self._cuda or not self._asleep:
            return False
        needed = _MEMORY_MARGIN * self._released_bytes
        if self._policy.get_free_memory_bytes() >= needed:
            return False
        # Most of what a step leaves is cached by the allocator: to give that back costs far less than to move the rest.
        self._policy.finish_training()
        return self._policy.get_free_memory_bytes() < needed

    def metrics(self) -> dict[str, float]:
        """Metrics of the last refit, for the prefix `refit`."""
        report = self.last_report
        if report is None:
            return {}
        seconds = {f"{phase}_s": duration for phase, duration in report.seconds.items()}
        return {
            "gib": report.nbytes / (1 << 30),
            "windows": float(report.windows),
            "version": float(report.version),
            **seconds,
            **pause_quantiles(self.pauses_s),
        }


def _most_released(reports: Sequence[Mapping[str, int]]) -> int:
    return max((shard["before"] - shard["after"] for shard in reports), default=0)
