"""Builds an SFT run from its configuration: `setup` is the start of a run, from top to bottom.

Invariant: one stack ends whatever was built, where a start fails and at the end of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl.algorithms.memory_watch import MemoryWatch
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
from nemo_rl.algorithms.profiling import check_profile
from nemo_rl.algorithms.resume import Resume, name_latest
from nemo_rl.algorithms.sft.driver import SFTRun, SFTState
from nemo_rl.algorithms.startup import (
    Loaders,
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
from nemo_rl.config import SFTMasterConfig
from nemo_rl.data.interfaces import DataError
from nemo_rl.data.llm_message_utils import add_loss_mask_to_message_log
from nemo_rl.data.loader import Batch, make_loader, sft_collate
from nemo_rl.data.setup import Mask, TaskDatasets
from nemo_rl.distributed.accelerator_slots import Accelerator
from nemo_rl.distributed.actor_logs import collect_actor_logs
from nemo_rl.distributed.ray_runtime import accelerator_here
from nemo_rl.distributed.worker_groups import RayWorkerGroup
from nemo_rl.loss import NLLLossFn
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.progress import RunProgress, StartPhases
from nemo_rl.utils.record import NullRecord
from nemo_rl.utils.timer import TimeoutChecker, Timer

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.data.processors import AllTaskProcessedDataset


def setup(config: SFTMasterConfig, start: StartPhases | None = None, placement: Placement | None = None) -> SFTRun:
    """A run that is ready to be driven. Arguments and errors are those of `grpo.assembly.setup`; OptimizerConfigError:
    a name of optimizer or schedule is wrong; UnsupportedModelError: the model does not divide over ranks.
    """
    start, placement = start or StartPhases(), placement or OwnPlacement()
    limits = limits_of(config)
    with ExitStack() as stack:
        with start.phase("directories"):
            checkpointer, resume = find_checkpoint(config)
            if resume is not None:
                # The run may have died between its last checkpoint and this link.
                name_latest(checkpointer)
            check_steps_left(resume, limits)
            here = accelerator_here(config.cluster.device)
            check_profile(here)
        ray = begin_beside(config, placement, partial(_begin, config, placement, checkpointer, resume), stack)
        with start.phase("model, tokenizer and data, beside Ray's start"):
            import_transformers()
            set_seed(config.sft.seed)
            model = check_policy(config)
            data = read_data(config, model, resume, here, start.say, mask_of(config))
            loaders = make_loaders(config, data.datasets, data.tokenizer)
            state, total_steps = find_position(data, loaders, SFTState(), SFTState.from_training_info, limits)
        logger = open_logger(config, data, loaders, start.say, stack)
        with start.phase("Ray"):
            accelerator, clusters, actors = ray.result()
        if here is None:
            check_cpu_is_meant(config, accelerator, model, start.say)

        progress = RunProgress(total_steps, title="SFT", first_step=state.step, measure="val_loss")
        if not placement.lends_shards:
            if accelerator.is_cuda:
                tell_memory(config, actors, start.say)
            else:
                tell_step_time(config, start.say, forward_passes=0)
                tell_cpu_memory(config, actors, start.say)
        with placement.building():
            with start.phase("policy"):
                policy = start_policy(config, clusters.training, data.tokenizer, actors, last_step=total_steps)
                stack.callback(policy.shutdown)
                policy.wait_until_started()
            run = SFTRun(
                config=config,
                policy=policy,
                generation=None,
                loss_fn=NLLLossFn(),
                train_loader=loaders.train,
                val_loader=loaders.validation,
                logger=logger,
                checkpointer=checkpointer,
                state=state,
                timer=Timer(),
                timeout=TimeoutChecker(config.checkpointing.checkpoint_must_save_by),
                progress=progress,
                record=NullRecord(),
                memory=MemoryWatch({"trainer": lambda: policy.worker_group.workers}, None, logger, progress.say),
                clusters=clusters,
            )
            run.accelerators = placement.accelerators(run)
        if policy.started is not None:
            start.say(f"training: {policy.started.kernels}")
        stack.callback(checkpointer.shutdown)
        ray.after_actors(partial(collect_actor_logs, Path(config.logger.log_dir) / "actors"))
        log_start(config, logger, state.step, start, {})
        run.ending = stack.pop_all()
    return run


def limits_of(config: SFTMasterConfig) -> RunLimits:
    """The end of a run."""
    sft = config.sft
    return RunLimits("sft.max_num_steps", sft.max_num_steps, sft.max_num_epochs, config.policy.train_global_batch_size)


def mask_of(config: SFTMasterConfig) -> Mask:
    """Marks the trained tokens of a conversation."""
    return lambda log: add_loss_mask_to_message_log([log], only_unmask_final=config.sft.only_unmask_final)


def _begin(
    config: SFTMasterConfig,
    placement: Placement,
    checkpointer: CheckpointManager,
    resume: Resume | None,
    accelerator: Accelerator,
    stack: ExitStack,
) -> tuple[Accelerator, Clusters, RayWorkerGroup]:
    """Reserves the slots and starts the policy's actors; `stack` ends them."""
    clusters = placement.reserve(config, accelerator)
    for cluster in clusters.distinct():
        stack.callback(cluster.shutdown)
    policy = begin_policy(config, clusters.training, checkpointer, resume, init_reference_model=False)
    stack.callback(policy.shutdown)
    return accelerator, clusters, policy


def make_loaders(
    config: SFTMasterConfig, datasets: TaskDatasets, tokenizer: PreTrainedTokenizerBase
) -> Loaders[StatefulDataLoader[Batch]]:
    """Checks the rows, and makes the loaders of training and validation. Raises DataError: there are no answers to
    train on, or no rows to validate.
    """
    sft, data, multiple = config.sft, config.data, config.policy.make_sequence_length_divisible_by
    _check_conversations(datasets.train_by_task, "data.train")
    make = partial(
        make_loader,
        collate_fn=sft_collate(tokenizer.pad_token_id, multiple, sft.only_unmask_final),
        num_workers=data.num_workers,
        seed=sft.seed,
    )
    train = make(
        datasets.train,
        config.policy.train_global_batch_size,
        shuffle=data.shuffle,
        drop_last=True,
        name="data.train",
    )
    if datasets.validation is None:
        if sft.val_period > 0 or sft.val_at_start or sft.val_at_end:
            raise DataError(
                "validation needs data.validation (or data.train.split_validation_size); set it, or switch "
                "sft.val_period, val_at_start and val_at_end off"
            )
        return Loaders(train, None)
    _check_conversations(datasets.validation_by_task, "data.validation")
    validation = make(
        datasets.validation, sft.val_global_batch_size, shuffle=False, drop_last=False, name="data.validation"
    )
    return Loaders(train, validation, sft.val_batches * sft.val_global_batch_size if sft.val_batches > 0 else None)


def _check_conversations(by_task: Mapping[str, AllTaskProcessedDataset], key: str) -> None:
    for task, dataset in by_task.items():
        if dataset[0]["message_log"][-1]["role"] != "assistant":
            raise DataError(
                f"{key}.processor makes prompts without an answer ({task}), and SFT trains on answers; set "
                f"{key}.processor: sft_processor"
            )
