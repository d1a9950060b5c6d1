"""Rules between the switches of the loss, the advantages and the rewards.

One function per reason. Knows which combinations have no meaning, not the formulas themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nemo_rl.config.master import MasterConfig


def cispo_stands_alone(config: MasterConfig) -> Iterator[str]:
    loss = config.loss_fn
    if not loss.use_cispo:
        return
    others = {
        "disable_ppo_ratio": loss.disable_ppo_ratio,
        "force_on_policy_ratio": loss.force_on_policy_ratio,
        "sequence_level_importance_ratios": loss.sequence_level_importance_ratios,
        "ratio_clip_c": loss.ratio_clip_c is not None,
    }
    for name in (name for name, used in others.items() if used):
        yield f"loss_fn.use_cispo and loss_fn.{name} exclude each other"
    if not loss.token_level_loss:
        yield "loss_fn.use_cispo needs loss_fn.token_level_loss: true"


def sequence_ratios_need_a_sequence_loss(config: MasterConfig) -> Iterator[str]:
    if config.loss_fn.sequence_level_importance_ratios and config.loss_fn.token_level_loss:
        yield "loss_fn.sequence_level_importance_ratios needs loss_fn.token_level_loss: false (GSPO averages each sequence first)"


def truncation_has_its_bounds(config: MasterConfig) -> Iterator[str]:
    loss, prefix = config.loss_fn, "loss_fn.truncated_importance_sampling"
    kind, high, low = loss.truncated_importance_sampling_type, loss.truncated_importance_sampling_ratio, loss.truncated_importance_sampling_ratio_min
    if kind is None:
        if high is not None or low is not None:
            yield f"{prefix}_ratio is {high} and {prefix}_ratio_min is {low}, but {prefix}_type is null, so nothing would be truncated; tis is the plain clamp"
        return
    if not loss.use_importance_sampling_correction:
        yield f"{prefix}_type {kind!r} needs loss_fn.use_importance_sampling_correction: true"
    if high is None:
        yield f"{prefix}_type {kind!r} needs {prefix}_ratio, the upper bound"
    if kind in ("icepop", "seq-mask-tis") and low is None:
        yield f"{prefix}_type {kind!r} needs {prefix}_ratio_min, the lower bound"
    if high is not None and low is not None and low > high:
        yield f"{prefix}_ratio_min {low} is above {prefix}_ratio {high}"
    if kind == "seq-mask-tis" and loss.sequence_level_importance_ratios:
        yield f"{prefix}_type 'seq-mask-tis' and loss_fn.sequence_level_importance_ratios exclude each other"


def on_policy_ratio_needs_one_optimizer_step(config: MasterConfig) -> Iterator[str]:
    samples = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
    if config.loss_fn.force_on_policy_ratio and config.policy.train_global_batch_size != samples:
        yield (
            f"loss_fn.force_on_policy_ratio needs policy.train_global_batch_size ({config.policy.train_global_batch_size}) to be "
            f"grpo.num_prompts_per_step * grpo.num_generations_per_prompt ({samples}): one optimizer step per RL step"
        )


def kl_has_a_reference(config: MasterConfig) -> Iterator[str]:
    loss, grpo = config.loss_fn, config.grpo
    if grpo.skip_reference_policy_logprobs_calculation and loss.reference_policy_kl_penalty != 0:
        yield (
            "grpo.skip_reference_policy_logprobs_calculation needs loss_fn.reference_policy_kl_penalty: 0, "
            f"not {loss.reference_policy_kl_penalty}: without reference log-probabilities there is no KL"
        )


def kl_in_reward_has_previous_logprobs(config: MasterConfig) -> Iterator[str]:
    loss, grpo = config.loss_fn, config.grpo
    if not loss.use_kl_in_reward:
        return
    skipped = loss.force_on_policy_ratio and grpo.seq_logprob_error_threshold is None
    if loss.reference_policy_kl_penalty != 0 and skipped:
        yield (
            "loss_fn.use_kl_in_reward needs previous log-probabilities, which loss_fn.force_on_policy_ratio skips; "
            "set grpo.seq_logprob_error_threshold, or switch one of them off"
        )
    if grpo.adv_estimator.name != "reinforce_plus_plus":
        yield f"loss_fn.use_kl_in_reward needs grpo.adv_estimator.name: reinforce_plus_plus, not {grpo.adv_estimator.name}"


def fp8_generation_is_corrected(config: MasterConfig) -> Iterator[str]:
    if config.policy.generation.vllm_cfg.precision == "fp8" and not config.loss_fn.use_importance_sampling_correction:
        yield "policy.generation.vllm_cfg.precision: fp8 needs loss_fn.use_importance_sampling_correction: true"


def distillation_has_teachers(config: MasterConfig) -> Iterator[str]:
    if config.grpo.adv_estimator.name == "opd" and not config.on_policy_distillation.enabled:
        yield "grpo.adv_estimator.name: opd needs teachers: on_policy_distillation.enabled: true, which is not built yet"


def ranges_are_ranges(config: MasterConfig) -> Iterator[str]:
    grpo = config.grpo
    low, high = grpo.advantage_clip_low, grpo.advantage_clip_high
    if low is not None and high is not None and low > high:
        yield f"grpo.advantage_clip_low {low} is above grpo.advantage_clip_high {high}"
    scaling, shaping = grpo.reward_scaling, grpo.reward_shaping
    if scaling.enabled and scaling.source_min >= scaling.source_max:
        yield f"grpo.reward_scaling.source_min {scaling.source_min} is not below source_max {scaling.source_max}"
    if shaping.enabled and shaping.stop_properly_penalty_coef is None and shaping.overlong_buffer_length > shaping.max_response_length:
        yield (
            f"grpo.reward_shaping.overlong_buffer_length {shaping.overlong_buffer_length} is longer than "
            f"grpo.reward_shaping.max_response_length {shaping.max_response_length}"
        )


LOSS_RULES: tuple[Callable[[MasterConfig], Iterator[str]], ...] = (
    cispo_stands_alone,
    sequence_ratios_need_a_sequence_loss,
    truncation_has_its_bounds,
    on_policy_ratio_needs_one_optimizer_step,
    kl_has_a_reference,
    kl_in_reward_has_previous_logprobs,
    fp8_generation_is_corrected,
    distillation_has_teachers,
    ranges_are_ranges,
)
