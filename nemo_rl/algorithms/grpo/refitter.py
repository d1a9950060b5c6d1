"""Refits generation: brings it to the policy's weight version.

It compares versions, so validation and the next step share one refit. If both share their devices, a refit wakes the
engine's weights, sends the new ones, moves training state to the host where memory requires it, and wakes the KV cache.
Shards that fail are left out; rebuilt shards join. Invariant: after `bring_to` every shard that takes requests serves
exactly that version.
"""

from __future__ import annotations

import logging
import time

from nemo_rl.config import WeightSyncConfig
from nemo_rl.models.generation.interfaces import GenerationError
from nemo_rl.models.generation.vllm.fleet import ShardState, Weights
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.record import Record
from nemo_rl.utils.timer import Timer
from nemo_rl.weight_sync.sync_session import SyncOptions, SyncReport, pause_quantiles

logger = logging.getLogger(__name__)

_MEMORY_MARGIN = 1.1
_REBUILD_S = 660.0
_NONE_LEFT = "every generation shard is lost and none could be restarted; the log says why"


class Refitter:
    """Refits one generation backend from one policy.

    Args:
        cfg: `weight_sync.*`.
        colocated: Whether both share their slots.
    """

    def __init__(
        self,
        policy: Policy,
        generation: VllmGeneration,
        cfg: WeightSyncConfig,
        *,
        colocated: bool,
        cuda: bool,
        record: Record,
    ) -> None:
        self._policy = policy
        self._generation, self._fleet = generation, generation.fleet
        self._options = SyncOptions(cfg.transport, cfg.bucket_bytes, cfg.verify, cfg.timeout_s)
        self._colocated = colocated
        self._cuda = cuda
        self._record = record
        self._offloaded = False
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
        if self._serves(version) and not self._asleep():
            return
        rebuilt = self._repair()
        offload = self._colocated and (self._must_offload() or (bool(rebuilt) and self._cuda))
        if offload:
            self._policy.offload_before_refit()
        weights = None
        if not self._serves(version):
            weights = Weights(lambda: version, lambda _: self._policy, self._options, self._record, recompute_kv, timer)
        moved = self._fleet.bring(
            self._fleet.shards,
            weights,
            # Engines of their own serve on while the windows arrive; where training shares the device, none serves.
            serving=not self._colocated,
            in_place=self._colocated,
            revive=(lambda: rebuilt.extend(self._repair())) if self.rebuilds else None,
            before_cache=self._leave if offload else lambda: None,
        )
        if moved.sync is not None:
            self.last_report = moved.sync
            self.pauses_s += moved.sync.pauses_s
        elif weights is not None:
            raise GenerationError(_NONE_LEFT)
        if rebuilt:
            self._fleet.activate_healthy(rebuilt)
        if not self._colocated:
            self._fleet.rebuild()

    def _serves(self, version: int) -> bool:
        healthy = self._fleet.healthy()
        return bool(healthy) and all(self._fleet.shards[shard].version == version for shard in healthy)

    def _leave(self) -> None:
        self._policy.offload_after_refit()
        self._offloaded = True

    def _asleep(self) -> bool:
        # Engines with slots of their own are put to sleep by others alone, who wake them.
        return self._colocated and bool(self._fleet.having(ShardState.ASLEEP, ShardState.WAKING))

    @property
    def rebuilds(self) -> bool:
        """Whether `revive` can rebuild shards: only if they have slots of their own."""
        return self._fleet.rebuilds and not self._colocated

    def await_rebuild(self, rebuilds: bool) -> None:
        """Whether requests wait while all shards have failed. The caller must then call `revive` from time to time."""
        if self.rebuilds:
            self._fleet.await_rebuild(rebuilds)

    def revive(self, version: int) -> None:
        """If all shards have failed, rebuilds them and sends them the policy's `version`. Raises GenerationError: none
        of them could be built; WorkerError, TransportError: see `bring_to`.
        """
        if self.rebuilds and not self._fleet.healthy():
            self.bring_to(version)

    def _repair(self) -> list[int]:
        """Takes rebuilt shards back, awake and without weights.

        Engines with slots of their own are rebuilt in the background, so the run waits only if none is left. Colocated
        engines need the device, so the run waits for all. Raises GenerationError: none is left and none starts.
        """
        if self._colocated:
            return self._rebuilt_in_turn() if self._fleet.lost() else []
        back = self._fleet.take_back()
        if self._fleet.healthy() or not self.rebuilds:
            return back
        logger.warning("shards=all_lost rebuild=awaited")
        deadline = time.monotonic() + _REBUILD_S
        while not back and self._fleet.lost() and time.monotonic() < deadline:
            self._fleet.rebuild()
            back = self._fleet.take_back(_REBUILD_S)
        if not back:
            raise GenerationError(_NONE_LEFT)
        return back

    def _rebuilt_in_turn(self) -> list[int]:
        if self._cuda:
            # An engine takes its share of the memory that is free while it starts.
            self._policy.offload_after_refit()
        self._fleet.rebuild()
        back = self._fleet.take_back(_REBUILD_S)
        if back:
            # Training needs the device once more before they get weights.
            self._fleet.sleep(back, in_place=True)
        if self._cuda:
            self._policy.prepare_for_lp_inference()
        return back

    def release_device(self) -> None:
        """Puts colocated generation to sleep to free its devices for training."""
        if self._colocated and self._fleet.having(ShardState.ACTIVE, ShardState.INACTIVE, ShardState.WAKING):
            self._generation.sleep()
            self._offloaded = False

    def make_room(self) -> None:
        """Puts colocated generation to sleep if training state is on the host because of it."""
        if self._offloaded:
            self.release_device()

    def close(self) -> None:
        """Stops rebuilding shards."""
        self._fleet.close()

    def _must_offload(self) -> bool:
        # Training state may stay where it is when the engine's memory fits beside it: moving it costs seconds per step.
        if not self._cuda or not self._asleep():
            return False
        needed = _MEMORY_MARGIN * self._generation.released_bytes()
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
