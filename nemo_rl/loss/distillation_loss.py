"""KL divergences between a policy and a teacher, over the teacher's k most likely tokens of each position, and the loss
of on-policy distillation made of them.

The teacher's probabilities are re-normalised over its k tokens. Invariant: the loss is a sum over trained tokens
divided by one count, so that a global batch may be cut anywhere.

Shapes: B rows, S tokens of a padded row, T = S-1 next-token positions, k tokens of the teacher.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nemo_rl.config.algorithms import TeacherKLConfig
from nemo_rl.data_plane.field_schema import TOPK_LOGPROBS
from nemo_rl.loss.interfaces import (
    Count,
    GivenScores,
    LossInputType,
    LossMetrics,
    LossType,
    MetricNormalizer,
    masked_mean,
)

OUTSIDE_LOGPROB = -100.0
"""Log-probability of the teacher for a token outside its top k, with `zero_outside_topk`."""


def reads_rest(cfg: TeacherKLConfig) -> bool:
    """Whether the divergence reads sums over the tokens outside the teacher's top k."""
    return cfg.zero_outside_topk and cfg.kl_type != "forward"


def teacher_kl(policy: GivenScores, teacher_BTk: torch.Tensor, cfg: TeacherKLConfig) -> torch.Tensor:
    """Divergence [B, T] of each position.

    With teacher t and policy p over the teacher's k tokens: forward is `sum t (log t - log p)`, reverse
    `sum p (log p - log t)`, mixed their weighted sum. Without `zero_outside_topk` p is re-normalised over the k tokens;
    with it p is the policy's probability over the vocabulary, and the reverse divergence goes on over all other tokens,
    where log t is -100.

    Args:
        policy: Scores of the teacher's tokens, [B, T, k] and [B, T].
        teacher_BTk: The teacher's log-probabilities of them, up to a constant per position.
    """
    teacher_BTk = teacher_BTk.to(policy.logprobs.dtype).log_softmax(dim=-1)
    policy_BTk = policy.logprobs if cfg.zero_outside_topk else policy.logprobs.log_softmax(dim=-1)
    gap_BTk = teacher_BTk - policy_BTk
    weight = {"forward": 1.0, "reverse": 0.0, "mixed": cfg.mixed_kl_weight}[cfg.kl_type]
    divergence_BT = policy_BTk.new_zeros(policy_BTk.shape[:-1])
    if weight > 0:
        divergence_BT = divergence_BT + weight * (teacher_BTk.exp() * gap_BTk).sum(dim=-1)
    if weight < 1:
        reverse_BT = -(policy_BTk.exp() * gap_BTk).sum(dim=-1)
        if policy.rest_mass is not None and policy.rest_entropy is not None:
            reverse_BT = reverse_BT + policy.rest_entropy - OUTSIDE_LOGPROB * policy.rest_mass
        divergence_BT = divergence_BT + (1 - weight) * reverse_BT
    return divergence_BT


def compared(data: Mapping[str, torch.Tensor], given: GivenScores | None, cfg: TeacherKLConfig) -> torch.Tensor:
    """`teacher_kl` of a microbatch, [B, T]. Raises KeyError: the batch has no columns of a teacher."""
    if given is None or TOPK_LOGPROBS not in data:
        raise KeyError(
            f"the loss compares with a teacher and needs its columns, {TOPK_LOGPROBS!r} among them; the batch has "
            f"{sorted(data)}"
        )
    return teacher_kl(given, data[TOPK_LOGPROBS][:, :-1], cfg)


class DistillationLossFn:
    """Mean divergence from the teacher over the trained tokens of the global batch."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    compares_with_teacher = True
    metric_normalizations: Mapping[str, MetricNormalizer] = {"num_valid_samples": MetricNormalizer.NONE}

    def __init__(self, cfg: TeacherKLConfig) -> None:
        self.cfg = cfg
        self.reads_rest = reads_rest(cfg)

    def __call__(
        self,
        data: Mapping[str, torch.Tensor],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        *,
        given: GivenScores | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, LossMetrics]:
        """The loss of a microbatch.

        Args:
            data: `token_mask` [B, S], `sample_mask` [B] and `teacher_topk_logprobs` [B, S, k].
            global_valid_seqs: Unused, part of the loss interface.
            global_valid_toks: Trained tokens of the global batch.
            given: The policy's scores of the teacher's tokens.

        Returns the loss and `loss`, `num_valid_samples`.
        """
        kl_BT = compared(data, given, self.cfg)
        mask_BT = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).to(kl_BT.dtype)
        loss = masked_mean(kl_BT, mask_BT, global_normalization_factor=global_valid_toks)
        # NeMo-RL counts every sample here, also one without loss.
        samples = loss.new_tensor(float(data["sample_mask"].numel()))
        return loss, {"loss": loss.detach(), "num_valid_samples": samples}
