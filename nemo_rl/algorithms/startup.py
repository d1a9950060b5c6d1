"""Prepares a training run: from the configuration to everything that needs no accelerator.

Checks directories, model, tokenizer and data while Ray and the first actors start, and restores the data position. An
algorithm supplies its own checks, loaders and limits, and then builds policy and engines. Invariants: a mistake in the
configuration raises before the run waits for Ray; if a step fails, everything built before is shut down.
"""

from __future__ import annotations

import importlib
import random
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

from nemo_rl.algorithms.placement import ConnectsRay, check_device
from nemo_rl.algorithms.profiling import check_profile
from nemo_rl.algorithms.resume import (
    Resume,
    RunState,
    check_same_shape,
    check_writable,
    find_resume,
    new_log_dir,
    same_contents,
)
from nemo_rl.config import ConfigError, PolicyConfig
from nemo_rl.config.generation_rules import fp8_needs_gpus
from nemo_rl.config.master import MasterConfig, RootConfig
from nemo_rl.data.datasets.raw import evenly_spread
from nemo_rl.data.interfaces import DataError
from nemo_rl.data.loader import Batch, Loader
from nemo_rl.data.model_tokens import StopTokens, check_vocabulary, stop_tokens, vocabulary_size
from nemo_rl.data.processors import AllTaskProcessedDataset
from nemo_rl.data.setup import Mask, TaskDatasets, example, load_datasets, unstopped_turn
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.accelerator_slots import Accelerator
from nemo_rl.distributed.ray_runtime import RayStart, accelerator_here
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.flops import TransformerShape, UnknownArchitecture
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.progress import StartPhases

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from nemo_rl.data.processors import AllTaskProcessedDataset

State = TypeVar("State", bound=RunState)
RayParts = TypeVar("RayParts", bound="HasShutdown")
TrainLoader = TypeVar("TrainLoader", bound=Loader)
Config = TypeVar("Config", bound=RootConfig)
Say = Callable[[str], None]
_TOO_LARGE_FOR_CPUS = 200e6


@dataclass(frozen=True)
class Limits:
    """The end of a run."""

    steps_key: str  # dotted key of the number of steps, for messages
    max_steps: int
    max_epochs: int | None  # passes over the data; None if the number of steps of an epoch is not known
    rows_per_step: int  # prompts, or conversations, of a step


@dataclass(frozen=True)
class Loaders(Generic[TrainLoader]):
    """Training batches, and validation batches or None."""

    train: TrainLoader
    validation: StatefulDataLoader[Batch] | None
    validated_rows: int | None = None  # rows, from the first, that a validation reads; None for all


class HasShutdown(Protocol):
    """Something on Ray that can be shut down."""

    def shutdown(self) -> None:
        """Shuts it down. Safe to call twice."""
        ...


@dataclass(frozen=True)
class Algorithm(Generic[State, TrainLoader, RayParts]):
    """What an algorithm supplies to `prepared`.

    Attributes:
        check_directories: Checks directories, given the checkpoint that the run resumes from.
        check: Checks what needs neither tokenizer nor data; returns the model's configuration.
        loaders: Checks the datasets and creates the loaders.
        begin: Starts what needs neither tokenizer nor data, given the accelerator and the checkpoint. Called on its own
            thread as soon as Ray is up.
    """

    state: State  # counters of a new run
    resumed: Callable[[Resume], State]  # returns the counters of a checkpoint
    seed: int
    limits: Limits
    check_directories: Callable[[CheckpointManager, Resume | None], None]
    check: Callable[[], PretrainedConfig]
    loaders: Callable[[TaskDatasets, PreTrainedTokenizerBase], Loaders[TrainLoader]]
    begin: Callable[[Accelerator, CheckpointManager, Resume | None], RayParts]
    mask: Mask | None = None  # marks the trained tokens of a row; None if rows are prompts


@dataclass(frozen=True)
class Prepared(Generic[State, TrainLoader, RayParts]):
    """A run without its parts on accelerators. `seconds`: durations of parts of the set-up, by metric; logged when the
    run is ready.
    """

    accelerator: Accelerator
    ray_parts: RayParts  # result of the algorithm's `begin`
    tokenizer: PreTrainedTokenizerBase
    stop_tokens: StopTokens  # tokens that end a response
    datasets: TaskDatasets
    loaders: Loaders[TrainLoader]  # positioned at the next batch
    checkpointer: CheckpointManager
    resume: Resume | None  # the checkpoint to resume from, or None
    state: State
    total_steps: int
    logger: Logger
    undo: ExitStack  # shuts down what was built so far
    seconds: dict[str, float] = field(default_factory=dict)


@contextmanager
def prepared(
    config: Config,
    algorithm: Algorithm[State, TrainLoader, RayParts],
    placement: ConnectsRay[Config],
    start: StartPhases,
) -> Generator[Prepared[State, TrainLoader, RayParts]]:
    """Context manager in which a run is built; on an error everything is shut down.

    Args:
        config: A checked configuration. `logger.log_dir` is replaced by its next numbered directory.
        start: Shows the phases of the start.

    Raises ConfigError, DataError, ModelNotFoundError, DeviceUnavailableError: the configuration asks for something that
    does not exist; CheckpointError: a checkpoint cannot be resumed, or none can be written; ResumeError: the checkpoint
    belongs to another run; NothingToDo: the run is over already.
    """
    checkpointer = CheckpointManager(config.checkpointing)
    with start.phase("directories"):
        resume = _checked_directories(config, algorithm, checkpointer)
        here = accelerator_here(config.cluster.device)
        check_profile(here)

    unwanted = threading.Event()

    def start_ray() -> tuple[Accelerator, RayParts]:
        accelerator = placement.connect(config)
        check_device(config, accelerator)
        import_transformers()
        if unwanted.is_set():
            raise CancelledError
        return accelerator, algorithm.begin(accelerator, checkpointer, resume)

    with ExitStack() as undo:
        ray_start = RayStart(start_ray)
        undo.callback(ray_start.end, lambda started: started[1].shutdown(), placement.disconnect)
        # An interrupted start, or one with a mistake, starts no actors that it would have to wait for and to end.
        undo.callback(unwanted.set)
        with start.phase("model, tokenizer and data, beside Ray's start"):
            import_transformers()
            set_seed(algorithm.seed)
            model = algorithm.check()
            if here is not None:
                check_cpu_is_meant(config, here, model, start.say)
            if resume is not None:
                check_same_shape(model, resume.checkpoint)
            tokenizer = get_tokenizer(config.policy.tokenizer, trust_remote_code=config.policy.trust_remote_code)
            ends = check_tokens(config.policy, model, tokenizer, start.say)
            datasets = load_datasets(tokenizer, config.data, ends.texts)
            resume = same_contents(resume, datasets.contents, config.checkpointing.resume)
            check_data(datasets, tokenizer, model, config.data.max_input_seq_length, start.say, algorithm.mask)
            loaders = algorithm.loaders(datasets, tokenizer)
            for line in never_validated(datasets.validation_by_task, loaders.validated_rows):
                start.say(line)
            state, total_steps = _position(algorithm, resume, loaders.train)
            state.data_contents = datasets.contents
        if resume is not None:
            start.say("\n".join(resume.lines()))
        config.logger.log_dir = new_log_dir(config)
        start.say(f"logs: {config.logger.log_dir}")
        logger = Logger(config.logger)
        undo.callback(logger.close)
        with start.phase("Ray"):
            accelerator, ray_parts = ray_start.result()
        if here is None:
            check_cpu_is_meant(config, accelerator, model, start.say)
        ready = Prepared(
            accelerator,
            ray_parts,
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


def _checked_directories(
    config: Config, algorithm: Algorithm[State, TrainLoader, RayParts], checkpointer: CheckpointManager
) -> Resume | None:
    """Checks the run's directories; returns the checkpoint that it resumes from, if any. For errors see `prepared`."""
    resume = find_resume(config, checkpointer)
    if config.checkpointing.enabled:
        check_writable(checkpointer)
    algorithm.check_directories(checkpointer, resume)
    if resume is not None:
        resume.check_unfinished(algorithm.limits.max_steps, algorithm.limits.steps_key)
    return resume


def check_data(
    datasets: TaskDatasets,
    tokenizer: PreTrainedTokenizerBase,
    model: PretrainedConfig,
    limit: int | None,
    say: Say,
    mask: Mask | None,
) -> None:
    """Makes datasets refuse tokens that the model lacks, and prints where their rows differ from NeMo-RL's, and each
    task's rows. Raises DataError: all sampled prompts of a task are too long.
    """
    by_key = {"train": datasets.train_by_task, "validation": datasets.validation_by_task}
    for line in datasets.notes:
        say(line)
    hold_to_vocabulary([datasets.train, datasets.validation], tokenizer, model)
    hold_to_vocabulary([rows for by_task in by_key.values() for rows in by_task.values()], tokenizer, model)
    for key, by_task in by_key.items():
        check_prompt_lengths(f"data.{key}", by_task, limit, say, mask)


def never_validated(by_task: Mapping[str, Sized], validated_rows: int | None) -> Iterator[str]:
    """A line for each validation set that no validation reaches: they follow each other, and it reads the first rows.
    `validated_rows`: see `Loaders`.
    """
    first = 0
    for task, rows in by_task.items():
        if validated_rows is not None and validated_rows <= first:
            yield (
                f"data.validation ({task}): none of its {len(rows)} rows is ever validated, because a validation reads "
                f"the first {validated_rows} rows of all sets together; raise grpo.max_val_samples (SFT: "
                "sft.val_batches), or name smaller sets with data.validation.*.max_samples"
            )
        first += len(rows)


def import_transformers() -> None:
    """Returns when transformers is imported completely; every thread of a start calls it before it imports from it.

    The package puts another module in its own place at the end of its import. `from transformers import ...` on a
    thread that came while another imported it still sees the module before that, without any of its names.
    """
    importlib.import_module("transformers")


def _position(
    algorithm: Algorithm[State, TrainLoader, RayParts], resume: Resume | None, loader: TrainLoader
) -> tuple[State, int]:
    """Restores the loader's position; returns the counters and the last step. Raises NothingToDo: that step is done."""
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
    """Compares tokenizer and model, and returns the tokens that end a response.

    Args:
        policy: What is trained or evaluated.
        key: Dotted key of the run's stop tokens, for messages.

    Raises DataError: the model lacks tokens, or its files do not say what ends a response.
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
    """Makes datasets refuse rows with tokens that the model's vocabulary lacks."""
    rows = vocabulary_size(model)
    for dataset in datasets if rows is not None and len(tokenizer) > rows else ():
        if dataset is not None:
            dataset.vocabulary = rows


def check_prompt_lengths(
    key: str, by_task: Mapping[str, AllTaskProcessedDataset], limit: int | None, say: Say, mask: Mask | None = None
) -> None:
    """Prints row counts and one example of each task. Prompts longer than the limit are cut and train nothing.

    Args:
        key: `data.train`, `data.validation`, or `data` of an evaluation.
        by_task: Processed data per task; `[i]["loss_multiplier"]` is 0 for a prompt that is too long.
        limit: `data.max_input_seq_length`, tokens; None has no limit.
        mask: Marks the trained tokens of a conversation; None for prompts.

    Raises DataError: all sampled prompts are too long.
    """
    trained = key == "data.train"
    effect = "train nothing" if trained else "are cut, so that no answer to them counts as right"
    for task, dataset in by_task.items():
        rows = len(dataset)
        checked_rows = evenly_spread(rows) if limit is not None else ()
        too_long = sum(dataset[row]["loss_multiplier"] == 0 for row in checked_rows)
        part = "" if len(checked_rows) == rows else f" looked at, of {rows},"
        count = f"{too_long} of {len(checked_rows)} prompts{part}"
        if checked_rows and too_long == len(checked_rows):
            raise DataError(
                f"{key} ({task}): {count} are longer than data.max_input_seq_length={limit} tokens, so nothing "
                f"would be {'trained' if trained else 'measured'}; raise it (and policy.max_total_sequence_length, or "
                "generation.vllm_cfg.max_model_len), or name shorter data"
            )
        left_out = f", {dataset.left_out} more left out by its format" if dataset.left_out else ""
        cut = f"{count} are longer than data.max_input_seq_length={limit} and {effect}" if too_long else "none is cut"
        file = dataset.prompt_file_of(task)
        # The default is NeMo-RL's, for mathematical problems; for conversations of one's own it is rarely meant.
        asked = f"each question is put into {file} ({key}.prompt_file; null asks it as it is); " if file else ""
        say(f"{key} ({task}): {rows} rows{left_out}; {cut}; {asked}{example(dataset, mask)}")


def check_cpu_is_meant(config: RootConfig, accelerator: Accelerator, model: PretrainedConfig, say: Say) -> None:
    """Checks that a run without GPUs was meant to run on CPUs.

    Args:
        accelerator: The accelerator that was found.
        model: The model's Hugging Face configuration.

    Raises ConfigError: there is no GPU, CPUs were not requested, and the model is too large for them, or its engines
    need GPUs.
    """
    cluster = config.cluster
    if accelerator.is_cuda or cluster.device != "auto":
        return
    if isinstance(config, MasterConfig) and config.policy.generation.vllm_cfg.precision == "fp8":
        raise ConfigError([fp8_needs_gpus("policy.generation.vllm_cfg", "there is no GPU here")])
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


def _parameters(model: PretrainedConfig) -> float | None:
    """Number of active parameters per token, and of the embedding."""
    try:
        shape = TransformerShape.from_hf_config(model)
    except UnknownArchitecture:
        return None
    attention = 2 * shape.hidden * (shape.query_width + shape.key_value_width)
    return shape.layers * (attention + shape.mlp_operations) + shape.vocabulary * shape.hidden


def set_seed(seed: int) -> None:
    """Seeds Python's, NumPy's and PyTorch's generators, on all accelerators."""
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
