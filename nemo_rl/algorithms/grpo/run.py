"""Everything one GRPO run consists of, as one named object, and the counters that a checkpoint carries.

Holds references only; what is done with them is the loop's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.algorithms.grpo.control_plane import ControlPlane
from nemo_rl.algorithms.grpo.placement import Placement
from nemo_rl.algorithms.grpo.rewards import RewardWatch
from nemo_rl.algorithms.run_checkpoint import RunState
from nemo_rl.algorithms.training_loop import TrainingRun
from nemo_rl.config import MasterConfig
from nemo_rl.data.loader import Loader
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.environments.registry import Actors
from nemo_rl.experience.rollout_source import RolloutSource
from nemo_rl.experience.rollouts import RolloutWatch
from nemo_rl.experience.sample_log import SampleFiles
from nemo_rl.experience.store import ExperienceStore
from nemo_rl.models.generation.vllm import VllmGeneration
from nemo_rl.utils.backlog import Backlog
from nemo_rl.utils.record import Record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class GRPOState(RunState):
    """Counters of a run, under the names that GRPO checkpoints use."""

    def training_info(self) -> dict[str, object]:
        """What a checkpoint carries."""
        reward = {"val_reward": self.val_metrics["accuracy"]} if "accuracy" in self.val_metrics else {}
        return self.totals() | {
            "current_step": self.step_in_epoch,
            "current_epoch": self.epoch,
            "val_metrics": self.val_metrics,
            **reward,
        }

    @classmethod
    def from_training_info(cls, info: dict[str, Any]) -> GRPOState:
        """The counters of a checkpoint."""
        return cls.resumed(
            info,
            epoch=info["current_epoch"],
            step_in_epoch=info["current_step"],
            val_metrics=info.get("val_metrics", {}),
        )


@dataclass
class GRPORun(TrainingRun[MasterConfig]):
    """A GRPO run.

    Attributes:
        tokenizer: The policy's.
        generation: The engines; None when rollouts are replayed and nothing validates.
        control: Owns the accelerators: refits, lends, and says what is saved when.
        rollouts: Where training rollouts come from.
        validation_rollouts: Where validation rollouts come from.
        store: Where a step's columns live.
        train_loader: Training prompts.
        record: Run record.
        total_steps: Of the whole run, as far as they can be known before it.
        environments: Environment actors by name, to be ended with the run.
        placement: Gave the run its accelerators.
        clusters: Slots, to be given back.
        device_count: Slots of the run, and of training and generation.
        resumed_from: Checkpoint that the run goes on from.
        reward_watch: Says when steps go by that teach nothing.
        validation_watch: Says when many samples of a validation are cut short.
        sample_files: How files of samples are written, which a run goes on without.
        reports: Writes what is said of a step while the next one generates.
        env_of_validation_task: Environment name per validation task.
    """

    tokenizer: PreTrainedTokenizerBase
    generation: VllmGeneration | None
    control: ControlPlane
    rollouts: RolloutSource
    validation_rollouts: RolloutSource | None
    store: ExperienceStore
    train_loader: Loader
    record: Record
    total_steps: int
    environments: Actors
    placement: Placement
    clusters: list[RayVirtualCluster]
    device_count: DeviceCount
    resumed_from: Path | None = None
    reward_watch: RewardWatch = field(default_factory=RewardWatch)
    validation_watch: RolloutWatch = field(default_factory=RolloutWatch)
    sample_files: SampleFiles = field(default_factory=SampleFiles)
    reports: Backlog = field(default_factory=lambda: Backlog("step-report"))
    env_of_validation_task: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceCount:
    """Accelerator slots of the run."""

    total: int
    training: int
    generation: int
