"""Everything one SFT run consists of, as one named object, and the counters that a checkpoint carries.

Holds references only; what is done with them is the driver's business. Invariant: `state.step` is the number of optimizer
steps behind the policy's weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nemo_rl.config import SFTMasterConfig
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.timer import TimeoutChecker, Timer


@dataclass
class SFTState:
    """Counters of a run.

    Attributes:
        step: Optimizer steps (`total_steps` in checkpoints).
        epoch: Completed passes over the data.
        step_in_epoch: Steps since the epoch began (`step` in checkpoints).
        consumed_samples: Conversations trained on.
        total_valid_tokens: Tokens trained on.
        val_metrics: Metrics of the last validation.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    consumed_samples: int = 0
    total_valid_tokens: int = 0
    val_metrics: dict[str, float] = field(default_factory=dict)

    def training_info(self) -> dict[str, Any]:
        """The counters under the names that checkpoints use."""
        return {
            "total_steps": self.step,
            "step": self.step_in_epoch,
            "epoch": self.epoch,
            "consumed_samples": self.consumed_samples,
            "total_valid_tokens": self.total_valid_tokens,
            **self.val_metrics,
        }

    @classmethod
    def from_training_info(cls, info: dict[str, Any]) -> SFTState:
        """The counters of a checkpoint."""
        return cls(
            step=info["total_steps"],
            epoch=info["epoch"],
            step_in_epoch=info["step"],
            consumed_samples=info["consumed_samples"],
            total_valid_tokens=info["total_valid_tokens"],
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
