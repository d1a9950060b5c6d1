"""Rules of the algorithm: its loss, advantages and rewards, and how rollouts run beside training."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl.config.async_rl import AsyncRLConfig
from nemo_rl.config.master import MasterConfig
from nemo_rl.config.rules import caution, rule


@rule
def loss_switches_fit(config: MasterConfig) -> Iterator[str]:
    loss, prefix = config.loss_fn, "loss_fn.truncated_importance_sampling"
    high, low = loss.truncated_importance_sampling_ratio, loss.truncated_importance_sampling_ratio_min
    if loss.truncated_importance_sampling_type is None and (high is not None or low is not None):
        yield (
            f"{prefix}_ratio is {high} and {prefix}_ratio_min is {low}, but {prefix}_type is null, so nothing would be "
            "truncated; tis is the plain clamp"
        )
        loss = loss.model_copy(update={"truncated_importance_sampling_ratio": None})
    yield from loss.problems()


@rule
def on_policy_ratio_needs_one_optimizer_step(config: MasterConfig) -> Iterator[str]:
    samples = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
    if config.loss_fn.force_on_policy_ratio and not config.distils and config.policy.train_global_batch_size != samples:
        yield (
            "loss_fn.force_on_policy_ratio needs policy.train_global_batch_size "
            f"({config.policy.train_global_batch_size}) to be "
            f"grpo.num_prompts_per_step * grpo.num_generations_per_prompt ({samples}): one optimizer step per RL step"
        )


@rule
def kl_has_a_reference(config: MasterConfig) -> Iterator[str]:
    loss, grpo = config.loss_fn, config.grpo
    if grpo.skip_reference_policy_logprobs_calculation and loss.reference_policy_kl_penalty != 0:
        yield (
            "grpo.skip_reference_policy_logprobs_calculation needs loss_fn.reference_policy_kl_penalty: 0, "
            f"not {loss.reference_policy_kl_penalty}: without reference log-probabilities there is no KL"
        )


@rule
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
        yield (
            "loss_fn.use_kl_in_reward needs grpo.adv_estimator.name: reinforce_plus_plus, not "
            f"{grpo.adv_estimator.name}"
        )


@rule
def fp8_generation_is_corrected(config: MasterConfig) -> Iterator[str]:
    corrected = config.loss_fn.use_importance_sampling_correction or config.distils
    if config.policy.generation.vllm_cfg.precision == "fp8" and not corrected:
        yield "policy.generation.vllm_cfg.precision: fp8 needs loss_fn.use_importance_sampling_correction: true"


@rule
def groups_have_something_to_compare(config: MasterConfig) -> Iterator[str]:
    if not config.grpo.allow_zero_advantages:
        yield from (
            f"{why}: every advantage would be 0; draw at least 2 samples, or take grpo.adv_estimator.name: "
            "reinforce_plus_plus with minus_baseline: false"
            for why in _nothing_to_compare(config)
        )


@caution
def advantages_may_all_be_zero(config: MasterConfig) -> Iterator[str]:
    if config.grpo.allow_zero_advantages:
        yield from (
            f"{why}: every advantage is 0, and the rewards teach nothing" for why in _nothing_to_compare(config)
        )


def _nothing_to_compare(config: MasterConfig) -> Iterator[str]:
    grpo, loss = config.grpo, config.loss_fn
    estimator = grpo.adv_estimator
    compares = estimator.name in ("grpo", "gdpo") or (
        estimator.name == "reinforce_plus_plus" and estimator.minus_baseline
    )
    # A loss of the user's, and VAPO's term, may learn without advantages.
    learns_otherwise = (
        loss.loss_class is not None
        or loss.positive_example_nll_weight > 0
        or loss.teacher_kl_penalty > 0
        or config.distils
    )
    if grpo.num_generations_per_prompt == 1 and compares and not learns_otherwise:
        switch = " with minus_baseline: true" if estimator.name == "reinforce_plus_plus" else ""
        yield (
            f"grpo.num_generations_per_prompt is 1, and grpo.adv_estimator.name {estimator.name}{switch} compares the "
            "samples of a prompt with each other"
        )


@rule
def some_samples_are_trained(config: MasterConfig) -> Iterator[str]:
    grpo, threshold = config.grpo, config.grpo.seq_logprob_error_threshold
    if threshold is not None and threshold < 1:
        yield (
            f"grpo.seq_logprob_error_threshold is {threshold:g}, and a sequence's mean exp|difference| is at least 1: "
            "every sample would be masked; 1.5 or 2 is usual, null masks none"
        )
    scaling = grpo.reward_scaling
    if scaling.enabled and scaling.target_min == scaling.target_max:
        yield (
            f"grpo.reward_scaling.target_min and target_max are both {scaling.target_min:g}: every reward would be "
            "the same, with nothing to learn from"
        )


@rule
def ranges_are_ranges(config: MasterConfig) -> Iterator[str]:
    grpo = config.grpo
    low, high = grpo.advantage_clip_low, grpo.advantage_clip_high
    if low is not None and high is not None and low > high:
        yield f"grpo.advantage_clip_low {low} is above grpo.advantage_clip_high {high}"
    scaling, shaping = grpo.reward_scaling, grpo.reward_shaping
    if scaling.enabled and scaling.source_min >= scaling.source_max:
        yield f"grpo.reward_scaling.source_min {scaling.source_min} is not below source_max {scaling.source_max}"
    if (
        shaping.enabled
        and shaping.stop_properly_penalty_coef is None
        and not 0 < shaping.overlong_buffer_length <= shaping.max_response_length
    ):
        size = "empty" if shaping.overlong_buffer_length == 0 else "longer than"
        yield (
            f"grpo.reward_shaping.overlong_buffer_length {shaping.overlong_buffer_length} is {size}; it lies in 1 .. "
            f"grpo.reward_shaping.max_response_length {shaping.max_response_length}"
        )


@rule
def async_training_is_possible(config: MasterConfig) -> Iterator[str]:
    if not config.grpo.async_grpo.enabled:
        return
    # A divergence from the teacher needs no correction: it is one over whole distributions, wherever samples come from.
    if not config.loss_fn.use_importance_sampling_correction and not config.distils:
        yield (
            "grpo.async_grpo.enabled needs loss_fn.use_importance_sampling_correction: true, for samples "
            "of older weights"
        )
    if config.policy.generation.colocated.enabled and config.policy.generation.backend == "vllm":
        yield (
            "grpo.async_grpo.enabled needs policy.generation.colocated.enabled: false, for generation goes "
            "on while training runs"
        )
    if config.data.use_multiple_dataloader:
        yield "grpo.async_grpo.enabled does not take data.use_multiple_dataloader"
    if config.grpo.async_grpo.max_trajectory_age_steps < 1:
        yield (
            "grpo.async_grpo.max_trajectory_age_steps is 0: training would wait for rollouts that may only begin once "
            "it has ended; the smallest that works is 1 (grpo.async_grpo.enabled: false takes turns)"
        )
    for key in ("rollout_record", "rollout_replay"):
        if config.grpo[key] is not None:
            yield (
                f"grpo.async_grpo.enabled does not take grpo.{key}, which repeats runs step by step; "
                "record a synchronous run"
            )


@rule
def streaming_is_possible(config: MasterConfig) -> Iterator[str]:
    stream = config.async_rl
    if stream is None:
        return
    if config.grpo.async_grpo.enabled:
        yield "async_rl needs grpo.async_grpo.enabled: false; both say how rollouts run beside training"
    if config.policy.generation.colocated.enabled and config.policy.generation.backend == "vllm":
        yield (
            "async_rl needs policy.generation.colocated.enabled: false, for slow groups generate while others are "
            "trained on"
        )
    if config.data.use_multiple_dataloader:
        yield "async_rl does not take data.use_multiple_dataloader"
    prompts, samples = config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt
    if prompts * samples != config.policy.train_global_batch_size:
        yield (
            "async_rl makes one optimizer step of a step: policy.train_global_batch_size must be num_prompts_per_step "
            f"* num_generations_per_prompt = {prompts * samples}, not {config.policy.train_global_batch_size}"
        )
    key = (
        "min_groups_for_streaming_train"
        if stream.min_prompt_groups_per_batch is None
        else "min_prompt_groups_per_batch"
    )
    if stream[key] > prompts:
        yield f"async_rl.{key}={stream[key]} is more than grpo.num_prompts_per_step={prompts}; lower it to at most that"
    if stream.target_prompt_groups_per_step not in (None, prompts):
        yield (
            f"async_rl.target_prompt_groups_per_step={stream.target_prompt_groups_per_step} must equal "
            f"grpo.num_prompts_per_step={prompts}"
        )
    yield from _sampler_fits(config, stream)
    failure = stream.rollout_failure
    if failure.max_skipped_prompts and not failure.max_consecutive_dropped_prompts:
        yield (
            f"async_rl.rollout_failure.max_skipped_prompts={failure.max_skipped_prompts} allows dropped prompts, and "
            "max_consecutive_dropped_prompts=0 none: set that to at least 1, too"
        )
    if failure.max_backoff_s < failure.backoff_base_s:
        yield (
            f"async_rl.rollout_failure.max_backoff_s={failure.max_backoff_s:g} must be at least "
            f"backoff_base_s={failure.backoff_base_s:g}"
        )
    if stream.stall_watchdog.stall_timeout_s <= stream.stall_watchdog.interval_s:
        yield (
            f"async_rl.stall_watchdog.stall_timeout_s={stream.stall_watchdog.stall_timeout_s:g} must be more than "
            f"interval_s={stream.stall_watchdog.interval_s:g}"
        )
    for key in ("rollout_record", "rollout_replay"):
        if config.grpo[key] is not None:
            yield f"async_rl does not take grpo.{key}; record a synchronous run"


def _sampler_fits(config: MasterConfig, stream: AsyncRLConfig) -> Iterator[str]:
    sampler, prompts = stream.sampler, config.grpo.num_prompts_per_step
    if sampler.name == "custom" and ":" not in (sampler.target or ""):
        yield f"async_rl.sampler.target={sampler.target!r}: a custom sampler is named by module:Class"
    if sampler.name != "custom" and sampler.model_extra:
        yield f"async_rl.sampler: only a custom sampler takes further keys, not {sorted(sampler.model_extra)}"
    in_order = sampler.name == "in_order"
    key = "max_lookahead_versions" if in_order else "max_staleness_versions"
    ahead = sampler.max_lookahead_versions if in_order else sampler.max_staleness_versions
    steps = 1 if sampler.name in ("windowed", "custom") else ahead + 1
    if stream.max_buffered_rollouts < prompts * steps:
        yield (
            f"async_rl.max_buffered_rollouts={stream.max_buffered_rollouts} holds fewer groups than {steps} "
            f"step{'s' * (steps > 1)} of {prompts}: set it to at least {prompts * steps}"
            + (f", or lower async_rl.sampler.{key}" if steps > 1 else "")
        )
    corrected = config.loss_fn.use_importance_sampling_correction or config.distils
    if (ahead > 0 or sampler.name == "ready_first") and sampler.name != "custom" and not corrected:
        yield (
            f"async_rl.sampler.name={sampler.name} with {key}={ahead} trains on samples of older weights and needs "
            "loss_fn.use_importance_sampling_correction: true; in_order with max_lookahead_versions=0 is strictly "
            "on-policy"
        )
    if sampler.name == "ready_first" and config.loss_fn.force_on_policy_ratio and not config.distils:
        yield "async_rl.sampler.name=ready_first needs loss_fn.force_on_policy_ratio: false; its samples may be old"


@rule
def draft_models_need_megatron(config: MasterConfig) -> Iterator[str]:
    if config.policy.draft.enabled and not config.policy.megatron_cfg.enabled:
        yield "policy.draft.enabled needs policy.megatron_cfg.enabled: true"


@rule
def rollouts_are_recorded_or_replayed(config: MasterConfig) -> Iterator[str]:
    if config.grpo.rollout_record is not None and config.grpo.rollout_record == config.grpo.rollout_replay:
        yield (
            "grpo.rollout_record and grpo.rollout_replay are the same directory, "
            f"{config.grpo.rollout_record}; a replay would write over what it reads"
        )


@rule
def loader_batch_is_whole(config: MasterConfig) -> Iterator[str]:
    grpo = config.grpo
    if grpo.batch_multiplier > 1 and not grpo.use_dynamic_sampling:
        yield f"grpo.batch_multiplier is {grpo.batch_multiplier}; above 1 it needs grpo.use_dynamic_sampling: true"
    if not float(grpo.num_prompts_per_step * grpo.batch_multiplier).is_integer():
        yield (
            "grpo.num_prompts_per_step * grpo.batch_multiplier is "
            f"{grpo.num_prompts_per_step * grpo.batch_multiplier}, which is no whole number of prompts"
        )


@caution
def groups_are_kept_whole(config: MasterConfig) -> Iterator[str]:
    grpo = config.grpo
    if grpo.use_dynamic_sampling and grpo.adv_estimator.use_leave_one_out_baseline:
        yield (
            "grpo.use_dynamic_sampling with use_leave_one_out_baseline: true keeps or drops whole groups, by the "
            "deviation of all of their rewards. DAPO's recipe sets "
            "grpo.use_leave_one_out_baseline: false"
        )


@caution
def a_deviation_of_zero(config: MasterConfig) -> Iterator[str]:
    estimator, key = config.grpo.adv_estimator, "grpo.adv_estimator.zero_deviation"
    groups = estimator.name in ("grpo", "gdpo") and config.grpo.num_generations_per_prompt > 1
    if not (groups and estimator.normalize_rewards and estimator.use_leave_one_out_baseline):
        return
    if estimator.zero_deviation == "unnormalized":
        yield (
            f"{key}: unnormalized: the only success of a group, whose fellows' rewards do not differ, has its reward "
            "minus the baseline as its advantage (1 where the others earned 0), as in NeMo-RL; `group` divides by the "
            "deviation of the whole group"
        )
    else:
        yield (
            f"{key}: group: the only success of a group, whose fellows' rewards do not differ, is divided by the "
            "deviation of the whole group; `unnormalized` leaves it as NeMo-RL does"
        )


@caution
def metrics_of_another_formula(config: MasterConfig) -> Iterator[str]:
    loss = config.loss_fn
    if loss.disable_ppo_ratio:
        yield (
            "loss_fn.disable_ppo_ratio: probs_ratio and its companions are ratios of probabilities all the same; "
            "NeMo-RL logs log-probabilities under these names"
        )
    if loss.sequence_level_importance_ratios:
        yield (
            "loss_fn.sequence_level_importance_ratios: sampling_importance_ratio is the mean over sequences of their "
            "importance weights; NeMo-RL logs another number under this name"
        )


@caution
def shaped_rewards_say_what_was_meant(config: MasterConfig) -> Iterator[str]:
    grpo, key = config.grpo, "grpo.reward_shaping"
    shaping, scaling = grpo.reward_shaping, grpo.reward_scaling
    if not shaping.enabled:
        return
    factor = shaping.stop_properly_penalty_coef
    if factor is None:
        if grpo.max_rollout_turns > 1:
            yield (
                f"{key}: the length penalty counts the first response of a sample, as in NeMo-RL, and none of its "
                "later turns"
            )
        return
    lowest = min(scaling.target_min, scaling.target_max)
    if scaling.enabled and lowest < 0 and factor < 1:
        yield (
            f"{key}.stop_properly_penalty_coef is {factor:g} and grpo.reward_scaling makes a wrong answer {lowest:g}: "
            f"a truncated one earns {factor * lowest + 0.0:g}, which is more than a wrong one that ended; with "
            "rewards from 0 on (grpo.reward_scaling.target_min: 0) truncation only costs"
        )
    elif not scaling.enabled and factor < 1:
        yield (
            f"{key}.stop_properly_penalty_coef is {factor:g}: where an environment gives negative rewards, a truncated "
            "sample earns more than one that ended with the same"
        )
