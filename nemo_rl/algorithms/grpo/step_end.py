"""What every driver does once a step has made new weights: count it, record it, and see what is due.

Knows the run's counters and configuration, not how the step came about. Invariant: the version of the weights is the
number of completed steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nemo_rl.algorithms.grpo.collect import group_id
from nemo_rl.algorithms.grpo.run import GRPORun
from nemo_rl.algorithms.grpo.stages import Experience
from nemo_rl.algorithms.grpo.validation import validate
from nemo_rl.utils.checkpoint_retention import UnknownMetric, should_save
from nemo_rl.utils.record_events import GroupTrained, StepFinished

logger = logging.getLogger(__name__)


def complete_step(run: GRPORun, experience: Experience[Any]) -> None:
    """Counts and records the step whose weights were just made."""
    state, rows = run.state, experience.rows
    trained = sorted(set(rows["prompt_number"].tolist()))
    for prompt in trained:
        run.record.emit(GroupTrained(group_id(state.step, prompt), state.step))
    run.record.emit(StepFinished(state.step, state.step + 1, len(trained)))
    state.step += 1
    state.step_in_epoch += 1
    state.consumed_samples += run.config.grpo.num_prompts_per_step
    state.total_valid_tokens += int(rows["generated_lengths"][rows["sample_mask"] != 0].sum())


@dataclass
class LastStep:
    """What is known of the newest completed step when the prompts end before the step after it is full.

    Attributes:
        metrics: Of its training.
        val_metrics: Of its validation, if it had one.
        saved: Whether its weights are in a checkpoint.
        ends_run: Whether the run ends with it for another reason.
    """

    metrics: dict[str, Any]
    val_metrics: dict[str, float] | None
    saved: bool
    ends_run: bool = False


def end_with(run: GRPORun, last: LastStep | None, save: Callable[[LastStep], None]) -> None:
    """Does for the newest step what only the last one gets: with dynamic sampling nobody knew that it would be.

    Args:
        run: The run.
        last: Its newest step; None when it made none.
        save: Writes its checkpoint.
    """
    logger.info("run=ended step=%d reason=prompts_exhausted", run.state.step)
    if last is None:
        return
    if last.val_metrics is None and validation_due(run, is_last=True):
        last.val_metrics = validate(run, run.state.step)
    if not last.saved and should_save(run.state.step, run.config.checkpointing, is_last=True):
        save(last)


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
    name, threshold = run.config.grpo.stop_at_validation_metric, run.config.grpo.stop_at_validation_metric_threshold
    if name is None or threshold is None or val_metrics is None:
        return False
    short = name.removeprefix("val:").removeprefix("validation/")
    if short not in val_metrics:
        raise UnknownMetric(f"grpo.stop_at_validation_metric={name}: validation gives {sorted(val_metrics)}")
    return val_metrics[short] >= threshold
