"""What a loss is to the training step: how it is called, which tensors it takes, and which denominators its results
need.

Invariant every loss keeps: called on the parts of a global batch with that batch's counts, its values and gradients add
up to those of the whole, whatever the split; called with both counts 1 it gives plain sums, which
`metric_normalizations` says how to divide afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias, runtime_checkable

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
    """What the model's output is turned into before the loss is called."""

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
    input_type: LossInputType  # what the model's output is turned into
    metric_normalizations: Mapping[str, MetricNormalizer]
    __call__: Callable[..., tuple[torch.Tensor, LossMetrics]]
