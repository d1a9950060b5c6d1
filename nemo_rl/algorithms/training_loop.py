"""The loop of every run that trains: new weights, hand-over, validation, checkpoint and report, step after step.

`run_step` is one step. An algorithm brings its `Steps`, which say what is computed and who owns the accelerators; the
loop decides only when things happen. Invariants: a step either completes (weights, counters and record agree) or raises
with the weights of the step before; the version of the weights is the number of completed steps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from nemo_rl.algorithms.profiling import profiled_steps
from nemo_rl.algorithms.run_checkpoint import RunState, begin_checkpoint, saved_without_logs
from nemo_rl.config.master import RootConfig
from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.checkpoint_retention import UnknownMetric, ranking_metric, should_save
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.timer import TimeoutChecker, Timer

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader

    from nemo_rl.data.loader import Batch, HasState

logger = logging.getLogger(__name__)

Config = TypeVar("Config", bound=RootConfig)
Run = TypeVar("Run", bound="TrainingRun[Any]")


@dataclass
class TrainingRun(Generic[Config]):
    """What every run that trains consists of, set up and ready to be driven.

    Attributes:
        config: The merged configuration.
        policy: The trained policy.
        loss_fn: The loss.
        val_loader: Validation data, or None.
        logger: Metrics.
        checkpointer: Checkpoints.
        state: Counters; `state.step` is the version of the policy's weights.
        timer: Times of the current step.
        timeout: Watches `checkpointing.checkpoint_must_save_by`.
        progress: What a person watches.
    """

    config: Config
    policy: Policy
    loss_fn: LossFunction
    val_loader: StatefulDataLoader[Batch] | None
    logger: Logger
    checkpointer: CheckpointManager
    state: RunState
    timer: Timer
    timeout: TimeoutChecker
    progress: RunProgress


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


class Steps(Generic[Run]):
    """What an algorithm does in the loop.

    Attributes:
        run: The run.
        section: Its section of the configuration, which has `max_num_steps`, `max_num_epochs`, `val_period`,
            `val_at_end`.
        saves_before_publish: Whether the training accelerators are somebody else's after `publish`.
    """

    run: Run
    section: Literal["grpo", "sft"]
    saves_before_publish = False

    @property
    def cfg(self) -> Any:
        """The algorithm's section."""
        return getattr(self.run.config, self.section)

    def running(self) -> AbstractContextManager[object]:
        """The span of all steps: whatever generates is started, and ended however the span ends. Validates first where
        that is wanted.
        """
        raise NotImplementedError

    def finished(self) -> bool:
        """Whether steps or epochs are used up."""
        raise NotImplementedError

    def train(self) -> dict[str, Any] | None:
        """Makes the weights of the next version and counts the step; its metrics. None where the data is used up."""
        raise NotImplementedError

    def validate(self) -> dict[str, float]:
        """Validates the current weights; logs and returns the metrics."""
        raise NotImplementedError

    def position(self) -> tuple[HasState, Mapping[str, object]]:
        """Where the data stands, for a checkpoint: its loader, and further files by name."""
        raise NotImplementedError

    def report(self, done: CompletedStep) -> None:
        """Has the step shown and logged; its accelerators may go to somebody else."""
        raise NotImplementedError

    def open(self) -> AbstractContextManager[object]:
        """The span of one step."""
        return nullcontext()

    def publish(self) -> None:
        """Generation gets the new weights; training may lose its accelerators."""

    def validation_due(self, *, is_last: bool) -> bool:
        """Whether validation runs after the step that was just counted."""
        period = self.cfg.val_period
        return (self.cfg.val_at_end and is_last) or (period > 0 and self.run.state.step % period == 0)

    def early_stop(self, val_metrics: Mapping[str, float] | None) -> bool:
        """Whether validation says that the run is over.

        Raises:
            UnknownMetric: Validation has no such metric.
        """
        return False

    def lend_saving(self) -> None:
        """The policy's state can be saved on return."""

    def await_reports(self) -> None:
        """Waits until everything that `report` took is written; raises what failed."""

    def why_ended(self, newest: CompletedStep | None) -> str | None:
        """Why the run ended before the step that was asked for; None where it did not."""
        if newest is not None and newest.stops_early:
            return (
                f"{self.section}.stop_at_validation_metric={self.cfg.stop_at_validation_metric} has reached "
                f"{self.section}.stop_at_validation_threshold={self.cfg.stop_at_validation_threshold}"
            )
        if self.run.state.step >= self.cfg.max_num_steps:
            return None
        if newest is not None and newest.timed_out:
            return self.run.timeout.reason
        return f"{self.section}.max_num_epochs={self.cfg.max_num_epochs} passes over the data are done"


def train_to_end(steps: Steps[Any]) -> None:
    """Drives a run to its end.

    Raises:
        NonFiniteStepError, WorkerError, GenerationError, EnvironmentFailure, CollectorError, CheckpointError: The run
            cannot go on; the last checkpoint is usable.
    """
    run = steps.run
    run.timeout.start_iterations()
    newest: CompletedStep | None = None
    last_step = partial(save_step, steps, CompletedStep({}))
    with (
        steps.running(),
        profiled_steps(run.policy, getattr(run, "generation", None)) as profiler,
        saved_without_logs(run.checkpointer, run.state, last_step),
    ):
        while not steps.finished():
            profiler.before(run.state.step + 1)
            done = run_step(steps)
            if done is None:
                _end_with(steps, newest)
                break
            newest = done
            if done.ends_run:
                break
        # What is said of the last step may fail too, and the run can be saved only while its source goes on.
        steps.await_reports()
    run.checkpointer.finish()
    if (why := steps.why_ended(newest)) is not None:
        asked = f"{steps.section}.max_num_steps={steps.cfg.max_num_steps}"
        logger.warning("ended after step %d of %s: %s", run.state.step, asked, why)


def run_step(steps: Steps[Any]) -> CompletedStep | None:
    """One step and everything that follows from it; None when the data is used up."""
    run = steps.run
    run.timer.reset()
    with run.timer.time("total_step_time"), steps.open():
        metrics = steps.train()
        if metrics is None:
            return None
        done = CompletedStep(metrics)
        is_last = steps.finished()
        if steps.saves_before_publish:
            _save_if_due(steps, done, is_last=is_last)
        steps.publish()
        if steps.validation_due(is_last=is_last):
            done.val_metrics = steps.validate()
        run.timeout.mark_iteration()
        try:
            done.stops_early = steps.early_stop(done.val_metrics)
        except UnknownMetric:
            # A name of a user's environment is known only now; the steps so far are not lost for it.
            if run.config.checkpointing.enabled and not done.saved:
                save_step(steps, done)
            raise
        if not steps.saves_before_publish:
            _save_if_due(steps, done, is_last=is_last)
        elif done.stops_early and run.config.checkpointing.enabled:
            # Again where that was before its validation, which tells the same command that the run is over.
            save_step(steps, done)
    steps.report(done)
    if done.saved or done.ends_run:
        steps.await_reports()
    return done


def _save_if_due(steps: Steps[Any], done: CompletedStep, *, is_last: bool) -> None:
    run = steps.run
    done.timed_out = run.timeout.check_save()
    run.checkpointer.poll()
    stops_early, step = done.stops_early, run.state.step
    due = should_save(step, run.config.checkpointing, is_last=is_last, early_stop=stops_early, timeout=done.timed_out)
    if due or run.checkpointer.retry_due:
        save_step(steps, done)


def save_step(steps: Steps[Any], done: CompletedStep) -> None:
    """Snapshots the run after a completed step; files are finished in the background. One that cannot be written is
    tried again after the next step.

    Raises:
        CheckpointError: It was the third in a row that failed.
    """
    run, cfg = steps.run, steps.run.config
    steps.lend_saving()
    with run.timer.time("checkpointing"), run.checkpointer.tolerate_failure():
        step, (loader, files) = run.state.step, steps.position()
        info = run.state.training_info()
        info |= ranking_metric(cfg.checkpointing, step, train=done.metrics, val=done.val_metrics)
        begin_checkpoint(run.checkpointer, run.policy, loader, step, info, cfg, files)
        done.saved = True


def _end_with(steps: Steps[Any], newest: CompletedStep | None) -> None:
    """Does for the newest step what only the last one gets: with dynamic sampling nobody knew that it would be."""
    if newest is None:
        return
    if newest.val_metrics is None and steps.validation_due(is_last=True):
        # What is said of the step is said first: trackers take steps in order.
        steps.await_reports()
        newest.val_metrics = steps.validate()
    if not newest.saved and should_save(steps.run.state.step, steps.run.config.checkpointing, is_last=True):
        save_step(steps, newest)
