"""How many accelerators train and how many generate, by the configuration alone.

Knows keys, not machines. Invariant: not colocated, the two counts add up to the cluster; colocated, each is the whole cluster.
"""

from __future__ import annotations

from nemo_rl.config.master import MasterConfig, RootConfig


def cluster_world_size(config: RootConfig) -> int:
    """Accelerator slots of the whole cluster."""
    return config.cluster.gpus_per_node * config.cluster.num_nodes


def generation_world_size(config: RootConfig) -> int:
    """Accelerator slots that generate; 0 where nothing generates or the keys do not say."""
    if not isinstance(config, MasterConfig):
        return 0
    colocated, cluster = config.policy.generation.colocated, config.cluster
    if colocated.enabled:
        return cluster_world_size(config)
    if cluster.num_nodes == 1:
        return colocated.resources.gpus_per_node or 0
    return (colocated.resources.num_nodes or 0) * cluster.gpus_per_node


def generation_slots_per_node(config: RootConfig) -> int:
    """Accelerator slots that generate on each node that does; 0 where nothing generates or the keys do not say."""
    if not isinstance(config, MasterConfig):
        return 0
    colocated, cluster = config.policy.generation.colocated, config.cluster
    if colocated.enabled or cluster.num_nodes > 1:
        return cluster.gpus_per_node
    return colocated.resources.gpus_per_node or 0


def training_world_size(config: RootConfig) -> int:
    """Accelerator slots that train."""
    if not isinstance(config, MasterConfig) or config.policy.generation.colocated.enabled:
        return cluster_world_size(config)
    return cluster_world_size(config) - generation_world_size(config)


def model_parallel_size(config: RootConfig) -> int:
    """Training ranks that together hold one replica of the data: tensor * context (* pipeline) parallel."""
    if config.policy.dtensor_cfg.enabled:
        return config.policy.dtensor_cfg.tensor_parallel_size * config.policy.dtensor_cfg.context_parallel_size
    mcore = config.policy.megatron_cfg
    return mcore.tensor_model_parallel_size * mcore.pipeline_model_parallel_size * mcore.context_parallel_size


def data_parallel_size(config: RootConfig) -> int:
    """Training ranks that see different samples; rounded down where the world does not divide."""
    return max(1, training_world_size(config) // model_parallel_size(config))
