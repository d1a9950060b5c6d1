"""The training loop of GRPO and SFT: train, publish weights, validate, save a checkpoint, report.

`run_step` is one step. An algorithm implements `Steps`; the loop calls them in order. Invariants: a step either
completes (weights, counters and record agree) or raises with the weights of the step before; the version of the weights
is the number of completed steps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from nemo_rl.algorithms.accelerators import Accelerators
from nemo_rl.algorithms.memory_watch import MemoryWatch
from nemo_rl.algorithms.profiling import profiled_steps
from nemo_rl.algorithms.resume import RunState, begin_checkpoint, saved_without_logs
from nemo_rl.config.master import RootConfig
from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.checkpoint_retention import UnknownMetric, ranking_metric, should_save
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.record import Record
from nemo_rl.utils.timer import TimeoutChecker, Timer

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader

    from nemo_rl.data.loader import Batch, HasState
    from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
    from nemo_rl.utils.log_backends import Metrics

logger = logging.getLogger(__name__)

Config = TypeVar("Config", bound=RootConfig)
Run = TypeVar("Run", bound="TrainingRun[Any]")


@dataclass(kw_only=True)
class TrainingRun(Generic[Config]):
    """A run that is set up: the parts that GRPO and SFT share."""

    config: Config
    policy: Policy
    generation: VllmGeneration | None  # the engines; None where nothing is generated
    loss_fn: LossFunction
    val_loader: StatefulDataLoader[Batch] | None  # validation data, or None
    logger: Logger
    checkpointer: CheckpointManager
    state: RunState  # counters; `state.step` is the version of the policy's weights
    timer: Timer  # times of the current step
    timeout: TimeoutChecker  # watches `checkpointing.checkpoint_must_save_by`
    progress: RunProgress
    record: Record
    memory: MemoryWatch  # logs the memory of the run's processes after each step
    accelerators: Accelerators = field(init=False)  # who uses them, and when
    ending: ExitStack = field(default_factory=ExitStack, init=False)  # ends whatever the run started, last first

    def close(self) -> None:
        """Ends everything that the run started; safe after a failure."""
        self.ending.close()


@dataclass
class CompletedStep:
    """Result of a trained step."""

    metrics: Metrics
    val_metrics: dict[str, float] | None = None  # validation metrics; None if it did not validate
    saved: bool = False  # whether its weights are in a checkpoint
    stops_early: bool = False  # whether validation has reached its threshold
    timed_out: bool = False  # whether the run was asked to end, or `checkpointing.checkpoint_must_save_by` has passed

    @property
    def ends_run(self) -> bool:
        """Whether this is the last step."""
        return self.stops_early or self.timed_out


class Steps(Generic[Run]):
    """What an algorithm implements for the loop. `saves_before_publish`: whether the run loses its training
    accelerators in `publish`, so that a due checkpoint must be taken before.
    """

    run: Run
    section: Literal["grpo", "distillation", "sft"]  # name of the algorithm's configuration section
    saves_before_publish = False

    @property
    def cfg(self) -> Any:
        """The algorithm's configuration section."""
        return self.run.config[self.section]

    def running(self) -> AbstractContextManager[object]:
        """Context manager around all steps: starts generation, validates if configured, and stops generation."""
        raise NotImplementedError

    def finished(self) -> bool:
        """Whether steps or epochs are used up."""
        raise NotImplementedError

    def train(self) -> Metrics | None:
        """Trains and counts one step. Returns its metrics, or None if the data is used up."""
        raise NotImplementedError

    def validate(self) -> dict[str, float]:
        """Validates the current weights; logs and returns the metrics."""
        raise NotImplementedError

    def position(self) -> tuple[HasState, Mapping[str, object]]:
        """Data position for a checkpoint: the loader, and further files by name."""
        raise NotImplementedError

    def report(self, done: CompletedStep) -> None:
        """Logs the step. SFT also releases its accelerators here."""
        raise NotImplementedError

    def open(self) -> AbstractContextManager[object]:
        """Context manager around one step; it counts in no time."""
        return nullcontext()

    def publish(self) -> None:
        """Sends the new weights to generation. The run may lose its training accelerators."""

    def validation_due(self, *, is_last: bool) -> bool:
        """Whether to validate after the step that was just counted."""
        period = self.cfg.val_period
        return (self.cfg.val_at_end and is_last) or (period > 0 and self.run.state.step % period == 0)

    def early_stop(self, val_metrics: Mapping[str, float] | None) -> bool:
        """Whether the validation metrics end the run. Raises UnknownMetric: validation has no such metric."""
        return False

    def lend_saving(self) -> None:
        """Makes room for the policy's state so that it can be saved."""

    def await_reports(self) -> None:
        """Waits until all reports are written. Raises their errors."""

    def why_ended(self, newest: CompletedStep | None) -> str | None:
        """Reason why the run ended before the requested last step, or None."""
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


def train_to_end(steps: Steps[Run]) -> None:
    """Runs all steps. Raises NonFiniteStepError, WorkerError, GenerationError, EnvironmentFailure, CollectorError,
    CheckpointError: the run cannot go on; the last checkpoint is usable.
    """
    run = steps.run
    run.timeout.start_iterations()
    newest: CompletedStep | None = None
    last_step = partial(save_step, steps, CompletedStep({}))
    with (
        steps.running(),
        profiled_steps(run.policy, run.generation) as profiler,
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
        # The last report may fail too, and the run can be saved only while its source still runs.
        steps.await_reports()
        run.memory.last()
    run.checkpointer.finish()
    if (why := steps.why_ended(newest)) is not None:
        asked = f"{steps.section}.max_num_steps={steps.cfg.max_num_steps}"
        logger.warning("ended after step %d of %s: %s", run.state.step, asked, why)


def run_step(steps: Steps[Run]) -> CompletedStep | None:
    """One step, with validation, checkpoint and report. None if the data is used up."""
    run = steps.run
    run.timer.reset()
    with steps.open(), run.timer.time("total_step_time"):
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
            # Metric names of custom environments are known only now. Save before failing, so that no step is lost.
            if run.config.checkpointing.enabled and not done.saved:
                save_step(steps, done)
            raise
        if not steps.saves_before_publish:
            _save_if_due(steps, done, is_last=is_last)
        elif done.stops_early and run.config.checkpointing.enabled:
            # The first save was before validation. Save again, so that a restart knows that the run is over.
            save_step(steps, done)
    # Before the next step's first call reaches the workers.
    run.memory.after_step(run.state.step)
    steps.report(done)
    if done.saved or done.ends_run:
        steps.await_reports()
    return done


def _save_if_due(steps: Steps[Run], done: CompletedStep, *, is_last: bool) -> None:
    run = steps.run
    done.timed_out = run.timeout.check_save()
    run.checkpointer.poll()
    stops_early, step = done.stops_early, run.state.step
    due = should_save(step, run.config.checkpointing, is_last=is_last, early_stop=stops_early, timeout=done.timed_out)
    if due or run.checkpointer.retry_due:
        save_step(steps, done)


def save_step(steps: Steps[Run], done: CompletedStep) -> None:
    """Takes a checkpoint; its files are finished in the background. After a failed write the next step tries again.
    Raises CheckpointError: three checkpoints in a row have failed.
    """
    run, cfg = steps.run, steps.run.config
    steps.lend_saving()
    with run.timer.time("checkpointing"), run.checkpointer.tolerate_failure():
        step, (loader, files) = run.state.step, steps.position()
        info = run.state.training_info()
        info |= ranking_metric(cfg.checkpointing, step, train=done.metrics, val=done.val_metrics)
        begin_checkpoint(run.checkpointer, run.policy, loader, step, info, cfg, files)
        done.saved = True


def _end_with(steps: Steps[Run], newest: CompletedStep | None) -> None:
    """Validates and saves the newest step as the last one. With dynamic sampling the last step is not known before."""
    if newest is None:
        return
    if newest.val_metrics is None and steps.validation_due(is_last=True):
        # Report the step first: trackers expect steps in order.
        steps.await_reports()
        newest.val_metrics = steps.validate()
    if not newest.saved and should_save(steps.run.state.step, steps.run.config.checkpointing, is_last=True):
        save_step(steps, newest)
