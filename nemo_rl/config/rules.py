"""Rules between keys: what a valid value may not be combined with, because no mode could honour both.

Each rule is a function from the configuration to lines, each naming its dotted keys, their values and a way out. Knows
the schemas only; whether a file, a model or a GPU exists is found out later. Invariant: no rule depends on another's
result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from nemo_rl.config.async_rl import AsyncRLConfig
from nemo_rl.config.data_rules import (
    DATA_RULES,
    EVAL_DATA_RULES,
    GRPO_METRIC_RULES,
    SFT_DATA_RULES,
    SHARED_METRIC_RULES,
    keys_without_effect,
)
from nemo_rl.config.errors import ConfigError, Problem
from nemo_rl.config.evaluation import EVAL_RULES, EvalMasterConfig
from nemo_rl.config.generation_rules import GENERATION_RULES
from nemo_rl.config.master import CompleteConfig, MasterConfig, RootConfig, SFTMasterConfig
from nemo_rl.config.pass_through import EVAL_PASS_THROUGH_RULES, PASS_THROUGH_RULES, engine_arguments_are_safe
from nemo_rl.config.placement import (
    ParallelSizesError,
    data_parallel_size,
    model_parallel_size,
    parallel_sizes,
    replica_sizes,
    training_world_size,
)
from nemo_rl.config.profiling import ENGINES, POLICY_WORKERS, asked_profile
from nemo_rl.config.profiling import WORKERS as PROFILED_WORKERS
from nemo_rl.config.section import not_built
from nemo_rl.config.training_rules import (
    BATCH_RULES,
    DTENSOR_RULES,
    LOSS_RULES,
    MEGATRON_RULES,
    OPTIMIZER_RULES,
    SFT_BATCH_RULES,
    learning_rates,
)


def broken_rules(config: CompleteConfig) -> list[Problem]:
    """One line per rule that the configuration breaks, and per part that a combination asks for and is not built."""
    problems: list[Problem] = []
    if isinstance(config, RootConfig):
        problems += [
            line for rule in (*SHARED_RULES, *SHARED_METRIC_RULES, *PASS_THROUGH_RULES) for line in rule(config)
        ]
    if isinstance(config, MasterConfig):
        problems += [
            line
            for rule in (*GRPO_RULES, *LOSS_RULES, *BATCH_RULES, *DATA_RULES, *GRPO_METRIC_RULES)
            for line in rule(config)
        ]
    if isinstance(config, SFTMasterConfig):
        problems += [line for rule in (*SFT_BATCH_RULES, *SFT_DATA_RULES) for line in rule(config)]
    if isinstance(config, (MasterConfig, EvalMasterConfig)):
        problems += engine_arguments_are_safe(config)
    if isinstance(config, EvalMasterConfig):
        rules = (*EVAL_RULES, *EVAL_PASS_THROUGH_RULES, *EVAL_DATA_RULES)
        problems += [line for rule in rules for line in rule(config)]
    return problems


def cautions(config: CompleteConfig) -> Iterator[str]:
    """What is allowed and may not be what was meant."""
    if isinstance(config, RootConfig):
        for key, rate in learning_rates(config):
            if rate == 0:
                yield f"{key} is 0: the optimizer changes no weight"
    if isinstance(config, (MasterConfig, EvalMasterConfig)):
        yield from keys_without_effect(config.env)
    if not isinstance(config, MasterConfig):
        return
    grpo, policy = config.grpo, config.policy
    longest, engine = policy.max_total_sequence_length, policy.generation.vllm_cfg.max_model_len
    if policy.generation.max_new_tokens > longest:
        yield (
            f"policy.generation.max_new_tokens is {policy.generation.max_new_tokens}, but prompt and responses "
            f"together end at policy.max_total_sequence_length {longest}"
        )
    if engine < longest and policy.generation.backend == "vllm":
        yield (
            f"policy.generation.vllm_cfg.max_model_len is {engine}, below policy.max_total_sequence_length {longest}: "
            f"samples end at {engine} tokens"
        )
    if grpo.use_dynamic_sampling and grpo.adv_estimator.use_leave_one_out_baseline:
        yield (
            "grpo.use_dynamic_sampling with use_leave_one_out_baseline: true keeps or drops whole groups, by the "
            "deviation of all of their rewards; a group's only success is normalised by it. DAPO's recipe sets "
            "grpo.use_leave_one_out_baseline: false"
        )


def one_training_backend(config: RootConfig) -> Iterator[str]:
    dtensor, megatron = config.policy.dtensor_cfg.enabled, config.policy.megatron_cfg.enabled
    if dtensor == megatron:
        yield (
            f"policy.dtensor_cfg.enabled and policy.megatron_cfg.enabled are both {str(dtensor).lower()}; "
            "enable exactly one"
        )
    if dtensor and config.policy.optimizer is None:
        yield "policy.optimizer: null, but the DTensor backend has no optimizer of its own; name one"


def profiles_are_possible(config: RootConfig) -> Iterator[Problem]:
    groups = (POLICY_WORKERS,) if isinstance(config, SFTMasterConfig) else (POLICY_WORKERS, ENGINES)
    try:
        asked = asked_profile(os.environ, groups)
    except ConfigError as error:
        yield from error.problems
        return
    if asked is not None and config.cluster.device == "cpu":
        yield f"cluster.device is cpu, and {PROFILED_WORKERS} is set: Nsight Systems profiles GPUs; unset the variable"


def packing_or_dynamic_batching(config: RootConfig) -> Iterator[str]:
    if config.policy.sequence_packing.enabled and config.policy.dynamic_batching.enabled:
        yield (
            "policy.sequence_packing.enabled and policy.dynamic_batching.enabled exclude each other; "
            "switch one off (packing is on by default)"
        )


def shared_prompts_are_possible(config: RootConfig) -> Iterator[Problem]:
    policy, key = config.policy, "policy.sequence_packing.share_prompts"
    if not policy.sequence_packing.share_prompts:
        return
    if not policy.sequence_packing.enabled:
        yield f"{key} is true, and policy.sequence_packing.enabled is false; rows that share prompts are packed"
    elif policy.megatron_cfg.enabled:
        yield not_built(key, True, "shared prompts with Megatron-Core", "leave it null")
    elif policy.dtensor_cfg.context_parallel_size > 1:
        yield not_built(key, True, "shared prompts with context parallelism", "leave it null")


def parallelism_divides_the_world(config: RootConfig) -> Iterator[str]:
    world, policy = training_world_size(config), config.policy
    if world < 1:
        return
    if world % model_parallel_size(config):
        try:
            parallel_sizes(policy, world)
        except ParallelSizesError as error:
            yield str(error)
    elif policy.dtensor_cfg.enabled and data_parallel_size(config) % policy.dtensor_cfg.dp_replicate_size:
        size = data_parallel_size(config)
        yield (
            f"policy.dtensor_cfg.dp_replicate_size is {policy.dtensor_cfg.dp_replicate_size}, which does "
            f"not divide the data-parallel size {size}"
        )


def wide_tensor_parallelism_keeps_one_batch_size(config: RootConfig) -> Iterator[str]:
    policy = config.policy
    width = replica_sizes(policy).tp
    excused = isinstance(config, SFTMasterConfig) or os.environ.get("NRL_IGNORE_TP_ACCURACY_CHECK", "0") not in (
        "",
        "0",
    )
    if isinstance(config, MasterConfig):
        excused = excused or config.loss_fn.force_on_policy_ratio
    if width >= 4 and policy.train_micro_batch_size != policy.logprob_batch_size and not excused:
        yield (
            f"policy.train_micro_batch_size is {policy.train_micro_batch_size} and policy.logprob_batch_size "
            f"is {policy.logprob_batch_size}; with tensor "
            f"parallelism {width} they must be equal, or log-probabilities drift "
            "(NRL_IGNORE_TP_ACCURACY_CHECK=1 allows it)"
        )


def ports_are_ranges(config: RootConfig) -> Iterator[str]:
    generation, cluster = config.policy.generation, config.cluster
    for prefix, low, high in (
        ("cluster.master_port_range", cluster.master_port_range_low, cluster.master_port_range_high),
        ("policy.generation.port_range", generation.port_range_low, generation.port_range_high),
    ):
        if low > high:
            yield f"{prefix}_low is {low}, above {prefix}_high {high}"


def cpu_slots_suffice(config: RootConfig) -> Iterator[str]:
    cluster = config.cluster
    if cluster.device == "cpu" and cluster.gpus_per_node > cluster.cpu_slots:
        yield (
            f"cluster.gpus_per_node is {cluster.gpus_per_node}, but cluster.cpu_slots offers "
            f"{cluster.cpu_slots} slots per node"
        )


def optimizers_exist(config: RootConfig) -> Iterator[Problem]:
    optimizer = config.policy.optimizer
    if config.policy.dtensor_cfg.enabled and optimizer is not None and optimizer.name.startswith("transformer_engine."):
        yield not_built(
            "policy.optimizer.name",
            optimizer.name,
            "optimizers of Transformer Engine",
            "take torch.optim.AdamW, with kwargs.fused: true on GPUs",
        )


def adapters_are_possible(config: RootConfig) -> Iterator[Problem]:
    cfg = config.policy.dtensor_cfg
    if not (cfg.enabled and cfg.lora_cfg.enabled):
        return
    if cfg.tensor_parallel_size > 1:
        yield not_built(
            "policy.dtensor_cfg.lora_cfg.enabled",
            True,
            "LoRA with tensor parallelism",
            f"set policy.dtensor_cfg.tensor_parallel_size to 1 instead of {cfg.tensor_parallel_size}; frozen weights "
            "are sharded over all data-parallel ranks anyway",
        )


def async_training_is_possible(config: MasterConfig) -> Iterator[str]:
    if not config.grpo.async_grpo.enabled:
        return
    if not config.loss_fn.use_importance_sampling_correction:
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
            "grpo.async_grpo.max_trajectory_age_steps is 0: training would wait for rollouts that may only "
            "begin once it has ended; "
            "the smallest that works is 1 (grpo.async_grpo.enabled: false takes turns)"
        )
    for key in ("rollout_record", "rollout_replay"):
        if config.grpo[key] is not None:
            yield (
                f"grpo.async_grpo.enabled does not take grpo.{key}, which repeats runs step by step; "
                "record a synchronous run"
            )


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
            f"async_rl makes one optimizer step of a step: policy.train_global_batch_size must be "
            f"num_prompts_per_step * num_generations_per_prompt = {prompts * samples}, "
            f"not {config.policy.train_global_batch_size}"
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
    corrected = config.loss_fn.use_importance_sampling_correction
    if (ahead > 0 or sampler.name == "ready_first") and sampler.name != "custom" and not corrected:
        yield (
            f"async_rl.sampler.name={sampler.name} with {key}={ahead} trains on samples of older weights and needs "
            "loss_fn.use_importance_sampling_correction: true; in_order with max_lookahead_versions=0 is strictly "
            "on-policy"
        )
    if sampler.name == "ready_first" and config.loss_fn.force_on_policy_ratio:
        yield "async_rl.sampler.name=ready_first needs loss_fn.force_on_policy_ratio: false; its samples may be old"


def draft_models_need_megatron(config: MasterConfig) -> Iterator[str]:
    if config.policy.draft.enabled and not config.policy.megatron_cfg.enabled:
        yield "policy.draft.enabled needs policy.megatron_cfg.enabled: true"


def rollouts_are_recorded_or_replayed(config: MasterConfig) -> Iterator[str]:
    if config.grpo.rollout_record is not None and config.grpo.rollout_record == config.grpo.rollout_replay:
        yield (
            "grpo.rollout_record and grpo.rollout_replay are the same directory, "
            f"{config.grpo.rollout_record}; a replay would write over what it reads"
        )


SHARED_RULES: tuple[Callable[[RootConfig], Iterator[Problem]], ...] = (
    one_training_backend,
    profiles_are_possible,
    packing_or_dynamic_batching,
    shared_prompts_are_possible,
    parallelism_divides_the_world,
    wide_tensor_parallelism_keeps_one_batch_size,
    ports_are_ranges,
    cpu_slots_suffice,
    optimizers_exist,
    adapters_are_possible,
    *DTENSOR_RULES,
    *MEGATRON_RULES,
    *OPTIMIZER_RULES,
)
GRPO_RULES: tuple[Callable[[MasterConfig], Iterator[Problem]], ...] = (
    *GENERATION_RULES,
    async_training_is_possible,
    streaming_is_possible,
    draft_models_need_megatron,
    rollouts_are_recorded_or_replayed,
)
