"""Checkpoints of a GRPO run: when one is due, what it holds, and how a run goes on from it.

Ties the checkpoint directory to policy, loader and counters. Knows no file format of theirs. Invariants: a visible
checkpoint is complete; the loader state saved with step N yields the prompts of step N+1 first.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nemo_rl.algorithms.grpo.run import GRPORun
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.checkpoint_retention import ranking_metric

LOADER_FILE = "train_dataloader.pt"


def save_checkpoint(run: GRPORun, train_metrics: Mapping[str, float], val_metrics: Mapping[str, float] | None) -> None:
    """Snapshots the run after a completed step; files are finished in the background.

    Raises:
        CheckpointError: The directory cannot be written, or the previous checkpoint failed.
    """
    cfg = run.config.checkpointing
    info: dict[str, Any] = run.state.training_info()
    info["dataset_names"] = [entry.dataset_name for entry in run.config.data.train]
    info |= ranking_metric(cfg, run.state.step, train=train_metrics, val=val_metrics)
    # Workers write too, from working directories of their own.
    path = run.checkpointer.init_tmp_checkpoint(run.state.step, info, run.config).resolve()
    with run.checkpointer.writing(path):
        torch.save(run.train_loader.state_dict(), path / LOADER_FILE)
        weights, optimizer = path / "policy" / "weights", path / "policy" / "optimizer"
        run.policy.save_checkpoint(str(weights), str(optimizer) if cfg.save_optimizer else None, str(path / "policy" / "tokenizer"))
    run.checkpointer.begin_finalization(path, run.policy.finalize_async_save)


def restore_loader(loader: Any, checkpoint: Path, info: Mapping[str, Any], dataset_names: list[str]) -> bool:
    """Continues a loader from a checkpoint; False (and an untouched loader) when the datasets changed."""
    if info.get("dataset_names") != dataset_names:
        return False
    loader.load_state_dict(torch.load(checkpoint / LOADER_FILE, weights_only=True))
    return True


def latest_checkpoint(checkpointer: CheckpointManager) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint and its info, if there is one."""
    path = checkpointer.get_latest_checkpoint_path()
    if path is None:
        return None
    return path, checkpointer.load_training_info(path) or {}
