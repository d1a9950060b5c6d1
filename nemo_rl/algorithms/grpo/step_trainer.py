"""From the experience of a step to new weights, in one piece or part by part.

A `StepTrainer` drives the optimizer; `score` and `weigh` come before it. Invariants: a step that fails leaves the
weights of the step before, and no step open; every part of a step counts in its one optimizer step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from nemo_rl.algorithms.grpo.stages import (
    Experience,
    columns_to_train,
    compute_logprobs,
    mask_and_weigh,
    needs_previous_logprobs,
    needs_reference_logprobs,
)
from nemo_rl.experience.columns import joined_rows
from nemo_rl.models.policy.interfaces import BatchHandle, TrainResult
from nemo_rl.utils.record_events import StepSpan
from nemo_rl.utils.step_timeline import LOGPROBS, TRAINING

if TYPE_CHECKING:
    from nemo_rl.algorithms.grpo.run import GRPORun


@contextmanager
def _recorded_span(run: GRPORun, what: str) -> Iterator[None]:
    """Writes into the run record how long the current step was busy with something."""
    step, begun = run.state.step, time.time()
    yield
    run.record.emit(StepSpan(step, what, begun, time.time()))


def score(run: GRPORun, part: Experience, *, step_open: bool) -> None:
    """Log-probabilities of some groups, or of a whole step, as far as anything reads them.

    Args:
        run: The run.
        part: Gets the columns.
        step_open: Whether gradients of earlier groups wait for the optimizer.
    """
    cfg, loss_cfg, timer = run.config.grpo, run.config.loss_fn, run.timer
    run.progress.phase("log-probabilities")
    with timer.time("logprob_inference_prep"):
        if needs_previous_logprobs(cfg, loss_cfg) or needs_reference_logprobs(cfg, loss_cfg):
            run.policy.prepare_for_lp_inference(keep_train_buffers=step_open)
    with timer.time("policy_and_reference_logprobs"), _recorded_span(run, LOGPROBS):
        compute_logprobs(part, run.store, run.policy, cfg, loss_cfg, timer)


def weigh(run: GRPORun, part: Experience, *, first_row: int) -> None:
    """Masks and advantages of some groups, or of a whole step.

    Args:
        run: The run.
        part: Scored.
        first_row: Number of its first sample within the step.
    """
    with run.timer.time("advantage_calculation"):
        global_batch_size = run.config.policy.train_global_batch_size
        mask_and_weigh(part, run.store, run.config.grpo, run.config.loss_fn, global_batch_size, first_row)


@dataclass(frozen=True)
class Trained:
    """The experience that a step was trained on, and what training returned."""

    experience: Experience
    result: TrainResult


class StepTrainer:
    """Trains the current step; a context manager that gives the step up when its body fails.

    Args:
        run: The run.
        in_parts: Whether gradients are accumulated part by part; otherwise the step is one part.
    """

    def __init__(self, run: GRPORun, *, in_parts: bool) -> None:
        self._run, self._in_parts = run, in_parts
        self._parts: list[Experience] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._in_parts and self._parts:
            self._run.policy.abort_train_step()

    @property
    def rows(self) -> int:
        """Samples added so far."""
        return sum(part.rows.size for part in self._parts)

    def add(self, part: Experience) -> None:
        """Takes weighed experience; in parts, its gradients are computed now. Columns that no stage knows go along, for
        the model and for losses of users.
        """
        run = self._run
        run.progress.phase("training")
        with run.timer.time("training_prep"):
            run.policy.prepare_for_training()
        self._parts.append(part)
        if not self._in_parts:
            return
        if len(self._parts) == 1:
            run.policy.begin_train_step(run.loss_fn, gbs=run.config.policy.train_global_batch_size)
        with run.timer.time("policy_training"), _recorded_span(run, TRAINING):
            run.policy.train_microbatches(self._columns(part), timer=run.timer)

    def finish(self, meanwhile: Callable[[], None]) -> Trained:
        """The optimizer's steps; the weights are then those of the next version.

        Args:
            meanwhile: Called while the workers train; must not fail.

        Raises:
            NonFiniteStepError, WorkerError: The weights are those of the step before.
        """
        run = self._run
        if self._in_parts:
            # The training accelerators may have been away since the last part.
            run.policy.prepare_for_training()
        with run.timer.time("policy_training"), _recorded_span(run, TRAINING):
            if self._in_parts:
                pending = run.policy.submit_finish_train_step()
            else:
                pending = run.policy.submit_train(self._columns(self._parts[0]), run.loss_fn, timer=run.timer)
            meanwhile()
            result = pending.result()
        return Trained(_joined(run, self._parts), result)

    def _columns(self, part: Experience) -> BatchHandle:
        return columns_to_train(part, self._run.store, self._run.config.grpo, self._run.config.loss_fn)


def _joined(run: GRPORun, parts: Sequence[Experience]) -> Experience:
    """All parts of a step as one, for its metrics and its samples."""
    if len(parts) == 1:
        return parts[0]
    rows = joined_rows([part.rows for part in parts])
    names = {number: name for part in parts for number, name in part.group_names.items()}
    return Experience(run.store.concat([part.handle for part in parts]), rows, joined_metrics(parts), names)


def joined_metrics(parts: Sequence[Experience]) -> dict[str, object]:
    """Lists joined, extremes of extremes, sums of counts, and means by rows."""
    joined: dict[str, object] = {}
    for name in dict.fromkeys(name for part in parts for name in part.metrics):
        found = [(part.metrics[name], part.rows.size) for part in parts if name in part.metrics]
        values = [value for value, _ in found]
        if isinstance(values[0], list):
            joined[name] = [one for value in values for one in value]
        elif "max" in name:
            joined[name] = max(values)
        elif "min" in name:
            joined[name] = min(values)
        elif name.startswith(("num_", "total_")) or name.endswith("/sum"):
            joined[name] = sum(values)
        else:
            joined[name] = sum(value * size for value, size in found) / sum(size for _, size in found)
    return joined
