"""Slots for a run and the policy on them, as every algorithm takes them from its configuration.

Decides nothing about which slots training and generation share; that is each algorithm's set-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemo_rl.algorithms.profiling import profile_of_run
from nemo_rl.algorithms.resume import Resume
from nemo_rl.config import ClusterConfig, MasterConfig
from nemo_rl.config.master import RootConfig
from nemo_rl.distributed.devices import Accelerator
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.policy.backend import backend_spec
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.model_config import model_config
from nemo_rl.utils.checkpoint import CheckpointManager


def check_policy(config: RootConfig) -> Any:
    """Reads the model's configuration and checks that the policy can be built, before anything starts; the model's
    configuration.

    Raises:
        ModelNotFoundError: There is no model at `policy.model_name`.
        UnsupportedModelError: Heads, vocabulary or experts do not divide over the ranks of training.
        KernelUnavailableError: A package is asked for and not installed.
        OptimizerConfigError: Optimizer or schedule do not exist or refuse their arguments.
    """
    model = model_config(config.policy)
    backend_spec(config.policy).check(config.policy, model)
    return model


def check_device(config: RootConfig, accelerator: Accelerator) -> None:
    """Whether the accelerators can run what the training backend is configured for.

    Raises:
        KernelUnavailableError: They cannot.
    """
    backend_spec(config.policy).check_device(config.policy, cuda=accelerator.is_cuda)


def reserve(
    cluster: ClusterConfig, accelerator: Accelerator, name: str, per_node: Sequence[int], *, groups: int = 1
) -> RayVirtualCluster:
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
    config: RootConfig,
    cluster: RayVirtualCluster,
    tokenizer: Any,
    checkpointer: CheckpointManager,
    resume: Resume | None,
    *,
    init_reference_model: bool,
) -> Policy:
    """The policy, from the checkpoint if there is one; its workers may still be starting.

    Args:
        config: The run's.
        cluster: Slots; all of them are used.
        tokenizer: Saved beside checkpoints.
        checkpointer: Owner of the checkpoint.
        resume: What to go on from, or None.
        init_reference_model: Whether the initial weights are kept for reference log-probabilities.

    Raises:
        CheckpointError: The checkpoint has no weights.
    """
    paths = checkpointer.get_resume_paths(resume.checkpoint) if resume is not None else None
    optimizer = paths.optimizer if paths is not None and resume is not None and not resume.fresh_optimizer else None
    options: dict[str, Any] = {
        "weights_path": str(paths.weights.resolve()) if paths else None,
        "optimizer_path": str(optimizer.resolve()) if optimizer else None,
        "init_reference_model": init_reference_model,
        "profile": profile_of_run(),
    }
    if isinstance(config, MasterConfig) and config.data_plane.enabled:
        from nemo_rl.models.policy.tq_policy import TQPolicy

        return TQPolicy(cluster, config.policy, tokenizer, dp_cfg=config.data_plane, **options)
    return Policy(cluster, config.policy, tokenizer, **options)
