"""Brings generation to the policy's version, whichever way the two are placed.

Compares versions instead of keeping flags: generation that already has the wanted version is left alone, so validation
and the next step share one refit. Colocated, it wakes the engine's weights, sends, moves training out of the way where
memory requires it, and wakes the KV cache. Knows policy and generation by the session's protocols. Invariant: after
`bring_to` generation serves exactly that version.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from nemo_rl.config import WeightSyncConfig
from nemo_rl.utils.record import Record
from nemo_rl.utils.record_events import SyncStarted, VersionPublished
from nemo_rl.utils.timer import Timer
from nemo_rl.weight_sync.session import SyncOptions, SyncReport, SyncSession, finished_event, pause_quantiles

logger = logging.getLogger(__name__)

_MEMORY_MARGIN = 1.1


class Refitter:
    """Refits one generation backend from one policy.

    Args:
        policy: Source of weights.
        generation: Targets.
        cfg: `weight_sync.*`.
        colocated: Whether both share their slots.
        cuda: Whether slots are GPUs.
        record: Run record.
        slept: What the shards said when generation was put to sleep before it ever served; nothing where it is awake.
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
    ) -> None:
        self._policy = policy
        self._generation = generation
        self._options = SyncOptions(cfg.transport, cfg.bucket_bytes, cfg.verify, cfg.timeout_s)
        self._colocated = colocated
        self._cuda = cuda
        self._record = record
        self._released_bytes = _most_released(slept)
        self._asleep = bool(slept)
        self.version: int | None = None
        self.last_report: SyncReport | None = None
        self.pauses_s: list[float] = []

    def bring_to(self, version: int, timer: Timer | None = None, *, recompute_kv: bool = True) -> None:
        """Makes generation serve `version`, awake; requests that run meanwhile stand still for one pause and go on with
        the new weights.

        Args:
            version: Of the policy's weights.
            timer: Takes the time of the transfer.
            recompute_kv: Whether running requests compute their keys and values anew, and cached prefixes are
                forgotten.

        Raises:
            WorkerError: A worker failed.
            TransportError: The weights could not be sent within the deadline.
        """
        current = self.version == version and self._generation.weights_resident
        if current and not self._asleep:
            return
        offload = self._colocated and self._must_offload()
        if offload:
            self._policy.offload_before_refit()
        if self._asleep:
            self._generation.prepare_for_generation(tags=["weights"])
        if not current:
            self._sync(version, timer, recompute_kv)
        if offload:
            self._policy.offload_after_refit()
        if self._asleep:
            self._generation.prepare_for_generation(tags=["kv_cache"])
        self._asleep = False
        self.version = version

    def _sync(self, version: int, timer: Timer | None, recompute_kv: bool) -> None:
        targets = self._generation.get_model_update_receiver(recompute_kv=recompute_kv)
        # Engines of their own serve on while the windows arrive, where both copies of the weights fit.
        staged = not self._colocated and targets.staging_fits(sum(meta.nbytes for meta in self._policy.tensor_metas()))
        session = SyncSession(self._policy, targets, version=version, options=self._options, staged=staged)
        shards = targets.shards
        self._record.emit(SyncStarted(session.session_id, version, shards, self._options.transport))
        # Until it is done, targets may hold some of the new weights: after a failure every version must be sent anew.
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
        """Puts colocated generation to sleep, so that training has the device; nothing to do elsewhere."""
        if not self._colocated or self._asleep:
            return
        self._released_bytes = _most_released(self._generation.sleep())
        self._asleep = True

    def _must_offload(self) -> bool:
        # Training state may stay where it is when the engine's memory fits beside it: moving it costs seconds per step.
        if not self._cuda or not self._asleep:
            return False
        free = self._policy.get_free_memory_bytes()
        return free < _MEMORY_MARGIN * self._released_bytes

    def metrics(self) -> dict[str, float]:
        """Figures of the last refit, for the prefix `refit`."""
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
