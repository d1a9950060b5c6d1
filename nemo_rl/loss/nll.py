"""Negative log-likelihood of the masked-in tokens: the loss of supervised fine-tuning.

Invariant: the mean over the tokens of the global batch, however it is cut.
"""

from collections.abc import Mapping

import torch

from nemo_rl.loss.interfaces import Count, LossInputType, LossMetrics, LossType, MetricNormalizer, masked_mean


class NLLLossFn:
    """Mean of `-log p(token)` over the trained tokens of the global batch."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    metric_normalizations: Mapping[str, MetricNormalizer] = {
        "num_valid_samples": MetricNormalizer.NONE,
        "num_unmasked_tokens": MetricNormalizer.NONE,
    }

    def __call__(
        self,
        data: Mapping[str, torch.Tensor],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        *,
        next_token_logprobs: torch.Tensor,
        **_: object,
    ) -> tuple[torch.Tensor, LossMetrics]:
        """The loss of a microbatch.

        Args:
            data: `token_mask` [B, S], `sample_mask` [B].
            global_valid_seqs: unused, part of the loss interface.
            global_valid_toks: trained tokens of the global batch.
            next_token_logprobs: [B, S-1], entry t is the log-probability of token t+1.

        Returns the loss and `loss`, `num_unmasked_tokens`, `num_valid_samples`.
        """
        mask_BT = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).to(next_token_logprobs.dtype)
        loss = -masked_mean(next_token_logprobs, mask_BT, global_normalization_factor=global_valid_toks)
        return loss, {
            "loss": loss.detach(),
            "num_unmasked_tokens": mask_BT.sum(),
            "num_valid_samples": data["sample_mask"].sum(),
        }
