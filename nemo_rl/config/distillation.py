"""Keys of `distillation.*`, `teacher.*` and `on_policy_distillation.*`: learning from other models on the policy's own
samples.

A distillation run is a run of the same loop as GRPO; its sections are those of GRPO with other defaults, without what
judges samples by rewards. Invariant: every default equals the one of NeMo-RL's exemplar recipe.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from nemo_rl.config.algorithms import ClippedPGLossConfig, GRPOConfig, TeacherKLConfig
from nemo_rl.config.generation import ColocatedConfig
from nemo_rl.config.policy import PolicyConfig, TokenizerConfig
from nemo_rl.config.section import DefaultFrom, NotYet, Section

_LOOP_KEYS = frozenset(
    {
        "num_prompts_per_step",
        "num_generations_per_prompt",
        "max_rollout_turns",
        "max_num_epochs",
        "max_num_steps",
        "val_period",
        "val_start_at",
        "val_at_start",
        "val_at_end",
        "max_val_samples",
        "val_batch_size",
        "val_num_generations_per_prompt",
        "use_best_at_k",
        "stop_at_validation_metric",
        "stop_at_validation_threshold",
        "overlong_filtering",
        "topk_logits_k",
        "seed",
        "async_grpo",
        "rollout_record",
        "rollout_replay",
    }
)


class DistillationConfig(GRPOConfig):
    """`distillation.*`: the training loop."""

    without: ClassVar[frozenset[str]] = frozenset(GRPOConfig.model_fields) - _LOOP_KEYS

    num_prompts_per_step: PositiveInt = Field(128, description="Prompts per step.")
    num_generations_per_prompt: PositiveInt = Field(1, description="Samples per prompt.")
    max_num_epochs: PositiveInt = 10
    """Passes over the training data; ignored with several dataloaders."""
    max_num_steps: PositiveInt = 1000
    """Steps; whichever of epochs and steps is reached first ends the run."""
    val_period: int = Field(20, description="Steps between validations; 0 or less switches them off.")
    max_val_samples: PositiveInt | None = 512
    """Prompts per validation, null for all of them; floor(max_val_samples / val_batch_size) batches run, at least one.
    """
    val_batch_size: PositiveInt | None = 64
    """Prompts per validation batch; null takes all prompts of a validation at once."""


class DistillationLossConfig(ClippedPGLossConfig):
    """`loss_fn.*` of distillation: the divergence from the teacher."""

    without: ClassVar[frozenset[str]] = frozenset(ClippedPGLossConfig.model_fields) - frozenset(
        TeacherKLConfig.model_fields
    )

    # Nothing reads log-probabilities of the policy before the step, nor of its start.
    force_on_policy_ratio: bool = True
    reference_policy_kl_penalty: NonNegativeFloat = 0.0

    @property
    def reads_advantages(self) -> bool:
        return False

    @property
    def compares_with_teacher(self) -> bool:
        return True


class TeacherTokenizerConfig(TokenizerConfig):
    """`teacher.tokenizer`."""

    name: Annotated[str, DefaultFrom("${teacher.model_name}")] = ""
    """Hugging Face id or path of the tokenizer; its vocabulary must be the policy's."""


class TeacherConfig(PolicyConfig):
    """`teacher.*`: the keys of `policy`, of a model that is frozen. Those of training and generation are accepted for
    NeMo-RL's recipes and have no effect: it only scores.
    """

    # Defaults that follow other keys of the policy follow the teacher's own.
    follows: ClassVar[dict[str, str]] = {"${policy.": "${teacher."}

    model_name: str = Field("", description="Hugging Face id or path of the model.")
    tokenizer: TeacherTokenizerConfig = Field(  # pyrefly: ignore[bad-override-mutable-attribute]
        TeacherTokenizerConfig(), description="The tokenizer."
    )
    precision: Annotated[Literal["float32", "float16", "bfloat16"], DefaultFrom("${..policy.precision}")] = "bfloat16"
    """Compute precision."""
    max_total_sequence_length: Annotated[PositiveInt, DefaultFrom("${..policy.max_total_sequence_length}")] = 512
    """Prompt and response together, in tokens, at most; no less than the policy's."""
    backend: Literal["policy", "vllm"] = "policy"
    """What computes it: policy, the training backend that its keys choose; or vllm, engines with the options of
    teacher.generation.vllm_cfg and vllm_kwargs.
    """
    job: str | None = None
    """The job of the pool whose engines score the samples, for several students; null: the run has a teacher of its
    own.
    """
    colocated: ColocatedConfig = ColocatedConfig()
    """Where it computes: in turn with the policy on the accelerators of training, or on its own."""


class TeacherSizesConfig(Section):
    """`on_policy_distillation.non_colocated_teachers.default_teacher_cfg`: how a teacher computes."""

    tensor_model_parallel_size: PositiveInt = Field(1, description="Ranks that share each layer.")
    pipeline_model_parallel_size: PositiveInt = Field(1, description="Pipeline stages; more than 1 takes Megatron.")
    context_parallel_size: PositiveInt = Field(1, description="Ranks that share each sequence.")
    expert_model_parallel_size: PositiveInt = Field(1, description="Ranks that share the experts.")
    moe_shared_expert_overlap: Annotated[bool, NotYet("shared experts beside the exchange of tokens")] = False
    """Compute shared experts while tokens travel."""
    num_nodes: NonNegativeInt = Field(0, description="Whole nodes, in a cluster of several.")
    gpus_per_node: PositiveInt | None = Field(None, description="Accelerators per node.")
    precision: Literal["float32", "float16", "bfloat16", "bf16", "fp16", "fp32"] | None = None
    """Compute precision; null: the policy's."""
    micro_batch_size: PositiveInt = Field(1, description="Samples per microbatch and data-parallel rank.")


class NonColocatedTeachersConfig(Section):
    """`on_policy_distillation.non_colocated_teachers`."""

    enabled: bool = False
    """Give every teacher accelerators of its own; false computes in turn with the policy."""
    default_teacher_cfg: TeacherSizesConfig = Field(TeacherSizesConfig(), description="How teachers compute.")
    teacher_overrides: dict[str, dict[str, object]] = Field(default_factory=dict)
    """Other values of these keys, by agent or data set."""


class OnPolicyDistillationConfig(Section):
    """`on_policy_distillation.*`: several teachers, whose log-probabilities of the sampled tokens become advantages."""

    enabled: bool = Field(False, description="Learn from teachers; needs grpo.adv_estimator.name: opd.")
    teacher_model_by_agent_name: dict[str, str] = Field(default_factory=dict)
    """The teacher's model, by agent or data set."""
    default_teacher_alias: str | None = None
    """The entry of teacher_model_by_agent_name for samples of all others; null: there is none."""
    deduplicate_shared_teacher_checkpoints: bool = True
    """Load a model that several entries name once."""
    backend: Literal["policy", "vllm"] = "policy"
    """What computes the teachers: policy, the policy's training backend; or vllm, engines with the options of
    policy.generation.vllm_cfg and vllm_kwargs.
    """
    job_by_agent_name: dict[str, str] = Field(default_factory=dict)
    """The job of the pool that serves the teacher, by agent or data set; needs backend vllm. Empty: the run has its
    own.
    """
    strict_agent_name_match: bool = False
    """Refuse data sets without a teacher of their own, though there is a default."""
    non_colocated_teachers: NonColocatedTeachersConfig = NonColocatedTeachersConfig()
    """Teachers on accelerators of their own."""
