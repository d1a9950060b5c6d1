"""The synchronous driver: generate, score, train, refit, in order, one step after the other.

Decides only when a stage runs; what stages do lives in `stages`, `collect`, `validation` and `saving`. Invariants: a
step either completes (weights, counters and record agree) or raises with the weights of the step before; the version of
the weights is the number of completed steps.
"""

from __future__ import annotations

import logging
from typing import Any

from nemo_rl.algorithms.grpo.collect import collect_experience
from nemo_rl.algorithms.grpo.learn import learn
from nemo_rl.algorithms.grpo.run import GRPORun
from nemo_rl.algorithms.grpo.saving import save_checkpoint
from nemo_rl.algorithms.grpo.stages import Experience
from nemo_rl.algorithms.grpo.step_end import LastStep, complete_step, early_stop, end_with, validation_due
from nemo_rl.algorithms.grpo.step_log import log_samples, log_step
from nemo_rl.algorithms.grpo.validation import validate
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.prompts import EpochPrompts
from nemo_rl.utils.checkpoint_retention import should_save
from nemo_rl.utils.record_events import StepBegun

logger = logging.getLogger(__name__)


def grpo_train(run: GRPORun) -> None:
    """Drives a run to its end.

    Raises:
        NonFiniteStepError, WorkerError, GenerationError, EnvironmentFailure, CheckpointError: The run cannot go on; the
            last checkpoint is usable.
    """
    cfg = run.config.grpo
    run.timeout.start_iterations()
    if cfg.val_at_start and run.state.step == 0:
        validate(run, 0)
    prompts = _Prompts(run)
    last: LastStep | None = None
    while not prompts.finished():
        run.timer.reset()
        with run.timer.time("total_step_time"), run.store.step():
            try:
                experience, metrics, result = run_step(run, prompts)
            except StopIteration:
                end_with(run, last, lambda step: save_checkpoint(run, step.metrics, step.val_metrics))
                break
            complete_step(run, experience)
            val_metrics = validate(run, run.state.step) if validation_due(run, is_last=prompts.finished()) else None
            run.timeout.mark_iteration()
            stop = early_stop(run, val_metrics)
            timed_out = run.timeout.check_save()
            due = should_save(run.state.step, run.config.checkpointing, is_last=prompts.finished(), early_stop=stop, timeout=timed_out)
            last = LastStep(metrics, val_metrics, saved=due)
            if due:
                with run.timer.time("checkpointing"):
                    save_checkpoint(run, metrics, val_metrics)
            log_samples(run, experience, run.state.step)
            run.store.clear(experience.handle)
        log_step(run, experience, metrics, result)
        run.record.flush()
        if stop or timed_out:
            logger.info("run=ended step=%d reason=%s", run.state.step, "early_stop" if stop else "checkpoint_must_save_by")
            break
    run.checkpointer.finalize_pending()


def run_step(run: GRPORun, prompts: _Prompts) -> tuple[Experience[Any], dict[str, Any], Any]:
    """One step up to and including the optimizer; the weights are then those of version `state.step + 1`."""
    run.record.emit(StepBegun(run.state.step))
    run.progress.phase("generation")
    with run.timer.time("prepare_for_generation/total"):
        if run.refitter is not None:
            run.refitter.bring_to(run.state.step, run.timer)
    experience = collect_experience(run, prompts.next)
    return experience, *learn(run, experience)


class _Prompts:
    """Prompt batches across epochs, and whether the run is over."""

    def __init__(self, run: GRPORun) -> None:
        self._run = run
        self._endless = run.config.data.use_multiple_dataloader
        cfg = run.config.grpo
        size = int(cfg.num_prompts_per_step * cfg.batch_multiplier)
        self._prompts = EpochPrompts(run.train_loader, batch_size=size, epoch=run.state.epoch, max_epochs=cfg.max_num_epochs)

    def next(self) -> BatchedDataDict[Any]:
        """The next batch; at an epoch's end the next epoch's first.

        Raises:
            StopIteration: The last epoch is over.
        """
        try:
            return self._prompts.next()
        finally:
            if self._prompts.epoch != self._run.state.epoch:
                self._run.state.epoch, self._run.state.step_in_epoch = self._prompts.epoch, 0

    def finished(self) -> bool:
        """Whether steps or epochs are used up."""
        cfg, state = self._run.config.grpo, self._run.state
        if state.step >= cfg.max_num_steps:
            return True
        if self._endless or cfg.use_dynamic_sampling:
            return not self._endless and state.epoch >= cfg.max_num_epochs
        per_epoch = len(self._run.train_loader)
        return state.epoch >= cfg.max_num_epochs or (state.epoch == cfg.max_num_epochs - 1 and state.step_in_epoch >= per_epoch)
