"""A step's gradient, norm and loss are those of its global batch however it is cut, by a backend of plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.loss.interfaces import LossType, MetricNormalizer
from nemo_rl.models.policy.train_step import MicrobatchResult, TrainStep, TrainStepStateError


class Sum:
    """A loss whose gradient is the sum of `value` over trained tokens."""

    def __init__(self, loss_type: LossType) -> None:
        self.loss_type = loss_type
        self.metric_normalizations = {"tokens": MetricNormalizer.TOKENS, "rows": MetricNormalizer.NONE}


class Backend:
    """One weight vector under plain gradient descent with rate 1. `others`: counts of other ranks."""

    device = torch.device("cpu")

    def __init__(self, others: tuple[float, float] = (0.0, 0.0)) -> None:
        self.weights, self.gradient = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        self.others = torch.tensor(others, dtype=torch.float64)
        self.groups: Any = self
        self.steps = 0

    def start_step(self) -> None:
        pass

    def forward_backward(
        self, microbatches: Sequence[Mapping[str, torch.Tensor]], loss_fn: Any, *, idle: int
    ) -> list[MicrobatchResult]:
        results = []
        for data in microbatches:
            mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
            per_row = mask.sum(1) if loss_fn.loss_type is LossType.TOKEN_LEVEL else data["sample_mask"]
            self.gradient += (data["value"] * per_row[:, None]).sum(0)
            loss = (data["value"].sum(1) * per_row).sum()
            metrics = {"loss": loss, "tokens": mask.sum(), "rows": data["sample_mask"].sum()}
            results.append(MicrobatchResult(metrics, torch.zeros(len(per_row), dtype=torch.bool)))
        return results

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.others if values.shape == (2,) else values

    def max_over_data(self, value: int) -> int:
        return value

    def gather_over_data(self, numbers: list[int]) -> list[int]:
        return numbers

    def gradient_norm(self) -> torch.Tensor:
        return self.gradient.norm()

    def apply_gradients(self, factor: float) -> None:
        self.weights = self.weights - factor * self.gradient
        self.steps += 1
        self.discard_gradients()

    def trained_weights(self) -> list[torch.Tensor]:
        return [self.weights]

    def discard_gradients(self) -> None:
        self.gradient = torch.zeros(2, dtype=torch.float64)


ROWS = st.lists(
    st.tuples(st.lists(st.sampled_from([0.0, 1.0]), min_size=4, max_size=4), st.sampled_from([0.0, 1.0])),
    min_size=1,
    max_size=6,
)


def batch(rows: Sequence[tuple[Sequence[float], float]], first: int = 0) -> dict[str, torch.Tensor]:
    numbers = torch.arange(first, first + len(rows), dtype=torch.float64)
    return {
        "token_mask": torch.tensor([mask for mask, _ in rows], dtype=torch.float64),
        "sample_mask": torch.tensor([kept for _, kept in rows], dtype=torch.float64),
        "value": torch.stack([numbers + 1, 3 - numbers], dim=1),
    }


@given(
    ROWS, st.lists(st.integers(0, 3), max_size=3), st.sampled_from(list(LossType)), st.sampled_from([None, 0.5, 100.0])
)
def test_a_step_moves_the_weights_by_the_clipped_mean_gradient_however_it_is_cut(
    rows: list[tuple[list[float], float]], cuts: list[int], loss_type: LossType, most: float | None
) -> None:
    backend = Backend()
    step = TrainStep(backend)
    step.begin(Sum(loss_type))
    borders = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    for begin, end in pairwise(borders):
        step.microbatches([batch(rows[row : row + 1], row) for row in range(begin, end)])
    result = step.finish(most)

    trained = [(number, sum(mask[1:])) for number, (mask, kept) in enumerate(rows) if kept]
    tokens, sequences = sum(count for _, count in trained), len(trained)
    assert (result.valid_seqs, result.valid_toks) == (sequences, tokens)
    assert not step.is_open and not backend.gradient.any()
    if tokens == 0:
        # Nothing is learned from a batch without a trained token: no step, and no decay by the optimizer either.
        assert (result.stepped, backend.steps) == (False, 0) and not backend.weights.any()
        return
    by_token = loss_type is LossType.TOKEN_LEVEL
    count = tokens if by_token else sequences
    mean = torch.zeros(2, dtype=torch.float64)
    for number, own in trained:
        mean += torch.tensor([number + 1.0, 3.0 - number]) * (own if by_token else 1) / count
    norm = float(mean.norm())
    assert result.grad_norm == pytest.approx(norm)
    # Clipping is by the norm of the mean gradient, which does not depend on the size of the batch.
    factor = 1.0 if most is None else min(1.0, most / (norm + 1e-6))
    torch.testing.assert_close(backend.weights, -mean * factor)
    assert result.loss == pytest.approx(float(mean.sum()))
    assert sum(result.metrics["tokens"]) == pytest.approx(1.0) and sum(result.metrics["rows"]) == sequences


def test_counts_of_other_ranks_divide_this_ranks_gradient_too() -> None:
    backend = Backend(others=(3.0, 6.0))
    step = TrainStep(backend)
    step.begin(Sum(LossType.TOKEN_LEVEL))
    step.microbatches([batch([([0.0, 1.0, 1.0, 0.0], 1.0)])])
    result = step.finish(None)
    assert (result.valid_seqs, result.valid_toks) == (4, 8)
    torch.testing.assert_close(backend.weights, torch.tensor([-2 / 8, -6 / 8], dtype=torch.float64))


@pytest.mark.parametrize("how", ["abort", "fails"])
def test_gradients_of_a_step_that_was_given_up_never_reach_the_next(how: str) -> None:
    backend = Backend()
    step = TrainStep(backend)
    row = [batch([([1.0, 1.0, 1.0, 1.0], 1.0)])]
    step.begin(Sum(LossType.TOKEN_LEVEL))
    step.microbatches(row)
    if how == "abort":
        step.abort()
    else:
        with pytest.raises(KeyError):
            step.microbatches([{"input_ids": torch.zeros(1, 2)}])
    assert not step.is_open and not backend.gradient.any() and backend.steps == 0
    with pytest.raises(TrainStepStateError):
        step.finish(None)
    step.begin(Sum(LossType.TOKEN_LEVEL))
    step.microbatches(row)
    step.finish(None)
    torch.testing.assert_close(backend.weights, torch.tensor([-1.0, -3.0], dtype=torch.float64))
