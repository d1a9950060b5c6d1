"""Rules of training: what must divide what, what must fit, which switches exclude each other, and what the backends ask
for.

Sizes are in samples, lengths in tokens. One function per reason; each names its dotted keys, their values and a way
out. Assumes the parallel sizes to be sound, which `rules.py` checks, and knows no formula; what depends on the model is
found out from the model. Invariant: no rule depends on another's result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from nemo_rl.config.errors import Problem
from nemo_rl.config.master import MasterConfig, RootConfig, SFTMasterConfig
from nemo_rl.config.placement import data_parallel_size, training_world_size
from nemo_rl.config.section import not_built

_KERNELS = "policy.dtensor_cfg.automodel_kwargs"


def global_batch_divides(config: RootConfig) -> Iterator[str]:
    policy, ranks = config.policy, data_parallel_size(config)
    size = policy.train_global_batch_size
    if size % ranks:
        yield f"policy.train_global_batch_size is {size}, which the {ranks} data-parallel ranks do not divide"
    elif _fixed_microbatches(config) and (size // ranks) % policy.train_micro_batch_size:
        yield (
            f"policy.train_micro_batch_size is {policy.train_micro_batch_size}, which does not divide the "
            f"{size // ranks} samples of a rank "
            f"(policy.train_global_batch_size {size} / {ranks} data-parallel ranks)"
        )


def step_divides_into_optimizer_steps(config: MasterConfig) -> Iterator[str]:
    grpo, policy = config.grpo, config.policy
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    if samples % policy.train_global_batch_size:
        yield (
            f"policy.train_global_batch_size is {policy.train_global_batch_size}, which does not divide the "
            f"{samples} samples of a step "
            f"(grpo.num_prompts_per_step {grpo.num_prompts_per_step} * grpo.num_generations_per_prompt "
            f"{grpo.num_generations_per_prompt})"
        )
    ranks = data_parallel_size(config)
    if samples % ranks == 0 and _fixed_microbatches(config) and (samples // ranks) % policy.logprob_batch_size:
        yield (
            f"policy.logprob_batch_size is {policy.logprob_batch_size}, which does not divide the "
            f"{samples // ranks} samples of a rank and step"
        )


def loader_batch_is_whole(config: MasterConfig) -> Iterator[str]:
    grpo = config.grpo
    if grpo.batch_multiplier > 1 and not grpo.use_dynamic_sampling:
        yield f"grpo.batch_multiplier is {grpo.batch_multiplier}; above 1 it needs grpo.use_dynamic_sampling: true"
    if not float(grpo.num_prompts_per_step * grpo.batch_multiplier).is_integer():
        yield (
            "grpo.num_prompts_per_step * grpo.batch_multiplier is "
            f"{grpo.num_prompts_per_step * grpo.batch_multiplier}, which is no whole number of prompts"
        )


def sequences_fit(config: RootConfig) -> Iterator[str]:
    policy = config.policy
    longest = (
        -(-policy.max_total_sequence_length // policy.make_sequence_length_divisible_by)
        * policy.make_sequence_length_divisible_by
    )
    for name, batching in (
        ("sequence_packing", policy.sequence_packing),
        ("dynamic_batching", policy.dynamic_batching),
    ):
        for key, tokens in (
            ("train_mb_tokens", batching.train_mb_tokens),
            ("logprob_mb_tokens", batching.logprob_mb_tokens),
        ):
            if batching.enabled and tokens < longest:
                yield (
                    f"policy.{name}.{key} is {tokens}, too small for one sequence of "
                    f"policy.max_total_sequence_length {policy.max_total_sequence_length}"
                )


def sft_validation_divides(config: SFTMasterConfig) -> Iterator[str]:
    sft, ranks = config.sft, data_parallel_size(config)
    validates = sft.val_period > 0 or sft.val_at_start or sft.val_at_end
    if validates and sft.val_global_batch_size % (
        ranks * (sft.val_micro_batch_size if _fixed_microbatches(config) else 1)
    ):
        yield (
            f"sft.val_global_batch_size is {sft.val_global_batch_size}, which {ranks} data-parallel ranks with "
            f"sft.val_micro_batch_size {sft.val_micro_batch_size} do not divide"
        )


def _fixed_microbatches(config: RootConfig) -> bool:
    return not (config.policy.sequence_packing.enabled or config.policy.dynamic_batching.enabled)


BATCH_RULES: tuple[Callable[[MasterConfig], Iterator[str]], ...] = (
    global_batch_divides,
    step_divides_into_optimizer_steps,
    loader_batch_is_whole,
    sequences_fit,
)

SFT_BATCH_RULES: tuple[Callable[[SFTMasterConfig], Iterator[str]], ...] = (
    global_batch_divides,
    sequences_fit,
    sft_validation_divides,
)


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
        yield (
            "loss_fn.sequence_level_importance_ratios needs loss_fn.token_level_loss: false (GSPO averages "
            "each sequence first)"
        )


def truncation_has_its_bounds(config: MasterConfig) -> Iterator[str]:
    loss, prefix = config.loss_fn, "loss_fn.truncated_importance_sampling"
    kind, high, low = (
        loss.truncated_importance_sampling_type,
        loss.truncated_importance_sampling_ratio,
        loss.truncated_importance_sampling_ratio_min,
    )
    if kind is None:
        if high is not None or low is not None:
            yield (
                f"{prefix}_ratio is {high} and {prefix}_ratio_min is {low}, but {prefix}_type is null, so "
                "nothing would be truncated; tis is the plain clamp"
            )
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
            "loss_fn.force_on_policy_ratio needs policy.train_global_batch_size "
            f"({config.policy.train_global_batch_size}) to be "
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
        yield (
            "loss_fn.use_kl_in_reward needs grpo.adv_estimator.name: reinforce_plus_plus, not "
            f"{grpo.adv_estimator.name}"
        )


def fp8_generation_is_corrected(config: MasterConfig) -> Iterator[str]:
    if config.policy.generation.vllm_cfg.precision == "fp8" and not config.loss_fn.use_importance_sampling_correction:
        yield "policy.generation.vllm_cfg.precision: fp8 needs loss_fn.use_importance_sampling_correction: true"


def groups_have_something_to_compare(config: MasterConfig) -> Iterator[str]:
    grpo, loss = config.grpo, config.loss_fn
    estimator = grpo.adv_estimator
    compares = estimator.name in ("grpo", "gdpo") or (
        estimator.name == "reinforce_plus_plus" and estimator.minus_baseline
    )
    # A loss of the user's, and VAPO's term, may learn without advantages.
    learns_otherwise = loss.loss_class is not None or loss.positive_example_nll_weight > 0
    if grpo.num_generations_per_prompt == 1 and compares and not learns_otherwise:
        switch = " with minus_baseline: true" if estimator.name == "reinforce_plus_plus" else ""
        yield (
            f"grpo.num_generations_per_prompt is 1, and grpo.adv_estimator.name {estimator.name}{switch} compares the "
            "samples of a prompt with each other: every advantage would be 0; draw at least 2 samples, or take "
            "grpo.adv_estimator.name: reinforce_plus_plus with minus_baseline: false"
        )


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


def distillation_has_teachers(config: MasterConfig) -> Iterator[Problem]:
    if config.grpo.adv_estimator.name == "opd" and not config.on_policy_distillation.enabled:
        yield not_built("grpo.adv_estimator.name", "opd", "on-policy distillation", "choose another estimator")


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


LOSS_RULES: tuple[Callable[[MasterConfig], Iterator[Problem]], ...] = (
    cispo_stands_alone,
    sequence_ratios_need_a_sequence_loss,
    truncation_has_its_bounds,
    on_policy_ratio_needs_one_optimizer_step,
    kl_has_a_reference,
    kl_in_reward_has_previous_logprobs,
    fp8_generation_is_corrected,
    groups_have_something_to_compare,
    some_samples_are_trained,
    distillation_has_teachers,
    ranges_are_ranges,
)


def expert_parallelism_is_possible(config: RootConfig) -> Iterator[str]:
    cfg = config.policy.dtensor_cfg
    if not cfg.enabled or cfg.expert_parallel_size == 1:
        return
    key = f"policy.dtensor_cfg.expert_parallel_size is {cfg.expert_parallel_size}"
    ranks = data_parallel_size(config) * cfg.context_parallel_size // cfg.dp_replicate_size
    if training_world_size(config) > 0 and ranks % cfg.expert_parallel_size:
        sizes = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
        yield (
            f"{key}, which does not divide the {ranks} ranks that share one copy of the parameters "
            f"(data-parallel ranks / dp_replicate_size * context_parallel_size); possible: {sizes}"
        )
    if cfg.torch_compile:
        yield (
            f"{key} and policy.dtensor_cfg.torch_compile is true: tokens travel between ranks inside the "
            "layers that would be compiled; set one of them off"
        )


def kernels_fit_the_run(config: RootConfig) -> Iterator[str]:
    cfg, precision, device = config.policy.dtensor_cfg, config.policy.precision, config.cluster.device
    attention = cfg.automodel_kwargs.backend.attn
    if not cfg.enabled:
        return
    if attention == "flash_attention_2" and precision == "float32":
        yield (
            f"{_KERNELS}.backend.attn is flash_attention_2, which has no float32; set policy.precision to "
            "bfloat16 or attn to sdpa"
        )
    if attention in ("flash_attention_2", "flex", "flex_attention") and device == "cpu":
        yield (
            f"{_KERNELS}.backend.attn is {attention}, which needs a GPU for training, and cluster.device "
            "is cpu; set attn to sdpa or eager"
        )
    if attention in ("flex", "flex_attention") and cfg.context_parallel_size > 1:
        yield (
            f"{_KERNELS}.backend.attn is {attention}, which reads whole rows, and context_parallel_size is "
            f"{cfg.context_parallel_size}; set attn to sdpa"
        )
    if cfg.automodel_kwargs.use_liger_kernel:
        yield from _liger(config)


def _liger(config: RootConfig) -> Iterator[str]:
    cfg, key = config.policy.dtensor_cfg, f"{_KERNELS}.use_liger_kernel"
    if config.cluster.device == "cpu":
        yield f"{key} is true, but Liger's kernels run on GPUs only and cluster.device is cpu; set it to false"
    if cfg.sequence_parallel:
        yield (
            f"{key} is true and policy.dtensor_cfg.sequence_parallel too: its norms cannot read rows that "
            "are cut over ranks; set one of them to false"
        )


DTENSOR_RULES: tuple[Callable[[RootConfig], Iterator[str]], ...] = (expert_parallelism_is_possible, kernels_fit_the_run)

_KEY = "policy.megatron_cfg"


def optimizer_is_possible(config: RootConfig) -> Iterator[str]:
    megatron = config.policy.megatron_cfg
    if not megatron.enabled:
        return
    if megatron.optimizer.optimizer == "sgd" and megatron.optimizer.use_distributed_optimizer:
        yield (
            f"{_KEY}.optimizer.optimizer is sgd, which Megatron's distributed optimizer does not take; set "
            f"{_KEY}.optimizer.use_distributed_optimizer to false"
        )
    if config.policy.precision == "float16":
        yield (
            f"policy.precision is float16, which needs loss scaling; with {_KEY}.enabled set it to bfloat16 or float32"
        )


def experts_divide_the_ranks(config: RootConfig) -> Iterator[str]:
    megatron, world = config.policy.megatron_cfg, training_world_size(config)
    shared = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    stage = world // megatron.pipeline_model_parallel_size
    if megatron.enabled and stage > 0 and stage % shared:
        sizes = ", ".join(str(size) for size in range(1, stage + 1) if stage % size == 0)
        yield (
            f"{_KEY}: expert_model_parallel_size * expert_tensor_parallel_size is {shared}, which does not divide the "
            f"{stage} ranks of a pipeline stage; possible: {sizes}"
        )


# A step of Adam moves every weight by about the learning rate, and weights are mostly below 1.
_HIGHEST_LR = 1.0


def learning_rates(config: RootConfig) -> Iterator[tuple[str, object]]:
    """Key and value of the learning rate that the run trains with."""
    policy = config.policy
    if policy.megatron_cfg.enabled:
        yield f"{_KEY}.optimizer.lr", policy.megatron_cfg.optimizer.lr
    elif policy.optimizer is not None and "lr" in policy.optimizer.kwargs:
        yield "policy.optimizer.kwargs.lr", policy.optimizer.kwargs["lr"]


def learning_rate_is_possible(config: RootConfig) -> Iterator[str]:
    megatron, optimizer = config.policy.megatron_cfg, config.policy.optimizer
    name = megatron.optimizer.optimizer if megatron.enabled else optimizer.name if optimizer is not None else ""
    for key, rate in learning_rates(config):
        # What is no number is refused by the rule of pass-through arguments.
        if isinstance(rate, bool) or not isinstance(rate, (int, float)):
            continue
        if not 0 <= rate < math.inf:
            yield f"{key}: {rate:g} is no learning rate; write a small positive number such as 1e-6"
        elif rate > _HIGHEST_LR and "sgd" not in name.lower():
            yield (
                f"{key}: {rate:g} would move every weight by about that much in each step of {name}, and destroy the "
                "model; 1e-6 to 1e-4 is usual"
            )


MEGATRON_RULES: tuple[Callable[[RootConfig], Iterator[str]], ...] = (optimizer_is_possible, experts_divide_the_ranks)
OPTIMIZER_RULES: tuple[Callable[[RootConfig], Iterator[str]], ...] = (learning_rate_is_possible,)
