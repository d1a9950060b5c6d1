"""Builds a GRPO run from its configuration.

Checks everything that needs no accelerator first (tokenizer, model, data), then starts Ray, reserves slots, builds
engines and policy at the same time and restores the latest checkpoint. Invariants: a mistake in the configuration
raises before Ray starts; whatever was built is ended again when a later part fails.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.grpo.refit import Refitter
from nemo_rl.algorithms.grpo.run import DeviceCount, GRPORun, GRPOState
from nemo_rl.algorithms.placement import check_policy, reserve, start_policy
from nemo_rl.algorithms.run_checkpoint import check_writable, latest_checkpoint, new_log_dir, restore_loader
from nemo_rl.algorithms.utils import set_seed
from nemo_rl.config import ClippedPGLossConfig, ConfigError, MasterConfig
from nemo_rl.config.dotted import import_dotted
from nemo_rl.config.placement import generation_world_size, training_world_size
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.loader import MultipleLoaders, make_loader
from nemo_rl.data.setup import TaskDatasets, load_datasets
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.actor_logs import collect_actor_logs
from nemo_rl.distributed.devices import Accelerator
from nemo_rl.distributed.ray_runtime import init_ray, shutdown_ray
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.environments.registry import environment_class, section_of
from nemo_rl.environments.setup import start_environments
from nemo_rl.experience.data_plane_store import DataPlaneStore
from nemo_rl.experience.environment_batcher import EnvironmentHandle
from nemo_rl.experience.hooks import time_sharing_enabled
from nemo_rl.experience.rollout_source import LiveRollouts, RecordedRollouts, ReplayedRollouts, RolloutSource
from nemo_rl.experience.rollouts import RolloutGenerator, RolloutRunner
from nemo_rl.experience.store import ExperienceStore, InProcessStore
from nemo_rl.loss import ClippedPGLossFn
from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.models.dtensor.kernels import check_device
from nemo_rl.models.dtensor.model_config import check_divisible
from nemo_rl.models.generation.interfaces import request_timeout_s
from nemo_rl.models.generation.vllm import VllmGeneration
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.record import MemoryRecord, Record, RecordWriter
from nemo_rl.utils.timer import TimeoutChecker, Timer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Clusters:
    """Slots of training and of generation; the same object when they share them."""

    training: RayVirtualCluster
    generation: RayVirtualCluster | None


def setup(config: MasterConfig) -> GRPORun:
    """A run that is ready to be driven.

    Args:
        config: A checked configuration. `logger.log_dir` is replaced by its next numbered directory.

    Raises:
        ConfigError, DataError, ModelNotFoundError, DeviceUnavailableError: The configuration asks for what is not there.
        CheckpointError: A checkpoint exists but cannot be resumed.
    """
    started = time.monotonic()
    set_seed(config.grpo.seed)
    tokenizer = get_tokenizer(config.policy.tokenizer, config.policy.trust_remote_code)
    check_model(config)
    datasets = load_datasets(tokenizer, config.data)
    for name in _environment_names(datasets):
        environment_class(name, section_of(name, config.env))
    make_loss(config.loss_fn)
    train_loader, val_loader = _loaders(config, datasets)
    checkpointer = CheckpointManager(config.checkpointing)
    if config.checkpointing.enabled:
        check_writable(checkpointer)
    checkpoint = latest_checkpoint(checkpointer) if config.checkpointing.enabled else None
    state = GRPOState()
    if checkpoint is not None:
        state = GRPOState.from_training_info(checkpoint[1])
        if not restore_loader(train_loader, checkpoint[0], checkpoint[1], config):
            logger.warning("resume=loader_ignored checkpoint=%s reason=datasets_changed", checkpoint[0])
    config.logger.log_dir = new_log_dir(config)
    with ExitStack() as undo:
        accelerator = init_ray(device=config.cluster.device, cpu_slots=config.cluster.cpu_slots)
        undo.callback(shutdown_ray)
        check_device(config.policy.dtensor_cfg, cuda=accelerator.is_cuda)
        run = _build(config, tokenizer, datasets, accelerator, checkpointer, state, (train_loader, val_loader), undo, checkpoint[0] if checkpoint else None)
        undo.pop_all()
    run.setup_seconds["total_setup_time_s"] = time.monotonic() - started
    run.logger.log_hyperparams(config.to_dict())
    run.logger.log_metrics(run.setup_seconds, state.step, prefix="timing/setup")
    logger.info("setup=done seconds=%.1f step=%d log_dir=%s", run.setup_seconds["total_setup_time_s"], state.step, config.logger.log_dir)
    return run


def check_model(config: MasterConfig) -> None:
    """Checks what the model's own configuration and torch's names decide, without loading weights.

    Raises:
        ModelNotFoundError: There is no model at `policy.model_name`.
        UnsupportedModelError: Heads, vocabulary or experts do not divide over the ranks of training or generation.
        KernelUnavailableError: A package is asked for and not installed.
        OptimizerConfigError: Optimizer or schedule do not exist or refuse their arguments.
    """
    model = check_policy(config)
    check_divisible(model, config.policy.generation.vllm_cfg.tensor_parallel_size, "policy.generation.vllm_cfg.tensor_parallel_size", ("num_attention_heads",))


def _environment_names(datasets: TaskDatasets) -> list[str]:
    return list(dict.fromkeys([*datasets.env_of_task.values(), *datasets.env_of_validation_task.values()]))


def _build(
    config: MasterConfig,
    tokenizer: Any,
    datasets: TaskDatasets,
    accelerator: Accelerator,
    checkpointer: CheckpointManager,
    state: GRPOState,
    loaders: tuple[Any, Any],
    undo: ExitStack,
    checkpoint: Path | None,
) -> GRPORun:
    began = time.monotonic()
    log = Logger(config.logger)
    record = RecordWriter(Path(config.logger.log_dir) / "record.jsonl", source="driver")
    clusters = _reserve(config, accelerator)
    undo.callback(clusters.training.shutdown)
    generation = _start_generation(config, clusters.generation, tokenizer, record)
    slept: list[dict[str, int]] = []
    if generation is not None:
        undo.callback(generation.shutdown)
        if generation.colocated and accelerator.is_cuda:
            # An engine takes its share of the memory that is free, and measures it while it starts: training takes its own afterwards.
            generation.wait_until_started()
            slept = generation.sleep()
    policy = start_policy(
        config,
        clusters.training,
        tokenizer,
        checkpointer,
        checkpoint,
        init_reference_model=config.loss_fn.reference_policy_kl_penalty != 0 and not config.grpo.skip_reference_policy_logprobs_calculation,
    )
    undo.callback(policy.shutdown)
    actors = start_environments(_environment_names(datasets), config.env) if generation is not None else {}
    policy.wait_until_started()
    seconds = {"policy_init_time_s": time.monotonic() - began}
    refitter = None
    if generation is not None:
        generation.wait_until_started()
        seconds["vllm_init_time_s"] = time.monotonic() - began
        refitter = Refitter(
            policy, generation, config.weight_sync, colocated=generation.colocated, cuda=accelerator.is_cuda, record=record.bind("refit"), slept=slept
        )
    store, train_source, val_source = _store_and_sources(config, tokenizer, policy, generation, datasets, actors, record, undo)
    return GRPORun(
        config=config,
        tokenizer=tokenizer,
        policy=policy,
        generation=generation,
        refitter=refitter,
        rollouts=train_source,
        validation_rollouts=val_source,
        store=store,
        loss_fn=make_loss(config.loss_fn),
        train_loader=loaders[0],
        val_loader=loaders[1],
        logger=log,
        checkpointer=checkpointer,
        state=state,
        record=record,
        timer=Timer(),
        timeout=TimeoutChecker(config.checkpointing.checkpoint_must_save_by),
        progress=RunProgress(_total_steps(config, loaders[0]), first_step=state.step),
        environments=actors,
        clusters=list({id(c): c for c in (clusters.training, clusters.generation) if c is not None}.values()),
        device_count=DeviceCount(
            config.cluster.gpus_per_node * config.cluster.num_nodes, training_world_size(config), generation_world_size(config) if generation is not None else 0
        ),
        setup_seconds=seconds,
        resumed_from=checkpoint,
    )


def _store_and_sources(
    config: MasterConfig,
    tokenizer: Any,
    policy: Any,
    generation: VllmGeneration | None,
    datasets: TaskDatasets,
    actors: dict[str, Any],
    record: Record,
    undo: ExitStack,
) -> tuple[ExperienceStore[Any], RolloutSource, RolloutSource | None]:
    multiple = config.policy.make_sequence_length_divisible_by
    if not isinstance(policy, TQPolicy):
        return InProcessStore(tokenizer.pad_token_id, multiple), *_sources(config, tokenizer, generation, datasets, actors, record)
    plane = DataPlaneStore(policy.dp_client, tokenizer.pad_token_id, multiple)
    undo.callback(plane.close)
    if config.grpo.async_grpo.enabled:
        # Rollouts that run ahead stay with the dispatcher, which knows the shards that come and go: their rows are written group by group.
        return plane, *_sources(config, tokenizer, generation, datasets, actors, record)
    # Others happen in an actor, which reaches the engines on its own and hands its events over.
    events = MemoryRecord()
    reached = generation.for_other_process() if generation is not None else None
    train_source, val_source = _sources(config, tokenizer, reached, datasets, actors, events)
    return plane, *plane.rollouts(train_source, val_source, events, record)


def make_loss(cfg: ClippedPGLossConfig) -> LossFunction:
    """The loss of the run: `loss_fn.class`, or the clipped policy-gradient loss.

    Raises:
        ConfigError: the class cannot be imported, or is no loss.
    """
    if cfg.loss_class is None:
        return ClippedPGLossFn(cfg)
    loss = import_dotted(cfg.loss_class, "loss_fn.class")(cfg)
    if not isinstance(loss, LossFunction):
        raise ConfigError([f"loss_fn.class: {cfg.loss_class} is no loss; it needs loss_type, input_type, metric_normalizations and __call__"])
    return loss


def _total_steps(config: MasterConfig, loader: Any) -> int:
    if config.data.use_multiple_dataloader or config.grpo.use_dynamic_sampling:
        return config.grpo.max_num_steps
    return min(config.grpo.max_num_steps, len(loader) * config.grpo.max_num_epochs)


def _loaders(config: MasterConfig, datasets: TaskDatasets) -> tuple[Any, Any]:
    grpo, data = config.grpo, config.data
    common: dict[str, Any] = {"collate_fn": rl_collate_fn, "num_workers": data.num_workers, "seed": grpo.seed}
    if data.use_multiple_dataloader:
        each = data.num_prompts_per_dataloader or grpo.num_prompts_per_step
        by_task = {
            task: make_loader(dataset, each, shuffle=data.shuffle, drop_last=True, name=f"data.train ({task})", **common)
            for task, dataset in datasets.train_by_task.items()
        }
        train: Any = MultipleLoaders(by_task, max(1, grpo.num_prompts_per_step // each), _custom_loader(config))
    else:
        size = int(grpo.num_prompts_per_step * grpo.batch_multiplier)
        train = make_loader(datasets.train, size, shuffle=data.shuffle, drop_last=True, name="data.train", **common)
    validation = None
    if datasets.validation is not None:
        size = min(grpo.val_batch_size, len(datasets.validation))
        validation = make_loader(datasets.validation, size, shuffle=False, drop_last=False, name="data.validation", **common)
    return train, validation


def _custom_loader(config: MasterConfig) -> Any:
    path = config.data.custom_dataloader
    return None if path is None else import_dotted(path, "data.custom_dataloader")


def _reserve(config: MasterConfig, accelerator: Accelerator) -> _Clusters:
    cluster, colocated = config.cluster, config.policy.generation.colocated
    nodes, each = cluster.num_nodes, cluster.gpus_per_node
    replayed = config.grpo.rollout_replay is not None and not _validates(config)
    if replayed or colocated.enabled:
        shared = reserve(cluster, accelerator, "policy", [each] * nodes, groups=2)
        return _Clusters(shared, None if replayed else shared)
    if nodes == 1:
        own = colocated.resources.gpus_per_node or 0
        return _Clusters(reserve(cluster, accelerator, "policy", [each - own]), reserve(cluster, accelerator, "generation", [own]))
    own = colocated.resources.num_nodes or 0
    training = reserve(cluster, accelerator, "policy", [each] * (nodes - own))
    return _Clusters(training, reserve(cluster, accelerator, "generation", [each] * own))


def _validates(config: MasterConfig) -> bool:
    return config.grpo.val_period > 0 or config.grpo.val_at_start or config.grpo.val_at_end


def _start_generation(config: MasterConfig, cluster: RayVirtualCluster | None, tokenizer: Any, record: Record) -> VllmGeneration | None:
    if cluster is None:
        return None
    generation = config.policy.generation
    return VllmGeneration(
        cluster,
        config.policy,
        config.cluster,
        pad_token_id=tokenizer.pad_token_id,
        stop_token_ids=generation.stop_token_ids or [tokenizer.eos_token_id],
        seed=config.grpo.seed,
        colocated=generation.colocated.enabled,
        request_timeout_s=request_timeout_s(),
        record=record.bind("generation"),
    )


def _sources(
    config: MasterConfig, tokenizer: Any, generation: RolloutGenerator | None, datasets: TaskDatasets, actors: dict[str, Any], record: Record
) -> tuple[RolloutSource, RolloutSource | None]:
    def live(env_of_task: dict[str, str], trained: Record | None = None) -> LiveRollouts:
        environments = {task: EnvironmentHandle.of(name, actors[name], config.env) for task, name in env_of_task.items()}
        runner = RolloutRunner(generation, tokenizer, environments, trained) if generation is not None else None
        if runner is None:
            raise RuntimeError("live rollouts need generation")
        return LiveRollouts(runner, pad_token_id=tokenizer.pad_token_id, multiple=config.policy.make_sequence_length_divisible_by)

    validation = live(datasets.env_of_validation_task) if generation is not None and datasets.validation is not None else None
    if config.grpo.rollout_replay is not None:
        return ReplayedRollouts(config.grpo.rollout_replay), validation
    training: RolloutSource = live(datasets.env_of_task, record)
    if config.grpo.rollout_record is not None:
        training = RecordedRollouts(training, config.grpo.rollout_record)
    return training, validation


def close(run: GRPORun) -> None:
    """Ends everything the run started; safe after a failure, and no process is left."""
    import ray

    with ExitStack() as stack:
        # On a shared pool Ray belongs to the control plane.
        if not time_sharing_enabled():
            stack.callback(shutdown_ray)
        stack.callback(collect_actor_logs, Path(run.config.logger.log_dir) / "actors")
        for cluster in run.clusters:
            stack.callback(cluster.shutdown)
        for actor in run.environments.values():
            stack.callback(ray.kill, actor)
        if run.generation is not None:
            stack.callback(run.generation.shutdown)
        stack.callback(run.policy.shutdown)
        stack.callback(run.store.close)
        stack.callback(run.logger.close)
        stack.callback(run.record.flush)
        stack.callback(run.checkpointer.shutdown)
