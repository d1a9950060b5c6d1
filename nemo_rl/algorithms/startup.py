"""The parts of a start that every algorithm has: directories, tokenizer, data and position, beside Ray's start.

The `setup` of each algorithm calls them in order, and then builds policy and engines. Invariant: a mistake in the
configuration raises before a run waits for Ray.
"""

from __future__ import annotations

import importlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from concurrent.futures import CancelledError
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from nemo_rl.algorithms.placement import Placement, check_device
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
from nemo_rl.distributed.ray_runtime import RayStart
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.flops import TransformerShape, UnknownArchitecture
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.progress import StartPhases

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from nemo_rl.data.processors import AllTaskProcessedDataset
    from nemo_rl.utils.checkpoint import TrainingInfo

State = TypeVar("State", bound=RunState)
Begun = TypeVar("Begun")
TrainLoader = TypeVar("TrainLoader", bound=Loader)
Say = Callable[[str], None]
_TOO_LARGE_FOR_CPUS = 200e6


@dataclass(frozen=True)
class RunLimits:
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


class RunData(NamedTuple):
    """What a run reads before it needs accelerators."""

    tokenizer: PreTrainedTokenizerBase
    stop_tokens: StopTokens  # tokens that end a response
    datasets: TaskDatasets
    resume: Resume | None  # the checkpoint to resume from, or None


def find_checkpoint(config: RootConfig) -> tuple[CheckpointManager, Resume | None]:
    """The run's checkpoints, and the one that it resumes from, if any. Raises CheckpointError: a checkpoint cannot be
    resumed, or none can be written; ResumeError: it belongs to another run.
    """
    checkpointer = CheckpointManager(config.checkpointing)
    resume = find_resume(config, checkpointer)
    if config.checkpointing.enabled:
        check_writable(checkpointer)
    return checkpointer, resume


def check_steps_left(resume: Resume | None, limits: RunLimits) -> None:
    """Raises NothingToDo: the checkpoint has all steps of the run."""
    if resume is not None:
        resume.check_unfinished(limits.max_steps, limits.steps_key)


def begin_beside(
    config: RootConfig,
    placement: Placement,
    begin: Callable[[Accelerator, ExitStack], Begun],
    stack: ExitStack,
) -> RayStart[Begun]:
    """Joins Ray on a thread of its own, and begins there what needs neither tokenizer nor data.

    Args:
        begin: Given the accelerator and a stack, on which it leaves what ends each thing that it begins.
        stack: Ends all of it and leaves Ray.
    """

    unwanted = threading.Event()

    def start(actors: ExitStack) -> Begun:
        accelerator = placement.connect(config)
        check_device(config, accelerator)
        import_transformers()
        if unwanted.is_set():
            raise CancelledError
        return begin(accelerator, actors)

    ray = RayStart(start, placement.disconnect)
    stack.callback(ray.close)
    # An interrupted start, or one with a mistake, starts no actors that it would have to wait for and to end.
    stack.callback(unwanted.set)
    return ray


def read_data(
    config: RootConfig,
    model: PretrainedConfig,
    resume: Resume | None,
    here: Accelerator | None,
    say: Say,
    mask: Mask | None = None,
) -> RunData:
    """Loads tokenizer and data, and holds them to the model.

    Args:
        here: This machine's accelerator; None if Ray alone knows.
        mask: Marks the trained tokens of a row; None if rows are prompts.

    Raises ConfigError: CPUs were not meant; DataError: the data does not suit the model; ResumeError: the checkpoint
    belongs to another model or other data.
    """
    if here is not None:
        check_cpu_is_meant(config, here, model, say)
    if resume is not None:
        check_same_shape(model, resume.checkpoint)
    tokenizer = get_tokenizer(config.policy.tokenizer, trust_remote_code=config.policy.trust_remote_code)
    ends = check_tokens(config.policy, model, tokenizer, say)
    datasets = load_datasets(tokenizer, config.data, ends.texts)
    resume = same_contents(resume, datasets.contents, config.checkpointing.resume)
    check_data(datasets, tokenizer, model, config.data.max_input_seq_length, say, mask)
    return RunData(tokenizer, ends, datasets, resume)


def find_position(
    data: RunData,
    loaders: Loaders[TrainLoader],
    new: State,
    resumed: Callable[[TrainingInfo], State],
    limits: RunLimits,
) -> tuple[State, int]:
    """Restores the loader's position; returns the run's counters and its last step.

    Args:
        new: Counters of a new run.
        resumed: Reads those of a checkpoint.

    Raises NothingToDo: that step is done.
    """
    loader, resume = loaders.train, data.resume
    epochs, per_epoch = (limits.max_epochs, len(loader)) if isinstance(loader, Sized) else (None, 0)
    if resume is None:
        state, total = new, limits.max_steps if epochs is None else min(limits.max_steps, epochs * per_epoch)
    else:
        state, total = resumed(resume.info), limits.max_steps
        resume.restore_position(loader, state, limits.rows_per_step)
        if epochs is not None:
            total = resume.total_steps(state, limits.max_steps, epochs, per_epoch)
            resume.check_unfinished(total, limits.steps_key)
    state.data_contents = data.datasets.contents
    return state, total


def open_logger(config: RootConfig, data: RunData, loaders: Loaders[TrainLoader], say: Say, stack: ExitStack) -> Logger:
    """Says what the data means for the run, and opens its next numbered log directory, which replaces
    `logger.log_dir`. `stack` closes it.
    """
    for line in never_validated(data.datasets.validation_by_task, loaders.validated_rows):
        say(line)
    if data.resume is not None:
        say("\n".join(data.resume.lines()))
    config.logger.log_dir = new_log_dir(config)
    say(f"logs: {config.logger.log_dir}")
    logger = Logger(config.logger)
    stack.callback(logger.close)
    return logger


def log_start(config: RootConfig, logger: Logger, step: int, start: StartPhases, seconds: Mapping[str, float]) -> None:
    """Logs configuration and durations of a start that is over. `seconds`: of its parts, by metric."""
    logger.log_hyperparams(config.to_dict())
    logger.log_metrics({**seconds, "total_setup_time_s": start.done()}, step, prefix="timing/setup")


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
