"""Builds a GRPO run from its configuration: `setup` is the start of a run, from top to bottom.

Data is read while Ray and the first actors start; then engines, policy and environments are built beside each other.
Invariant: one stack ends whatever was built, where a start fails and at the end of the run.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nemo_rl.algorithms.accelerators import check_control_plane
from nemo_rl.algorithms.distillation import teachers as teaching
from nemo_rl.algorithms.grpo.async_source import AsynchronousSource
from nemo_rl.algorithms.grpo.collect import SynchronousSource, prompts_per_batch
from nemo_rl.algorithms.grpo.run import ExperienceSource, GRPORun, GRPOState, ValidationParts
from nemo_rl.algorithms.grpo.stages import needs_previous_logprobs, needs_reference_logprobs
from nemo_rl.algorithms.grpo.step_reports import DeviceCount, StepReports
from nemo_rl.algorithms.grpo.streaming import StreamingSource, check_streaming
from nemo_rl.algorithms.grpo.validation import batch_size as validation_batch_size
from nemo_rl.algorithms.grpo.validation import batches_to_run
from nemo_rl.algorithms.memory_watch import MemoryWatch, WatchedActors
from nemo_rl.algorithms.placement import (
    Clusters,
    OwnPlacement,
    Placement,
    begin_policy,
    check_policy,
    start_policy,
    tell_cpu_memory,
    tell_memory,
    tell_step_time,
)
from nemo_rl.algorithms.profiling import check_profile, profile_of_run
from nemo_rl.algorithms.resume import Resume
from nemo_rl.algorithms.startup import (
    Loaders,
    RunData,
    RunLimits,
    begin_beside,
    check_cpu_is_meant,
    check_steps_left,
    find_checkpoint,
    find_position,
    import_transformers,
    log_start,
    open_logger,
    read_data,
    set_seed,
)
from nemo_rl.config import ClippedPGLossConfig, ConfigError, DistillationLossConfig, MasterConfig
from nemo_rl.config.data_rules import environments_in_use
from nemo_rl.config.dotted import import_dotted
from nemo_rl.data.loader import Loader, MultipleLoaders, make_loader, rl_collate_fn
from nemo_rl.data.setup import TaskDatasets
from nemo_rl.data_plane.factory import check_data_plane
from nemo_rl.distributed.accelerator_slots import Accelerator
from nemo_rl.distributed.actor_logs import collect_actor_logs
from nemo_rl.distributed.ray_runtime import accelerator_here
from nemo_rl.distributed.worker_groups import RayWorkerGroup
from nemo_rl.environments.environment_registry import (
    Actors,
    await_environments,
    check_rows,
    end_environments,
    environment_class,
    section_of,
    start_environments,
    start_lines,
)
from nemo_rl.experience.data_plane_store import DataPlaneStore
from nemo_rl.experience.environment_batcher import EnvironmentHandle, environment_lines
from nemo_rl.experience.hooks import time_sharing_enabled
from nemo_rl.experience.rollout_source import LiveRollouts, RecordedRollouts, ReplayedRollouts, RolloutSource
from nemo_rl.experience.rollouts import AgentRollouts, RolloutGenerator, RolloutRunner
from nemo_rl.experience.store import InProcessStore
from nemo_rl.loss import ClippedPGLossFn, DistillationLossFn
from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.models.generation.decisions import Recording, recording_of
from nemo_rl.models.generation.endpoint.server import Endpoint, start_endpoint
from nemo_rl.models.generation.interfaces import request_timeout_s
from nemo_rl.models.generation.vllm.engine_actors import EngineActors, start_engine_actors
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.model_config import check_divisible
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.progress import RunProgress, StartPhases
from nemo_rl.utils.record import ARCHIVE_BYTES, MemoryRecord, Record, RecordWriter
from nemo_rl.utils.timer import TimeoutChecker, Timer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from nemo_rl.data.model_tokens import StopTokens
    from nemo_rl.models.multi_lora.multi_lora_policy import MultiLoraPolicy

_WARM_UP_S = 900.0


class Begun(NamedTuple):
    """Slots, the actors on them, and environments. Replayed rollouts without validation need no engines or
    environments.
    """

    accelerator: Accelerator
    clusters: Clusters
    policy: RayWorkerGroup
    engines: EngineActors | None
    environments: Actors
    teachers: list[teaching.TeacherActors]


def setup(config: MasterConfig, start: StartPhases | None = None, placement: Placement | None = None) -> GRPORun:
    """Builds a run that is ready to train.

    Args:
        config: A checked configuration. `logger.log_dir` is replaced by its next numbered directory.
        start: Shows the phases of the start.
        placement: Provides accelerators; by default slots of its own.

    Raises ConfigError, DataError, ModelNotFoundError, DeviceUnavailableError: the configuration names
    something that does not exist; CheckpointError: a checkpoint exists but cannot be resumed; ResumeError: it belongs
    to another run; NothingToDo: the run is over already.
    """
    start, placement = start or StartPhases(), placement or OwnPlacement()
    limits = limits_of(config)
    with ExitStack() as stack:
        with start.phase("directories"):
            checkpointer, resume = find_checkpoint(config)
            check_data_plane(config.data_plane)
            check_steps_left(resume, limits)
            here = accelerator_here(config.cluster.device)
            check_profile(here)
        ray = begin_beside(config, placement, partial(_begin, config, placement, checkpointer, resume), stack)
        with start.phase("model, tokenizer and data, beside Ray's start"):
            import_transformers()
            set_seed(config.grpo.seed)
            model = check(config)
            data = read_data(config, model, resume, here, start.say)
            loaders = make_loaders(config, data.datasets)
            state, total_steps = find_position(data, loaders, GRPOState(), GRPOState.from_training_info, limits)
        logger = open_logger(config, data, loaders, start.say, stack)
        with start.phase("Ray"):
            begun = ray.result()
        if here is None:
            check_cpu_is_meant(config, begun.accelerator, model, start.say)

        clusters, tokenizer, began = begun.clusters, data.tokenizer, time.monotonic()
        record = _open_record(config, placement, stack)
        timer, seconds = Timer(), dict[str, float]()
        title = "Distillation" if config.distils else "GRPO"
        progress = RunProgress(total_steps, title=title, first_step=state.step, details=environment_lines)
        # Engines take long to start: a mistake in an environment is said before.
        with start.phase("environments"):
            await_environments(begun.environments, config.env)
            for line in start_lines(environments_in_use(config), config.env):
                start.say(line)
        generation = start_generation(begun.engines, tokenizer, data.stop_tokens, placement.shard_record(record))
        if generation is not None:
            stack.callback(generation.shutdown)
            placement.generation_prepared(generation)
        # While engines start: a mistake in its keys is said before anything waits for them.
        endpoint = _start_endpoint(config, begun.accelerator, data, generation, start)
        if endpoint is not None:
            stack.callback(endpoint.close)
        beside = _start_beside(config, begun, placement, generation, start)
        loss_fn = make_loss(config.loss_fn)
        with placement.building():
            with start.phase("policy, beside the data plane" if config.data_plane.enabled else "policy"):
                policy = start_policy(config, clusters.training, tokenizer, begun.policy, last_step=total_steps)
                stack.callback(policy.shutdown)
                store = make_store(config, tokenizer, policy, stack)
                policy.wait_until_started()
            warming = None
            compiles = begun.accelerator.is_cuda or config.policy.dtensor_cfg.torch_compile
            if compiles and not placement.lends_shards and type(loss_fn) is ClippedPGLossFn:
                warming = policy.submit_warm_up(loss_fn)
            teachers = teaching.start_teachers(
                begun.teachers, config, policy, tokenizer, start, stack, lends=placement.lends_shards
            )
            rollouts, validation_rollouts = make_rollout_sources(
                store,
                config,
                tokenizer,
                generation,
                data.datasets,
                begun.environments,
                record,
                placement.record_prefix,
                endpoint,
            )
            if policy.started is not None:
                record.emit(policy.started)
                start.say(f"training: {policy.started.kernels}")
            seconds["policy_init_time_s"] = time.monotonic() - began
            if generation is not None:
                with start.phase("engines, beside the policy"):
                    generation.wait_until_started()
                seconds["vllm_init_time_s"] = time.monotonic() - began
            if warming is not None:
                with start.phase("first passes of training, compiled"):
                    seconds["policy_warm_up_time_s"] = warming.result(_WARM_UP_S)
            if beside and generation is not None:
                # Only now: an engine that sleeps measures what comes back, and the first passes move it.
                generation.sleep()
            watched = watched_actors(policy, begun.environments, teachers)
            run = GRPORun(
                config=config,
                policy=policy,
                generation=generation,
                rollouts=rollouts,
                validation=validation_of(validation_rollouts, begun.environments, data.datasets),
                store=store,
                loss_fn=loss_fn,
                train_loader=loaders.train,
                val_loader=loaders.validation,
                logger=logger,
                checkpointer=checkpointer,
                state=state,
                record=record,
                timer=timer,
                timeout=TimeoutChecker(config.checkpointing.checkpoint_must_save_by),
                progress=progress,
                memory=MemoryWatch(watched, generation, logger, progress.say),
                total_steps=total_steps,
                teachers=teachers,
                endpoint=endpoint,
                clusters=clusters.distinct(),
                reports=StepReports(
                    config, store, logger, record, progress, generation, count_devices(clusters, placement)
                ),
                resumed_from=resumed_from(data.resume),
            )
            run.accelerators = placement.accelerators(run)
        run.source = make_source(run)
        end_files_first(run, stack)
        ray.after_actors(partial(collect_actor_logs, Path(config.logger.log_dir) / "actors"))
        log_start(config, logger, state.step, start, seconds)
        run.ending = stack.pop_all()
    return run


def limits_of(config: MasterConfig) -> RunLimits:
    """The end of a run."""
    grpo = config.grpo
    # Neither loaders by task nor dynamic sampling know how many steps an epoch has.
    epochs = None if config.data.use_multiple_dataloader or grpo.use_dynamic_sampling else grpo.max_num_epochs
    return RunLimits(f"{config.section()}.max_num_steps", grpo.max_num_steps, epochs, prompts_per_batch(grpo))


def _begin(
    config: MasterConfig,
    placement: Placement,
    checkpointer: CheckpointManager,
    resume: Resume | None,
    accelerator: Accelerator,
    stack: ExitStack,
) -> Begun:
    """Starts what needs neither tokenizer nor data; `stack` ends it."""
    clusters = placement.reserve(config, accelerator)
    for cluster in clusters.distinct():
        stack.callback(cluster.shutdown)
    engines: EngineActors | None = None
    environments: Actors = {}
    if clusters.generation is not None:
        local = config.policy.generation.vllm_cfg.http_server.is_local
        environments = start_environments(environments_in_use(config), config.env, agents_anywhere=not local)
        stack.callback(end_environments, environments)
        lent = placement.lends_shards
        engines = start_engine_actors(
            clusters.generation,
            config.policy,
            config.cluster,
            seed=config.grpo.seed,
            colocated=config.policy.generation.colocated.enabled and not lent,
            # A foreign control plane puts engines to sleep, whatever accelerators they are on.
            sleeps=True if time_sharing_enabled() else None,
            lent=lent,
            profile=profile_of_run(),
        )
        stack.callback(engines.shutdown)
    reference = config.loss_fn.reference_policy_kl_penalty != 0
    policy = begin_policy(
        config,
        clusters.training,
        checkpointer,
        resume,
        init_reference_model=reference and not config.grpo.skip_reference_policy_logprobs_calculation,
    )
    stack.callback(policy.shutdown)
    teachers = teaching.start_teacher_actors(
        config, clusters.training, clusters.teachers, lambda teacher: placement.served_teacher(teacher, config)
    )
    for teacher in teachers:
        stack.callback(teacher.shutdown)
    return Begun(accelerator, clusters, policy, engines, environments, teachers)


def check(config: MasterConfig) -> PretrainedConfig:
    """Checks what needs neither tokenizer nor data; returns the model's configuration. For errors see `check_model`."""
    model = check_model(config)
    teaching.check_teachers(config, model)
    for name in environments_in_use(config):
        environment_class(name, section_of(name, config.env))
    make_loss(config.loss_fn)
    check_streaming(config)
    check_control_plane(config)
    return model


def check_model(config: MasterConfig) -> PretrainedConfig:
    """Checks the model's configuration, optimizer names and installed packages without loading weights; returns the
    model's configuration.

    Raises ModelNotFoundError: there is no model at `policy.model_name`; UnsupportedModelError: heads, vocabulary or
    experts do not divide over the ranks of training or generation; KernelUnavailableError: a package is asked for and
    not installed; OptimizerConfigError: optimizer or schedule do not exist or refuse their arguments;
    MooncakeUnavailableError: the data plane is configured for Mooncake, which is not fully installed.
    """
    check_data_plane(config.data_plane)
    model = check_policy(config, generates=True)
    check_divisible(
        model,
        config.policy.generation.vllm_cfg.tensor_parallel_size,
        "policy.generation.vllm_cfg.tensor_parallel_size",
        ("num_attention_heads",),
    )
    return model


def _start_beside(
    config: MasterConfig,
    begun: Begun,
    placement: Placement,
    generation: VllmGeneration | None,
    start: StartPhases,
) -> bool:
    """Says what a GPU of training will hold, or how long a step takes without one, and whether the policy starts while
    engines on its GPUs are awake; else they are asleep when this returns. Engines on other GPUs stay as they are.
    """
    if placement.lends_shards:
        return False
    if not begun.accelerator.is_cuda:
        previous = not config.distils and needs_previous_logprobs(config.grpo, config.loss_fn)
        reference = not config.distils and needs_reference_logprobs(config.grpo, config.loss_fn)
        tell_step_time(config, start.say, forward_passes=1 + previous + reference)
        tell_cpu_memory(config, begun.policy, start.say, reference=reference)
        return False
    vllm = config.policy.generation.vllm_cfg
    shares = generation is not None and generation.colocated
    memory = tell_memory(config, begun.policy, start.say, engines=vllm.engines_per_gpu if shares else 0)
    if generation is None or not shares:
        return False
    sized = begun.engines is not None and begun.engines.sized and not begun.teachers
    if sized and memory is not None and memory.starts_beside_engines(vllm.gpu_memory_utilization):
        return True
    with start.phase("engines"):
        generation.wait_until_started()
        generation.sleep()
    return False


def _open_record(config: MasterConfig, placement: Placement, stack: ExitStack) -> RecordWriter:
    path, source = Path(config.logger.log_dir) / "record.jsonl", f"{placement.record_prefix}driver"
    record = RecordWriter(path, source=source, archive_bytes=ARCHIVE_BYTES)
    stack.callback(record.close)
    return record


def validation_of(
    rollouts: RolloutSource | None, environments: Actors, datasets: TaskDatasets
) -> ValidationParts | None:
    """What validation works with; None if there is no validation data."""
    return None if rollouts is None else ValidationParts(rollouts, environments, datasets.env_of_validation_task)


def watched_actors(
    policy: Policy | MultiLoraPolicy, environments: Actors, teachers: teaching.Teachers | None = None
) -> dict[str, WatchedActors]:
    """The actors of a run whose memory is logged, by kind."""
    return {
        "trainer": lambda: policy.worker_group.workers,
        "teacher": lambda: teachers.workers() if teachers is not None else [],
        "environment": lambda: [actor for replicas in environments.values() for actor in replicas],
    }


def count_devices(clusters: Clusters, placement: Placement) -> DeviceCount:
    """The accelerators of a run, and how many of them train and generate. Lent ones train and generate in turns."""
    slots = [cluster.world_size() for cluster in clusters.distinct()]
    generating = clusters.generation.world_size() if clusters.generation is not None else 0
    return DeviceCount(max(slots) if placement.lends_shards else sum(slots), clusters.training.world_size(), generating)


def resumed_from(resume: Resume | None) -> Path | None:
    """The checkpoint whose prompt groups wait to be trained: those are of its data."""
    return resume.checkpoint if resume is not None and resume.same_data else None


def end_files_first(run: GRPORun, stack: ExitStack) -> None:
    """Has `stack` begin with what writes files: while the processes that they tell of still run."""
    stack.callback(run.store.close)
    stack.callback(run.record.flush)
    stack.callback(run.checkpointer.shutdown)
    stack.callback(run.reports.close)


def make_loss(cfg: ClippedPGLossConfig) -> LossFunction:
    """The configured loss: `loss_fn.class`, or the clipped policy-gradient loss. Raises ConfigError: the class cannot
    be imported, or is no loss.
    """
    if isinstance(cfg, DistillationLossConfig):
        return DistillationLossFn(cfg)
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


def start_generation(
    actors: EngineActors | None, tokenizer: PreTrainedTokenizerBase, ends: StopTokens, record: Record
) -> VllmGeneration | None:
    """Starts engines on their actors; does not wait for them. None without actors."""
    if actors is None:
        return None
    return VllmGeneration(
        actors,
        pad_token_id=tokenizer.pad_token_id,
        stop_token_ids=list(ends.ids),
        request_timeout_s=request_timeout_s(),
        record=record,
    )


def _start_endpoint(
    config: MasterConfig,
    accelerator: Accelerator,
    data: RunData,
    generation: VllmGeneration | None,
    start: StartPhases,
) -> Endpoint | None:
    if generation is None or not config.policy.generation.vllm_cfg.expose_http_server:
        return None
    with start.phase("endpoint"):
        endpoint = start_endpoint(
            config.policy,
            data.tokenizer,
            generation.generate_one,
            stop_token_ids=data.stop_tokens.ids,
            cuda=accelerator.is_cuda,
        )
    generation.dp_openai_server_base_urls = endpoint.base_urls(len(generation.group.workers))
    start.say(f"endpoint: {endpoint.base_url}, model {endpoint.model}")
    return endpoint


def make_loaders(config: MasterConfig, datasets: TaskDatasets) -> Loaders[Loader]:
    """Checks the rows, and makes the loaders of training and validation prompts. Raises ConfigError: a row lacks what
    the function that rewards it reads.
    """
    grpo, data = config.grpo, config.data
    check_rows(datasets.train_by_task, datasets.env_of_task, config.env)
    check_rows(datasets.validation_by_task, datasets.env_of_validation_task, config.env)
    make = partial(make_loader, collate_fn=rl_collate_fn, num_workers=data.num_workers, seed=grpo.seed)
    size = prompts_per_batch(grpo)
    if data.use_multiple_dataloader:
        each = data.num_prompts_per_dataloader or grpo.num_prompts_per_step
        by_task = {
            task: make(dataset, each, shuffle=data.shuffle, drop_last=True, name=f"data.train ({task})")
            for task, dataset in datasets.train_by_task.items()
        }
        path = data.custom_dataloader
        mixed_by = None if path is None else import_dotted(path, "data.custom_dataloader")
        train: Loader = MultipleLoaders(by_task, max(1, size // each), mixed_by)
    else:
        train = make(datasets.train, size, shuffle=data.shuffle, drop_last=True, name="data.train")
    if datasets.validation is None:
        return Loaders(train, None)
    size = validation_batch_size(grpo, len(datasets.validation))
    validation = make(datasets.validation, size, shuffle=False, drop_last=False, name="data.validation")
    return Loaders(train, validation, size * batches_to_run(grpo, len(validation)))


def make_store(
    config: MasterConfig, tokenizer: PreTrainedTokenizerBase, policy: Policy, undo: ExitStack
) -> InProcessStore | DataPlaneStore:
    """Where samples are kept between the phases of a step; `undo` closes it."""
    multiple = config.policy.make_sequence_length_divisible_by
    if not isinstance(policy, TQPolicy):
        return InProcessStore(tokenizer.pad_token_id, multiple)
    plane = DataPlaneStore(policy.dp_client, tokenizer.pad_token_id, multiple)
    undo.callback(plane.close)
    plane.start_runner()
    return plane


def make_rollout_sources(
    store: InProcessStore | DataPlaneStore,
    config: MasterConfig,
    tokenizer: PreTrainedTokenizerBase,
    generation: VllmGeneration | None,
    datasets: TaskDatasets,
    actors: Actors,
    record: Record,
    record_prefix: str,
    endpoint: Endpoint | None = None,
) -> tuple[RolloutSource, RolloutSource | None]:
    """What generates for training and for validation, and writes into the store."""
    ahead = config.grpo.async_grpo.enabled or config.async_rl is not None
    stays = ahead or endpoint is not None or (generation is not None and generation.lent)
    if isinstance(store, InProcessStore) or stays:
        # Rollouts that run ahead stay with the dispatcher, which knows the shards that come and go: their rows are
        # written group by group. Those of agents stay with the endpoint.
        agents = AgentRollouts(endpoint, tokenizer) if endpoint is not None else None
        return _sources(config, tokenizer, generation, datasets, actors, record, agents)
    # Others happen in an actor, which reaches the engines on its own and hands its events over.
    events = MemoryRecord(source=f"{record_prefix}driver")
    reached = generation.for_other_process(events.bind("generation")) if generation is not None else None
    train_source, val_source = _sources(config, tokenizer, reached, datasets, actors, events)
    return store.rollouts(train_source, val_source, events, record, reached, generation)


def make_source(run: GRPORun) -> ExperienceSource:
    """The configured source: streaming, asynchronous or synchronous."""
    if run.config.async_rl is not None:
        return StreamingSource(run)
    return AsynchronousSource(run) if run.config.grpo.async_grpo.enabled else SynchronousSource(run)


def _sources(
    config: MasterConfig,
    tokenizer: PreTrainedTokenizerBase,
    generation: RolloutGenerator | None,
    datasets: TaskDatasets,
    actors: Actors,
    record: Record,
    agents: AgentRollouts | None = None,
) -> tuple[RolloutSource, RolloutSource | None]:
    def live(
        generation: RolloutGenerator,
        env_of_task: dict[str, str],
        trained: Record | None = None,
        *,
        shown: bool = False,
        recording: Recording | None = None,
    ) -> LiveRollouts:
        environments = {
            task: EnvironmentHandle.of(name, actors[name], config.env) for task, name in env_of_task.items()
        }
        return LiveRollouts(
            RolloutRunner(generation, tokenizer, environments, trained, agents),
            pad_token_id=tokenizer.pad_token_id,
            multiple=config.policy.make_sequence_length_divisible_by,
            # What an agent said in which role cannot be seen from the text of its rows.
            conversations=shown or any(environment.is_agent for environment in environments.values()),
            branches=not shown,
            recording=recording,
        )

    validation = (
        live(generation, datasets.env_of_validation_task, shown=True)
        if generation is not None and datasets.validation is not None
        else None
    )
    if config.grpo.rollout_replay is not None:
        return ReplayedRollouts(config.grpo.rollout_replay, recording_of(config.policy)), validation
    if generation is None:
        raise RuntimeError("live rollouts need generation")
    training: RolloutSource = live(generation, datasets.env_of_task, record, recording=recording_of(config.policy))
    if config.grpo.rollout_record is not None:
        training = RecordedRollouts(training, config.grpo.rollout_record)
    return training, validation
