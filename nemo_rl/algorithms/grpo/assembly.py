"""Builds a GRPO run from its configuration.

Checks everything that needs no accelerator (model, tokenizer, data) while Ray starts, then reserves slots, builds
engines and policy at the same time and restores the latest checkpoint. Invariants: a mistake in the configuration
raises before Ray is waited for; whatever was built is ended again when a later part fails.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.algorithms import start_checks
from nemo_rl.algorithms.grpo.placement import Built, Clusters, OwnPlacement, Placement
from nemo_rl.algorithms.grpo.run import DeviceCount, GRPORun, GRPOState
from nemo_rl.algorithms.grpo.streaming import check_streaming
from nemo_rl.algorithms.grpo.validation import batch_size as validation_batch_size
from nemo_rl.algorithms.placement import check_device, check_policy, start_policy
from nemo_rl.algorithms.profiling import check_profile, profile_of_run
from nemo_rl.algorithms.resume import Resume, check_same_shape, find_resume
from nemo_rl.algorithms.run_checkpoint import check_writable, new_log_dir
from nemo_rl.algorithms.seeds import set_seed
from nemo_rl.config import ClippedPGLossConfig, ConfigError, MasterConfig
from nemo_rl.config.dotted import import_dotted
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.loader import MultipleLoaders, make_loader
from nemo_rl.data.setup import TaskDatasets, load_datasets
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.data_plane.factory import check_data_plane
from nemo_rl.distributed.actor_logs import collect_actor_logs
from nemo_rl.distributed.devices import Accelerator
from nemo_rl.distributed.ray_runtime import RayStart, accelerator_here
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.environments.registry import environment_class, section_of
from nemo_rl.environments.setup import start_environments
from nemo_rl.experience.data_plane_store import DataPlaneStore
from nemo_rl.experience.environment_batcher import EnvironmentHandle
from nemo_rl.experience.rollout_source import LiveRollouts, RecordedRollouts, ReplayedRollouts, RolloutSource
from nemo_rl.experience.rollouts import RolloutGenerator, RolloutRunner
from nemo_rl.experience.store import ExperienceStore, InProcessStore
from nemo_rl.loss import ClippedPGLossFn
from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.models.generation.interfaces import request_timeout_s
from nemo_rl.models.generation.vllm import VllmGeneration
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.model_config import check_divisible
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.record import MemoryRecord, Record, RecordWriter
from nemo_rl.utils.start_phases import StartPhases
from nemo_rl.utils.timer import TimeoutChecker, Timer

logger = logging.getLogger(__name__)

_ARCHIVE_BYTES = 1 << 20


def setup(config: MasterConfig, start: StartPhases | None = None, placement: Placement | None = None) -> GRPORun:
    """A run that is ready to be driven.

    Args:
        config: A checked configuration. `logger.log_dir` is replaced by its next numbered directory.
        start: Where the phases of the start are shown.
        placement: Gives the run its accelerators; by default it has slots of its own.

    Raises:
        ConfigError, DataError, ModelNotFoundError, DeviceUnavailableError: The configuration asks for what is not
        there. CheckpointError: A checkpoint exists but cannot be resumed. ResumeError: It belongs to another run.
        NothingToDo: The run is over already.
    """
    start, placement = start or StartPhases(), placement or OwnPlacement()
    checkpointer = CheckpointManager(config.checkpointing)
    with start.phase("directories"):
        resume = find_resume(config, checkpointer)
        if config.checkpointing.enabled:
            check_writable(checkpointer)
        if resume is not None:
            resume.check_unfinished(config.grpo.max_num_steps, "grpo.max_num_steps")
        here = accelerator_here(config.cluster.device)
        check_profile(here)
        check_data_plane(config.data_plane)
    with ExitStack() as undo:
        ray_start = RayStart(lambda: placement.connect(config))
        undo.callback(ray_start.end, placement.disconnect)
        with start.phase("model, tokenizer and data, beside Ray's start"):
            set_seed(config.grpo.seed)
            model = check_model(config)
            if here is not None:
                start_checks.check_cpu_is_meant(config, here, model, start.say)
            make_loss(config.loss_fn)
            check_streaming(config)
            if resume is not None:
                check_same_shape(model, resume.checkpoint)
            tokenizer = get_tokenizer(config.policy.tokenizer, config.policy.trust_remote_code)
            datasets = load_datasets(tokenizer, config.data)
            start_checks.check_prompt_lengths(datasets.train_by_task, config.data.max_input_seq_length, start.say)
            for name in _environment_names(datasets):
                environment_class(name, section_of(name, config.env))
            loaders = _loaders(config, datasets)
            state, total_steps = _position(config, resume, loaders[0])
        if resume is not None:
            start.say("\n".join(resume.lines()))
        config.logger.log_dir = new_log_dir(config)
        start.say(f"logs: {config.logger.log_dir}")
        log = Logger(config.logger)
        undo.callback(log.close)
        with start.phase("Ray"):
            accelerator = ray_start.result()
        if here is None:
            start_checks.check_cpu_is_meant(config, accelerator, model, start.say)
        check_device(config, accelerator)
        ready = _Checked(config, tokenizer, datasets, loaders, checkpointer, log, resume, state, total_steps)
        run = _build(ready, placement, accelerator, undo, start)
        undo.pop_all()
    run.setup_seconds["total_setup_time_s"] = start.done()
    run.logger.log_hyperparams(config.to_dict())
    run.logger.log_metrics(run.setup_seconds, state.step, prefix="timing/setup")
    return run


def _position(config: MasterConfig, resume: Resume | None, loader: Any) -> tuple[GRPOState, int]:
    """The run's counters, with the loader where they say, and its last step.

    Raises:
        NothingToDo: That step is done.
    """
    if resume is None:
        return GRPOState(), _total_steps(config, loader)
    state = GRPOState.from_training_info(resume.info)
    resume.restore_position(loader, state, _prompts_per_step(config))
    if not _has_epochs(config):
        return state, config.grpo.max_num_steps
    total = resume.total_steps(state, config.grpo.max_num_steps, config.grpo.max_num_epochs, len(loader))
    resume.check_unfinished(total, "grpo.max_num_steps")
    return state, total


def check_model(config: MasterConfig) -> Any:
    """Checks what the model's own configuration, torch's names and installed packages decide, without loading weights;
    the model's configuration.

    Raises:
        ModelNotFoundError: There is no model at `policy.model_name`.
        UnsupportedModelError: Heads, vocabulary or experts do not divide over the ranks of training or generation.
        KernelUnavailableError: A package is asked for and not installed.
        OptimizerConfigError: Optimizer or schedule do not exist or refuse their arguments.
        MooncakeUnavailableError: The data plane is to lie in Mooncake, which is not installed whole.
    """
    check_data_plane(config.data_plane)
    model = check_policy(config)
    check_divisible(
        model,
        config.policy.generation.vllm_cfg.tensor_parallel_size,
        "policy.generation.vllm_cfg.tensor_parallel_size",
        ("num_attention_heads",),
    )
    return model


def _environment_names(datasets: TaskDatasets) -> list[str]:
    return list(dict.fromkeys([*datasets.env_of_task.values(), *datasets.env_of_validation_task.values()]))


@dataclass(frozen=True)
class _Checked:
    """What needs no accelerator, read and checked."""

    config: MasterConfig
    tokenizer: Any
    datasets: TaskDatasets
    loaders: tuple[Any, Any]
    checkpointer: CheckpointManager
    log: Logger
    resume: Resume | None
    state: GRPOState
    total_steps: int


def _build(
    ready: _Checked, placement: Placement, accelerator: Accelerator, undo: ExitStack, start: StartPhases
) -> GRPORun:
    config, tokenizer, began = ready.config, ready.tokenizer, time.monotonic()
    path, source = Path(config.logger.log_dir) / "record.jsonl", f"{placement.record_prefix}driver"
    record = RecordWriter(path, source=source, archive_bytes=_ARCHIVE_BYTES)
    timer = Timer()
    progress = RunProgress(ready.total_steps, first_step=ready.state.step)
    clusters = placement.reserve(config, accelerator)
    undo.callback(clusters.training.shutdown)
    shard_record = placement.shard_record(record)
    generation = _start_generation(config, clusters.generation, tokenizer, shard_record, lent=placement.lends_shards)
    slept: list[dict[str, int]] = []
    if generation is not None:
        undo.callback(generation.shutdown)
        if generation.colocated and accelerator.is_cuda:
            # An engine takes its share of the memory that is free, and measures it while it starts: training takes its
            # own afterwards.
            with start.phase("engines"):
                generation.wait_until_started()
                slept = generation.sleep()
    seconds: dict[str, float] = {}
    with placement.training_accelerators():
        policy = _start_policy(ready, clusters)
        undo.callback(policy.shutdown)
        names = _environment_names(ready.datasets)
        actors = start_environments(names, config.env) if generation is not None else {}
        with start.phase("policy"):
            policy.wait_until_started()
        if policy.started is not None:
            record.emit(policy.started)
            start.say(f"training: {policy.started.kernels}")
        seconds["policy_init_time_s"] = time.monotonic() - began
        if generation is not None:
            with start.phase("engines, beside the policy"):
                generation.wait_until_started()
            seconds["vllm_init_time_s"] = time.monotonic() - began
        built = Built(config, policy, generation, ready.state.step, record, timer, progress, slept)
        control = placement.control_plane(built)
    store, train_source, val_source = _store_and_sources(
        config, tokenizer, policy, generation, ready.datasets, actors, record, placement.record_prefix, undo
    )
    slots = [cluster.world_size() for cluster in clusters.distinct()]
    return GRPORun(
        config=config,
        tokenizer=tokenizer,
        policy=policy,
        generation=generation,
        control=control,
        rollouts=train_source,
        validation_rollouts=val_source,
        store=store,
        loss_fn=make_loss(config.loss_fn),
        train_loader=ready.loaders[0],
        val_loader=ready.loaders[1],
        logger=ready.log,
        checkpointer=ready.checkpointer,
        state=ready.state,
        record=record,
        timer=timer,
        timeout=TimeoutChecker(config.checkpointing.checkpoint_must_save_by),
        progress=progress,
        total_steps=ready.total_steps,
        environments=actors,
        placement=placement,
        clusters=clusters.distinct(),
        device_count=DeviceCount(
            max(slots) if placement.lends_shards else sum(slots),
            clusters.training.world_size(),
            clusters.generation.world_size() if clusters.generation is not None else 0,
        ),
        setup_seconds=seconds,
        env_of_validation_task=ready.datasets.env_of_validation_task,
        # Groups that wait in a checkpoint are of its data.
        resumed_from=ready.resume.checkpoint if ready.resume is not None and ready.resume.same_data else None,
    )


def _start_policy(ready: _Checked, clusters: Clusters) -> Policy:
    config = ready.config
    reads_reference = config.loss_fn.reference_policy_kl_penalty != 0
    return start_policy(
        config,
        clusters.training,
        ready.tokenizer,
        ready.checkpointer,
        ready.resume,
        init_reference_model=reads_reference and not config.grpo.skip_reference_policy_logprobs_calculation,
    )


def _store_and_sources(
    config: MasterConfig,
    tokenizer: Any,
    policy: Any,
    generation: VllmGeneration | None,
    datasets: TaskDatasets,
    actors: dict[str, Any],
    record: Record,
    record_prefix: str,
    undo: ExitStack,
) -> tuple[ExperienceStore[Any], RolloutSource, RolloutSource | None]:
    multiple = config.policy.make_sequence_length_divisible_by
    if not isinstance(policy, TQPolicy):
        return InProcessStore(tokenizer.pad_token_id, multiple), *_sources(
            config, tokenizer, generation, datasets, actors, record
        )
    plane = DataPlaneStore(policy.dp_client, tokenizer.pad_token_id, multiple)
    undo.callback(plane.close)
    if config.grpo.async_grpo.enabled or config.async_rl is not None or (generation is not None and generation.lent):
        # Rollouts that run ahead stay with the dispatcher, which knows the shards that come and go: their rows are
        # written group by group.
        return plane, *_sources(config, tokenizer, generation, datasets, actors, record)
    # Others happen in an actor, which reaches the engines on its own and hands its events over.
    events = MemoryRecord(source=f"{record_prefix}driver")
    reached = generation.for_other_process(events.bind("generation")) if generation is not None else None
    train_source, val_source = _sources(config, tokenizer, reached, datasets, actors, events)
    return plane, *plane.rollouts(train_source, val_source, events, record, reached, generation)


def make_loss(cfg: ClippedPGLossConfig) -> LossFunction:
    """The loss of the run: `loss_fn.class`, or the clipped policy-gradient loss.

    Raises:
        ConfigError: the class cannot be imported, or is no loss.
    """
    if cfg.loss_class is None:
        return ClippedPGLossFn(cfg)
    loss = import_dotted(cfg.loss_class, "loss_fn.class")(cfg)
    if not isinstance(loss, LossFunction):
        raise ConfigError(
            [
                f"loss_fn.class: {cfg.loss_class} is no loss; it needs loss_type, input_type, "
                "metric_normalizations and __call__"
            ]
        )
    return loss


def _total_steps(config: MasterConfig, loader: Any) -> int:
    if not _has_epochs(config):
        return config.grpo.max_num_steps
    return min(config.grpo.max_num_steps, len(loader) * config.grpo.max_num_epochs)


def _has_epochs(config: MasterConfig) -> bool:
    """Whether the number of steps in an epoch is known."""
    return not (config.data.use_multiple_dataloader or config.grpo.use_dynamic_sampling)


def _prompts_per_step(config: MasterConfig) -> int:
    return int(config.grpo.num_prompts_per_step * config.grpo.batch_multiplier)


def _loaders(config: MasterConfig, datasets: TaskDatasets) -> tuple[Any, Any]:
    grpo, data = config.grpo, config.data
    common: dict[str, Any] = {"collate_fn": rl_collate_fn, "num_workers": data.num_workers, "seed": grpo.seed}
    if data.use_multiple_dataloader:
        each = data.num_prompts_per_dataloader or grpo.num_prompts_per_step
        by_task = {
            task: make_loader(
                dataset, each, shuffle=data.shuffle, drop_last=True, name=f"data.train ({task})", **common
            )
            for task, dataset in datasets.train_by_task.items()
        }
        train: Any = MultipleLoaders(by_task, max(1, grpo.num_prompts_per_step // each), _custom_loader(config))
    else:
        size = _prompts_per_step(config)
        train = make_loader(datasets.train, size, shuffle=data.shuffle, drop_last=True, name="data.train", **common)
    validation = None
    if datasets.validation is not None:
        size = validation_batch_size(grpo, len(datasets.validation))
        validation = make_loader(
            datasets.validation, size, shuffle=False, drop_last=False, name="data.validation", **common
        )
    return train, validation


def _custom_loader(config: MasterConfig) -> Any:
    path = config.data.custom_dataloader
    return None if path is None else import_dotted(path, "data.custom_dataloader")


def _start_generation(
    config: MasterConfig, cluster: RayVirtualCluster | None, tokenizer: Any, record: Record, *, lent: bool
) -> VllmGeneration | None:
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
        colocated=generation.colocated.enabled and not lent,
        request_timeout_s=request_timeout_s(),
        lent=lent,
        record=record,
        profile=profile_of_run(),
    )


def _sources(
    config: MasterConfig,
    tokenizer: Any,
    generation: RolloutGenerator | None,
    datasets: TaskDatasets,
    actors: dict[str, Any],
    record: Record,
) -> tuple[RolloutSource, RolloutSource | None]:
    def live(env_of_task: dict[str, str], trained: Record | None = None) -> LiveRollouts:
        environments = {
            task: EnvironmentHandle.of(name, actors[name], config.env) for task, name in env_of_task.items()
        }
        runner = RolloutRunner(generation, tokenizer, environments, trained) if generation is not None else None
        if runner is None:
            raise RuntimeError("live rollouts need generation")
        return LiveRollouts(
            runner, pad_token_id=tokenizer.pad_token_id, multiple=config.policy.make_sequence_length_divisible_by
        )

    validation = (
        live(datasets.env_of_validation_task) if generation is not None and datasets.validation is not None else None
    )
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
        if isinstance(run.record, RecordWriter):
            stack.callback(run.record.close)
        stack.callback(run.placement.disconnect)
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
        stack.callback(run.reports.close)
