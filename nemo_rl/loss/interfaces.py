"""Interface between losses and the train step: call, input tensors, and denominators of results; masked means over
global counts, and the counts themselves; and the wrapper that lets a loss written for padded rows take the output of a
packed forward pass.

Everything is linear in one over the count, which is what lets a global batch be cut anywhere and a split train step
divide once at the end. Rows that were concatenated into one sequence are cut out again by their offsets; the loss never
learns that they were packed. Invariants: called on the parts of a global batch with that batch's counts, a loss's
values and gradients add up to those of the whole, whatever the split; called with both counts 1 it gives plain sums,
which `metric_normalizations` says how to divide afterwards; what lies under a zero of the mask never reaches the
result, not even as NaN or infinity; the result of packed rows equals that of the same rows padded.

Shapes: B rows, S tokens of a padded row, P tokens of the packed sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

Count: TypeAlias = torch.Tensor | float
LossMetrics: TypeAlias = dict[
    str, torch.Tensor
]  # detached scalars; left on the device so that no microbatch waits for a copy


@dataclass(frozen=True)
class GivenScores:
    """The policy's scores of given tokens after each position, over the whole vocabulary and before filters.

    Attributes:
        logprobs: [..., k].
        rest_mass: Probability [...] of all other tokens; None where the loss does not read it.
        rest_entropy: Their sum [...] of p log p.
    """

    logprobs: torch.Tensor
    rest_mass: torch.Tensor | None = None
    rest_entropy: torch.Tensor | None = None

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> GivenScores:
        """The same with every column changed."""
        mass, entropy = (None if of is None else change(of) for of in (self.rest_mass, self.rest_entropy))
        return GivenScores(change(self.logprobs), mass, entropy)


class LossType(str, Enum):
    """Which count divides the gradient."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(str, Enum):
    """Form of the model's output that a loss takes."""

    LOGIT = "logit"
    LOGPROB = "logprob"
    DISTILLATION = "distillation"
    DISTILLATION_CROSS_TOKENIZER = "distillation_cross_tokenizer"
    DRAFT = "draft"


class MetricNormalizer(str, Enum):
    """Which global count divides a metric that was summed without one."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"


@runtime_checkable
class ComparesWithTeacher(Protocol):
    """A loss that may read the distributions of a teacher: it is then called with `given`, a `GivenScores` [B, S-1]
    of the tokens in the column `teacher_topk_ids` [B, S, k].
    """

    compares_with_teacher: bool  # whether it does
    reads_rest: bool  # whether it reads the sums over all other tokens


@runtime_checkable
class LossFunction(Protocol):
    """A loss the training step can call: `loss, metrics = loss_fn(data, global_valid_seqs, global_valid_toks,
    **model_output)`.

    - `data`: columns of the microbatch, `sample_mask` [B] and `token_mask` [B, S] among them.
    - `global_valid_seqs`: sequences with a nonzero sample mask in the global batch, over all ranks; 1 to get plain
      sums.
    - `global_valid_toks`: trained tokens in the global batch, over all ranks; 1 to get plain sums.
    - `model_output`: by `input_type`, `next_token_logprobs` [B, S-1] or `logits` [B, S, V].
    - It returns a scalar with gradient, to be summed with those of its sibling microbatches, and detached scalars,
      `num_valid_samples` among them.

    Attributes:
        metric_normalizations: denominator of each metric; one not listed is divided like the gradient. Names with
            `_min` or `_max` are never divided.
    """

    loss_type: LossType  # which count divides the gradient
    input_type: LossInputType  # form of the model's output
    metric_normalizations: Mapping[str, MetricNormalizer]
    __call__: Callable[..., tuple[torch.Tensor, LossMetrics]]


EPSILON = 1e-8


def masked_mean(
    values: torch.Tensor, mask: torch.Tensor, dim: int | None = None, global_normalization_factor: Count | None = None
) -> torch.Tensor:
    """Sum of `values * mask` over a count.

    Args:
        mask: the same shape (or one that broadcasts to it); where it is 0, `values` may hold anything.
        dim: dimension to reduce; all when None.
        global_normalization_factor: the count to divide by; the sum of `mask` when None.

    Returns `sum(values * mask) / (count + 1e-8)`.
    """
    mask = mask.to(values.dtype).expand_as(values)
    weighted = torch.where(mask != 0, values * mask, 0)
    total, own = (weighted.sum(), mask.sum()) if dim is None else (weighted.sum(dim), mask.sum(dim))
    return total / ((own if global_normalization_factor is None else global_normalization_factor) + EPSILON)


def sequence_mean(
    values_BS: torch.Tensor, token_mask_BS: torch.Tensor, sample_mask_B: torch.Tensor, global_valid_seqs: Count
) -> torch.Tensor:
    """Mean over each row's own tokens, then the sum over rows divided by the global number of sequences."""
    return masked_mean(
        masked_mean(values_BS, token_mask_BS, dim=-1), sample_mask_B, global_normalization_factor=global_valid_seqs
    )


def count_valid(data: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """This batch's sequences and trained tokens, to be summed over ranks and microbatches.

    Args:
        data: `sample_mask` [B], and `token_mask` [B, S] (every token counts where it is absent, of `input_ids` [B, S]).

    Returns two float64 scalars: sequences, and tokens a next-token loss sees (column 0 has no prediction). Raises
    KeyError: `sample_mask` is missing.
    """
    if "sample_mask" not in data:
        raise KeyError(f"a training batch needs the column sample_mask [B]; it has {sorted(data)}")
    sample_mask_B = data["sample_mask"].double()
    sequences = sample_mask_B.sum()
    if "token_mask" not in data:
        return sequences, sequences * data["input_ids"].shape[1]
    return sequences, (data["token_mask"][:, 1:].double() * sample_mask_B[:, None]).sum()


def gradient_count(loss_type: LossType, valid_seqs: Count, valid_toks: Count) -> Count:
    """The count that divides loss and gradient; 1 for a batch without any, whose loss is 0 anyway."""
    count = valid_toks if loss_type is LossType.TOKEN_LEVEL else valid_seqs
    return torch.where(count > 0, count, 1) if isinstance(count, torch.Tensor) else count if count > 0 else 1.0


def normalize_metrics(
    sums: Mapping[str, Any], loss_fn: LossFunction, valid_seqs: Count, valid_toks: Count
) -> dict[str, Any]:
    """Metrics of a call with both counts 1, as that call with the true counts would have given them.

    Args:
        sums: metrics of one or more such calls.
        loss_fn: the loss they come from.
        valid_seqs: sequences of the global batch.
        valid_toks: trained tokens of the global batch.
    """
    by_gradient = gradient_count(loss_fn.loss_type, valid_seqs, valid_toks)
    denominators: dict[MetricNormalizer | None, Count] = {
        None: by_gradient,
        MetricNormalizer.TOKENS: gradient_count(LossType.TOKEN_LEVEL, valid_seqs, valid_toks),
        MetricNormalizer.SEQUENCES: gradient_count(LossType.SEQUENCE_LEVEL, valid_seqs, valid_toks),
        MetricNormalizer.NONE: 1.0,
    }
    return {
        name: value if is_extremum(name) else value / denominators[loss_fn.metric_normalizations.get(name)]
        for name, value in sums.items()
    }


def is_extremum(name: str) -> bool:
    """Whether a metric is a minimum or maximum, which is neither summed nor divided."""
    return "_min" in name or "_max" in name


class SequencePackingLossWrapper:
    """A loss over the rows of one packed microbatch.

    Args:
        loss_fn: a loss over padded rows, of input type `LOGPROB` or `LOGIT`.
        cu_seqlens: [B+1] cumulative lengths of the rows without padding.
        cu_seqlens_padded: [B+1] where each row starts in the packed sequence; `cu_seqlens` when rows are not padded
            inside it.

    Raises ValueError: the loss takes some other model output.
    """

    def __init__(
        self, loss_fn: LossFunction, cu_seqlens: torch.Tensor, cu_seqlens_padded: torch.Tensor | None = None
    ) -> None:
        if loss_fn.input_type not in (LossInputType.LOGPROB, LossInputType.LOGIT):
            raise ValueError(
                f"sequence packing cannot feed a loss of input type {loss_fn.input_type.value}; set "
                "policy.sequence_packing.enabled=false"
            )
        self.loss_fn = loss_fn
        self.loss_type: LossType = loss_fn.loss_type
        self.input_type: LossInputType = loss_fn.input_type
        self.metric_normalizations: Mapping[str, MetricNormalizer] = loss_fn.metric_normalizations
        self.lengths_B = cu_seqlens[1:] - cu_seqlens[:-1]
        self.starts_B = (cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded)[:-1]

    def __call__(
        self,
        data: Mapping[str, torch.Tensor],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        **model_output: torch.Tensor | None,
    ) -> tuple[torch.Tensor, LossMetrics]:
        """The loss of the packed rows.

        Args:
            data: the rows' columns, padded [B, S].
            global_valid_seqs: sequences of the global batch.
            global_valid_toks: trained tokens of the global batch.
            model_output: packed: log-probabilities [1, P] (entry p is that of token p+1 given the tokens of its row up
                to p), or `logits` [1, P, V].

        Returns what `loss_fn` returns.
        """
        width = data["input_ids"].shape[1]
        padded = {
            name: None
            if packed is None
            else self._unpack(packed, width if self.input_type is LossInputType.LOGIT else width - 1)
            for name, packed in model_output.items()
        }
        return self.loss_fn(data, global_valid_seqs, global_valid_toks, **padded)

    def _unpack(self, packed: torch.Tensor, width: int) -> torch.Tensor:
        column_W = torch.arange(width, device=packed.device)
        # The last token of a row predicts the first of the next one, which is not its continuation.
        predictions_B = self.lengths_B if self.input_type is LossInputType.LOGIT else self.lengths_B - 1
        inside_BW = column_W < predictions_B.to(packed.device)[:, None]
        position_BW = torch.where(inside_BW, self.starts_B.to(packed.device)[:, None] + column_W, 0)
        rows = packed.squeeze(0)[position_BW]
        return torch.where(inside_BW if rows.ndim == 2 else inside_BW[..., None], rows, 0)
