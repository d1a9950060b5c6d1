"""The actors of engines, one per data-parallel shard, before any engine runs in them.

They take seconds to import vLLM and need nothing but the configuration for it, so they are started as early as the
slots are known. Invariant: until `VllmGeneration` starts their engines they touch no accelerator.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl.config import ClusterConfig, GenerationConfig, PolicyConfig
from nemo_rl.config.profiling import ENGINES, Profile
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, cores_per_slot
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.models.generation.vllm.engine_args import engine_spec

_WORKER = "nemo_rl.models.generation.vllm.worker.VllmGenerationWorker"


@dataclass(frozen=True)
class EngineActors:
    """What `VllmGeneration` is made of.

    Attributes:
        cfg: The generation section.
        group: One actor per shard.
        colocated: Whether the slots are shared with training, so that engines must sleep.
        lent: Whether a scheduler lends the slots shard by shard: engines are then built one by one (`shards.build`),
            and nothing is routed at first.
    """

    cfg: GenerationConfig
    group: RayWorkerGroup
    colocated: bool
    lent: bool


def start_engine_actors(
    cluster: RayVirtualCluster,
    policy: PolicyConfig,
    cluster_cfg: ClusterConfig,
    *,
    seed: int,
    colocated: bool,
    refits: bool = True,
    sleeps: bool | None = None,
    lent: bool = False,
    name_prefix: str = ENGINES,
    profile: Profile | None = None,
) -> EngineActors:
    """Starts the actors on the slots of a cluster; they import what an engine needs.

    Args:
        cluster: Slots; tensor x pipeline parallel size of them form one shard, inside one node.
        policy: The policy section, generation below it.
        cluster_cfg: Accelerator budget of CPU slots.
        seed: Base seed of the engines.
        colocated: Whether the slots are shared with training.
        refits: Whether training sends its weights.
        sleeps: Whether engines must be able to sleep; by default where slots are shared or lent.
        lent: Whether a scheduler lends the slots.
        name_prefix: Name in messages.
        profile: Which shards start under Nsight Systems; none by default.
    """
    width = policy.generation.vllm_cfg.tensor_parallel_size * policy.generation.vllm_cfg.pipeline_parallel_size
    spec = engine_spec(
        policy,
        cuda=cluster.accelerator.is_cuda,
        seed=seed,
        sleeps=colocated or lent if sleeps is None else sleeps,
        refits=refits,
        cpu_slot_memory_gb=cluster_cfg.cpu_slot_memory_gb,
        threads=cores_per_slot(cluster.world_size() // cluster.node_count()),
    )
    group = RayWorkerGroup(
        cluster,
        RayWorkerBuilder(_WORKER, spec, policy.generation.bad_words),
        name_prefix=name_prefix,
        bundle_indices_list=_tie_bundles(cluster, width),
        env_vars=spec.env,
        max_concurrency=4096,
        profile=profile,
    )
    group.run_all_workers_single_data("prepare")
    return EngineActors(policy.generation, group, colocated, lent)


def _tie_bundles(cluster: RayVirtualCluster, width: int) -> list[tuple[int, list[int]]]:
    """Groups of `width` neighbouring slots inside one node.

    Raises:
        ValueError: A node's slots do not divide into groups.
    """
    tied: list[tuple[int, list[int]]] = []
    by_node: dict[int, list[int]] = {}
    for slot in cluster.slots():
        by_node.setdefault(slot.node_rank, []).append(slot.bundle_index)
    for node, bundles in by_node.items():
        if len(bundles) % width:
            raise ValueError(
                f"policy.generation.vllm_cfg: tensor x pipeline parallel size {width} does not divide the "
                f"{len(bundles)} slots of node {node}; "
                "an engine lies inside one node"
            )
        tied += [(node, bundles[start : start + width]) for start in range(0, len(bundles), width)]
    return tied
