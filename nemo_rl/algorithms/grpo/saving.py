"""Checkpoints of a GRPO run: its counters and the metric that ranks it, beside what every run's checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_rl.algorithms.grpo.run import GRPORun
from nemo_rl.algorithms.run_checkpoint import begin_checkpoint
from nemo_rl.utils.checkpoint_retention import ranking_metric


def save_checkpoint(
    run: GRPORun,
    train_metrics: Mapping[str, float],
    val_metrics: Mapping[str, float] | None,
    *,
    loader: Any = None,
    also: Mapping[str, Any] | None = None,
) -> None:
    """Snapshots the run after a completed step; files are finished in the background.

    Args:
        run: The run.
        train_metrics: Of the step.
        val_metrics: Of the last validation, if the step had one.
        loader: Whose state is saved; the run's own by default.
        also: Further files by name.

    Raises:
        CheckpointError: The directory cannot be written, or the previous checkpoint failed.
    """
    info = run.state.training_info() | ranking_metric(run.config.checkpointing, run.state.step, train=train_metrics, val=val_metrics)
    begin_checkpoint(run.checkpointer, run.policy, loader or run.train_loader, run.state.step, info, run.config, also)
