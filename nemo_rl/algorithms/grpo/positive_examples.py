"""The weight of correct answers in the loss (`loss_fn.positive_example_nll_weight`), as a column of the batch.

A microbatch cannot know how many tokens the correct answers of its whole global batch have; the driver can. Knows no loss but by that column.
Invariant: with the column, the term is one mean over the global batch, however ranks and microbatches cut it.
"""

from collections.abc import Mapping

import torch

from nemo_rl.algorithms.grpo.advantages import ApplyStage
from nemo_rl.config import ClippedPGLossConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.stage import StageOutput, TokenStage
from nemo_rl.loss.clipped_pg import positive_nll_scale


def positive_example_columns(
    apply: ApplyStage, rewards_B: torch.Tensor, sample_mask_B: torch.Tensor, loss_cfg: ClippedPGLossConfig, global_batch_size: int
) -> Mapping[str, torch.Tensor]:
    """The column `positive_nll_scale` [B], or none where the loss has no such term.

    Args:
        apply: runs a stage on the batch, which holds `token_mask`.
        rewards_B: processed rewards.
        sample_mask_B: 0 for rows without loss.
        loss_cfg: `positive_example_nll_weight` and `token_level_loss` are read.
        global_batch_size: rows of one optimizer step.
    """
    if not loss_cfg.positive_example_nll_weight:
        return {}
    tokens_B = apply(TokenStage(trained_tokens, reads=("token_mask",)))["trained_tokens"]
    scale_B = positive_nll_scale(rewards_B, tokens_B, sample_mask_B, token_level_loss=loss_cfg.token_level_loss, global_batch_size=global_batch_size)
    return {"positive_nll_scale": scale_B}


def trained_tokens(columns: BatchedDataDict) -> StageOutput:
    """Tokens of each row that a next-token loss sees."""
    return StageOutput(columns={}, rows={"trained_tokens": columns["token_mask"][:, 1:].sum(-1)})
