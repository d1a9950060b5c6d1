"""What follows once a step has made new weights: it is counted, recorded, seen whether something is due, and saved.

Knows the run, not where the experience came from. Invariant: the version of the weights is the number of completed
steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_rl.algorithms.grpo.collect import group_id
from nemo_rl.algorithms.grpo.sources import ExperienceSource
from nemo_rl.algorithms.grpo.stages import Experience
from nemo_rl.algorithms.run_checkpoint import begin_checkpoint
from nemo_rl.config.errors import did_you_mean
from nemo_rl.config.metric_names import MetricName
from nemo_rl.utils.checkpoint_retention import UnknownMetric, ranking_metric
from nemo_rl.utils.record_events import GroupTrained, StepFinished

if TYPE_CHECKING:
    from nemo_rl.algorithms.grpo.run import GRPORun
    from nemo_rl.data.loader import HasState


@dataclass
class CompletedStep:
    """What is known of a step that has made new weights.

    Attributes:
        metrics: Of its training.
        val_metrics: Of its validation, if it had one.
        saved: Whether its weights are in a checkpoint.
        stops_early: Whether validation has reached its threshold.
        timed_out: Whether `checkpointing.checkpoint_must_save_by` has come.
    """

    metrics: dict[str, Any]
    val_metrics: dict[str, float] | None = None
    saved: bool = False
    stops_early: bool = False
    timed_out: bool = False

    @property
    def ends_run(self) -> bool:
        """Whether no further step follows."""
        return self.stops_early or self.timed_out


def save_step(run: GRPORun, source: ExperienceSource, done: CompletedStep) -> None:
    """Snapshots the run after a completed step; files are finished in the background. One that cannot be written is
    tried again after the next step.

    Raises:
        CheckpointError: It was the third in a row that failed.
    """
    run.control.lend_saving(run.state.step)
    with run.timer.time("checkpointing"), run.checkpointer.trying():
        save_checkpoint(run, done.metrics, done.val_metrics, loader=source.loader(), also=source.saved())
        done.saved = True


def save_checkpoint(
    run: GRPORun,
    train_metrics: Mapping[str, float],
    val_metrics: Mapping[str, float] | None,
    *,
    loader: HasState,
    also: Mapping[str, object],
) -> None:
    """Snapshots the run after a completed step; files are finished in the background.

    Args:
        run: The run.
        train_metrics: Of the step.
        val_metrics: Of the last validation, if the step had one.
        loader: Whose state is saved.
        also: Further files by name.

    Raises:
        CheckpointError: The directory cannot be written, or the previous checkpoint failed.
    """
    info = run.state.training_info() | ranking_metric(
        run.config.checkpointing, run.state.step, train=train_metrics, val=val_metrics
    )
    begin_checkpoint(run.checkpointer, run.policy, loader, run.state.step, info, run.config, also)


def complete_step(run: GRPORun, experience: Experience) -> None:
    """Counts and records the step whose weights were just made."""
    state, rows = run.state, experience.rows
    trained = sorted(set(rows["prompt_number"].tolist()))
    for prompt in trained:
        name = experience.group_names.get(prompt, group_id(state.step, prompt))
        run.record.emit(GroupTrained(name, state.step))
    run.record.emit(StepFinished(state.step, state.step + 1, len(trained)))
    state.step += 1
    state.step_in_epoch += 1
    state.consumed_samples += run.config.grpo.num_prompts_per_step if not experience.group_names else len(trained)
    state.total_valid_tokens += int(rows["generated_lengths"][rows["sample_mask"] != 0].sum())


def validation_due(run: GRPORun, *, is_last: bool) -> bool:
    """Whether validation runs after the step that was just counted."""
    cfg, step = run.config.grpo, run.state.step
    if cfg.val_at_end and is_last:
        return True
    return cfg.val_period > 0 and step % cfg.val_period == 0 and step >= max(cfg.val_start_at, 0)


def early_stop(run: GRPORun, val_metrics: dict[str, float] | None) -> bool:
    """Whether the validation metric has reached its threshold.

    Raises:
        UnknownMetric: Validation has no such metric.
    """
    name, threshold = run.config.grpo.stop_at_validation_metric, run.config.grpo.stop_at_validation_threshold
    if name is None or threshold is None or val_metrics is None:
        return False
    short = MetricName.read(name).name
    if short not in val_metrics:
        raise UnknownMetric(
            f"grpo.stop_at_validation_metric={name}: validation gives {sorted(val_metrics)}."
            f"{did_you_mean(short, val_metrics)}"
        )
    return val_metrics[short] >= threshold
