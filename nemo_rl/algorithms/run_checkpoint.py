"""What every run's checkpoint holds besides its counters: policy and loader; how a run goes on from it; and that a run has where to write.

Ties the checkpoint directory to policy and loader. Knows no file format of theirs and no algorithm. Invariants: a visible
checkpoint is complete; the loader state saved with step N yields the batches of step N+1 first.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nemo_rl.config import ConfigError
from nemo_rl.config.master import RootConfig
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.logger import get_next_experiment_dir

LOADER_FILE = "train_dataloader.pt"
WEIGHTS = Path("policy") / "weights"


def begin_checkpoint(
    checkpointer: CheckpointManager,
    policy: Policy,
    loader: Any,
    step: int,
    info: Mapping[str, Any],
    config: RootConfig,
    also: Mapping[str, Any] | None = None,
) -> None:
    """Snapshots policy and loader after a completed step; files are finished in the background.

    Args:
        checkpointer: Owner of the directory.
        policy: Saved as `policy/`.
        loader: Its `state_dict()` is saved as `train_dataloader.pt`.
        step: Completed steps.
        info: Counters and ranking metric.
        config: Saved as `config.yaml`.
        also: Further files by name, each plain values and tensors.

    Raises:
        CheckpointError: The directory cannot be written, or the previous checkpoint failed.
    """
    named = {**info, "dataset_names": dataset_names(config)}
    # Workers write too, from working directories of their own.
    path = checkpointer.init_tmp_checkpoint(step, named, config).resolve()
    with checkpointer.writing(path):
        for name, content in {LOADER_FILE: loader.state_dict(), **(also or {})}.items():
            # Through memory: torch reports a full disk as a RuntimeError without the reason.
            state = io.BytesIO()
            torch.save(content, state)
            (path / name).write_bytes(state.getvalue())
        optimizer = str(path / "policy" / "optimizer") if config.checkpointing.save_optimizer else None
        save_format = config.checkpointing.model_save_format or "safetensors"
        policy.save_checkpoint(str(path / WEIGHTS), optimizer, str(path / "policy" / "tokenizer"), save_format)
    checkpointer.begin_finalization(path, policy.finalize_async_save)


def restore_loader(loader: Any, checkpoint: Path, info: Mapping[str, Any], config: RootConfig) -> bool:
    """Continues a loader from a checkpoint; False (and an untouched loader) when the datasets changed."""
    if info.get("dataset_names") != dataset_names(config):
        return False
    loader.load_state_dict(torch.load(checkpoint / LOADER_FILE, weights_only=True))
    return True


def check_writable(checkpointer: CheckpointManager) -> None:
    """Finds out before the first step, not after it, whether checkpoints can be written.

    Raises:
        CheckpointError: The directory cannot be made or written.
    """
    probe = checkpointer.root / "tmp_probe"
    with checkpointer.writing(probe):
        probe.mkdir(parents=True, exist_ok=True)
        probe.rmdir()


def new_log_dir(config: RootConfig) -> str:
    """The next numbered directory in `logger.log_dir`, made.

    Raises:
        ConfigError: It cannot be made.
    """
    try:
        return str(get_next_experiment_dir(config.logger.log_dir))
    except OSError as error:
        raise ConfigError([f"logger.log_dir: {config.logger.log_dir} cannot be written ({error.strerror or error})"]) from error


def latest_checkpoint(checkpointer: CheckpointManager) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint and its info, if there is one."""
    path = checkpointer.get_latest_checkpoint_path()
    if path is None:
        return None
    return path, checkpointer.load_training_info(path) or {}


def dataset_names(config: RootConfig) -> list[str]:
    """The training datasets, by which a checkpoint knows whether its prompts are still the run's."""
    return [entry.dataset_name for entry in config.data.train]
