"""From a step's experience to new weights: log-probabilities, advantages, the optimizer.

The part of a step that every driver has in common, whole or in its parts. Knows the run, not where the experience came
from nor what becomes of the weights. Invariant: a step that fails leaves the weights of the step before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_rl.algorithms.grpo.metrics import step_metrics
from nemo_rl.algorithms.grpo.stages import (
    Experience,
    columns_to_train,
    compute_logprobs,
    mask_and_weigh,
    needs_previous_logprobs,
    needs_reference_logprobs,
)
from nemo_rl.models.policy.interfaces import TrainResult
from nemo_rl.utils.record_events import StepSpan
from nemo_rl.utils.step_timeline import LOGPROBS, TRAINING

if TYPE_CHECKING:
    from nemo_rl.algorithms.grpo.run import GRPORun


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
