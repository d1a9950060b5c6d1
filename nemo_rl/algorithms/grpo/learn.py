"""From a step's experience to new weights: log-probabilities, advantages, training, one after the other.

The part of a step that every driver has in common. Knows the run, not where the experience came from nor what becomes of
the weights. Invariant: a step that fails leaves the weights of the step before.
"""

from __future__ import annotations

from typing import Any

from nemo_rl.algorithms.grpo.run import GRPORun
from nemo_rl.algorithms.grpo.stages import Experience, compute_logprobs, mask_and_weigh, needs_previous_logprobs, needs_reference_logprobs, train
from nemo_rl.algorithms.grpo.step_log import step_metrics
from nemo_rl.models.policy.interfaces import TrainResult


def learn(run: GRPORun, experience: Experience[Any]) -> tuple[dict[str, Any], TrainResult]:
    """Trains on the experience of the current step; the weights are then those of version `state.step + 1`.

    Args:
        run: The run; generation that shares its slots is put to sleep.
        experience: Scored and filtered.

    Returns:
        The step's `train/` metrics, and what training returned.

    Raises:
        NonFiniteStepError, WorkerError: The weights are those of the step before.
    """
    cfg, loss_cfg, timer = run.config.grpo, run.config.loss_fn, run.timer
    run.progress.phase("log-probabilities")
    with timer.time("logprob_inference_prep"):
        if run.refitter is not None:
            run.refitter.release_device()
        if needs_previous_logprobs(cfg, loss_cfg) or needs_reference_logprobs(cfg, loss_cfg):
            run.policy.prepare_for_lp_inference()
    with timer.time("policy_and_reference_logprobs"):
        compute_logprobs(experience, run.store, run.policy, cfg, loss_cfg, timer)
    with timer.time("advantage_calculation"):
        mask_and_weigh(experience, run.store, cfg, loss_cfg, run.config.policy.train_global_batch_size)
    run.progress.phase("training")
    with timer.time("training_prep"):
        run.policy.prepare_for_training()
    with timer.time("policy_training"):
        result = train(experience, run.store, run.policy, run.loss_fn, cfg, loss_cfg, timer)
    return step_metrics(run, experience, result), result
