"""Where a GRPO run's prompts and rollouts come from, and where samples wait between the phases of a step."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from nemo_rl.algorithms.grpo.async_source import AsynchronousSource
from nemo_rl.algorithms.grpo.collect import prompts_per_batch
from nemo_rl.algorithms.grpo.experience_source import ExperienceSource, SourceParts
from nemo_rl.algorithms.grpo.streaming import StreamingSource
from nemo_rl.algorithms.grpo.synchronous_source import SynchronousSource
from nemo_rl.algorithms.grpo.validation import batch_size as validation_batch_size
from nemo_rl.algorithms.grpo.validation import batches_to_run
from nemo_rl.algorithms.startup import Loaders
from nemo_rl.config import MasterConfig
from nemo_rl.config.dotted import import_dotted
from nemo_rl.data.collate_fn import rl_collate_fn
from nemo_rl.data.loader import CustomLoader, Loader, MultipleLoaders, make_loader
from nemo_rl.data.setup import TaskDatasets
from nemo_rl.environments.registry import Actors, check_rows
from nemo_rl.experience.agent_rollouts import AgentRollouts
from nemo_rl.experience.data_plane_store import DataPlaneStore
from nemo_rl.experience.environment_batcher import EnvironmentHandle
from nemo_rl.experience.rollout_source import LiveRollouts, RecordedRollouts, ReplayedRollouts, RolloutSource
from nemo_rl.experience.rollouts import RolloutGenerator, RolloutRunner
from nemo_rl.experience.store import InProcessStore
from nemo_rl.models.generation.endpoint.server import Endpoint
from nemo_rl.models.generation.recording import Recording, recording_of
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.tq_policy import TQPolicy
from nemo_rl.utils.record import MemoryRecord, Record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        train: Loader = MultipleLoaders(by_task, max(1, size // each), _custom_loader(config))
    else:
        train = make(datasets.train, size, shuffle=data.shuffle, drop_last=True, name="data.train")
    if datasets.validation is None:
        return Loaders(train, None)
    size = validation_batch_size(grpo, len(datasets.validation))
    validation = make(datasets.validation, size, shuffle=False, drop_last=False, name="data.validation")
    return Loaders(train, validation, size * batches_to_run(grpo, len(validation)))


def _custom_loader(config: MasterConfig) -> CustomLoader | None:
    path = config.data.custom_dataloader
    return None if path is None else import_dotted(path, "data.custom_dataloader")


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


def make_source(parts: SourceParts) -> ExperienceSource:
    """The configured source: streaming, asynchronous or synchronous."""
    if parts.config.async_rl is not None:
        return StreamingSource(parts)
    return AsynchronousSource(parts) if parts.config.grpo.async_grpo.enabled else SynchronousSource(parts)


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
