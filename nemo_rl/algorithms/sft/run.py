"""Everything one SFT run consists of, as one named object, the counters that a checkpoint carries, and where it trains.

Holds references only; what is done with them is the driver's business. A scheduler that lends accelerators brings a
placement of its own. Invariants: `state.step` is the number of optimizer steps behind the policy's weights; nothing of
training touches an accelerator but inside `building`, and between `lend` and `step_done`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nemo_rl.algorithms.placement import OwnSlots, reserve_all
from nemo_rl.algorithms.run_state import RunState
from nemo_rl.config import SFTMasterConfig
from nemo_rl.data.loader import Batch
from nemo_rl.distributed.accelerators import Accelerator
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.timer import TimeoutChecker, Timer

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader


class SFTState(RunState):
    """Counters of a run, under the names that SFT checkpoints use."""

    def training_info(self) -> dict[str, object]:
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


class Placement(Protocol):
    """Gives an SFT run its accelerators."""

    def connect(self, config: SFTMasterConfig) -> Accelerator:
        """Joins or starts the Ray cluster; its kind of accelerator."""
        ...

    def disconnect(self) -> None:
        """Leaves the Ray cluster. Safe to call twice."""
        ...

    def reserve(self, config: SFTMasterConfig, accelerator: Accelerator) -> RayVirtualCluster:
        """The run's slots."""
        ...

    def building(self) -> AbstractContextManager[object]:
        """The span in which the policy is built."""
        ...

    def lend(self, run: SFTRun) -> None:
        """Weights and optimizer are on the accelerators on return, for the next step or a validation."""
        ...

    def step_done(self, run: SFTRun) -> None:
        """A step is complete, with its validation and its checkpoint: the accelerators may go to somebody else."""
        ...


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
    train_loader: StatefulDataLoader[Batch]
    val_loader: StatefulDataLoader[Batch] | None
    logger: Logger
    checkpointer: CheckpointManager
    state: SFTState
    timer: Timer
    timeout: TimeoutChecker
    progress: RunProgress
    cluster: RayVirtualCluster
    placement: Placement


class OwnPlacement(OwnSlots):
    """One run on slots of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._ready = False

    def reserve(self, config: SFTMasterConfig, accelerator: Accelerator) -> RayVirtualCluster:
        """All slots of the configuration."""
        return reserve_all(config.cluster, accelerator, "policy")

    def building(self) -> AbstractContextManager[object]:
        """They are the run's from the start."""
        return nullcontext()

    def lend(self, run: SFTRun) -> None:
        """They stay the run's."""
        if not self._ready:
            run.policy.prepare_for_training()
            self._ready = True

    def step_done(self, run: SFTRun) -> None:
        """They stay the run's."""
