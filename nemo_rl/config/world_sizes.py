"""Numbers of training and generating accelerators, by the configuration alone.

Knows keys, not machines. Invariant: without generation's and teachers' own accelerators all of the cluster trains.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nemo_rl.config.errors import UserError
from nemo_rl.config.master import MasterConfig, RootConfig
from nemo_rl.config.megatron import MegatronConfig
from nemo_rl.config.policy import DTensorConfig, PolicyConfig
from nemo_rl.config.teacher_sections import teachers_of


def cluster_world_size(config: RootConfig) -> int:
    """Accelerator slots of the whole cluster."""
    return config.cluster.gpus_per_node * config.cluster.num_nodes


def generation_world_size(config: RootConfig) -> int:
    """Accelerator slots that generate; 0 where nothing generates or the keys do not say."""
    if not isinstance(config, MasterConfig):
        return 0
    colocated, cluster = config.policy.generation.colocated, config.cluster
    if colocated.enabled:
        return cluster_world_size(config) - teacher_world_size(config)
    if cluster.num_nodes == 1:
        return colocated.resources.gpus_per_node or 0
    return (colocated.resources.num_nodes or 0) * cluster.gpus_per_node


def generation_slots_per_node(config: RootConfig) -> int:
    """Accelerator slots that generate on each node that does; 0 where nothing generates or the keys do not say."""
    if not isinstance(config, MasterConfig):
        return 0
    colocated, cluster = config.policy.generation.colocated, config.cluster
    if colocated.enabled and cluster.num_nodes == 1:
        return cluster.gpus_per_node - teacher_world_size(config)
    if colocated.enabled or cluster.num_nodes > 1:
        return cluster.gpus_per_node
    return colocated.resources.gpus_per_node or 0


def engine_fits(width: int, slots: int, nodes: int) -> bool:
    """Whether engines of `width` ranks fill nodes of `slots` accelerators each: several inside a node, or each on whole
    nodes.
    """
    return slots % width == 0 or (width % slots == 0 and nodes % (width // slots) == 0)


def training_world_size(config: RootConfig) -> int:
    """Accelerator slots that train."""
    if not isinstance(config, MasterConfig):
        return cluster_world_size(config)
    own = 0 if config.policy.generation.colocated.enabled else generation_world_size(config)
    return cluster_world_size(config) - teacher_world_size(config) - own


def teacher_world_size(config: MasterConfig) -> int:
    """Accelerator slots that teachers have for themselves."""
    return sum(teacher.slots(config) for teacher in teachers_of(config))


@dataclass(frozen=True)
class ParallelSizes:
    """Training ranks along each axis.

    Attributes:
        dp: Ranks that see different samples.
        pp: Pipeline stages.
        cp: Ranks that share each sequence.
        tp: Ranks that share each layer.
        ep: Ranks that share the experts; they are among those of dp, cp and tp.
        etp: Ranks that share each expert.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def replica(self) -> int:
        """Ranks that together see one sample."""
        return self.pp * self.cp * self.tp

    @property
    def world(self) -> int:
        """All ranks."""
        return self.dp * self.replica


class ParallelSizesError(UserError, ValueError):
    """The training accelerators do not divide by the configured parallel sizes."""


def training_backend(policy: PolicyConfig) -> DTensorConfig | MegatronConfig:
    """The section of the backend that trains."""
    return policy.megatron_cfg if policy.megatron_cfg.enabled else policy.dtensor_cfg


def trains_adapters(policy: PolicyConfig) -> bool:
    """Whether low-rank adapters are trained instead of the weights, whatever the backend."""
    if policy.megatron_cfg.enabled:
        return policy.megatron_cfg.peft.enabled
    return policy.dtensor_cfg.lora_cfg.enabled


def replica_sizes(policy: PolicyConfig) -> ParallelSizes:
    """The parallel sizes of one replica of the data (dp is 1), whatever the backend."""
    if policy.megatron_cfg.enabled:
        mcore = policy.megatron_cfg
        return ParallelSizes(
            1,
            mcore.pipeline_model_parallel_size,
            mcore.context_parallel_size,
            mcore.tensor_model_parallel_size,
            mcore.expert_model_parallel_size,
            mcore.expert_tensor_parallel_size,
        )
    cfg = policy.dtensor_cfg
    return ParallelSizes(1, 1, cfg.context_parallel_size, cfg.tensor_parallel_size, cfg.expert_parallel_size)


def parallel_sizes(policy: PolicyConfig, world: int) -> ParallelSizes:
    """How `world` training ranks are divided, whatever the backend. Raises ParallelSizesError: They do not divide."""
    sizes = replica_sizes(policy)
    if world % sizes.replica:
        raise ParallelSizesError(
            f"{replica_keys(policy)} is {sizes.replica}, which does not divide the {world} accelerators that train; "
            f"possible: {divisors(world)}"
        )
    return replace(sizes, dp=world // sizes.replica)


def divisors(number: int) -> str:
    """The sizes that divide a number, for messages."""
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)


def compiles_layers(policy: PolicyConfig, sizes: ParallelSizes, *, cuda: bool) -> bool:
    """Whether the DTensor backend compiles decoder layers: by default on GPUs whose ranks hold whole ones."""
    backend = policy.dtensor_cfg
    if policy.megatron_cfg.enabled or backend.torch_compile is not None:
        return bool(backend.torch_compile) and not policy.megatron_cfg.enabled
    whole_layers = sizes.tp * sizes.cp * sizes.ep == 1
    # A layer that is recomputed cannot be compiled around its router.
    routed = policy.router_replay.enabled and backend.activation_checkpointing
    return cuda and whole_layers and not routed and not backend.automodel_kwargs.use_liger_kernel


def replica_keys(policy: PolicyConfig) -> str:
    """The dotted keys whose product is the size of a replica, for messages."""
    if policy.megatron_cfg.enabled:
        return "policy.megatron_cfg: tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size"
    return "policy.dtensor_cfg: tensor_parallel_size * context_parallel_size"


def model_parallel_size(config: RootConfig) -> int:
    """Training ranks that together hold one replica of the data: tensor * context * pipeline parallel."""
    return replica_sizes(config.policy).replica


def data_parallel_size(config: RootConfig) -> int:
    """Training ranks that see different samples; rounded down where the world does not divide."""
    return max(1, training_world_size(config) // model_parallel_size(config))
