"""Builds an SFT run from its configuration.

Checks everything that needs no accelerator (model, tokenizer, data) while Ray starts, then reserves slots, builds the
policy and restores the latest checkpoint. Invariants: a mistake in the configuration raises before Ray is waited for;
whatever was built is ended again when a later part fails.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nemo_rl.algorithms import start_checks
from nemo_rl.algorithms.placement import check_device, check_policy, start_policy
from nemo_rl.algorithms.profiling import check_profile
from nemo_rl.algorithms.resume import Resume, check_same_shape, find_resume
from nemo_rl.algorithms.run_checkpoint import check_writable, name_latest, new_log_dir
from nemo_rl.algorithms.seeds import set_seed
from nemo_rl.algorithms.sft.placement import OwnPlacement, Placement
from nemo_rl.algorithms.sft.run import SFTRun, SFTState
from nemo_rl.config import SFTMasterConfig
from nemo_rl.data.errors import DataError
from nemo_rl.data.loader import make_loader
from nemo_rl.data.setup import TaskDatasets, load_datasets
from nemo_rl.data.sft import sft_collate
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.actor_logs import collect_actor_logs
from nemo_rl.distributed.ray_runtime import RayStart, accelerator_here
from nemo_rl.loss import NLLLossFn
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.start_phases import StartPhases
from nemo_rl.utils.timer import TimeoutChecker, Timer

logger = logging.getLogger(__name__)


def setup(config: SFTMasterConfig, start: StartPhases | None = None, placement: Placement | None = None) -> SFTRun:
    """A run that is ready to be driven.

    Args:
        config: A checked configuration. `logger.log_dir` is replaced by its next numbered directory.
        start: Where the phases of the start are shown.
        placement: Gives the run its accelerators; by default it has slots of its own.

    Raises:
        ConfigError, DataError, ModelNotFoundError, DeviceUnavailableError: The configuration asks for what is not
        there. OptimizerConfigError, UnsupportedModelError: Names of optimizer or schedule are wrong; the model does not
        divide over ranks. CheckpointError: A checkpoint exists but cannot be resumed, or none can be written.
        ResumeError: It belongs to another run. NothingToDo: The run is over already.
    """
    start, placement = start or StartPhases(), placement or OwnPlacement()
    checkpointer = CheckpointManager(config.checkpointing)
    with start.phase("directories"):
        resume = find_resume(config, checkpointer)
        if config.checkpointing.enabled:
            check_writable(checkpointer)
        if resume is not None:
            # The run may have died between its last checkpoint and this link.
            name_latest(checkpointer)
            resume.check_unfinished(config.sft.max_num_steps, "sft.max_num_steps")
        here = accelerator_here(config.cluster.device)
        check_profile(here)
    with ExitStack() as undo:
        ray_start = RayStart(lambda: placement.connect(config))
        undo.callback(ray_start.end, placement.disconnect)
        with start.phase("model, tokenizer and data, beside Ray's start"):
            set_seed(config.sft.seed)
            model = check_policy(config)
            if here is not None:
                start_checks.check_cpu_is_meant(config, here, model, start.say)
            if resume is not None:
                check_same_shape(model, resume.checkpoint)
            tokenizer = get_tokenizer(config.policy.tokenizer, config.policy.trust_remote_code)
            datasets = load_datasets(tokenizer, config.data)
            start_checks.check_prompt_lengths(datasets.train_by_task, config.data.max_input_seq_length, start.say)
            train_loader, val_loader = _loaders(config, datasets, tokenizer.pad_token_id)
            state, total_steps = _position(config, resume, train_loader)
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
        cluster = placement.reserve(config, accelerator)
        undo.callback(cluster.shutdown)
        with placement.building(), start.phase("policy"):
            policy = start_policy(config, cluster, tokenizer, checkpointer, resume, init_reference_model=False)
            undo.callback(policy.shutdown)
            policy.wait_until_started()
        if policy.started is not None:
            start.say(f"training: {policy.started.kernels}")
        run = SFTRun(
            config=config,
            policy=policy,
            loss_fn=NLLLossFn(),
            train_loader=train_loader,
            val_loader=val_loader,
            logger=log,
            checkpointer=checkpointer,
            state=state,
            timer=Timer(),
            timeout=TimeoutChecker(config.checkpointing.checkpoint_must_save_by),
            progress=RunProgress(total_steps, title="SFT", first_step=state.step),
            cluster=cluster,
            placement=placement,
        )
        undo.pop_all()
    run.logger.log_hyperparams(config.to_dict())
    run.logger.log_metrics({"total_setup_time_s": start.done()}, state.step, prefix="timing/setup")
    return run


def _position(config: SFTMasterConfig, resume: Resume | None, loader: Any) -> tuple[SFTState, int]:
    """The run's counters, with the loader where they say, and its last step.

    Raises:
        NothingToDo: That step is done.
    """
    limits = (config.sft.max_num_steps, config.sft.max_num_epochs, len(loader))
    if resume is None:
        return SFTState(), min(limits[0], limits[1] * limits[2])
    state = SFTState.from_training_info(resume.info)
    resume.restore_position(loader, state, config.policy.train_global_batch_size)
    total = resume.total_steps(state, *limits)
    resume.check_unfinished(total, "sft.max_num_steps")
    return state, total


def _loaders(config: SFTMasterConfig, datasets: TaskDatasets, pad_token_id: int) -> tuple[Any, Any]:
    sft, data = config.sft, config.data
    _check_conversations(datasets.train, "data.train")
    common: dict[str, Any] = {
        "collate_fn": sft_collate(pad_token_id, config.policy.make_sequence_length_divisible_by, sft.only_unmask_final),
        "num_workers": data.num_workers,
        "seed": sft.seed,
    }
    train = make_loader(
        datasets.train,
        config.policy.train_global_batch_size,
        shuffle=data.shuffle,
        drop_last=True,
        name="data.train",
        **common,
    )
    if datasets.validation is None:
        if sft.val_period > 0 or sft.val_at_start or sft.val_at_end:
            raise DataError(
                "validation needs data.validation (or data.train.split_validation_size); set it, or switch "
                "sft.val_period, val_at_start and val_at_end off"
            )
        return train, None
    _check_conversations(datasets.validation, "data.validation")
    return train, make_loader(
        datasets.validation, sft.val_global_batch_size, shuffle=False, drop_last=False, name="data.validation", **common
    )


def _check_conversations(dataset: Any, key: str) -> None:
    if dataset[0]["message_log"][-1]["role"] != "assistant":
        raise DataError(
            f"{key}.processor makes prompts without an answer, and SFT trains on answers; set "
            f"{key}.processor: sft_processor"
        )


def close(run: SFTRun) -> None:
    """Ends everything the run started; safe after a failure, and no process is left."""
    with ExitStack() as stack:
        stack.callback(run.placement.disconnect)
        stack.callback(collect_actor_logs, Path(run.config.logger.log_dir) / "actors")
        stack.callback(run.cluster.shutdown)
        stack.callback(run.policy.shutdown)
        stack.callback(run.logger.close)
        stack.callback(run.checkpointer.shutdown)
