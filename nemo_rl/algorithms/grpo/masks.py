"""Which samples give no loss: truncated ones, flagged ones, and those whose generation and training log-probabilities disagree.

Row decisions; the disagreement of a sequence comes from a token stage. A masked sample keeps its place in its group's baseline.
Invariant: a mask only ever loses samples here.
"""

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.stage import StageOutput, TokenStage
from nemo_rl.loss.normalization import masked_mean


def overlong_filter(sample_mask_B: torch.Tensor, truncated_B: torch.Tensor) -> torch.Tensor:
    """`grpo.overlong_filtering`: no loss from truncated samples."""
    return torch.where(truncated_B.bool(), 0, sample_mask_B)


def mask_sample_filter(sample_mask_B: torch.Tensor, flagged_B: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    """No loss from samples the environment asks to mask; with the metric `num_mask_sample_filtered`."""
    newly = flagged_B.bool() & (sample_mask_B != 0)
    return torch.where(flagged_B.bool(), 0, sample_mask_B), {"num_mask_sample_filtered": float(newly.sum())}


def sequence_error_stage() -> TokenStage:
    """The stage behind `mask_by_sequence_error`; its row is `seq_mult_prob_error` [B], the mean over trained tokens of exp|g - o|."""
    return TokenStage(sequence_error, reads=("prev_logprobs", "generation_logprobs", "token_mask"))


def sequence_error(columns: BatchedDataDict) -> StageOutput:
    """How far the probabilities of both engines lie apart on each row's own trained tokens: 1 when they agree."""
    mask = columns["token_mask"][:, 1:]
    gap = torch.where(mask != 0, columns["generation_logprobs"][:, 1:] - columns["prev_logprobs"][:, 1:], 0)
    return StageOutput(columns={}, rows={"seq_mult_prob_error": masked_mean(gap.abs().exp(), mask, dim=-1)})


def mask_by_sequence_error(
    error_B: torch.Tensor, sample_mask_B: torch.Tensor, rewards_B: torch.Tensor, threshold: float | None
) -> tuple[torch.Tensor, dict[str, float]]:
    """`grpo.seq_logprob_error_threshold`: no loss from samples above it.

    Args:
        error_B: `seq_mult_prob_error` of the stage.
        sample_mask_B: 0 for samples that already give no loss; they do not count in the metrics.
        rewards_B: rewards, 1 meaning correct.
        threshold: None masks nothing but still measures.

    Returns:
        The new mask, and the metrics of the error before and after.
    """
    valid_B = sample_mask_B != 0
    # An error that is not a number is no agreement either.
    bad_B = valid_B & ~(error_B <= threshold) if threshold is not None else torch.zeros_like(valid_B)
    masked = int(bad_B.sum())
    return torch.where(bad_B, 0, sample_mask_B), {
        **_extent("seq_mult_prob_error", error_B[valid_B]),
        **_extent("seq_mult_prob_error_after_mask", error_B[valid_B & ~bad_B]),
        "num_masked_seqs_by_logprob_error": float(masked),
        "masked_correct_pct": float((rewards_B[bad_B] == 1).sum()) / masked if masked else 0.0,
    }


def skipped_sequence_error_metrics() -> dict[str, float]:
    """Zeros under the names of `mask_by_sequence_error`, for steps that skip the pass it needs."""
    none = torch.zeros(0)
    return mask_by_sequence_error(none, none, none, None)[1]


def _extent(name: str, values: torch.Tensor) -> dict[str, float]:
    if not len(values):
        return {f"{kind}_{name}": 0.0 for kind in ("max", "mean", "min")}
    return {f"max_{name}": values.max().item(), f"mean_{name}": values.mean().item(), f"min_{name}": values.min().item()}
