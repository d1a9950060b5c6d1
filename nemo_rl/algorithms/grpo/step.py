"""The two parts of a step that every driver has in common: from its experience to new weights, and what follows.

`train_on_batch` computes log-probabilities and advantages and drives the optimizer, whole or in parts; `complete_step`
and its neighbours count the step, record it, see what is due, and save it. Knows the run, not where the experience came
from. Invariants: a step that fails leaves the weights of the step before; the version of the weights is the number of
completed steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_rl.algorithms.grpo.collect import group_id
from nemo_rl.algorithms.grpo.metrics import step_metrics
from nemo_rl.algorithms.grpo.run import GRPORun
from nemo_rl.algorithms.grpo.sources import ExperienceSource
from nemo_rl.algorithms.grpo.stages import (
    Experience,
    columns_to_train,
    compute_logprobs,
    mask_and_weigh,
    needs_previous_logprobs,
    needs_reference_logprobs,
)
from nemo_rl.algorithms.run_checkpoint import begin_checkpoint
from nemo_rl.config.errors import did_you_mean
from nemo_rl.config.metric_names import MetricName
from nemo_rl.models.policy.interfaces import TrainResult
from nemo_rl.utils.checkpoint_retention import UnknownMetric, ranking_metric
from nemo_rl.utils.record_events import GroupTrained, StepFinished, StepSpan
from nemo_rl.utils.step_timeline import LOGPROBS, TRAINING

if TYPE_CHECKING:
    from nemo_rl.algorithms.grpo.run import GRPORun
    from nemo_rl.data.loader import HasState


@contextmanager
def recorded_span(run: GRPORun, what: str) -> Iterator[None]:
    """Writes into the run record how long the current step was busy with something."""
    step, begun = run.state.step, time.time()
    yield
    run.record.emit(StepSpan(step, what, begun, time.time()))


@dataclass(frozen=True)
class Trained:
    """A step that was trained.

    Attributes:
        experience: What it was trained on.
        metrics: Its `train/` metrics.
        result: What training returned.
    """

    experience: Experience
    metrics: dict[str, Any]
    result: TrainResult


def train_on_batch(run: GRPORun, experience: Experience, meanwhile: Callable[[], None]) -> Trained:
    """Trains on the experience of the current step; the weights are then those of version `state.step + 1`.

    Args:
        run: The run, whose training accelerators may be used.
        experience: Scored and filtered.
        meanwhile: Called while the workers train; must not fail.

    Raises:
        NonFiniteStepError, WorkerError: The weights are those of the step before.
    """
    score(run, experience)
    weigh(run, experience)
    result = optimise(run, experience, meanwhile)
    return Trained(experience, step_metrics(run, experience, result), result)


def score(run: GRPORun, experience: Experience, *, step_open: bool = False) -> None:
    """Log-probabilities of the experience, as far as anything reads them. Group-local.

    Args:
        run: The run.
        experience: Some groups, or all of a step.
        step_open: Whether gradients of earlier groups wait for the optimizer.
    """
    cfg, loss_cfg, timer = run.config.grpo, run.config.loss_fn, run.timer
    run.progress.phase("log-probabilities")
    with timer.time("logprob_inference_prep"):
        if needs_previous_logprobs(cfg, loss_cfg) or needs_reference_logprobs(cfg, loss_cfg):
            run.policy.prepare_for_lp_inference(keep_train_buffers=step_open)
    with timer.time("policy_and_reference_logprobs"), recorded_span(run, LOGPROBS):
        compute_logprobs(experience, run.store, run.policy, cfg, loss_cfg, timer)


def weigh(run: GRPORun, experience: Experience, *, first_row: int = 0) -> None:
    """Masks and advantages. Group-local, unless `stages.whole_batch_stages` names one of them.

    Args:
        run: The run.
        experience: Some groups, or all of a step.
        first_row: Number of its first sample within the step.
    """
    with run.timer.time("advantage_calculation"):
        global_batch_size = run.config.policy.train_global_batch_size
        mask_and_weigh(experience, run.store, run.config.grpo, run.config.loss_fn, global_batch_size, first_row)


def optimise(run: GRPORun, experience: Experience, meanwhile: Callable[[], None]) -> TrainResult:
    """The optimizer's steps on weighed experience; columns that no stage knows go along, for the model and for losses
    of users.
    """
    run.progress.phase("training")
    with run.timer.time("training_prep"):
        run.policy.prepare_for_training()
    with run.timer.time("policy_training"), recorded_span(run, TRAINING):
        data = columns_to_train(experience, run.store, run.config.grpo, run.config.loss_fn)
        pending = run.policy.submit_train(data, run.loss_fn, timer=run.timer)
        meanwhile()
        return pending.result()


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
