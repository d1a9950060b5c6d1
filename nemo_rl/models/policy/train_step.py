"""One optimizer step in four parts: begin, train microbatches, finish, abort.

The state machine that every training backend runs, and the one place where counts, gradients and metrics are
normalised. Microbatches deposit gradients of plain sums; `finish` learns the global counts and divides once, so the
result does not depend on how the batch was cut (`docs/train_step.md`). Invariants: at most one step is open; a call
that fails closes the step and drops its gradients; a step that is not finite, or that trains no token, changes nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import torch

from nemo_rl.config.errors import UserError
from nemo_rl.distributed.communicators import RankGroups
from nemo_rl.loss.interfaces import LossFunction, count_valid, gradient_count, normalize_metrics
from nemo_rl.utils.flops import Work

logger = logging.getLogger(__name__)


class TrainStepStateError(RuntimeError):
    """A part of a step was called out of order."""


class NonFiniteStepError(UserError, RuntimeError):
    """Loss or gradient is NaN or infinite; the step was refused and the weights are unchanged."""


@dataclass(frozen=True)
class MicrobatchResult:
    """Results of a microbatch's backward pass besides gradients: metric sums, rows that were not finite [B], and its
    work.
    """

    metrics: dict[str, torch.Tensor]
    bad_rows_B: torch.Tensor
    work: Work = Work()


class StepBackend(Protocol):
    """Operations of a framework that a train step calls."""

    groups: RankGroups

    def start_step(self) -> None:
        """Zeroes the gradients."""
        ...

    def forward_backward(
        self, microbatches: Sequence[Mapping[str, torch.Tensor]], loss_fn: LossFunction, *, idle: int
    ) -> list[MicrobatchResult]:
        """Adds the gradients of the plain-sum losses of all microbatches, in training mode.

        Args:
            microbatches: All of this chunk's at once, because pipeline schedules overlap them; may be empty.
            idle: Microbatches that other ranks have and this one has not: it takes part in their collectives and adds
                nothing.

        Returns one result per microbatch, the same on all ranks of a replica.
        """
        ...

    def gradient_norm(self) -> torch.Tensor:
        """Completes the accumulated gradients over all ranks, once per step; their global L2 norm, a scalar."""
        ...

    def apply_gradients(self, factor: float) -> None:
        """Multiplies gradients by `factor`, steps the optimizer and drops the gradients."""
        ...

    def trained_weights(self) -> list[torch.Tensor]:
        """This rank's shards of the parameters that the optimizer updates."""
        ...

    def discard_gradients(self) -> None:
        """Drops accumulated gradients; calls no collective."""
        ...


@dataclass
class _OpenStep:
    loss_fn: LossFunction
    counts: torch.Tensor
    results: list[MicrobatchResult] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    chunks: int = 0


@dataclass(frozen=True)
class StepResult:
    """A finished step. `metrics`: one value per microbatch of this rank, already divided by global counts."""

    loss: float  # loss of the global batch
    grad_norm: float
    metrics: dict[str, list[float]]
    valid_seqs: float  # sequences of the global batch that were trained on
    valid_toks: float  # tokens of the global batch that were trained on
    stepped: bool = True  # whether the optimizer stepped; False for a batch without a trained token
    chunks: int = 1  # calls of `microbatches` that made up the step
    work: Work = Work()


class TrainStep:
    """Runs steps on a backend, one after the other."""

    def __init__(self, backend: StepBackend) -> None:
        self._backend, self._groups = backend, backend.groups
        self._open: _OpenStep | None = None

    def begin(self, loss_fn: LossFunction) -> None:
        """Opens a step. Raises TrainStepStateError: a step is already open, and stays open."""
        if self._open is not None:
            raise TrainStepStateError("a train step is already open: finish or abort it before beginning another")
        self._backend.start_step()
        self._open = _OpenStep(loss_fn, torch.zeros(2, dtype=torch.float64, device=self._groups.device))

    def microbatches(self, batches: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Adds a chunk of any size to the open step; ranks with fewer microbatches, or none, take part in the others'
        collectives. An error closes the step. Raises TrainStepStateError: no step is open.
        """
        step = self._require_open("train_microbatches")
        with ExitStack() as undo:
            undo.callback(self.abort)
            idle = self._groups.max_over_data(len(batches)) - len(batches)
            self.deposit(batches, self._backend.forward_backward(batches, step.loss_fn, idle=idle))
            undo.pop_all()

    def deposit(self, batches: Sequence[Mapping[str, torch.Tensor]], results: Sequence[MicrobatchResult]) -> None:
        """Adds a chunk whose gradients the backend has accumulated already. Raises TrainStepStateError: no step is
        open.
        """
        step = self._require_open("train_microbatches")
        for data in batches:
            step.counts += torch.stack(count_valid(data)).to(step.counts.device)
        step.results += results
        step.samples += [_sample_numbers(data) for data in batches]
        step.chunks += 1

    def finish(self, max_grad_norm: float | None) -> StepResult:
        """Normalises, clips to `max_grad_norm` (None only measures) and steps the optimizer. An error closes the step.
        Raises TrainStepStateError: no step is open; NonFiniteStepError: loss or gradient is not finite, and gradients
        are dropped; or the updated weights are not, and nothing can be done with them. The step is closed.
        """
        step = self._require_open("finish_train_step")
        with ExitStack() as close:
            # A step that is done has nothing left to drop, so that this only ever acts on errors and empty steps.
            close.callback(self.abort)
            counts = self._groups.sum_over_data(step.counts.clone()).tolist()
            if counts[1] <= 0:
                logger.warning("step=skipped reason=no_trained_token sequences=%.0f chunks=%d", counts[0], step.chunks)
                return self._result(step, counts, 0.0, stepped=False)
            divisor = float(gradient_count(step.loss_fn.loss_type, *counts))
            grad_norm = float(self._backend.gradient_norm()) / divisor
            result = self._result(step, counts, grad_norm, stepped=True)
            self._require_finite(step, result)
            factor = 1.0 / divisor
            if max_grad_norm is not None:
                factor *= min(1.0, max_grad_norm / (grad_norm + 1e-6))
            self._backend.apply_gradients(factor)
            self._open = None
            _require_finite_weights(self._backend.trained_weights(), result)
            return result

    def _result(self, step: _OpenStep, counts: list[float], grad_norm: float, *, stepped: bool) -> StepResult:
        local = normalize_metrics(_stack(step.results), step.loss_fn, *counts)
        loss = self._groups.sum_over_data(
            local["loss"].double().sum().to(self._groups.device) if "loss" in local else step.counts.new_zeros(())
        )
        metrics = {name: values.tolist() for name, values in local.items()}
        work = total_work(step.results)
        return StepResult(float(loss), grad_norm, metrics, *counts, stepped=stepped, chunks=step.chunks, work=work)

    def _require_finite(self, step: _OpenStep, result: StepResult) -> None:
        bad = self._groups.sum_over_data(
            torch.tensor([0.0 if math.isfinite(result.grad_norm) else 1.0], device=self._groups.device)
        )
        if not float(bad) and math.isfinite(result.loss):
            return
        samples = [
            n
            for outcome, numbers in zip(step.results, step.samples, strict=True)
            for n, is_bad in zip(numbers, outcome.bad_rows_B.tolist(), strict=True)
            if is_bad
        ]
        # Ranks work on different samples, and only one rank's message reaches the user: each knows those of all.
        samples = sorted(self._groups.gather_over_data(samples))
        raise NonFiniteStepError(
            f"the step was refused, weights are unchanged: loss {result.loss}, gradient norm {result.grad_norm}; "
            "samples of the step with values that are not finite: "
            f"{samples or 'none, so it was an overflow in the backward pass'}"
        )

    def abort(self) -> None:
        """Closes an open step without stepping the optimizer; nothing to do when none is open."""
        if self._open is not None:
            self._open = None
            self._backend.discard_gradients()

    @property
    def is_open(self) -> bool:
        """Whether a step is open."""
        return self._open is not None

    def _require_open(self, what: str) -> _OpenStep:
        if self._open is None:
            raise TrainStepStateError(f"{what}: no train step open; call begin_train_step first")
        return self._open


def _require_finite_weights(shards: Sequence[torch.Tensor], result: StepResult) -> None:
    largest = torch._foreach_norm([shard.detach() for shard in shards if shard.numel()], float("inf"))
    # Each rank speaks for its own shards: the run ends, so that the others need not know.
    if largest and not bool(torch.stack([value.float() for value in largest]).isfinite().all()):
        raise NonFiniteStepError(
            f"weights are not finite after the optimizer's step, though loss {result.loss:g} and gradient norm "
            f"{result.grad_norm:g} are: the optimizer's state is damaged, or the learning rate far too large. They are "
            "not saved: the same command goes on from the last checkpoint. If that ends here again, move it away to go "
            "on from the one before"
        )


def total_work(results: Sequence[MicrobatchResult | StepResult]) -> Work:
    """Work of the passes of microbatches, or of whole steps."""
    return sum((result.work for result in results), start=Work())


def step_report(
    results: Sequence[StepResult], rates: Mapping[str, float], routers: Mapping[str, float]
) -> dict[str, object]:
    """A worker's answer after steps. `rates`: learning rate and weight decay that they used. `routers`: metrics of a
    mixture of experts.
    """
    metrics: dict[str, list[float]] = {}
    for result in results:
        for name, values in result.metrics.items():
            metrics.setdefault(name, []).extend(values)
    metrics["global_valid_seqs"] = [result.valid_seqs for result in results]
    metrics["global_valid_toks"] = [result.valid_toks for result in results]
    metrics |= {name: [value] for name, value in routers.items()}
    return {
        "loss": [result.loss for result in results],
        "grad_norm": results[-1].grad_norm if results else 0.0,
        "all_mb_metrics": metrics,
        "num_steps": len(results),
        "skipped_steps": sum(not result.stepped for result in results),
        "work": total_work(results),
        **rates,
    }


def non_finite_rows(scores: torch.Tensor, data: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Which rows [B] hold a NaN or infinity that training reads. `scores`: next-token log-probabilities [B, S-1], or
    logits [B, S, V]. `data`: the microbatch, on the device of `scores`; values under a zero of its masks are not read.
    """
    trained_BS, used_B = data.get("token_mask"), data["sample_mask"] != 0
    columns = [(scores, None if trained_BS is None or scores.dim() != 2 else trained_BS[:, 1:])]
    for column in data.values():
        if isinstance(column, torch.Tensor) and column.is_floating_point():
            columns.append(
                (column, trained_BS if trained_BS is not None and column.shape == trained_BS.shape else None)
            )
    bad_B = torch.zeros_like(used_B)
    for column, mask in columns:
        finite = column.detach().isfinite()
        finite = finite if mask is None else finite | (mask == 0)
        bad_B = bad_B | ~finite.reshape(len(used_B), -1).all(dim=1)
    return bad_B & used_B


def _stack(results: list[MicrobatchResult]) -> dict[str, torch.Tensor]:
    names = results[0].metrics if results else {}
    # One copy to the host for the whole step: reading scalars one by one would stall the device at every microbatch.
    return {
        name: torch.stack([torch.as_tensor(result.metrics[name]).detach().double() for result in results]).cpu()
        for name in names
    }


def _sample_numbers(data: Mapping[str, torch.Tensor]) -> list[int]:
    numbers = data.get("sample_index")
    return numbers.tolist() if isinstance(numbers, torch.Tensor) else list(range(len(data["sample_mask"])))
