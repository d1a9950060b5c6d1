"""The step loop of GRPO, whatever its experience comes from and whoever owns its accelerators.

`run_step` is one step from experience to checkpoint.
Decides only when things happen: the source says where a batch comes from, the control plane when accelerators change
hands, the stages what is computed. Invariants: a step either completes (weights, counters and record agree) or raises
with the weights of the step before; the version of the weights is the number of completed steps.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial

from nemo_rl.algorithms.grpo.async_source import AsynchronousSource
from nemo_rl.algorithms.grpo.control_plane import HookedControlPlane, OwnAccelerators
from nemo_rl.algorithms.grpo.metrics import report_step, step_metrics
from nemo_rl.algorithms.grpo.run import GRPORun
from nemo_rl.algorithms.grpo.sources import ExperienceSource, SynchronousSource
from nemo_rl.algorithms.grpo.step import CompletedStep, complete_step, early_stop, save_step, validation_due
from nemo_rl.algorithms.grpo.step_trainer import StepTrainer, score, weigh
from nemo_rl.algorithms.grpo.streaming import StreamingSource
from nemo_rl.algorithms.grpo.validation import validate
from nemo_rl.algorithms.profiling import profiled_steps
from nemo_rl.algorithms.run_checkpoint import saved_without_logs
from nemo_rl.config.errors import UserError
from nemo_rl.experience.hooks import RLixHooksProtocol, time_sharing_enabled
from nemo_rl.utils.checkpoint_retention import UnknownMetric, should_save
from nemo_rl.utils.record_events import StepBegun

logger = logging.getLogger(__name__)


class PromptsUsedUp(UserError, RuntimeError):
    """A run ends for want of prompts before the end that was asked for."""


def drive(run: GRPORun) -> None:
    """Drives a run to its end with the source that its configuration asks for; see `train_to_end`."""
    train_to_end(run, source_of(run))


def source_of(run: GRPORun) -> ExperienceSource:
    """The source that a run's configuration asks for: streaming, ahead of training, or in turns with it."""
    if run.config.async_rl is not None:
        return StreamingSource(run)
    return AsynchronousSource(run) if run.config.grpo.async_grpo.enabled else SynchronousSource(run)


def train_to_end(run: GRPORun, source: ExperienceSource) -> None:
    """Drives a run to its end.

    Raises:
        NonFiniteStepError, WorkerError, GenerationError, EnvironmentFailure, CollectorError, CheckpointError: The run
            cannot go on; the last checkpoint is usable.
    """
    run.timeout.start_iterations()
    newest: CompletedStep | None = None
    used_up = False
    try:
        source.start()
        run.control.start(source)
        if run.config.grpo.val_at_start and run.state.step == 0:
            validate(run, 0)
        source.published(run.state.step)
        last_step = partial(save_step, run, source, CompletedStep({}))
        with (
            profiled_steps(run.policy, run.generation) as profiler,
            saved_without_logs(run.checkpointer, run.state, last_step),
        ):
            while not source.finished():
                profiler.before(run.state.step + 1)
                step = run_step(run, source)
                if step is None:
                    used_up = True
                    _end_with(run, source, newest)
                    break
                newest = step
                if step.ends_run:
                    break
            # What is said of the last step may fail too, and the run can be saved only while its source goes on.
            run.reports.settle()
    finally:
        source.stop()
        run.control.stop()
    source.clear()
    run.checkpointer.settle()
    _say_why(run, newest, used_up=used_up)


def run_step(run: GRPORun, source: ExperienceSource) -> CompletedStep | None:
    """One step and everything that follows from it; None when the prompts are used up."""
    control, step = run.control, run.state.step
    run.timer.reset()
    with run.timer.time("total_step_time"), run.store.step():
        run.record.emit(StepBegun(step))
        with StepTrainer(run, in_parts=source.in_parts) as trainer, closing(source.parts()) as parts:
            for part in parts:
                control.lend_training(step)
                score(run, part, step_open=trainer.rows > 0)
                weigh(run, part, first_row=trainer.rows)
                trainer.add(part)
            if not trainer.rows:
                return None
            trained = trainer.finish(meanwhile=source.draw_ahead)
        metrics = step_metrics(run, trained.experience, trained.result) | dict(source.metrics())
        control.weights_ready(step)
        complete_step(run, trained.experience)
        source.trained(step)
        with run.timer.time("step_report"):
            run.reports.settle()

        done = CompletedStep(metrics)
        is_last = source.finished()
        if control.saves_before_publish:
            _save_if_due(run, source, done, is_last=is_last)
        control.publish(step, source)
        with run.timer.time("begin_rollouts"):
            source.published(run.state.step)
        with _idle(run, source, "validation"):
            done.val_metrics = validate(run, run.state.step) if validation_due(run, is_last=is_last) else None
        run.timeout.mark_iteration()
        try:
            done.stops_early = early_stop(run, done.val_metrics)
        except UnknownMetric:
            # A name of a user's environment is known only now; the steps so far are not lost for it.
            if run.config.checkpointing.enabled and not done.saved:
                save_step(run, source, done)
            raise
        if not control.saves_before_publish:
            _save_if_due(run, source, done, is_last=is_last)
        elif done.stops_early and run.config.checkpointing.enabled:
            # Again where that was before its validation, which tells the same command that the run is over.
            save_step(run, source, done)
        run.store.keep(trained.experience.handle)
    report_step(run, trained.experience, metrics, trained.result)
    if done.saved or done.ends_run:
        run.reports.settle()
    return done


def _idle(run: GRPORun, source: ExperienceSource, what: str) -> AbstractContextManager[object]:
    """Takes the time in which generation that could run ahead waits."""
    return run.timer.time(f"idle/{what}") if source.generates_ahead else nullcontext()


def _save_if_due(run: GRPORun, source: ExperienceSource, done: CompletedStep, *, is_last: bool) -> None:
    done.timed_out = run.timeout.check_save()
    cfg, stops_early = run.config.checkpointing, done.stops_early
    run.checkpointer.look()
    due = should_save(run.state.step, cfg, is_last=is_last, early_stop=stops_early, timeout=done.timed_out)
    if due or run.checkpointer.owes:
        save_step(run, source, done)


def _end_with(run: GRPORun, source: ExperienceSource, newest: CompletedStep | None) -> None:
    """Does for the newest step what only the last one gets: with dynamic sampling nobody knew that it would be."""
    if newest is None:
        return
    if newest.val_metrics is None and validation_due(run, is_last=True):
        # What is said of the step is said first: trackers take steps in order.
        run.reports.settle()
        newest.val_metrics = validate(run, run.state.step)
    if not newest.saved and should_save(run.state.step, run.config.checkpointing, is_last=True):
        save_step(run, source, newest)


def _say_why(run: GRPORun, newest: CompletedStep | None, *, used_up: bool) -> None:
    """Says why a run ended that did not reach `grpo.max_num_steps`.

    Raises:
        PromptsUsedUp: It is not the end that was asked for.
    """
    cfg, step = run.config.grpo, run.state.step
    if used_up and run.config.data.use_multiple_dataloader:
        raise PromptsUsedUp(
            f"ended after step {step} of grpo.max_num_steps={cfg.max_num_steps}: data.custom_dataloader gave no more "
            "prompts; it has to start exhausted iterators anew (itself, from the loaders that it is given)"
        )
    if used_up and step == 0:
        kept = "dynamic sampling kept too few samples for one step of " if cfg.use_dynamic_sampling else ""
        raise PromptsUsedUp(
            f"no step was trained: the prompts of grpo.max_num_epochs={cfg.max_num_epochs} are used up, and {kept}"
            f"grpo.num_prompts_per_step={cfg.num_prompts_per_step} was not filled; look at the rewards "
            "(are the prompts too hard or too easy for the model?), take more data or smaller steps"
        )
    if newest is not None and newest.stops_early:
        why = (
            f"grpo.stop_at_validation_metric={cfg.stop_at_validation_metric} has reached "
            f"grpo.stop_at_validation_threshold={cfg.stop_at_validation_threshold}"
        )
    elif newest is not None and newest.timed_out and step < cfg.max_num_steps:
        why = run.timeout.reason
    elif step < cfg.max_num_steps:
        why = f"grpo.max_num_epochs={cfg.max_num_epochs} passes over the prompts are done"
    else:
        return
    logger.warning("ended after step %d of grpo.max_num_steps=%d: %s", step, cfg.max_num_steps, why)


def grpo_train(run: GRPORun) -> None:
    """Drives a run to its end with rollouts and training in turns; see `train_to_end`."""
    train_to_end(run, SynchronousSource(run))


def async_grpo_train(run: GRPORun, rlix_hooks: RLixHooksProtocol | None = None) -> None:
    """Drives a run to its end with rollouts ahead of training; see `train_to_end`.

    Args:
        run: Set up, with generation on accelerators of its own.
        rlix_hooks: A foreign control plane's hooks; under `RLIX_CONTROL_PLANE=rlix` they own the accelerators.

    Raises:
        HooksError: The hooks own the accelerators, and did not bring generation to the new weights.
    """
    if rlix_hooks is not None:
        own = run.control if isinstance(run.control, OwnAccelerators) and not time_sharing_enabled() else None
        run.control = HookedControlPlane(rlix_hooks, own)
    train_to_end(run, AsynchronousSource(run))
