"""Builds an SFT run from its configuration.

Checks everything that needs no accelerator first (tokenizer, model, data), then starts Ray, reserves slots, builds the
policy and restores the latest checkpoint. Invariants: a mistake in the configuration raises before Ray starts; whatever
was built is ended again when a later part fails.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.placement import check_policy, reserve, start_policy
from nemo_rl.algorithms.run_checkpoint import check_writable, latest_checkpoint, new_log_dir, restore_loader
from nemo_rl.algorithms.sft.run import SFTRun, SFTState
from nemo_rl.algorithms.utils import set_seed
from nemo_rl.config import SFTMasterConfig
from nemo_rl.data.errors import DataError
from nemo_rl.data.loader import make_loader
from nemo_rl.data.setup import TaskDatasets, load_datasets
from nemo_rl.data.sft import sft_collate
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.actor_logs import collect_actor_logs
from nemo_rl.distributed.ray_runtime import init_ray, shutdown_ray
from nemo_rl.loss import NLLLossFn
from nemo_rl.models.dtensor.kernels import check_device
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.timer import TimeoutChecker, Timer

logger = logging.getLogger(__name__)


def setup(config: SFTMasterConfig) -> SFTRun:
    """A run that is ready to be driven.

    Args:
        config: A checked configuration. `logger.log_dir` is replaced by its next numbered directory.

    Raises:
        ConfigError, DataError, ModelNotFoundError, DeviceUnavailableError: The configuration asks for what is not there.
        OptimizerConfigError, UnsupportedModelError: Names of optimizer or schedule are wrong; the model does not divide over ranks.
        CheckpointError: A checkpoint exists but cannot be resumed, or none can be written.
    """
    started = time.monotonic()
    set_seed(config.sft.seed)
    tokenizer = get_tokenizer(config.policy.tokenizer, config.policy.trust_remote_code)
    check_policy(config)
    train_loader, val_loader = _loaders(config, load_datasets(tokenizer, config.data), tokenizer.pad_token_id)
    checkpointer = CheckpointManager(config.checkpointing)
    if config.checkpointing.enabled:
        check_writable(checkpointer)
    checkpoint = latest_checkpoint(checkpointer) if config.checkpointing.enabled else None
    state = SFTState()
    if checkpoint is not None:
        state = SFTState.from_training_info(checkpoint[1])
        if not restore_loader(train_loader, checkpoint[0], checkpoint[1], config):
            logger.warning("resume=loader_ignored checkpoint=%s reason=datasets_changed", checkpoint[0])
    config.logger.log_dir = new_log_dir(config)
    with ExitStack() as undo:
        accelerator = init_ray(device=config.cluster.device, cpu_slots=config.cluster.cpu_slots)
        undo.callback(shutdown_ray)
        check_device(config.policy.dtensor_cfg, cuda=accelerator.is_cuda)
        cluster = reserve(config.cluster, accelerator, "policy", [config.cluster.gpus_per_node] * config.cluster.num_nodes)
        undo.callback(cluster.shutdown)
        policy = start_policy(config, cluster, tokenizer, checkpointer, checkpoint[0] if checkpoint else None, init_reference_model=False)
        undo.callback(policy.shutdown)
        policy.wait_until_started()
        run = SFTRun(
            config=config,
            policy=policy,
            loss_fn=NLLLossFn(),
            train_loader=train_loader,
            val_loader=val_loader,
            logger=Logger(config.logger),
            checkpointer=checkpointer,
            state=state,
            timer=Timer(),
            timeout=TimeoutChecker(config.checkpointing.checkpoint_must_save_by),
            progress=RunProgress(_total_steps(config, train_loader), title="SFT", first_step=state.step),
            cluster=cluster,
        )
        undo.pop_all()
    run.logger.log_hyperparams(config.to_dict())
    run.logger.log_metrics({"total_setup_time_s": time.monotonic() - started}, state.step, prefix="timing/setup")
    return run


def _loaders(config: SFTMasterConfig, datasets: TaskDatasets, pad_token_id: int) -> tuple[Any, Any]:
    sft, data = config.sft, config.data
    _check_conversations(datasets.train, "data.train")
    common: dict[str, Any] = {
        "collate_fn": sft_collate(pad_token_id, config.policy.make_sequence_length_divisible_by),
        "num_workers": data.num_workers,
        "seed": sft.seed,
    }
    train = make_loader(datasets.train, config.policy.train_global_batch_size, shuffle=data.shuffle, drop_last=True, name="data.train", **common)
    if datasets.validation is None:
        if sft.val_period > 0 or sft.val_at_start or sft.val_at_end:
            raise DataError(
                "validation needs data.validation (or data.train.split_validation_size); set it, or switch sft.val_period, val_at_start and val_at_end off"
            )
        return train, None
    _check_conversations(datasets.validation, "data.validation")
    return train, make_loader(datasets.validation, sft.val_global_batch_size, shuffle=False, drop_last=False, name="data.validation", **common)


def _check_conversations(dataset: Any, key: str) -> None:
    if dataset[0]["message_log"][-1]["role"] != "assistant":
        raise DataError(f"{key}.processor makes prompts without an answer, and SFT trains on answers; set {key}.processor: sft_processor")


def _total_steps(config: SFTMasterConfig, loader: Any) -> int:
    return min(config.sft.max_num_steps, len(loader) * config.sft.max_num_epochs)


def close(run: SFTRun) -> None:
    """Ends everything the run started; safe after a failure, and no process is left."""
    with ExitStack() as stack:
        stack.callback(shutdown_ray)
        stack.callback(collect_actor_logs, Path(run.config.logger.log_dir) / "actors")
        stack.callback(run.cluster.shutdown)
        stack.callback(run.policy.shutdown)
        stack.callback(run.logger.close)
        stack.callback(run.checkpointer.shutdown)
