"""Lets a loss written for padded rows take the output of a packed forward pass.

Rows that were concatenated into one sequence are cut out again by their offsets; the loss never learns that they were
packed. Invariant: the result equals that of the same rows padded.

Shapes: B rows, S tokens of a padded row, P tokens of the packed sequence.
"""

from collections.abc import Mapping

import torch

from nemo_rl.loss.interfaces import Count, LossFunction, LossInputType, LossMetrics, LossType, MetricNormalizer


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
