"""Rules between keys: what a valid value may not be combined with, because no mode could honour both.

Each rule is a function from the configuration to lines, each naming its dotted keys, their values and a way out. Knows the schemas only;
whether a file, a model or a GPU exists is found out later. Invariant: no rule depends on another's result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from nemo_rl.config.batch_rules import BATCH_RULES, SFT_BATCH_RULES
from nemo_rl.config.data_rules import DATA_RULES, SFT_DATA_RULES
from nemo_rl.config.dtensor_rules import DTENSOR_RULES
from nemo_rl.config.eval_rules import EVAL_RULES
from nemo_rl.config.evaluation import EvalMasterConfig
from nemo_rl.config.loss_rules import LOSS_RULES
from nemo_rl.config.master import CompleteConfig, MasterConfig, RootConfig, SFTMasterConfig
from nemo_rl.config.metric_rules import GRPO_METRIC_RULES, SHARED_METRIC_RULES
from nemo_rl.config.placement import data_parallel_size, generation_slots_per_node, training_world_size


def broken_rules(config: CompleteConfig) -> list[str]:
    """One line per rule that the configuration breaks."""
    problems: list[str] = []
    if isinstance(config, RootConfig):
        problems += [line for rule in (*SHARED_RULES, *SHARED_METRIC_RULES) for line in rule(config)]
    if isinstance(config, MasterConfig):
        problems += [line for rule in (*GRPO_RULES, *LOSS_RULES, *BATCH_RULES, *DATA_RULES, *GRPO_METRIC_RULES) for line in rule(config)]
    if isinstance(config, SFTMasterConfig):
        problems += [line for rule in (*SFT_BATCH_RULES, *SFT_DATA_RULES) for line in rule(config)]
    if isinstance(config, EvalMasterConfig):
        problems += [line for rule in EVAL_RULES for line in rule(config)]
    return problems


def one_training_backend(config: RootConfig) -> Iterator[str]:
    dtensor, megatron = config.policy.dtensor_cfg.enabled, config.policy.megatron_cfg.enabled
    if dtensor == megatron:
        yield f"policy.dtensor_cfg.enabled and policy.megatron_cfg.enabled are both {str(dtensor).lower()}; enable exactly one"
    if dtensor and config.policy.optimizer is None:
        yield "policy.optimizer: null, but the DTensor backend has no optimizer of its own; name one"


def packing_or_dynamic_batching(config: RootConfig) -> Iterator[str]:
    if config.policy.sequence_packing.enabled and config.policy.dynamic_batching.enabled:
        yield "policy.sequence_packing.enabled and policy.dynamic_batching.enabled exclude each other; switch one off (packing is on by default)"


def parallelism_divides_the_world(config: RootConfig) -> Iterator[str]:
    world, policy = training_world_size(config), config.policy
    if world < 1:
        return
    if policy.dtensor_cfg.enabled:
        cfg = policy.dtensor_cfg
        ranks, keys = cfg.tensor_parallel_size * cfg.context_parallel_size, "policy.dtensor_cfg: tensor_parallel_size * context_parallel_size"
    else:
        mcore = policy.megatron_cfg
        ranks = mcore.tensor_model_parallel_size * mcore.pipeline_model_parallel_size * mcore.context_parallel_size
        keys = "policy.megatron_cfg: tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size"
    if world % ranks:
        yield f"{keys} is {ranks}, which does not divide the {world} accelerators that train"
    elif policy.dtensor_cfg.enabled and data_parallel_size(config) % policy.dtensor_cfg.dp_replicate_size:
        size = data_parallel_size(config)
        yield f"policy.dtensor_cfg.dp_replicate_size is {policy.dtensor_cfg.dp_replicate_size}, which does not divide the data-parallel size {size}"


def rows_fit_the_parallel_shards(config: RootConfig) -> Iterator[str]:
    cfg, multiple = config.policy.dtensor_cfg, config.policy.make_sequence_length_divisible_by
    if not cfg.enabled:
        return
    needed = cfg.tensor_parallel_size if cfg.sequence_parallel else 1
    needed *= 2 * cfg.context_parallel_size if cfg.context_parallel_size > 1 else 1
    if multiple % needed:
        yield (
            f"policy.make_sequence_length_divisible_by is {multiple}, but sequence_parallel={str(cfg.sequence_parallel).lower()}, "
            f"tensor_parallel_size={cfg.tensor_parallel_size} and context_parallel_size={cfg.context_parallel_size} need a multiple of {needed}"
        )


def wide_tensor_parallelism_keeps_one_batch_size(config: RootConfig) -> Iterator[str]:
    policy = config.policy
    width = policy.dtensor_cfg.tensor_parallel_size if policy.dtensor_cfg.enabled else policy.megatron_cfg.tensor_model_parallel_size
    excused = isinstance(config, SFTMasterConfig) or os.environ.get("NRL_IGNORE_TP_ACCURACY_CHECK", "0") not in ("", "0")
    if isinstance(config, MasterConfig):
        excused = excused or config.loss_fn.force_on_policy_ratio
    if width >= 4 and policy.train_micro_batch_size != policy.logprob_batch_size and not excused:
        yield (
            f"policy.train_micro_batch_size is {policy.train_micro_batch_size} and policy.logprob_batch_size is {policy.logprob_batch_size}; with tensor "
            f"parallelism {width} they must be equal, or log-probabilities drift (NRL_IGNORE_TP_ACCURACY_CHECK=1 allows it)"
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
        yield f"cluster.gpus_per_node is {cluster.gpus_per_node}, but cluster.cpu_slots offers {cluster.cpu_slots} slots per node"


def generation_has_its_own_accelerators(config: MasterConfig) -> Iterator[str]:
    colocated, cluster = config.policy.generation.colocated, config.cluster
    if colocated.enabled:
        return
    key = "policy.generation.colocated.resources"
    gpus, nodes = colocated.resources.gpus_per_node, colocated.resources.num_nodes
    if cluster.num_nodes == 1:
        if gpus is None or not 0 < gpus < cluster.gpus_per_node:
            yield f"{key}.gpus_per_node is {_shown(gpus)}; without colocation it must leave training one of cluster.gpus_per_node={cluster.gpus_per_node}"
        if nodes not in (None, 1):
            yield f"{key}.num_nodes is {nodes}, but the cluster has one node"
        return
    if nodes is None or not 0 < nodes < cluster.num_nodes:
        yield f"{key}.num_nodes is {_shown(nodes)}; without colocation it must leave training at least one of cluster.num_nodes={cluster.num_nodes}"
    if gpus not in (None, cluster.gpus_per_node):
        yield f"{key}.gpus_per_node is {gpus}; in a cluster of several nodes generation takes whole nodes: {cluster.gpus_per_node}"


def engines_fit_into_nodes(config: MasterConfig) -> Iterator[str]:
    vllm, slots = config.policy.generation.vllm_cfg, generation_slots_per_node(config)
    engine = vllm.tensor_parallel_size * vllm.pipeline_parallel_size
    if slots > 0 and slots % engine:
        yield (
            f"policy.generation.vllm_cfg: tensor_parallel_size * pipeline_parallel_size is {engine}, which does not divide the {slots} generating accelerators "
            "of a node; an engine lies inside one node, whose memory its ranks share; lower one of the two, or give generation more accelerators per node"
        )
    if vllm.expert_parallel_size > 1 and vllm.expert_parallel_size % vllm.tensor_parallel_size:
        yield (
            f"policy.generation.vllm_cfg.expert_parallel_size is {vllm.expert_parallel_size}, "
            f"which is not a multiple of tensor_parallel_size {vllm.tensor_parallel_size}"
        )


def async_training_is_possible(config: MasterConfig) -> Iterator[str]:
    if not config.grpo.async_grpo.enabled:
        return
    if not config.loss_fn.use_importance_sampling_correction:
        yield "grpo.async_grpo.enabled needs loss_fn.use_importance_sampling_correction: true, for samples of older weights"
    if config.policy.generation.colocated.enabled:
        yield "grpo.async_grpo.enabled needs policy.generation.colocated.enabled: false, for generation goes on while training runs"
    if config.data.use_multiple_dataloader:
        yield "grpo.async_grpo.enabled does not take data.use_multiple_dataloader"
    if config.grpo.async_grpo.max_trajectory_age_steps < 1:
        yield (
            "grpo.async_grpo.max_trajectory_age_steps is 0: training would wait for rollouts that may only begin once it has ended; "
            "the smallest that works is 1 (grpo.async_grpo.enabled: false takes turns)"
        )
    for key in ("rollout_record", "rollout_replay"):
        if config.grpo[key] is not None:
            yield f"grpo.async_grpo.enabled does not take grpo.{key}, which repeats runs step by step; record a synchronous run"
    if config.async_rl is not None:
        yield "async_rl needs grpo.async_grpo left out: both are asynchronous drivers"


def draft_models_need_megatron(config: MasterConfig) -> Iterator[str]:
    if config.policy.draft.enabled and not config.policy.megatron_cfg.enabled:
        yield "policy.draft.enabled needs policy.megatron_cfg.enabled: true"


def rollouts_are_recorded_or_replayed(config: MasterConfig) -> Iterator[str]:
    if config.grpo.rollout_record is not None and config.grpo.rollout_record == config.grpo.rollout_replay:
        yield f"grpo.rollout_record and grpo.rollout_replay are the same directory, {config.grpo.rollout_record}; a replay would write over what it reads"


def _shown(value: int | None) -> str:
    return "null" if value is None else str(value)


SHARED_RULES: tuple[Callable[[RootConfig], Iterator[str]], ...] = (
    one_training_backend,
    packing_or_dynamic_batching,
    parallelism_divides_the_world,
    rows_fit_the_parallel_shards,
    wide_tensor_parallelism_keeps_one_batch_size,
    ports_are_ranges,
    cpu_slots_suffice,
    *DTENSOR_RULES,
)
GRPO_RULES: tuple[Callable[[MasterConfig], Iterator[str]], ...] = (
    generation_has_its_own_accelerators,
    engines_fit_into_nodes,
    async_training_is_possible,
    draft_models_need_megatron,
    rollouts_are_recorded_or_replayed,
)
