"""Rules between keys of the Megatron-Core backend.

Each rule is a function from the configuration to lines, each naming its dotted keys, their values and a way out. What
depends on the model is found out from the model. Invariant: no rule depends on another's result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nemo_rl.config.master import RootConfig
from nemo_rl.config.placement import training_world_size

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
