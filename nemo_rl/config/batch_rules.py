"""Rules of batch sizes and lengths: what must divide what, and what must fit into what.

Sizes are in samples, lengths in tokens. Assumes the parallel sizes to be sound; `rules.py` checks those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nemo_rl.config.master import MasterConfig, RootConfig, SFTMasterConfig
from nemo_rl.config.placement import data_parallel_size


def global_batch_divides(config: RootConfig) -> Iterator[str]:
    policy, ranks = config.policy, data_parallel_size(config)
    size = policy.train_global_batch_size
    if size % ranks:
        yield f"policy.train_global_batch_size is {size}, which the {ranks} data-parallel ranks do not divide"
    elif _fixed_microbatches(config) and (size // ranks) % policy.train_micro_batch_size:
        yield (
            f"policy.train_micro_batch_size is {policy.train_micro_batch_size}, which does not divide the {size // ranks} samples of a rank "
            f"(policy.train_global_batch_size {size} / {ranks} data-parallel ranks)"
        )


def step_divides_into_optimizer_steps(config: MasterConfig) -> Iterator[str]:
    grpo, policy = config.grpo, config.policy
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    if samples % policy.train_global_batch_size:
        yield (
            f"policy.train_global_batch_size is {policy.train_global_batch_size}, which does not divide the {samples} samples of a step "
            f"(grpo.num_prompts_per_step {grpo.num_prompts_per_step} * grpo.num_generations_per_prompt {grpo.num_generations_per_prompt})"
        )
    ranks = data_parallel_size(config)
    if samples % ranks == 0 and _fixed_microbatches(config) and (samples // ranks) % policy.logprob_batch_size:
        yield f"policy.logprob_batch_size is {policy.logprob_batch_size}, which does not divide the {samples // ranks} samples of a rank and step"


def loader_batch_is_whole(config: MasterConfig) -> Iterator[str]:
    grpo = config.grpo
    if grpo.batch_multiplier > 1 and not grpo.use_dynamic_sampling:
        yield f"grpo.batch_multiplier is {grpo.batch_multiplier}; above 1 it needs grpo.use_dynamic_sampling: true"
    if not float(grpo.num_prompts_per_step * grpo.batch_multiplier).is_integer():
        yield f"grpo.num_prompts_per_step * grpo.batch_multiplier is {grpo.num_prompts_per_step * grpo.batch_multiplier}, which is no whole number of prompts"


def validation_has_a_batch(config: MasterConfig) -> Iterator[str]:
    grpo = config.grpo
    if (grpo.val_period > 0 or grpo.val_at_start or grpo.val_at_end) and grpo.max_val_samples < grpo.val_batch_size:
        yield f"grpo.max_val_samples {grpo.max_val_samples} is below grpo.val_batch_size {grpo.val_batch_size}, so validation would have no batch"


def early_stop_has_its_metric(config: MasterConfig) -> Iterator[str]:
    grpo, prefix = config.grpo, "grpo.stop_at_validation_metric"
    if (grpo.stop_at_validation_metric is None) != (grpo.stop_at_validation_metric_threshold is None):
        yield f"{prefix} and {prefix}_threshold belong together; set both or neither"
    if grpo.stop_at_validation_metric == "pass_k" and grpo.val_num_generations_per_prompt < 2:
        yield f"{prefix}: pass_k needs grpo.val_num_generations_per_prompt above 1"


def sequences_fit(config: RootConfig) -> Iterator[str]:
    policy, data = config.policy, config.data
    longest = -(-policy.max_total_sequence_length // policy.make_sequence_length_divisible_by) * policy.make_sequence_length_divisible_by
    for name, batching in (("sequence_packing", policy.sequence_packing), ("dynamic_batching", policy.dynamic_batching)):
        for key, tokens in (("train_mb_tokens", batching.train_mb_tokens), ("logprob_mb_tokens", batching.logprob_mb_tokens)):
            if batching.enabled and tokens < longest:
                yield f"policy.{name}.{key} is {tokens}, too small for one sequence of policy.max_total_sequence_length {policy.max_total_sequence_length}"
    if data.max_input_seq_length > policy.max_total_sequence_length:
        yield f"data.max_input_seq_length {data.max_input_seq_length} is above policy.max_total_sequence_length {policy.max_total_sequence_length}"


def sft_validation_divides(config: SFTMasterConfig) -> Iterator[str]:
    sft, ranks = config.sft, data_parallel_size(config)
    validates = sft.val_period > 0 or sft.val_at_start or sft.val_at_end
    if validates and sft.val_global_batch_size % (ranks * (sft.val_micro_batch_size if _fixed_microbatches(config) else 1)):
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
    validation_has_a_batch,
    early_stop_has_its_metric,
    sequences_fit,
)
SFT_BATCH_RULES: tuple[Callable[[SFTMasterConfig], Iterator[str]], ...] = (global_batch_divides, sequences_fit, sft_validation_divides)
