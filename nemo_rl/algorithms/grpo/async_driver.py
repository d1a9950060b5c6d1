"""The asynchronous driver: rollouts run ahead of training into a replay buffer, and every step takes what was made for it.

Decides only when a stage runs; the stages are those of the synchronous driver. A control plane may hook in (see
`nemo_rl.experience.hooks`): it then lends the accelerators and refits generation itself. Invariants: the version of the
weights is the number of completed steps; a step trains on groups whose oldest token is at most
`grpo.async_grpo.max_trajectory_age_steps` versions old; every drawn prompt group is trained once or recorded as dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from nemo_rl.algorithms.grpo.async_parts import build_collector, collected_experience, restore_collector, saved_collector
from nemo_rl.algorithms.grpo.collect import gather_experience
from nemo_rl.algorithms.grpo.learn import learn
from nemo_rl.algorithms.grpo.mixed_versions import judge_versions
from nemo_rl.algorithms.grpo.run import GRPORun
from nemo_rl.algorithms.grpo.saving import save_checkpoint
from nemo_rl.algorithms.grpo.stages import Experience
from nemo_rl.algorithms.grpo.step_end import LastStep, complete_step, early_stop, end_with, validation_due
from nemo_rl.algorithms.grpo.step_log import log_samples, log_step
from nemo_rl.algorithms.grpo.validation import validate
from nemo_rl.experience.hooks import CONTROL_PLANE_VARIABLE, HooksError, NoOpRLixHooks, RLixHooksProtocol, time_sharing_enabled
from nemo_rl.experience.trajectory_collector import TrajectoryCollector
from nemo_rl.models.generation.interfaces import request_timeout_s
from nemo_rl.utils.checkpoint_retention import should_save
from nemo_rl.utils.record_events import StepBegun

logger = logging.getLogger(__name__)

_FIFTIETHS = 50


def async_grpo_train(run: GRPORun, rlix_hooks: RLixHooksProtocol | None = None) -> None:
    """Drives a run to its end.

    Args:
        run: Set up, with generation on accelerators of its own.
        rlix_hooks: A control plane's hooks; none by default.

    Raises:
        NonFiniteStepError, WorkerError, CollectorError, CheckpointError: The run cannot go on; the last checkpoint is usable.
        HooksError: A control plane owns the accelerators, and its hooks did not bring generation to the new weights.
    """
    hooks: RLixHooksProtocol = rlix_hooks or NoOpRLixHooks()
    if time_sharing_enabled():
        # A control plane brings generation to every version: nothing here may reach for weights or accelerators that are lent to others.
        run.refitter = None
    run.timeout.start_iterations()
    collector = build_collector(run)
    try:
        restore_collector(run, collector)
        hooks.on_trajectory_collector_created(collector)
        if not time_sharing_enabled():
            _refit(run, collector, run.state.step)
        if run.config.grpo.val_at_start and run.state.step == 0:
            validate(run, 0)
        collector.set_weight_version(run.state.step)
        last: LastStep | None = None
        while run.state.step < run.config.grpo.max_num_steps:
            step = _one_step(run, collector, hooks)
            if step is None:
                end_with(run, last, lambda newest: _save_on_lent_accelerators(run, collector, hooks, newest))
                break
            last = step
            if step.ends_run:
                break
    finally:
        collector.stop()
        hooks.clear_progress()
    collector.clear()
    run.checkpointer.finalize_pending()


def _one_step(run: GRPORun, collector: TrajectoryCollector, hooks: RLixHooksProtocol) -> LastStep | None:
    """One step with everything that follows from it; None when the prompts are used up."""
    run.timer.reset()
    with run.timer.time("total_step_time"), run.store.step():
        try:
            experience = _wait_for_experience(run, collector, hooks)
        except StopIteration:
            return None
        step = run.state.step
        hooks.before_training(step)
        metrics, result = learn(run, experience)
        hooks.before_weight_sync(step)
        complete_step(run, experience)
        position = collector.finish_step(step)
        if position.epoch != run.state.epoch:
            run.state.epoch, run.state.step_in_epoch = position.epoch, 0
        is_last = run.state.step >= min(run.config.grpo.max_num_steps, run.progress.total_steps)
        timed_out = saved = False
        if time_sharing_enabled():
            # A snapshot is taken on the training accelerators, which belong to others once the hooks have given them back.
            timed_out = run.timeout.check_save()
            saved = _save_if_due(run, collector, metrics, None, is_last=is_last, stop=False, timed_out=timed_out)
        _publish(run, collector, hooks, step)
        with run.timer.time("idle/validation"):
            val_metrics = validate(run, run.state.step) if validation_due(run, is_last=is_last) else None
        run.timeout.mark_iteration()
        stop = early_stop(run, val_metrics)
        if not time_sharing_enabled():
            timed_out = run.timeout.check_save()
            saved = _save_if_due(run, collector, metrics, val_metrics, is_last=is_last, stop=stop, timed_out=timed_out)
        last = LastStep(metrics, val_metrics, saved, ends_run=stop or timed_out)
        if stop and not saved and run.config.checkpointing.enabled:
            _save_on_lent_accelerators(run, collector, hooks, last)
        log_samples(run, experience, run.state.step)
        run.store.clear(experience.handle)
    log_step(run, experience, metrics, result)
    run.record.flush()
    if last.ends_run:
        logger.info("run=ended step=%d reason=%s", run.state.step, "early_stop" if stop else "checkpoint_must_save_by")
    return last


def _publish(run: GRPORun, collector: TrajectoryCollector, hooks: RLixHooksProtocol, step: int) -> None:
    """Generation serves the weights of step `step`, and rollouts of later steps may begin."""
    published = hooks.after_training(step)
    if published is None:
        _refit(run, collector, run.state.step)
    elif published != run.state.step:
        raise HooksError(f"after_training({step}) published version {published}; the weights of {run.state.step} completed steps are that version")
    collector.set_weight_version(run.state.step)


def _save_if_due(
    run: GRPORun, collector: TrajectoryCollector, metrics: dict[str, Any], val_metrics: dict[str, float] | None, *, is_last: bool, stop: bool, timed_out: bool
) -> bool:
    due = should_save(run.state.step, run.config.checkpointing, is_last=is_last, early_stop=stop, timeout=timed_out)
    if due:
        _save(run, collector, metrics, val_metrics)
    return due


def _save_on_lent_accelerators(run: GRPORun, collector: TrajectoryCollector, hooks: RLixHooksProtocol, last: LastStep) -> None:
    """Saves the newest step where the run ends with it: under a control plane the accelerators are asked for again, and the run's end gives them back."""
    if time_sharing_enabled():
        hooks.before_training(run.state.step)
    _save(run, collector, last.metrics, last.val_metrics)


def _save(run: GRPORun, collector: TrajectoryCollector, metrics: dict[str, Any], val_metrics: dict[str, float] | None) -> None:
    with run.timer.time("checkpointing"):
        save_checkpoint(run, metrics, val_metrics, loader=collector.position(), also=saved_collector(run, collector))


def _wait_for_experience(run: GRPORun, collector: TrajectoryCollector, hooks: RLixHooksProtocol) -> Experience[Any]:
    cfg, step = run.config.grpo, run.state.step
    run.record.emit(StepBegun(step))
    run.progress.phase("waiting for rollouts")
    # Progress begins before the wait: whoever lends accelerators hears of the demand by it.
    hooks.begin_progress_batch(step, cfg.num_prompts_per_step, collector.count_intended_for_step(step))
    try:
        with run.timer.time("exposed_generation"):
            experience = gather_experience(run, lambda attempt: collected_experience(run, collector, attempt, _reporter(hooks)))
    finally:
        hooks.end_progress_batch()
    judge_versions(experience, run.store, cfg.async_grpo.mixed_versions, step)
    experience.metrics |= {"buffer_size": float(len(collector.buffer)), "avg_trajectory_age": experience.metrics["lag/mean"]}
    return experience


def _reporter(hooks: RLixHooksProtocol) -> Callable[[int, int], None]:
    reported = -1

    def report(ready: int, of: int) -> None:
        nonlocal reported
        share = _FIFTIETHS * ready // max(1, of)
        if share != reported:
            hooks.report_progress(of, ready, reported < 0)
            reported = share

    return report


def _refit(run: GRPORun, collector: TrajectoryCollector, version: int) -> None:
    """Brings generation to `version`: below running requests, or once they have ended."""
    cfg = run.config.grpo.async_grpo
    run.progress.phase("refit")
    with run.timer.time("weight_sync"):
        if run.refitter is None:
            raise HooksError(f"{CONTROL_PLANE_VARIABLE} is set, so hooks refit: after_training must bring generation to version {version} and return it")
        if not cfg.in_flight_weight_updates:
            with run.timer.time("idle/refit_bubble"):
                collector.prepare_for_refit(timeout_s=run.config.grpo.max_rollout_turns * request_timeout_s())
        try:
            run.refitter.bring_to(version, run.timer, recompute_kv=cfg.recompute_kv_cache_after_weight_updates or not cfg.in_flight_weight_updates)
        finally:
            collector.resume_after_refit()
