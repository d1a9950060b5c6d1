"""Keys of `grpo.*`, `reward_penalties.*`, `loss_fn.*` and `sft.*`: when a run generates, trains, validates and stops,
how rewards become advantages, and what is minimised.

The formulas are in `nemo_rl.loss` and `nemo_rl.algorithms`; this file names their switches. Knows nothing of models or
devices. Invariant: every default equals the one of NeMo-RL's exemplar recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from nemo_rl.config.section import DefaultFrom, NotYet, Section


class RewardShapingConfig(Section):
    """`grpo.reward_shaping`: DAPO's penalty for responses that come close to the length limit
    (https://arxiv.org/abs/2503.14476, eq. 13).
    """

    enabled: bool = Field(False, description="Shape rewards by the length of a sample's first response.")
    overlong_buffer_length: NonNegativeInt = 128
    """Tokens before max_response_length over which the penalty grows."""
    overlong_buffer_penalty: float = Field(1.0, description="Penalty at max_response_length, in reward units.")
    max_response_length: Annotated[PositiveInt, DefaultFrom("${policy.max_total_sequence_length}")] = 512
    """Length, in tokens, of a sample's first response at which the penalty reaches overlong_buffer_penalty; later turns
    count nothing.
    """
    stop_properly_penalty_coef: Annotated[float, Field(ge=0, le=1)] | None = None
    """Factor on the rewards of truncated responses; when set, the overlong_* keys are not used. It brings negative
    rewards nearer to 0.
    """


class RewardScalingConfig(Section):
    """`grpo.reward_scaling`: clamp to the source range, then map linearly onto the target range."""

    enabled: bool = Field(False, description="Scale rewards before shaping.")
    source_min: float = Field(0.0, description="Lower end of the source range; smaller rewards are clamped to it.")
    source_max: float = Field(1.0, description="Upper end of the source range; larger rewards are clamped to it.")
    target_min: float = Field(0.0, description="What source_min becomes.")
    target_max: float = Field(1.0, description="What source_max becomes.")


class AdvEstimatorConfig(Section):
    """`grpo.adv_estimator`: how group rewards become per-token advantages."""

    name: Literal["grpo", "gdpo", "reinforce_plus_plus", "opd"] = "grpo"
    """Estimator; opd needs on_policy_distillation."""
    normalize_rewards: Annotated[bool, DefaultFrom("${grpo.normalize_rewards}")] = True
    """Divide by the group's standard deviation."""
    use_leave_one_out_baseline: Annotated[bool, DefaultFrom("${grpo.use_leave_one_out_baseline}")] = True
    """Baseline of a sample is the mean of the other samples of its group."""
    zero_deviation: Literal["unnormalized", "group"] = "unnormalized"
    """With normalize_rewards and use_leave_one_out_baseline, a sample whose fellows have equal rewards (a group's only
    success): its reward minus the baseline as it is, or divided by its whole group's deviation.
    """
    minus_baseline: bool = Field(True, description="reinforce_plus_plus: subtract the group mean first.")
    reward_weights: list[float] | dict[str, float] | None = None
    """gdpo: weight of each reward/<name> component, by name, or in the order of the sorted names; null weighs each 1.
    """


class AsyncGRPOConfig(Section):
    """`grpo.async_grpo`: rollouts run ahead of training into a replay buffer."""

    enabled: bool = Field(False, description="Train while later prompts generate.")
    max_trajectory_age_steps: NonNegativeInt = 1
    """How many steps older than the trained weights a trajectory may be."""
    max_generation_failures: NonNegativeInt = 0
    """Consecutive failed rollouts tolerated before the run stops."""
    in_flight_weight_updates: bool = Field(False, description="Refit without waiting for running requests.")
    recompute_kv_cache_after_weight_updates: bool = False
    """Drop the KV cache of running requests after a refit."""
    mixed_versions: Literal["importance", "mask", "drop"] = "importance"
    """What a sample made by several weight versions is worth: corrected by importance, its older tokens masked, or
    dropped.
    """


class GRPOConfig(Section):
    """`grpo.*`: the training loop."""

    num_prompts_per_step: PositiveInt = Field(32, description="Prompts per RL step.")
    num_generations_per_prompt: PositiveInt = Field(16, description="Samples per prompt: the group size.")
    allow_zero_advantages: bool = False
    """Run with one sample per prompt although the advantage estimator compares the samples of a prompt, so that every
    advantage is 0 and rewards teach nothing: for trying a setup. Wrapper files of a pool set it.
    """
    max_rollout_turns: PositiveInt = Field(1, description="Rounds of generation and environment per sample.")
    max_num_epochs: PositiveInt = 1
    """Passes over the training data; ignored with several dataloaders."""
    max_num_steps: PositiveInt = 1_000_000
    """RL steps; whichever of epochs and steps is reached first ends the run."""
    normalize_rewards: bool = Field(True, description="Divide advantages by the group's standard deviation.")
    use_leave_one_out_baseline: bool = Field(True, description="Leave a sample out of its own baseline and deviation.")
    val_period: int = Field(10, description="RL steps between validations; 0 or less switches them off.")
    val_start_at: int = -1
    """First RL step after which periodic validation runs; -1 means from the start."""
    val_at_start: bool = Field(False, description="Validate before the first step; logged as step 0.")
    val_at_end: bool = Field(False, description="Validate after the last step.")
    max_val_samples: PositiveInt | None = 256
    """Prompts per validation, null for all of them; floor(max_val_samples / val_batch_size) batches run, at least one.
    """
    val_batch_size: PositiveInt | None = 256
    """Prompts per validation batch; null takes all prompts of a validation at once."""
    val_num_generations_per_prompt: PositiveInt = 1
    """Samples per validation prompt; k > 1 adds the metric pass_k."""
    use_best_at_k: bool = False
    """Validation's accuracy, in whole and by task, takes the best of a prompt's val_num_generations_per_prompt samples
    instead of their mean, which is then logged as mean_accuracy.
    """
    stop_at_validation_metric: str | None = None
    """Validation metric that ends the run early, as <name> or val:<name>; null never does."""
    stop_at_validation_threshold: float | None = None
    """The run ends, after a checkpoint, once the metric is at least this."""
    overlong_filtering: bool = False
    """Take no loss from truncated samples; their rewards still count in the baseline (DAPO)."""
    should_mask_flagged_samples: bool = False
    """Take no loss from samples whose environment set mask_sample in their metadata, and leave their rewards out of
    baselines, deviations, dynamic sampling and the mean reward of a step; validation counts them.
    """
    invalid_tool_call_strategy: Literal["mask", "zero_reward"] | None = None
    """What becomes of samples whose environment set invalid_tool_call in their metadata: mask takes no loss from them
    and leaves their rewards out as should_mask_flagged_samples does, zero_reward makes their reward 0 before it is
    scaled and shaped, null leaves them as they are.
    """
    advantage_clip_low: float | None = None
    """Lower clamp on advantages after normalisation; null does not clamp."""
    advantage_clip_high: float | None = None
    """Upper clamp on advantages after normalisation; null does not clamp."""
    use_dynamic_sampling: bool = False
    """Drop prompt groups whose rewards do not differ and generate more (DAPO)."""
    dynamic_sampling_max_gen_batches: PositiveInt = 10
    """Generation batches per step before dynamic sampling gives up with an error."""
    batch_multiplier: float = Field(1, ge=1)
    """Loader batch is num_prompts_per_step times this; above 1 only with dynamic sampling."""
    reward_shaping: RewardShapingConfig = Field(RewardShapingConfig(), description="Length penalty.")
    reward_scaling: RewardScalingConfig = Field(RewardScalingConfig(), description="Linear map of rewards.")
    adv_estimator: AdvEstimatorConfig = Field(AdvEstimatorConfig(), description="Advantage estimator.")
    seq_logprob_error_threshold: float | None = None
    """Sequences whose mean exp|generation - training log-probability| exceeds this are masked; null masks none."""
    invalid_tool_call_advantage: Annotated[float | None, NotYet("flags of assistant messages come from NeMo-Gym")] = (
        None
    )
    """Advantage given to messages with an invalid tool call."""
    malformed_thinking_advantage: Annotated[float | None, NotYet("flags of assistant messages come from NeMo-Gym")] = (
        None
    )
    """Advantage given to messages with malformed thinking tags."""
    skip_reference_policy_logprobs_calculation: bool = False
    """Skip the reference pass; needs a KL penalty of 0, which implies it."""
    calculate_advantages_on_gpu: bool = False
    """Accepted from older recipes; no effect: advantages are one number per sample, computed on the host in
    microseconds.
    """
    deduplicate_multimodal_data: Annotated[bool, NotYet("vision-language and audio models")] = False
    """Share images between samples of a group."""
    debug_payload_metrics: bool = False
    """Accepted from older recipes; no effect: data_plane.observability.enabled counts the bytes that move between
    stages.
    """
    topk_logits_k: PositiveInt = 64
    """Tokens of the teacher kept per position: its most likely ones. Read with a teacher."""
    seed: int = Field(42, description="Seed of the run: data order, sampling, initial weights.")
    async_grpo: AsyncGRPOConfig = Field(AsyncGRPOConfig(), description="Asynchronous training.")
    rollout_record: str | None = None
    """Directory to which every step's rollouts are written; null writes none."""
    rollout_replay: str | None = None
    """Directory from which rollouts are read instead of generating; null generates."""


class PenaltyTokenIdsConfig(Section):
    """`reward_penalties.token_ids`."""

    unwanted: list[int] | None = Field(None, description="Token ids counted by penalize_unwanted_tokens.")
    think_open: list[int] | int | None = Field(None, description="Token id, or ids, that open a thinking block.")
    think_close: list[int] | int | None = Field(None, description="Token id, or ids, that close a thinking block.")


class RewardPenaltiesConfig(Section):
    """`reward_penalties.*`: penalties on NeMo-Gym trajectories."""

    penalize_duplicated_reasoning: bool = Field(False, description="Penalise reasoning repeated in the answer.")
    penalize_empty_final_answer: bool = Field(False, description="Penalise an empty final answer.")
    penalize_unwanted_tokens: bool = Field(False, description="Penalise the tokens of token_ids.unwanted.")
    penalize_malformed_think_tag: bool = Field(False, description="Penalise unbalanced thinking tags.")
    token_ids: PenaltyTokenIdsConfig = PenaltyTokenIdsConfig()
    """Token ids that the penalties look for."""


class TeacherKLConfig(Section):
    """The part of `loss_fn.*` that says how a policy is compared with a teacher."""

    kl_type: Literal["forward", "reverse", "mixed"] = "mixed"
    """Divergence from the teacher: KL(teacher || policy), KL(policy || teacher), or both."""
    mixed_kl_weight: float = Field(0.5, ge=0, le=1, description="mixed: weight of the forward divergence.")
    zero_outside_topk: bool = False
    """Take the policy's probabilities over the whole vocabulary, and the teacher's outside its top k as 0
    (log-probability -100); false re-normalises both over the top k.
    """


class ClippedPGLossConfig(TeacherKLConfig):
    """`loss_fn.*`."""

    loss_class: str | None = Field(None, alias="class")
    """Dotted path of a loss of your own, built with this section; null: the clipped loss."""
    reference_policy_kl_penalty: NonNegativeFloat = 0.01
    """Weight of the KL term to the reference policy; 0 loads no reference model."""
    teacher_kl_penalty: NonNegativeFloat = 0.0
    """Weight of the divergence from `teacher`, instead of the KL to the reference policy."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """KL estimator (http://joschu.net/blog/kl-approx.html)."""
    kl_input_clamp_value: float | None = 20.0
    """Clamp on the log-ratio before the estimator; null does not clamp."""
    kl_output_clamp_value: float | None = Field(10.0, description="Clamp on the KL of a token; null does not clamp.")
    ratio_clip_min: NonNegativeFloat = Field(0.2, description="The ratio is clipped below at 1 - this.")
    ratio_clip_max: NonNegativeFloat = Field(0.2, description="The ratio is clipped above at 1 + this.")
    ratio_clip_c: float | None = Field(None, gt=1)
    """Dual clip: bound -A*c for negative advantages; null is off, usual is 3."""
    use_on_policy_kl_approximation: bool = False
    """Weigh the KL by the ratio of the current to the generating policy."""
    use_kl_in_reward: bool = False
    """Subtract the KL from the reward instead of adding it to the loss (reinforce_plus_plus)."""
    use_importance_sampling_correction: bool = False
    """Weigh tokens by training over generation probability."""
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    """How importance weights are truncated."""
    truncated_importance_sampling_ratio: float | None = Field(None, gt=0)
    """Upper bound of the importance weight; null does not truncate."""
    truncated_importance_sampling_ratio_min: float | None = Field(None, ge=0)
    """Lower bound; mandatory for icepop and seq-mask-tis."""
    sequence_level_importance_ratios: bool = False
    """One ratio per sequence (GSPO); needs token_level_loss false."""
    token_level_loss: bool = True
    """Average over all tokens of the batch; false averages each sequence first."""
    force_on_policy_ratio: bool = Field(False, description="Take the ratio as 1; needs one optimizer step per RL step.")
    use_cispo: bool = False
    """CISPO: clipped, detached ratio times the log-probability (https://arxiv.org/abs/2506.13585)."""
    disable_ppo_ratio: bool = Field(False, description="REINFORCE: no ratio at all.")
    positive_example_nll_weight: NonNegativeFloat = 0.0
    """Weight of VAPO's negative log-likelihood on rewarded samples."""

    @property
    def reads_advantages(self) -> bool:
        """Whether samples are judged."""
        return True

    @property
    def compares_with_teacher(self) -> bool:
        """Whether the loss reads a teacher's distributions."""
        return self.teacher_kl_penalty > 0

    def problems(self) -> Iterator[str]:
        """What does not go together. A bound without a type is that of `tis`."""
        if self.use_cispo:
            for name in (
                "disable_ppo_ratio",
                "force_on_policy_ratio",
                "sequence_level_importance_ratios",
                "ratio_clip_c",
            ):
                if getattr(self, name):
                    yield f"loss_fn.use_cispo and loss_fn.{name} exclude each other"
            if not self.token_level_loss:
                yield "loss_fn.use_cispo needs loss_fn.token_level_loss: true"
        if self.sequence_level_importance_ratios and self.token_level_loss:
            yield (
                "loss_fn.sequence_level_importance_ratios needs loss_fn.token_level_loss: false (GSPO averages each "
                "sequence first)"
            )
        prefix = "loss_fn.truncated_importance_sampling"
        high, low = self.truncated_importance_sampling_ratio, self.truncated_importance_sampling_ratio_min
        kind = self.truncated_importance_sampling_type or (None if high is None else "tis")
        if kind is None:
            return
        if not self.use_importance_sampling_correction:
            yield f"{prefix}_type {kind!r} needs loss_fn.use_importance_sampling_correction: true"
        if high is None:
            yield f"{prefix}_type {kind!r} needs {prefix}_ratio, the upper bound"
        if kind in ("icepop", "seq-mask-tis") and low is None:
            yield f"{prefix}_type {kind!r} needs {prefix}_ratio_min, the lower bound"
        if high is not None and low is not None and low > high:
            yield f"{prefix}_ratio_min {low} is above {prefix}_ratio {high}"
        if kind == "seq-mask-tis" and self.sequence_level_importance_ratios:
            yield f"{prefix}_type 'seq-mask-tis' and loss_fn.sequence_level_importance_ratios exclude each other"


class SFTConfig(Section):
    """`sft.*`."""

    max_num_epochs: PositiveInt = Field(1, description="Passes over the training data.")
    max_num_steps: PositiveInt = 60
    """Optimizer steps; whichever of epochs and steps is reached first ends the run."""
    val_period: int = Field(10, description="Steps between validations; 0 or less switches them off.")
    val_batches: int = Field(8, description="Batches per validation; 0 or less takes all.")
    val_global_batch_size: PositiveInt = Field(32, description="Samples per validation batch.")
    val_micro_batch_size: PositiveInt = 1
    """Samples per validation microbatch and data-parallel rank."""
    val_at_start: bool = Field(True, description="Validate before the first step; logged as step 0.")
    val_at_end: bool = Field(False, description="Validate after the last step.")
    only_unmask_final: bool = False
    """Train on the last message of a conversation only, not on every answer in it."""
    seed: int = Field(42, description="Seed of the run: data order and initial weights.")
