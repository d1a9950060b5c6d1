"""The walk from a configuration to a run, the same for every algorithm that trains.

Checks everything that needs no accelerator (directories, model, tokenizer, data) while Ray and the first actors start,
and restores the position in the data. An algorithm brings its own checks, loaders and limits, and builds policy and
engines on what comes out. Invariants: a mistake in the configuration raises before Ray is waited for; whatever was
built is ended again when a later part fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from nemo_rl.algorithms.placement import check_device
from nemo_rl.algorithms.profiling import check_profile
from nemo_rl.algorithms.resume import Resume, check_same_shape, find_resume, same_contents
from nemo_rl.algorithms.run_checkpoint import RunState, check_writable, new_log_dir
from nemo_rl.config import ConfigError, PolicyConfig
from nemo_rl.config.master import RootConfig
from nemo_rl.data.interfaces import DataError
from nemo_rl.data.loader import Batch, Loader
from nemo_rl.data.model_tokens import StopTokens, check_vocabulary, stop_tokens, vocabulary_size
from nemo_rl.data.processors import AllTaskProcessedDataset
from nemo_rl.data.setup import TaskDatasets, load_datasets
from nemo_rl.data.shown import Mask, example, unstopped_turn
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.accelerators import Accelerator
from nemo_rl.distributed.ray_runtime import RayStart, accelerator_here
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.flops import TransformerShape, UnknownArchitecture
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.progress import StartPhases

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

State = TypeVar("State", bound=RunState)
Begun = TypeVar("Begun", bound="Ends")
TrainLoader = TypeVar("TrainLoader", bound=Loader)
Config_contra = TypeVar("Config_contra", bound=RootConfig, contravariant=True)
Config = TypeVar("Config", bound=RootConfig)
Say = Callable[[str], None]
_LOOKED_AT = 512
_TOO_LARGE_FOR_CPUS = 200e6


class ConnectsRay(Protocol[Config_contra]):
    """The part of a placement that the walk needs."""

    def connect(self, config: Config_contra) -> Accelerator:
        """Joins or starts the Ray cluster; its kind of accelerator."""
        ...

    def disconnect(self) -> None:
        """Leaves the Ray cluster. Safe to call twice."""
        ...


@dataclass(frozen=True)
class Limits:
    """Where a run ends.

    Attributes:
        steps_key: Dotted key of the number of steps, for messages.
        max_steps: The last step.
        max_epochs: Passes over the data; None where the number of steps of one is not known.
        rows_per_step: Prompts, or conversations, of a step.
    """

    steps_key: str
    max_steps: int
    max_epochs: int | None
    rows_per_step: int


@dataclass(frozen=True)
class Loaders(Generic[TrainLoader]):
    """Training batches, and those of validation, if there are any."""

    train: TrainLoader
    validation: StatefulDataLoader[Batch] | None


class Ends(Protocol):
    """What an algorithm has started on Ray."""

    def shutdown(self) -> None:
        """Ends it. Safe to call twice."""
        ...


@dataclass(frozen=True)
class Algorithm(Generic[State, TrainLoader, Begun]):
    """What the walk asks the algorithm.

    Attributes:
        state: Counters of a run that begins.
        resumed: Counters behind those of a checkpoint.
        seed: Of the run.
        limits: Where it ends.
        check_directories: Looks at what lies on disk, given the checkpoint that the run goes on from.
        check: Checks what needs neither tokenizer nor data; the model's configuration.
        loaders: Checks the datasets and makes the loaders.
        begin: Starts what needs neither tokenizer nor data, given the kind of accelerator and the checkpoint that the
            run goes on from. Called beside the checks, on a thread of its own, as soon as Ray is up.
        mask: Marks what is trained of a row; None where rows are prompts, and responses are trained.
    """

    state: State
    resumed: Callable[[Resume], State]
    seed: int
    limits: Limits
    check_directories: Callable[[CheckpointManager, Resume | None], None]
    check: Callable[[], PretrainedConfig]
    loaders: Callable[[TaskDatasets, PreTrainedTokenizerBase], Loaders[TrainLoader]]
    begin: Callable[[Accelerator, CheckpointManager, Resume | None], Begun]
    mask: Mask | None = None


@dataclass(frozen=True)
class Prepared(Generic[State, TrainLoader, Begun]):
    """A run of which only the parts on accelerators are missing.

    Attributes:
        accelerator: The cluster's kind.
        begun: What the algorithm's `begin` started.
        tokenizer: The policy's.
        stop_tokens: End a response, and an assistant's turn.
        datasets: What the loaders read.
        loaders: At the run's position.
        checkpointer: Owner of its checkpoints.
        resume: What it goes on from, or None.
        state: Its counters.
        total_steps: Its last step.
        logger: Metrics.
        undo: Ends what was built so far, should the rest fail.
        seconds: How long parts of the set-up took, by metric; logged when the run is ready.
    """

    accelerator: Accelerator
    begun: Begun
    tokenizer: PreTrainedTokenizerBase
    stop_tokens: StopTokens
    datasets: TaskDatasets
    loaders: Loaders[TrainLoader]
    checkpointer: CheckpointManager
    resume: Resume | None
    state: State
    total_steps: int
    logger: Logger
    undo: ExitStack
    seconds: dict[str, float] = field(default_factory=dict)


@contextmanager
def prepared(
    config: Config, algorithm: Algorithm[State, TrainLoader, Begun], placement: ConnectsRay[Config], start: StartPhases
) -> Iterator[Prepared[State, TrainLoader, Begun]]:
    """The span in which a run is built; everything of it is ended again if the span fails.

    Args:
        config: A checked configuration. `logger.log_dir` is replaced by its next numbered directory.
        algorithm: What the run is.
        placement: Gives it its accelerators.
        start: Where the phases of the start are shown.

    Raises:
        ConfigError, DataError, ModelNotFoundError, DeviceUnavailableError: The configuration asks for what is not
        there. CheckpointError: A checkpoint exists but cannot be resumed, or none can be written. ResumeError: It
        belongs to another run. NothingToDo: The run is over already.
    """
    checkpointer = CheckpointManager(config.checkpointing)
    with start.phase("directories"):
        resume = find_resume(config, checkpointer)
        if config.checkpointing.enabled:
            check_writable(checkpointer)
        algorithm.check_directories(checkpointer, resume)
        if resume is not None:
            resume.check_unfinished(algorithm.limits.max_steps, algorithm.limits.steps_key)
        here = accelerator_here(config.cluster.device)
        check_profile(here)

    def start_ray() -> tuple[Accelerator, Begun]:
        accelerator = placement.connect(config)
        check_device(config, accelerator)
        return accelerator, algorithm.begin(accelerator, checkpointer, resume)

    with ExitStack() as undo:
        ray_start = RayStart(start_ray)
        undo.callback(ray_start.end, lambda started: started[1].shutdown(), placement.disconnect)
        with start.phase("model, tokenizer and data, beside Ray's start"):
            set_seed(algorithm.seed)
            model = algorithm.check()
            if here is not None:
                check_cpu_is_meant(config, here, model, start.say)
            if resume is not None:
                check_same_shape(model, resume.checkpoint)
            tokenizer = get_tokenizer(config.policy.tokenizer, config.policy.trust_remote_code)
            ends = check_tokens(config.policy, model, tokenizer, start.say)
            datasets = load_datasets(tokenizer, config.data, ends.texts)
            resume = same_contents(resume, datasets.contents, config.checkpointing.resume)
            hold_to_vocabulary([datasets.train, datasets.validation], tokenizer, model)
            hold_to_vocabulary(
                [*datasets.train_by_task.values(), *datasets.validation_by_task.values()], tokenizer, model
            )
            limit = config.data.max_input_seq_length
            for key, by_task in (("train", datasets.train_by_task), ("validation", datasets.validation_by_task)):
                check_prompt_lengths(f"data.{key}", by_task, limit, start.say, algorithm.mask)
            loaders = algorithm.loaders(datasets, tokenizer)
            state, total_steps = _position(algorithm, resume, loaders.train)
            state.data_contents = datasets.contents
        if resume is not None:
            start.say("\n".join(resume.lines()))
        config.logger.log_dir = new_log_dir(config)
        start.say(f"logs: {config.logger.log_dir}")
        logger = Logger(config.logger)
        undo.callback(logger.close)
        with start.phase("Ray"):
            accelerator, begun = ray_start.result()
        if here is None:
            check_cpu_is_meant(config, accelerator, model, start.say)
        ready = Prepared(
            accelerator,
            begun,
            tokenizer,
            ends,
            datasets,
            loaders,
            checkpointer,
            resume,
            state,
            total_steps,
            logger,
            undo,
        )
        yield ready
        undo.pop_all()
    ready.seconds["total_setup_time_s"] = start.done()
    logger.log_hyperparams(config.to_dict())
    logger.log_metrics(ready.seconds, state.step, prefix="timing/setup")


def _position(
    algorithm: Algorithm[State, TrainLoader, Begun], resume: Resume | None, loader: TrainLoader
) -> tuple[State, int]:
    """The run's counters, with the loader where they say, and its last step.

    Raises:
        NothingToDo: That step is done.
    """
    limits = algorithm.limits
    epochs, per_epoch = (limits.max_epochs, len(loader)) if isinstance(loader, Sized) else (None, 0)
    if resume is None:
        total = limits.max_steps if epochs is None else min(limits.max_steps, epochs * per_epoch)
        return algorithm.state, total
    state = algorithm.resumed(resume)
    resume.restore_position(loader, state, limits.rows_per_step)
    if epochs is None:
        return state, limits.max_steps
    total = resume.total_steps(state, limits.max_steps, epochs, per_epoch)
    resume.check_unfinished(total, limits.steps_key)
    return state, total


def check_tokens(
    policy: PolicyConfig,
    model: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    say: Say,
    *,
    key: str = "policy.generation.stop_token_ids",
) -> StopTokens:
    """Compares tokenizer and model, and names the tokens that end a response.

    Args:
        policy: What is trained or evaluated.
        model: Its Hugging Face configuration.
        tokenizer: Its tokenizer.
        say: Tells the person.
        key: Dotted key of the run's stop tokens, for messages.

    Raises:
        DataError: The model lacks tokens, or its files do not say what ends a response.
    """
    lacking = check_vocabulary(tokenizer, model, policy.model_name)
    ends = stop_tokens(
        tokenizer,
        policy.model_name,
        setting=policy.generation.stop_token_ids,
        overrides=policy.hf_config_overrides,
        vocabulary=vocabulary_size(model),
        key=key,
    )
    for line in (lacking, ends.line(), unstopped_turn(tokenizer, ends)):
        if line is not None:
            say(line)
    return ends


def hold_to_vocabulary(
    datasets: Iterable[AllTaskProcessedDataset | None], tokenizer: PreTrainedTokenizerBase, model: PretrainedConfig
) -> None:
    """Has rows refused that spell a token which the model lacks, where the tokenizer has such tokens."""
    rows = vocabulary_size(model)
    for dataset in datasets if rows is not None and len(tokenizer) > rows else ():
        if dataset is not None:
            dataset.vocabulary = rows


def check_prompt_lengths(
    key: str, by_task: Mapping[str, Any], limit: int | None, say: Say, mask: Mask | None = None
) -> None:
    """Counts rows and shows one of each task; prompts that are longer than the limit are cut, train nothing, and nobody
    can answer them.

    Args:
        key: `data.train`, `data.validation`, or `data` of an evaluation.
        by_task: Processed data per task; `[i]["loss_multiplier"]` is 0 for a prompt that is too long.
        limit: `data.max_input_seq_length`, tokens; None has no limit.
        say: Tells the person.
        mask: Marks what is trained of a conversation; None for prompts.

    Raises:
        DataError: Every prompt that was looked at is too long.
    """
    trained = key == "data.train"
    effect = "train nothing" if trained else "are cut, so that no answer to them counts as right"
    for task, dataset in by_task.items():
        rows = len(dataset)
        looked_at = _spread(rows) if limit is not None else ()
        too_long = sum(dataset[row]["loss_multiplier"] == 0 for row in looked_at)
        part = "" if len(looked_at) == rows else f" looked at, of {rows},"
        count = f"{too_long} of {len(looked_at)} prompts{part}"
        if looked_at and too_long == len(looked_at):
            raise DataError(
                f"{key} ({task}): {count} are longer than data.max_input_seq_length={limit} tokens, so nothing "
                f"would be {'trained' if trained else 'measured'}; raise it (and policy.max_total_sequence_length, or "
                "generation.vllm_cfg.max_model_len), or name shorter data"
            )
        left_out = f", {dataset.left_out} more left out by its format" if dataset.left_out else ""
        cut = f"{count} are longer than data.max_input_seq_length={limit} and {effect}" if too_long else "none is cut"
        say(f"{key} ({task}): {rows} rows{left_out}; {cut}; {example(dataset, mask)}")


def check_cpu_is_meant(config: RootConfig, accelerator: Accelerator, model: PretrainedConfig, say: Say) -> None:
    """Whether a run that took what it found runs where it was meant to.

    Args:
        config: The run's.
        accelerator: What there is.
        model: The model's Hugging Face configuration.
        say: Tells the person.

    Raises:
        ConfigError: There is no GPU, nobody asked for CPUs, and the run is too large for them.
    """
    cluster = config.cluster
    if accelerator.is_cuda or cluster.device != "auto":
        return
    meant = "cluster.device=cpu says that CPUs are meant"
    if cluster.gpus_per_node > cluster.cpu_slots:
        raise ConfigError(
            [
                f"cluster.gpus_per_node={cluster.gpus_per_node}, but there is no GPU here, and cluster.cpu_slots="
                f"{cluster.cpu_slots}; {meant}, and cluster.cpu_slots how many slots they make"
            ]
        )
    size = _parameters(model)
    if size is not None and size > _TOO_LARGE_FOR_CPUS:
        raise ConfigError(
            [
                f"there is no GPU here, and {config.policy.model_name} has about {size / 1e9:.1f} billion parameters: "
                f"a step would take minutes to hours; {meant}. A run made for CPUs is "
                "examples/configs/grpo_arithmetic_cpu.yaml"
            ]
        )
    say(f"no GPU here: everything runs on CPUs ({meant})")


def _spread(rows: int) -> Sequence[int]:
    return range(rows) if rows <= _LOOKED_AT else [number * rows // _LOOKED_AT for number in range(_LOOKED_AT)]


def _parameters(model: PretrainedConfig) -> float | None:
    """Parameters that a token meets, and the embedding."""
    try:
        shape = TransformerShape.from_hf_config(model)
    except UnknownArchitecture:
        return None
    attention = 2 * shape.hidden * (shape.query_width + shape.key_value_width)
    return shape.layers * (attention + shape.mlp_operations) + shape.vocabulary * shape.hidden


def set_seed(seed: int) -> None:
    """Seed Python's, NumPy's and PyTorch's generators, those of every accelerator included."""
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
