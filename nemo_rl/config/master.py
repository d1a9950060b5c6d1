"""The whole configuration of a GRPO run and of an SFT run.

Both accept raw mappings as NeMo-RL's run scripts build them (`MasterConfig(**mapping)`): omitted keys get their defaults, also those that
follow other keys. Invariant: what validates here is complete; no reader needs a default of its own.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from nemo_rl.config.async_rl import AsyncRLConfig, OnPolicyDistillationConfig
from nemo_rl.config.checkpointing import CheckpointingConfig
from nemo_rl.config.cluster import ClusterConfig
from nemo_rl.config.data import DataConfig
from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.config.defaults import complete
from nemo_rl.config.env import EnvConfig
from nemo_rl.config.grpo import GRPOConfig, RewardPenaltiesConfig
from nemo_rl.config.logger import LoggerConfig
from nemo_rl.config.loss import ClippedPGLossConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.section import NotYet, Section
from nemo_rl.config.sft import SFTConfig
from nemo_rl.config.weight_sync import WeightSyncConfig


class CompleteConfig(Section):
    """A whole configuration, of whatever kind: omitted keys are filled in before it is checked."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, raw: Any) -> Any:
        return complete(raw, cls) if isinstance(raw, dict) else raw


class RootConfig(CompleteConfig):
    """What every kind of training run has at the top."""

    policy: PolicyConfig = Field(PolicyConfig(), description="The model, its training backend and its generation.")
    data: DataConfig = Field(DataConfig(), description="Datasets.")
    logger: LoggerConfig = Field(LoggerConfig(), description="Metrics and logs.")
    cluster: ClusterConfig = Field(ClusterConfig(), description="Accelerator slots.")
    checkpointing: CheckpointingConfig = Field(CheckpointingConfig(), description="Checkpoints.")


class MasterConfig(RootConfig):
    """A GRPO run."""

    loss_fn: ClippedPGLossConfig = Field(ClippedPGLossConfig(), description="The loss.")
    grpo: GRPOConfig = Field(GRPOConfig(), description="The training loop.")
    env: EnvConfig = Field(EnvConfig(), description="Environments, by name.")
    reward_penalties: Annotated[RewardPenaltiesConfig, NotYet("NeMo-Gym trajectories")] = Field(RewardPenaltiesConfig(), description="Penalties of NeMo-Gym.")
    data_plane: DataPlaneConfig = Field(DataPlaneConfig(), description="Where rollouts live.")
    weight_sync: WeightSyncConfig = Field(WeightSyncConfig(), description="How weights travel to generation.")
    on_policy_distillation: Annotated[OnPolicyDistillationConfig, NotYet("on-policy distillation")] = Field(
        OnPolicyDistillationConfig(), description="Learning from teachers."
    )
    async_rl: Annotated[AsyncRLConfig | None, NotYet("the streaming single controller")] = Field(None, description="The streaming single controller.")


class SFTMasterConfig(RootConfig):
    """An SFT run."""

    sft: SFTConfig = Field(SFTConfig(), description="The training loop.")
    checkpointing: CheckpointingConfig = Field(
        CheckpointingConfig(checkpoint_dir="results/sft", metric_name="val:val_loss", higher_is_better=False), description="Checkpoints."
    )
