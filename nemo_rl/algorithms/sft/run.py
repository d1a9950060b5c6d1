"""Everything one SFT run consists of, as one named object, and the counters that a checkpoint carries.

Holds references only; what is done with them is the driver's business. Invariant: `state.step` is the number of
optimizer steps behind the policy's weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nemo_rl.algorithms.run_state import RunState
from nemo_rl.algorithms.sft.placement import Placement
from nemo_rl.config import SFTMasterConfig
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.timer import TimeoutChecker, Timer


class SFTState(RunState):
    """Counters of a run, under the names that SFT checkpoints use."""

    def training_info(self) -> dict[str, Any]:
        """What a checkpoint carries."""
        return self.totals() | {"step": self.step_in_epoch, "epoch": self.epoch, **self.val_metrics}

    @classmethod
    def from_training_info(cls, info: dict[str, Any]) -> SFTState:
        """The counters of a checkpoint."""
        return cls.resumed(
            info,
            epoch=info["epoch"],
            step_in_epoch=info["step"],
            val_metrics={key: info[key] for key in ("val_loss",) if key in info},
        )


@dataclass
class SFTRun:
    """One run, set up and ready to be driven.

    Attributes:
        config: The merged configuration.
        policy: The trained policy.
        loss_fn: The loss.
        train_loader: Training conversations, batches of `policy.train_global_batch_size`.
        val_loader: Validation conversations, or None.
        logger: Metrics.
        checkpointer: Checkpoints.
        state: Counters.
        timer: Times of the current step.
        timeout: Watches `checkpointing.checkpoint_must_save_by`.
        progress: What a person watches.
        cluster: Slots, to be given back.
        placement: Who they come from.
    """

    config: SFTMasterConfig
    policy: Policy
    loss_fn: LossFunction
    train_loader: Any
    val_loader: Any
    logger: Logger
    checkpointer: CheckpointManager
    state: SFTState
    timer: Timer
    timeout: TimeoutChecker
    progress: RunProgress
    cluster: RayVirtualCluster
    placement: Placement
