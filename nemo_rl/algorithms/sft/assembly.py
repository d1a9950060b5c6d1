"""Builds an SFT run from its configuration, on what `algorithms.startup` prepares.

Invariant: whatever was built is ended again when a later part fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl.algorithms.memory_watch import MemoryWatch
from nemo_rl.algorithms.placement import (
    Clusters,
    begin_policy,
    check_policy,
    start_policy,
    tell_cpu_memory,
    tell_memory,
    tell_step_time,
)
from nemo_rl.algorithms.resume import Resume, name_latest
from nemo_rl.algorithms.sft.driver import OwnPlacement, SFTPlacement, SFTRun, SFTState, Trainer
from nemo_rl.algorithms.startup import Algorithm, Limits, Loaders, prepared
from nemo_rl.config import SFTMasterConfig
from nemo_rl.data.interfaces import DataError
from nemo_rl.data.llm_message_utils import add_loss_mask_to_message_log
from nemo_rl.data.loader import Batch, make_loader, sft_collate
from nemo_rl.data.setup import TaskDatasets
from nemo_rl.distributed.accelerator_slots import Accelerator
from nemo_rl.distributed.actor_logs import collect_actor_logs
from nemo_rl.distributed.worker_groups import RayWorkerGroup
from nemo_rl.loss import NLLLossFn
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.progress import RunProgress, StartPhases
from nemo_rl.utils.timer import TimeoutChecker, Timer

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.data.processors import AllTaskProcessedDataset


def setup(config: SFTMasterConfig, start: StartPhases | None = None, placement: SFTPlacement | None = None) -> SFTRun:
    """A run that is ready to be driven.

    Args:
        config: A checked configuration. `logger.log_dir` is replaced by its next numbered directory.
        start: Where the phases of the start are shown.
        placement: Gives the run its accelerators; by default it has slots of its own.

    Raises ConfigError, DataError, ModelNotFoundError, DeviceUnavailableError: the configuration names
    something that does not exist; OptimizerConfigError: a name of optimizer or schedule is wrong;
    UnsupportedModelError: the model does not divide over ranks; CheckpointError: a checkpoint exists but cannot be
    resumed, or none can be written; ResumeError: it belongs to another run; NothingToDo: the run is over already.
    """
    start, placement = start or StartPhases(), placement or OwnPlacement()
    with prepared(config, algorithm_of(config, placement), placement, start) as ready:
        clusters, timer = ready.ray_parts.clusters, Timer()
        progress = RunProgress(ready.total_steps, title="SFT", first_step=ready.state.step, measure="val_loss")
        if not placement.lends_shards:
            if ready.accelerator.is_cuda:
                tell_memory(config, ready.ray_parts.policy, start.say)
            else:
                tell_step_time(config, start.say, forward_passes=0)
                tell_cpu_memory(config, ready.ray_parts.policy, start.say)
        with placement.building():
            with start.phase("policy"):
                policy = start_policy(
                    config, clusters.training, ready.tokenizer, ready.ray_parts.policy, last_step=ready.total_steps
                )
                ready.undo.callback(policy.shutdown)
                policy.wait_until_started()
            accelerators = placement.accelerators(Trainer(policy, timer, progress))
        if policy.started is not None:
            start.say(f"training: {policy.started.kernels}")
        return SFTRun(
            config=config,
            policy=policy,
            loss_fn=NLLLossFn(),
            train_loader=ready.loaders.train,
            val_loader=ready.loaders.validation,
            logger=ready.logger,
            checkpointer=ready.checkpointer,
            state=ready.state,
            timer=timer,
            timeout=TimeoutChecker(config.checkpointing.checkpoint_must_save_by),
            progress=progress,
            memory=MemoryWatch({"trainer": lambda: policy.worker_group.workers}, None, ready.logger, progress.say),
            clusters=clusters,
            placement=placement,
            accelerators=accelerators,
        )


@dataclass(frozen=True)
class _RayParts:
    """Slots, and the policy's actors on them."""

    clusters: Clusters
    policy: RayWorkerGroup

    def shutdown(self) -> None:
        """Ends both. Safe to call twice."""
        self.policy.shutdown()
        for cluster in self.clusters.distinct():
            cluster.shutdown()


def algorithm_of(
    config: SFTMasterConfig, placement: SFTPlacement
) -> Algorithm[SFTState, StatefulDataLoader[Batch], _RayParts]:
    """What SFT brings to a start."""
    sft = config.sft
    return Algorithm(
        state=SFTState(),
        resumed=lambda resume: SFTState.from_training_info(resume.info),
        seed=sft.seed,
        limits=Limits(
            "sft.max_num_steps", sft.max_num_steps, sft.max_num_epochs, config.policy.train_global_batch_size
        ),
        check_directories=_name_latest,
        check=lambda: check_policy(config),
        loaders=lambda datasets, tokenizer: _loaders(config, datasets, tokenizer),
        begin=lambda accelerator, checkpointer, resume: _begin(config, placement, accelerator, checkpointer, resume),
        mask=lambda log: add_loss_mask_to_message_log([log], only_unmask_final=sft.only_unmask_final),
    )


def _begin(
    config: SFTMasterConfig,
    placement: SFTPlacement,
    accelerator: Accelerator,
    checkpointer: CheckpointManager,
    resume: Resume | None,
) -> _RayParts:
    with ExitStack() as undo:
        clusters = placement.reserve(config, accelerator)
        for cluster in clusters.distinct():
            undo.callback(cluster.shutdown)
        policy = begin_policy(config, clusters.training, checkpointer, resume, init_reference_model=False)
        undo.pop_all()
    return _RayParts(clusters, policy)


def _name_latest(checkpointer: CheckpointManager, resume: Resume | None) -> None:
    # The run may have died between its last checkpoint and this link.
    if resume is not None:
        name_latest(checkpointer)


def _loaders(
    config: SFTMasterConfig, datasets: TaskDatasets, tokenizer: PreTrainedTokenizerBase
) -> Loaders[StatefulDataLoader[Batch]]:
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


def close(run: SFTRun) -> None:
    """Ends everything the run started; safe after a failure, and no process is left."""
    with ExitStack() as stack:
        stack.callback(run.placement.disconnect)
        stack.callback(collect_actor_logs, Path(run.config.logger.log_dir) / "actors")
        for cluster in run.clusters.distinct():
            stack.callback(cluster.shutdown)
        stack.callback(run.policy.shutdown)
        stack.callback(run.logger.close)
        stack.callback(run.checkpointer.shutdown)
