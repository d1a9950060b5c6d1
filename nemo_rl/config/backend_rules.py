"""Rules between keys of the training backends: parallelism of experts, and what kernels and optimizers ask for.

Each rule is a function from the configuration to lines, each naming its dotted keys, their values and a way out. What
depends on the model is found out from the model. Invariant: no rule depends on another's result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nemo_rl.config.master import RootConfig
from nemo_rl.config.placement import data_parallel_size, training_world_size

_KERNELS = "policy.dtensor_cfg.automodel_kwargs"


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


MEGATRON_RULES: tuple[Callable[[RootConfig], Iterator[str]], ...] = (optimizer_is_possible, experts_divide_the_ranks)
