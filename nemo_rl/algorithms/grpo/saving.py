"""Checkpoints of a GRPO run: its counters and the metric that ranks it, beside what every run's checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl.algorithms.grpo.run import GRPORun
from nemo_rl.algorithms.run_checkpoint import begin_checkpoint
from nemo_rl.utils.checkpoint_retention import ranking_metric


def save_checkpoint(run: GRPORun, train_metrics: Mapping[str, float], val_metrics: Mapping[str, float] | None) -> None:
    """Snapshots the run after a completed step; files are finished in the background.

    Raises:
        CheckpointError: The directory cannot be written, or the previous checkpoint failed.
    """
    info = run.state.training_info() | ranking_metric(run.config.checkpointing, run.state.step, train=train_metrics, val=val_metrics)
    begin_checkpoint(run.checkpointer, run.policy, run.train_loader, run.state.step, info, run.config)
