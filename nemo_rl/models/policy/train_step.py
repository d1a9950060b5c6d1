"""One optimizer step in four parts: begin, train microbatches, finish, abort.

The state machine that every training backend runs, and the one place where counts, gradients and metrics are
normalised. Microbatches deposit gradients of plain sums; `finish` learns the global counts and divides once, so the
result does not depend on how the batch was cut. Knows no model and no framework. Invariants: at most one step is open;
a step with a loss or gradient that is not finite changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.loss.normalization import count_valid, gradient_count, normalize_metrics


class TrainStepStateError(RuntimeError):
    """A part of a step was called out of order."""


class NonFiniteStepError(RuntimeError):
    """Loss or gradient is NaN or infinite; the step was refused and the weights are unchanged."""


@dataclass(frozen=True)
class MicrobatchResult:
    """What a microbatch's backward pass gives besides gradients: metric sums, and which rows were not finite [B]."""

    metrics: dict[str, torch.Tensor]
    bad_rows_B: torch.Tensor


class TrainBackend(Protocol):
    """What a framework does for a step."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        ...

    def start_step(self) -> None:
        """Training mode, zero gradients."""
        ...

    def forward_backward(self, data: Mapping[str, Any], loss_fn: LossFunction) -> MicrobatchResult:
        """Adds the gradient of the plain-sum loss of one microbatch."""
        ...

    def idle_backward(self) -> None:
        """Takes part in the collectives of a microbatch that another rank has and this one has not."""
        ...

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over data-parallel ranks."""
        ...

    def max_over_data(self, value: int) -> int:
        """Maximum over data-parallel ranks."""
        ...

    def gather_over_data(self, numbers: list[int]) -> list[int]:
        """The numbers of all data-parallel ranks, in rank order."""
        ...

    def gradient_norm(self) -> torch.Tensor:
        """Global L2 norm of the accumulated gradients, a scalar."""
        ...

    def apply_gradients(self, factor: float) -> None:
        """Multiplies gradients by `factor` and steps the optimizer."""
        ...

    def discard_gradients(self) -> None:
        """Drops accumulated gradients."""
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
    """A finished step.

    Attributes:
        loss: Loss of the global batch.
        grad_norm: Gradient norm before clipping.
        metrics: Per metric one value per microbatch of this rank, already divided by global counts.
        valid_seqs: Sequences of the global batch that were trained on.
        valid_toks: Tokens of the global batch that were trained on.
    """

    loss: float
    grad_norm: float
    metrics: dict[str, list[float]]
    valid_seqs: float
    valid_toks: float


class TrainStep:
    """Runs steps on a backend, one after the other."""

    def __init__(self, backend: TrainBackend) -> None:
        self._backend = backend
        self._open: _OpenStep | None = None

    def begin(self, loss_fn: LossFunction) -> None:
        """Opens a step.

        Raises:
            TrainStepStateError: A step is already open.
        """
        if self._open is not None:
            raise TrainStepStateError("a train step is already open: finish or abort it before beginning another")
        self._backend.start_step()
        self._open = _OpenStep(loss_fn, torch.zeros(2, dtype=torch.float64, device=self._backend.device))

    def microbatches(self, batches: Iterable[Mapping[str, Any]], count: int) -> None:
        """Adds `count` microbatches to the open step; ranks with fewer take part in the others' collectives.

        Raises:
            TrainStepStateError: No step is open.
        """
        step = self._require_open("train_microbatches")
        for data in batches:
            seqs, toks = count_valid(data)
            step.results.append(self._backend.forward_backward(data, step.loss_fn))
            step.counts += torch.stack([seqs, toks]).to(step.counts.device)
            step.samples.append(_sample_numbers(data))
        for _ in range(self._backend.max_over_data(count) - count):
            self._backend.idle_backward()
        step.chunks += 1

    def finish(self, max_grad_norm: float | None) -> StepResult:
        """Normalises, clips to `max_grad_norm` (None only measures) and steps the optimizer.

        Raises:
            TrainStepStateError: No step is open.
            NonFiniteStepError: Loss or gradient is not finite; gradients are dropped and the step is closed.
        """
        step = self._require_open("finish_train_step")
        counts = self._backend.sum_over_data(step.counts).tolist()
        divisor = float(gradient_count(step.loss_fn.loss_type, *counts))
        grad_norm = float(self._backend.gradient_norm()) / divisor
        local = normalize_metrics(_stack(step.results), step.loss_fn, *counts)
        loss = self._backend.sum_over_data(local["loss"].double().sum().to(self._backend.device) if "loss" in local else step.counts.new_zeros(()))
        bad = self._backend.sum_over_data(torch.tensor([0.0 if math.isfinite(grad_norm) else 1.0], device=self._backend.device))
        if float(bad) or not math.isfinite(float(loss)):
            samples = [
                n
                for result, numbers in zip(step.results, step.samples, strict=True)
                for n, is_bad in zip(numbers, result.bad_rows_B.tolist(), strict=True)
                if is_bad
            ]
            # Ranks work on different samples, and only one rank's message reaches the user: each knows those of all.
            samples = sorted(self._backend.gather_over_data(samples))
            self.abort()
            raise NonFiniteStepError(
                f"the step was refused, weights are unchanged: loss {float(loss)}, gradient norm {grad_norm}; "
                f"samples of the step with values that are not finite: {samples or 'none, so it was an overflow in the backward pass'}"
            )
        factor = 1.0 / divisor
        if max_grad_norm is not None:
            factor *= min(1.0, max_grad_norm / (grad_norm + 1e-6))
        self._backend.apply_gradients(factor)
        self._open = None
        return StepResult(float(loss), grad_norm, {name: values.tolist() for name, values in local.items()}, *counts)

    def abort(self) -> None:
        """Closes an open step without stepping the optimizer; nothing to do when none is open."""
        if self._open is not None:
            self._backend.discard_gradients()
            self._open = None

    @property
    def is_open(self) -> bool:
        """Whether a step is open."""
        return self._open is not None

    def _require_open(self, what: str) -> _OpenStep:
        if self._open is None:
            raise TrainStepStateError(f"{what}: no train step open; call begin_train_step first")
        return self._open


def non_finite_rows(scores: torch.Tensor, data: Mapping[str, Any]) -> torch.Tensor:
    """Which rows [B] hold a NaN or infinity that training reads.

    Args:
        scores: next-token log-probabilities [B, S-1], or logits [B, S, V].
        data: the microbatch, on the device of `scores`; values under a zero of its masks are not read.
    """
    trained_BS, used_B = data.get("token_mask"), data["sample_mask"] != 0
    columns = [(scores, None if trained_BS is None or scores.dim() != 2 else trained_BS[:, 1:])]
    for column in data.values():
        if isinstance(column, torch.Tensor) and column.is_floating_point():
            columns.append((column, trained_BS if trained_BS is not None and column.shape == trained_BS.shape else None))
    bad_B = torch.zeros_like(used_B)
    for column, mask in columns:
        finite = column.detach().isfinite()
        finite = finite if mask is None else finite | (mask == 0)
        bad_B = bad_B | ~finite.reshape(len(used_B), -1).all(dim=1)
    return bad_B & used_B


def _stack(results: list[MicrobatchResult]) -> dict[str, torch.Tensor]:
    names = results[0].metrics if results else {}
    # One copy to the host for the whole step: reading scalars one by one would stall the device at every microbatch.
    return {name: torch.stack([torch.as_tensor(result.metrics[name]).detach().double() for result in results]).cpu() for name in names}


def _sample_numbers(data: Mapping[str, Any]) -> list[int]:
    numbers = data.get("sample_index")
    return numbers.tolist() if isinstance(numbers, torch.Tensor) else list(range(len(data["sample_mask"])))
