"""The whole configuration of a GRPO run, one of many adapters, a distillation run and an SFT run.

All accept raw mappings as NeMo-RL's run scripts build them (`MasterConfig(**mapping)`): omitted keys get their
defaults, also those that follow other keys. Invariant: what validates here is complete; no reader needs a default of
its own.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, ValidationInfo, model_validator

from nemo_rl.config.algorithms import ClippedPGLossConfig, GRPOConfig, RewardPenaltiesConfig, SFTConfig
from nemo_rl.config.async_rl import AsyncRLConfig
from nemo_rl.config.data import DataConfig, DatasetDefaults
from nemo_rl.config.defaults import complete
from nemo_rl.config.distillation import (
    DistillationConfig,
    DistillationLossConfig,
    OnPolicyDistillationConfig,
    TeacherConfig,
)
from nemo_rl.config.env import EnvConfig
from nemo_rl.config.infrastructure import (
    CheckpointingConfig,
    ClusterConfig,
    DataPlaneConfig,
    LoggerConfig,
    WeightSyncConfig,
)
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.section import NotYet, Section

# Validation context of mappings that hold every key already.
COMPLETE = {"complete": True}


class CompleteConfig(Section):
    """A whole configuration, of whatever kind: omitted keys are filled in before it is checked."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, raw: object, info: ValidationInfo) -> object:
        return complete(raw, cls) if isinstance(raw, dict) and info.context != COMPLETE else raw


class RootConfig(CompleteConfig):
    """What every kind of training run has at the top."""

    policy: PolicyConfig = Field(PolicyConfig(), description="The model, its training backend and its generation.")
    data: DataConfig = Field(DataConfig(), description="Datasets.")
    logger: LoggerConfig = Field(LoggerConfig(), description="Metrics and logs.")
    cluster: ClusterConfig = Field(ClusterConfig(), description="Accelerator slots.")
    checkpointing: CheckpointingConfig = Field(CheckpointingConfig(), description="Checkpoints.")

    @model_validator(mode="after")
    def _prompts_fit_into_sequences(self) -> Self:
        longest, limit = self.policy.max_total_sequence_length, self.data.max_input_seq_length
        if limit is None or limit > longest:
            self.data.max_input_seq_length = longest
        return self

    @model_validator(mode="after")
    def _rows_divide_among_ranks(self) -> Self:
        cfg, multiple = self.policy.dtensor_cfg, self.policy.make_sequence_length_divisible_by
        needed = cfg.tensor_parallel_size if cfg.sequence_parallel else 1
        needed *= 2 * cfg.context_parallel_size if cfg.context_parallel_size > 1 else 1
        if cfg.enabled and multiple % needed:
            self.policy.make_sequence_length_divisible_by = math.lcm(multiple, needed)
        return self


class MasterConfig(RootConfig):
    """A GRPO run."""

    loss_fn: ClippedPGLossConfig = Field(ClippedPGLossConfig(), description="The loss.")
    grpo: GRPOConfig = Field(GRPOConfig(), description="The training loop.")
    env: EnvConfig = Field(EnvConfig(), description="Environments, by name.")
    reward_penalties: Annotated[RewardPenaltiesConfig, NotYet("NeMo-Gym trajectories")] = RewardPenaltiesConfig()
    """Penalties of NeMo-Gym."""
    data_plane: DataPlaneConfig = Field(DataPlaneConfig(), description="Where rollouts live.")
    weight_sync: WeightSyncConfig = Field(WeightSyncConfig(), description="How weights travel to generation.")
    teacher: TeacherConfig | None = None
    """A frozen model whose distributions the policy is compared with."""
    on_policy_distillation: OnPolicyDistillationConfig = OnPolicyDistillationConfig()
    """Learning from several teachers by advantages."""
    async_rl: AsyncRLConfig | None = None
    """Training on prompt groups as they finish (the single controller)."""

    @classmethod
    def section(cls) -> Literal["grpo", "distillation"]:
        """Name of the training loop's section."""
        return "grpo"

    @property
    def distils(self) -> bool:
        """Whether the divergence from the teacher is all that is learned from."""
        return not self.loss_fn.reads_advantages

    def max_staleness(self) -> int | None:
        """How many versions older than the weights that train on them the tokens of a group may be; None for any
        number.
        """
        if self.async_rl is not None:
            return self.async_rl.sampler.max_staleness()
        ahead = self.grpo.async_grpo
        return ahead.max_trajectory_age_steps if ahead.enabled else 0


class DistillationMasterConfig(MasterConfig):
    """A distillation run: a run of GRPO's loop whose loss is the divergence from a teacher."""

    follows: ClassVar[dict[str, str]] = {"${grpo.": "${distillation."}

    # Narrower sections than the parent's; nothing puts a section of another kind in their place.
    grpo: DistillationConfig = Field(  # pyrefly: ignore[bad-override-mutable-attribute]
        DistillationConfig(), alias="distillation", description="The training loop."
    )
    loss_fn: DistillationLossConfig = Field(  # pyrefly: ignore[bad-override-mutable-attribute]
        DistillationLossConfig(), description="The loss."
    )

    @classmethod
    def section(cls) -> Literal["grpo", "distillation"]:
        return "distillation"


class SFTMasterConfig(RootConfig):
    """An SFT run."""

    sft: SFTConfig = Field(SFTConfig(), description="The training loop.")
    data: DataConfig = Field(
        # Conversations are trained as they are. GRPO's defaults ask for the solution of a problem.
        DataConfig(default=DatasetDefaults(prompt_file=None, processor="sft_processor")),
        description="Datasets.",
    )
    checkpointing: CheckpointingConfig = CheckpointingConfig(
        checkpoint_dir="results/sft", metric_name="val:val_loss", higher_is_better=False
    )
    """Checkpoints."""


class MultiLoraConfig(Section):
    """`multi_lora`: adapters that share one base model."""

    slots: PositiveInt = Field(4, description="Adapters that the job holds at once; each takes memory when it joins.")
    weight: float = Field(1.0, gt=0)
    """Share of an adapter in training passes, relative to the others; set in its own file."""
    pass_tokens: PositiveInt | None = None
    """Tokens of a training pass, at most: adapters whose steps do not fit wait for a later pass; one step alone may be
    larger. null has no limit.
    """
    pass_share: float = Field(0.5, gt=0, le=1)
    """Share of the adapters in a training pass, at most, rounded up; the others generate meanwhile. 1 has all share one
    pass.
    """
    wait_s: float = Field(0.5, ge=0)
    """Seconds that a ready adapter waits for others to share its training pass."""
    http_port: int = Field(0, ge=0, le=65535)
    """Port of add, remove and list on this machine's loopback; 0 takes a free one."""


class MultiLoraMasterConfig(MasterConfig):
    """A run of many adapters on one base model."""

    multi_lora: MultiLoraConfig = Field(MultiLoraConfig(), description="Adapters that share one base model.")
