"""Rules of training: its backends, divisibility, memory, and switches that exclude each other.

Sizes are in samples, lengths in tokens. What depends on the model is checked once the model is read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from nemo_rl.config.errors import ConfigError, Problem
from nemo_rl.config.evaluation import EvalMasterConfig
from nemo_rl.config.master import MasterConfig, RootConfig, SFTMasterConfig
from nemo_rl.config.nsight_variables import ENGINES, POLICY_WORKERS, asked_profile
from nemo_rl.config.nsight_variables import WORKERS as PROFILED_WORKERS
from nemo_rl.config.rules import caution, rule
from nemo_rl.config.section import not_built
from nemo_rl.config.world_sizes import (
    ParallelSizesError,
    data_parallel_size,
    divisors,
    model_parallel_size,
    parallel_sizes,
    replica_sizes,
    training_world_size,
)


@rule
def one_training_backend(config: RootConfig) -> Iterator[str]:
    dtensor, megatron = config.policy.dtensor_cfg.enabled, config.policy.megatron_cfg.enabled
    if dtensor == megatron:
        yield (
            f"policy.dtensor_cfg.enabled and policy.megatron_cfg.enabled are both {str(dtensor).lower()}; "
            "enable exactly one"
        )
    if dtensor and config.policy.optimizer is None:
        yield "policy.optimizer: null, but the DTensor backend has no optimizer of its own; name one"


@rule
def profiles_are_possible(config: RootConfig) -> Iterator[Problem]:
    groups = (POLICY_WORKERS,) if isinstance(config, SFTMasterConfig) else (POLICY_WORKERS, ENGINES)
    try:
        asked = asked_profile(os.environ, groups)
    except ConfigError as error:
        yield from error.problems
        return
    if asked is not None and config.cluster.device == "cpu":
        yield f"cluster.device is cpu, and {PROFILED_WORKERS} is set: Nsight Systems profiles GPUs; unset the variable"


@rule
def packing_or_dynamic_batching(config: RootConfig) -> Iterator[str]:
    if config.policy.sequence_packing.enabled and config.policy.dynamic_batching.enabled:
        yield (
            "policy.sequence_packing.enabled and policy.dynamic_batching.enabled exclude each other; "
            "switch one off (packing is on by default)"
        )


@rule
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
    elif policy.router_replay.enabled:
        why = "shared prompts with policy.router_replay.enabled: samples of a prompt were routed one by one"
        yield not_built(key, True, why, "leave it null")


@rule
def load_balancing_has_a_weight_and_a_router(config: RootConfig) -> Iterator[Problem]:
    megatron, key = config.policy.megatron_cfg, "policy.megatron_cfg.moe_router_load_balancing_type"
    if not megatron.enabled:
        return
    kinds, weights = megatron.load_balancing_kinds, megatron.load_balancing_weights
    if "sinkhorn" in kinds:
        yield not_built(key, "sinkhorn", "routing by Sinkhorn's algorithm", "set it to aux_loss or none")
        return
    if len(kinds) != len(weights):
        yield (
            f"{key} names {len(kinds)} kinds of loss, but policy.megatron_cfg.moe_aux_loss_coeff has {len(weights)}; "
            "give each its weight"
        )
        return
    weight = sum(weights)
    if any(weight > 0 and kind == "none" for kind, weight in zip(kinds, weights, strict=True)):
        yield (
            f"policy.megatron_cfg.moe_aux_loss_coeff is {weight:g}, but {key} is none, which has no loss; set it to "
            "aux_loss, or the coefficient to 0"
        )
    elif weight > 0 and megatron.freeze_moe_router:
        yield (
            f"{key} is aux_loss, but policy.megatron_cfg.freeze_moe_router is true, so that the router cannot follow "
            "it; set freeze_moe_router to false"
        )
    elif weight > 0 and megatron.peft.enabled:
        yield (
            f"{key} is aux_loss, but policy.megatron_cfg.peft.enabled is true, so that the router stays as it is and "
            "cannot follow it; set it to none"
        )


@rule
def multi_token_prediction_is_possible(config: RootConfig) -> Iterator[Problem]:
    megatron, section = config.policy.megatron_cfg, "policy.megatron_cfg"
    key, depths = f"{section}.mtp_num_layers", megatron.mtp_num_layers
    if not megatron.enabled or not depths:
        return
    if megatron.mtp_loss_scaling_factor == 0:
        yield (
            f"{key} is {depths} and {section}.mtp_loss_scaling_factor is 0, so that these layers would not be trained; "
            "set a factor (Megatron-Core's own is 0.1), or mtp_num_layers to 0"
        )
    for name, why in {
        "mtp_use_repeated_layer": "one layer of multi-token prediction for every depth, which Megatron-Core 0.16 lacks",
        "mtp_detach_heads": "multi-token prediction apart from the model, which Megatron-Core 0.16 lacks",
    }.items():
        if getattr(megatron, name):
            yield not_built(f"{section}.{name}", True, why, "set it to false, or mtp_num_layers to 0")
    if megatron.peft.enabled:
        why = "multi-token prediction with adapters, beside which no other weight is trained"
        yield not_built(key, depths, why, f"set it to 0, or {section}.peft.enabled to false")
    at_once = megatron.model_overrides.get("recompute_num_layers")
    if megatron.activation_checkpointing and at_once not in (None, 1):
        yield (
            f"{section}.model_overrides.recompute_num_layers is {at_once}, but {key} is {depths}, whose layers "
            "Megatron-Core recomputes one by one; leave it out"
        )


@rule
def replayed_routers_are_not_fused_or_compiled(config: RootConfig) -> Iterator[Problem]:
    policy, replay = config.policy, "with policy.router_replay.enabled"
    if not policy.router_replay.enabled:
        if policy.router_replay.compare_period:
            yield (
                f"policy.router_replay.compare_period is {policy.router_replay.compare_period}, but "
                "policy.router_replay.enabled is false, so that nothing is replayed; enable it or leave the period 0"
            )
        return
    if policy.megatron_cfg.enabled and policy.megatron_cfg.model_overrides.get("moe_router_fusion"):
        key = "policy.megatron_cfg.model_overrides.moe_router_fusion"
        yield not_built(key, True, f"fused routers {replay}", "leave it out")
    backend = policy.dtensor_cfg
    if backend.enabled and backend.torch_compile and backend.activation_checkpointing:
        key, what = "policy.dtensor_cfg.torch_compile", f"compiled layers that are recomputed {replay}"
        yield not_built(key, True, what, "leave it null, or set activation_checkpointing: false")


@rule
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


@rule
def wide_tensor_parallelism_keeps_one_batch_size(config: RootConfig) -> Iterator[str]:
    policy = config.policy
    width = replica_sizes(policy).tp
    excused = isinstance(config, SFTMasterConfig) or os.environ.get("NRL_IGNORE_TP_ACCURACY_CHECK", "0") not in (
        "",
        "0",
    )
    if isinstance(config, MasterConfig):
        excused = excused or config.loss_fn.force_on_policy_ratio or config.distils
    if width >= 4 and policy.train_micro_batch_size != policy.logprob_batch_size and not excused:
        yield (
            f"policy.train_micro_batch_size is {policy.train_micro_batch_size} and policy.logprob_batch_size is "
            f"{policy.logprob_batch_size}; with tensor parallelism {width} they must be equal, or log-probabilities "
            "drift (NRL_IGNORE_TP_ACCURACY_CHECK=1 allows it)"
        )


@caution
def experts_exchange_tokens_by_all_to_all(config: RootConfig) -> Iterator[str]:
    mcore, dtensor = config.policy.megatron_cfg, config.policy.dtensor_cfg
    key, backend = "policy.dtensor_cfg.automodel_kwargs.backend", dtensor.automodel_kwargs.backend
    asked = {
        f"policy.megatron_cfg.moe_token_dispatcher_type {mcore.moe_token_dispatcher_type}": mcore.enabled
        and mcore.moe_token_dispatcher_type != "alltoall",
        "policy.megatron_cfg.moe_enable_deepep": mcore.enabled and mcore.moe_enable_deepep,
        f"{key}.dispatcher deepep": dtensor.enabled and backend.dispatcher == "deepep",
        f"{key}.enable_deepep": dtensor.enabled and backend.enable_deepep,
    }
    if names := [name for name, on in asked.items() if on]:
        yield f"{', '.join(names)}: tokens reach experts by all-to-all, with the same result and another speed"


@rule
def ports_are_ranges(config: RootConfig) -> Iterator[str]:
    generation, cluster = config.policy.generation, config.cluster
    for prefix, low, high in (
        ("cluster.master_port_range", cluster.master_port_range_low, cluster.master_port_range_high),
        ("policy.generation.port_range", generation.port_range_low, generation.port_range_high),
    ):
        if low > high:
            yield f"{prefix}_low is {low}, above {prefix}_high {high}"


@rule
def optimizers_exist(config: RootConfig) -> Iterator[Problem]:
    optimizer = config.policy.optimizer
    if not config.policy.dtensor_cfg.enabled or optimizer is None:
        return
    if optimizer.name.startswith("transformer_engine.") and not optimizer.name.endswith(".FusedAdam"):
        yield not_built(
            "policy.optimizer.name",
            optimizer.name,
            "optimizers of Transformer Engine but FusedAdam",
            "take torch.optim.AdamW, with kwargs.fused: true on GPUs",
        )


@rule
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


@rule
def megatrons_adapters_are_possible(config: RootConfig) -> Iterator[Problem]:
    cfg = config.policy.megatron_cfg
    if cfg.enabled and cfg.peft.enabled and cfg.fp8_cfg.enabled:
        yield not_built("policy.megatron_cfg.fp8_cfg.enabled", True, "fp8 training of adapters", "leave it false")


_KERNELS = "policy.dtensor_cfg.automodel_kwargs"


@rule
def global_batch_divides(config: RootConfig) -> Iterator[str]:
    policy, ranks = config.policy, data_parallel_size(config)
    size = policy.train_global_batch_size
    if size % ranks:
        yield f"policy.train_global_batch_size is {size}, which the {ranks} data-parallel ranks do not divide"
    elif _fixed_microbatches(config) and (size // ranks) % policy.train_micro_batch_size:
        yield (
            f"policy.train_micro_batch_size is {policy.train_micro_batch_size}, which does not divide the "
            f"{size // ranks} samples of a rank (policy.train_global_batch_size {size} / {ranks} data-parallel ranks)"
        )


@rule
def step_divides_into_optimizer_steps(config: MasterConfig) -> Iterator[str]:
    grpo, policy = config.grpo, config.policy
    samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    if samples % policy.train_global_batch_size:
        yield (
            f"policy.train_global_batch_size is {policy.train_global_batch_size}, which does not divide the {samples} "
            f"samples of a step (grpo.num_prompts_per_step {grpo.num_prompts_per_step} * "
            f"grpo.num_generations_per_prompt {grpo.num_generations_per_prompt})"
        )
    ranks = data_parallel_size(config)
    if samples % ranks == 0 and _fixed_microbatches(config) and (samples // ranks) % policy.logprob_batch_size:
        yield (
            f"policy.logprob_batch_size is {policy.logprob_batch_size}, which does not divide the "
            f"{samples // ranks} samples of a rank and step"
        )


@caution
def sequences_fit(config: RootConfig) -> Iterator[str]:
    policy = config.policy
    multiple = policy.make_sequence_length_divisible_by
    longest = -(-policy.max_total_sequence_length // multiple) * multiple
    for name in ("sequence_packing", "dynamic_batching"):
        for key in ("train_mb_tokens", "logprob_mb_tokens"):
            if policy[name].enabled and policy[name][key] < longest:
                yield (
                    f"policy.{name}.{key} is {policy[name][key]}, below policy.max_total_sequence_length "
                    f"{policy.max_total_sequence_length}: a step with a longer sequence fails"
                )


@rule
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


@rule
def expert_parallelism_is_possible(config: RootConfig) -> Iterator[str]:
    cfg = config.policy.dtensor_cfg
    if not cfg.enabled or cfg.expert_parallel_size == 1:
        return
    key = f"policy.dtensor_cfg.expert_parallel_size is {cfg.expert_parallel_size}"
    ranks = data_parallel_size(config) * cfg.context_parallel_size // cfg.dp_replicate_size
    if training_world_size(config) > 0 and ranks % cfg.expert_parallel_size:
        yield (
            f"{key}, which does not divide the {ranks} ranks that share one copy of the parameters "
            f"(data-parallel ranks / dp_replicate_size * context_parallel_size); possible: {divisors(ranks)}"
        )
    if cfg.torch_compile:
        yield (
            f"{key} and policy.dtensor_cfg.torch_compile is true: tokens travel between ranks inside the "
            "layers that would be compiled; set one of them off"
        )


@rule
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


_KEY = "policy.megatron_cfg"


@rule
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


@rule
def experts_divide_the_ranks(config: RootConfig) -> Iterator[str]:
    megatron, world = config.policy.megatron_cfg, training_world_size(config)
    shared = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    stage = world // megatron.pipeline_model_parallel_size
    if megatron.enabled and stage > 0 and stage % shared:
        yield (
            f"{_KEY}: expert_model_parallel_size * expert_tensor_parallel_size is {shared}, which does not divide the "
            f"{stage} ranks of a pipeline stage; possible: {divisors(stage)}"
        )


@rule
def schedules_are_possible(config: RootConfig) -> Iterator[str]:
    megatron = config.policy.megatron_cfg
    rates, schedule, key = megatron.optimizer, megatron.scheduler, f"{_KEY}.scheduler"
    if not megatron.enabled:
        return
    decays = schedule.lr_decay_style != "constant" or schedule.weight_decay_incr_style != "constant"
    until, warmup = schedule.lr_decay_iters, schedule.lr_warmup_iters
    if decays and until is not None and until <= warmup:
        yield (
            f"{key}.lr_decay_iters is {until}, and {key}.lr_warmup_iters {warmup}: rates decay after the warm-up, so "
            "that a decay must end later; raise lr_decay_iters, or set it to null for the run's last step"
        )
    if schedule.lr_decay_style != "constant" and rates.min_lr > rates.lr:
        yield (
            f"{_KEY}.optimizer.min_lr is {rates.min_lr:g}, above {_KEY}.optimizer.lr {rates.lr:g}; it is where rates "
            "end"
        )
    if warmup and schedule.lr_warmup_init > rates.lr:
        yield (
            f"{key}.lr_warmup_init is {schedule.lr_warmup_init:g}, above {_KEY}.optimizer.lr {rates.lr:g}; a warm-up "
            "begins below it"
        )
    if schedule.start_weight_decay > schedule.end_weight_decay:
        yield (
            f"{key}.start_weight_decay is {schedule.start_weight_decay:g}, above end_weight_decay "
            f"{schedule.end_weight_decay:g}; Megatron's weight decay rises"
        )
    elif schedule.weight_decay_incr_style == "constant" and schedule.start_weight_decay < schedule.end_weight_decay:
        yield (
            f"{key}.weight_decay_incr_style is constant, but start_weight_decay is {schedule.start_weight_decay:g} and "
            f"end_weight_decay {schedule.end_weight_decay:g}; name linear or cosine, or set both to the same"
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


@caution
def a_learning_rate_of_zero(config: RootConfig) -> Iterator[str]:
    yield from (f"{key} is 0: the optimizer changes no weight" for key, rate in learning_rates(config) if rate == 0)


@rule
def learning_rate_is_possible(config: RootConfig) -> Iterator[str]:
    megatron, optimizer = config.policy.megatron_cfg, config.policy.optimizer
    name = megatron.optimizer.optimizer if megatron.enabled else optimizer.name if optimizer is not None else ""
    for key, rate in learning_rates(config):
        # Values that are no numbers are refused by the rule of pass-through arguments.
        if isinstance(rate, bool) or not isinstance(rate, (int, float)):
            continue
        if not 0 <= rate < math.inf:
            yield f"{key}: {rate:g} is no learning rate; write a small positive number such as 1e-6"
        elif rate > _HIGHEST_LR and "sgd" not in name.lower():
            yield (
                f"{key}: {rate:g} would move every weight by about that much in each step of {name}, and destroy the "
                "model; 1e-6 to 1e-4 is usual"
            )


@rule
def cpu_slots_suffice(config: RootConfig | EvalMasterConfig) -> Iterator[str]:
    cluster = config.cluster
    if cluster.device == "cpu" and cluster.gpus_per_node > cluster.cpu_slots:
        yield (
            f"cluster.gpus_per_node is {cluster.gpus_per_node}, but cluster.cpu_slots offers "
            f"{cluster.cpu_slots} slots per node"
        )
