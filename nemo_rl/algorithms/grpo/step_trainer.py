"""Trains one step on its experience, whole or part by part.

A `StepTrainer` computes log-probabilities, masks and advantages, and runs the optimizer. Invariant: a step that fails
keeps the weights of the step before and leaves no step open.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from nemo_rl.algorithms.grpo.stages import (
    Experience,
    columns_to_train,
    compare_routing,
    compares_routing,
    compute_logprobs,
    joined_experience,
    mask_and_weigh,
    needs_previous_logprobs,
    needs_reference_logprobs,
)
from nemo_rl.distributed.worker_groups import PendingCall
from nemo_rl.experience.store import sample_of_row, sample_starts
from nemo_rl.models.policy.interfaces import BatchHandle, TrainResult
from nemo_rl.utils.record import Record
from nemo_rl.utils.record_events import StepSpan
from nemo_rl.utils.step_timeline import LOGPROBS, TRAINING

if TYPE_CHECKING:
    from nemo_rl.algorithms.distillation.teachers import Teachers
    from nemo_rl.algorithms.grpo.run import GRPORun


@contextmanager
def _recorded_span(record: Record, step: int, what: str) -> Generator[None]:
    """Records the start and end of a phase of a step."""
    begun = time.time()
    yield
    record.emit(StepSpan(step, what, begun, time.time()))


@dataclass(frozen=True)
class Trained:
    """The step's experience and the result of training."""

    experience: Experience
    result: TrainResult


class StepTrainer:
    """Trains the current step; a context manager that aborts the step on an error. A streaming run accumulates
    gradients part by part; for others the step is one part.
    """

    def __init__(self, run: GRPORun) -> None:
        self._run, self._in_parts = run, run.config.async_rl is not None
        self._parts: list[Experience] = []
        self._open = False  # whether workers accumulate gradients

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._open:
            self._run.policy.abort_train_step()

    @property
    def rows(self) -> int:
        """Number of rows added so far."""
        return sum(part.rows.size for part in self._parts)

    def ask_served_teachers(self, part: Experience) -> None:
        """Adds the columns of teachers that other jobs serve, before training's accelerators are asked for: they may be
        those that the teachers need.
        """
        run = self._run
        if run.teachers is not None and run.teachers.served:
            run.accelerators.yield_training(run.state.step)
            self._ask_teachers(run.teachers, part)

    def score(self, part: Experience) -> None:
        """Adds the columns of log-probabilities and of teachers that later stages read, to a part of the step, or all
        of it.
        """
        run, cfg, loss_cfg = self._run, self._run.config.grpo, self._run.config.loss_fn
        compares = compares_routing(run.config.policy.router_replay, run.state.step)
        run.progress.phase("log-probabilities")
        with run.timer.time("logprob_inference_prep"):
            if needs_previous_logprobs(cfg, loss_cfg) or needs_reference_logprobs(cfg, loss_cfg) or compares:
                # Gradients of earlier parts stay on the devices.
                run.policy.prepare_for_lp_inference(keep_train_buffers=bool(self._parts))
        with run.timer.time("policy_and_reference_logprobs"), _recorded_span(run.record, run.state.step, LOGPROBS):
            compute_logprobs(part, run.store, run.policy, cfg, loss_cfg, run.timer)
            if compares:
                compare_routing(part, run.store, run.policy, loss_cfg, run.timer)
        if run.teachers is not None and not run.teachers.served:
            self._ask_teachers(run.teachers, part)

    def _ask_teachers(self, teachers: Teachers, part: Experience) -> None:
        run = self._run
        run.progress.phase("teacher")
        with run.timer.time("teacher_scoring"), _recorded_span(run.record, run.state.step, LOGPROBS):
            part.handle = teachers.score(part.handle, part.rows["task_name"], run.store, run.timer)

    def weigh(self, part: Experience) -> None:
        """Adds masks and advantages to scored experience."""
        run, size = self._run, self._run.config.policy.train_global_batch_size
        with run.timer.time("advantage_calculation"):
            mask_and_weigh(part, run.store, run.config.grpo, run.config.loss_fn, size, first_row=self.rows)

    def add(self, part: Experience) -> None:
        """Adds weighed experience. In parts, its gradients are computed now. Columns that no stage knows are passed on
        for models and custom losses.
        """
        run = self._run
        run.progress.phase("training")
        with run.timer.time("training_prep"):
            run.policy.prepare_for_training()
        if self._in_parts and not self._parts:
            self._begin()
        self._parts.append(part)
        if not self._in_parts:
            return
        with run.timer.time("policy_training"), _recorded_span(run.record, run.state.step, TRAINING):
            run.policy.train_microbatches(self._columns(part), timer=run.timer)

    def finish(self, meanwhile: Callable[[], None]) -> Trained:
        """Runs the optimizer. `meanwhile`: called while the workers train; must not fail. Raises NonFiniteStepError,
        WorkerError: the weights are those of the step before.
        """
        run = self._run
        if self._in_parts:
            # The training accelerators may have been released since the last part.
            run.policy.prepare_for_training()
        with run.timer.time("policy_training"), _recorded_span(run.record, run.state.step, TRAINING):
            earlier: list[TrainResult] = []
            if self._in_parts:
                pending = run.policy.submit_finish_train_step()
            else:
                earlier, pending = self._submit(self._parts[0])
            meanwhile()
            result = merged_results([*earlier, pending.result()])
        return Trained(joined_experience(self._parts, run.store), result)

    def _submit(self, part: Experience) -> tuple[list[TrainResult], PendingCall[TrainResult]]:
        """Trains a whole step; the results of its optimizer steps but the last, and that one as it runs.

        Each takes `policy.train_global_batch_size` samples. Where agents branched these have more rows, as many as they
        like.
        """
        run, handle, size = self._run, self._columns(part), self._run.config.policy.train_global_batch_size
        if bool(sample_starts(part.rows).all()):
            return [], run.policy.submit_train(handle, run.loss_fn, timer=run.timer)
        step_B = sample_of_row(part.rows) // size
        results: list[TrainResult] = []
        for step in range(int(step_B[-1]) + 1):
            if step:
                results.append(run.policy.finish_train_step())
            rows = (step_B == step).nonzero().flatten().tolist()
            self._begin()
            run.policy.train_microbatches(run.store.select(handle, rows), timer=run.timer)
        return results, run.policy.submit_finish_train_step()

    def _begin(self) -> None:
        self._run.policy.begin_train_step(self._run.loss_fn, gbs=self._run.config.policy.train_global_batch_size)
        self._open = True

    def _columns(self, part: Experience) -> BatchHandle:
        return columns_to_train(part, self._run.store, self._run.config.grpo, self._run.config.loss_fn)


def merged_results(results: Sequence[TrainResult]) -> TrainResult:
    """The result of several optimizer steps as one call of `train` gives it."""
    merged: TrainResult = {**results[-1]}
    if len(results) > 1:
        merged["loss"] = torch.cat([result["loss"] for result in results])
        merged["skipped_steps"] = sum(result["skipped_steps"] for result in results)
        names = dict.fromkeys(name for result in results for name in result["all_mb_metrics"])
        merged["all_mb_metrics"] = {
            name: [value for result in results for value in result["all_mb_metrics"].get(name, ())] for name in names
        }
        if "total_flops" in merged:
            merged["total_flops"] = sum(result.get("total_flops", 0.0) for result in results)
    return merged
