"""Slots for a run and the policy on them, as every algorithm takes them from its configuration.

Decides nothing about which slots training and generation share; that is each algorithm's set-up.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl.config import ClusterConfig, MasterConfig
from nemo_rl.config.master import RootConfig
from nemo_rl.distributed.devices import Accelerator
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.dtensor.kernels import check_packages
from nemo_rl.models.dtensor.model_config import check_divisible, check_experts, model_config
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.optimizer import check_names
from nemo_rl.utils.checkpoint import CheckpointManager

logger = logging.getLogger(__name__)


def check_policy(config: RootConfig) -> Any:
    """Reads the model's configuration and checks that the policy can be built, before anything starts; the model's configuration.

    Raises:
        ModelNotFoundError: There is no model at `policy.model_name`.
        UnsupportedModelError: Heads, vocabulary or experts do not divide over the ranks of training.
        KernelUnavailableError: A package is asked for and not installed.
        OptimizerConfigError: Optimizer or schedule do not exist or refuse their arguments.
    """
    model = model_config(config.policy)
    check_divisible(model, config.policy.dtensor_cfg.tensor_parallel_size, "policy.dtensor_cfg.tensor_parallel_size")
    check_experts(model, config.policy.dtensor_cfg)
    check_packages(config.policy.dtensor_cfg)
    check_names(config.policy.optimizer, config.policy.scheduler)
    return model


def reserve(cluster: ClusterConfig, accelerator: Accelerator, name: str, per_node: Sequence[int], *, groups: int = 1) -> RayVirtualCluster:
    """Slots on the cluster.

    Args:
        cluster: Ports, and slots per node.
        accelerator: Kind of slot.
        name: For messages.
        per_node: Slots of each node.
        groups: Worker groups that share each slot.
    """
    return RayVirtualCluster(
        list(per_node),
        use_gpus=accelerator.is_cuda,
        max_colocated_worker_groups=groups,
        num_gpus_per_node=cluster.gpus_per_node,
        name=name,
        port_range_low=cluster.master_port_range_low,
        port_range_high=cluster.master_port_range_high,
    )


def start_policy(
    config: RootConfig, cluster: RayVirtualCluster, tokenizer: Any, checkpointer: CheckpointManager, checkpoint: Path | None, *, init_reference_model: bool
) -> Policy:
    """The policy, from the checkpoint if there is one; its workers may still be starting.

    Args:
        config: The run's.
        cluster: Slots; all of them are used.
        tokenizer: Saved beside checkpoints.
        checkpointer: Owner of the checkpoint.
        checkpoint: What to resume from, or None.
        init_reference_model: Whether the initial weights are kept for reference log-probabilities.

    Raises:
        CheckpointError: The checkpoint has no weights.
    """
    resume = checkpointer.get_resume_paths(checkpoint) if checkpoint is not None else None
    if resume is not None and resume.optimizer is None:
        logger.warning("resume=fresh_optimizer checkpoint=%s: it has no optimizer state", checkpoint)
    options: dict[str, Any] = {
        "weights_path": str(resume.weights.resolve()) if resume else None,
        "optimizer_path": str(resume.optimizer.resolve()) if resume and resume.optimizer else None,
        "init_reference_model": init_reference_model,
    }
    if isinstance(config, MasterConfig) and config.data_plane.enabled:
        from nemo_rl.models.policy.tq_policy import TQPolicy

        return TQPolicy(cluster, config.policy, tokenizer, dp_cfg=config.data_plane, **options)
    return Policy(cluster, config.policy, tokenizer, **options)
