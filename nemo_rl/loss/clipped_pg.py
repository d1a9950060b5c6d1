"""The clipped policy-gradient loss: GRPO, DAPO, GSPO, CISPO, RLOO and REINFORCE by switches of one config section; KL
divergence and importance weights between two policies.

Turns log-probabilities and advantages into a scalar; knows nothing of how advantages were made or of any model. KL is
between any two policies; importance weights, with their truncation, decide how much each token counts when engines, or
weight versions, disagree. Invariants: values and gradients of the parts of a global batch add up to those of the whole,
and positions that are masked out never matter; tokens whose log-ratio the input clamp cut carry no gradient through
their weight, so one broken token cannot push the policy; importance weights carry no gradient, and one that is not
finite counts as 0; with bounds, a ratio too large for a float ends at its bound.

Log-probabilities: c current policy, o training engine before this step, g generating engine, f reference policy.
Shapes: B rows, S tokens of a padded row, T = S-1 next-token positions.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from nemo_rl.config import ClippedPGLossConfig
from nemo_rl.loss.distillation_loss import compared, reads_rest
from nemo_rl.loss.interfaces import (
    EPSILON,
    Count,
    GivenScores,
    LossInputType,
    LossMetrics,
    LossType,
    MetricNormalizer,
    masked_mean,
    sequence_mean,
)

_LARGEST_LOG = 60.0
"""Ratios stay below e**60: their exponential, and its product with an advantage, are finite in float32."""

KLType: TypeAlias = Literal["k1", "k2", "k3"]
TruncationType: TypeAlias = Literal["tis", "icepop", "seq-mask-tis"]


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """The ratio of a log-ratio, finite and with a finite gradient wherever the log-ratio is not infinite or NaN.

    A plain exponential overflows to infinity, whose gradient is NaN even where a clamp of the ratio drops it.
    """
    return log_ratio.clamp(max=_LARGEST_LOG).exp()


def calculate_kl(
    logprobs: torch.Tensor,
    logprobs_reference: torch.Tensor,
    kl_type: KLType = "k3",
    input_clamp_value: float | None = 20.0,
    output_clamp_value: float | None = 10.0,
    importance_sampling_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) from samples of the policy (http://joschu.net/blog/kl-approx.html).

    With `L = clamp(reference - policy)`: k1 is `-L`, k2 is `L**2 / 2`, k3 is `exp(L) - 1 - L`. k1 is unbiased and
    noisy, k2 biased, k3 unbiased and never negative.

    Args:
        logprobs: log-probabilities of the sampled tokens under the policy, any shape.
        logprobs_reference: the same under the reference.
        input_clamp_value: L is clamped to plus or minus this; None does not clamp.
        output_clamp_value: the weighted result is clamped to plus or minus this; None does not clamp.
        importance_sampling_weights: multiply the estimate before the output clamp; detached where the input clamp bit.

    Returns the estimate, in the shape of `logprobs`. Raises ValueError: unknown `kl_type`.
    """
    raw = logprobs_reference - logprobs
    log_ratio = raw if input_clamp_value is None else raw.clamp(-input_clamp_value, input_clamp_value)
    if kl_type == "k1":
        kl = -log_ratio
    elif kl_type == "k2":
        kl = log_ratio.square() / 2
    elif kl_type == "k3":
        kl = torch.expm1(log_ratio.clamp(max=_LARGEST_LOG)) - log_ratio
    else:
        raise ValueError(f"kl_type={kl_type!r} must be k1, k2 or k3")
    weight = importance_sampling_weights
    if weight is not None:
        kl = kl * (
            weight if input_clamp_value is None else torch.where(raw.abs() > input_clamp_value, weight.detach(), weight)
        )
    return kl if output_clamp_value is None else kl.clamp(-output_clamp_value, output_clamp_value)


def jensen_shannon(logprobs_a: torch.Tensor, logprobs_b: torch.Tensor) -> torch.Tensor:
    """Per-token Jensen-Shannon divergence as NeMo-RL logs it: the mean over both policies p of `exp(d) - d - 1` with
    `d = p - log_mixture`, their even mixture.
    """
    log_mixture = torch.logaddexp(logprobs_a, logprobs_b) - torch.log(logprobs_a.new_tensor(2.0))
    to_mixture = (calculate_kl(log_mixture, own, "k3", None, None) for own in (logprobs_a, logprobs_b))
    return sum(to_mixture, start=torch.zeros_like(log_mixture)) / 2


@dataclass(frozen=True)
class Truncation:
    """Bounds on importance weights.

    Attributes:
        kind: `tis` clamps weights (https://fengyao.notion.site/off-policy-rl); `icepop` zeroes those outside
            (https://ringtech.notion.site/icepop); `seq-mask-tis` zeroes whole sequences whose geometric mean ratio is
            outside, and leaves the weights of the others as they are.
    """

    kind: TruncationType
    upper: float
    lower: float | None = None  # smallest weight; None is 0, which only `tis` allows


@dataclass(frozen=True)
class ImportanceWeights:
    """Weights [B, T], and which tokens (or, for `seq-mask-tis`, sequences) lay outside the bounds: [B, T] (or [B]), 1
    or 0.
    """

    weights_BT: torch.Tensor
    out_of_bounds: torch.Tensor


def importance_weights(
    previous_BT: torch.Tensor,
    generation_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    sequence_level: bool,
    truncation: Truncation | None,
) -> ImportanceWeights:
    """Training over generation probability of each token, or of its whole sequence.

    Args:
        previous_BT: log-probabilities of the training engine before this step.
        generation_BT: those of the engine that generated.
        sequence_level: one weight per sequence, the product over its tokens (the exponential of a sum, where the GSPO
            ratio has a mean).
        truncation: bounds, or None.
    """
    log_ratio_BT = (previous_BT - generation_BT).detach()
    if sequence_level:
        log_weights_BT = (log_ratio_BT * mask_BT).sum(dim=-1, keepdim=True).expand_as(log_ratio_BT)
    else:
        log_weights_BT = log_ratio_BT
    weights_BT = torch.nan_to_num(log_weights_BT.exp(), nan=0.0, posinf=0.0, neginf=0.0)
    if truncation is None:
        return ImportanceWeights(weights_BT, torch.zeros_like(weights_BT))
    lower = 0.0 if truncation.lower is None else truncation.lower
    if truncation.kind == "seq-mask-tis":
        geometric_mean_B = masked_mean(log_ratio_BT, mask_BT, dim=-1).exp()
        outside_B = ~((geometric_mean_B >= lower) & (geometric_mean_B <= truncation.upper))
        return ImportanceWeights(torch.where(outside_B[:, None], 0, weights_BT), outside_B.to(weights_BT.dtype))
    # A log-ratio that is not finite says nothing; one that is finite but large says "at least the upper bound".
    broken_BT = ~torch.isfinite(log_weights_BT)
    weights_BT = torch.where(broken_BT, 0, bounded_exp(log_weights_BT))
    outside_BT = (weights_BT < lower) | (weights_BT > truncation.upper)
    kept_BT = (
        torch.where(broken_BT, 0, weights_BT.clamp(lower, truncation.upper))
        if truncation.kind == "tis"
        else torch.where(outside_BT, 0, weights_BT)
    )
    return ImportanceWeights(kept_BT, outside_BT.to(weights_BT.dtype))


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Tokens:
    """One microbatch, shifted to next-token positions, with zeros wherever it is masked."""

    current_BT: torch.Tensor
    current_unfiltered_BT: torch.Tensor
    previous_BT: torch.Tensor
    generation_BT: torch.Tensor
    reference_BT: torch.Tensor | None
    advantages_BT: torch.Tensor
    mask_BT: torch.Tensor
    sample_mask_B: torch.Tensor


class ClippedPGLossFn:
    """Clipped policy-gradient loss with KL penalty and importance correction.

    Per token, with ratio r = exp(c - o) and advantage A, times the importance weight w (see `importance`):
    - default (https://arxiv.org/abs/1707.06347, DAPO's two bounds https://arxiv.org/abs/2503.14476):
      max(-A r, -A clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max));
    - `ratio_clip_c` (dual clip, https://arxiv.org/abs/1912.09729): for A < 0 at most -A * ratio_clip_c;
    - `sequence_level_importance_ratios` (GSPO, https://arxiv.org/abs/2507.18071): r is the sequence's exp(mean(c - o)),
      while w is exp(sum(o - g)), a sum;
    - `use_cispo` (https://arxiv.org/abs/2506.13585): -A clip(r) c with the clipped ratio detached;
    - `disable_ppo_ratio` (REINFORCE): -A c;
    - `force_on_policy_ratio`: o is c detached, everywhere in this loss, whatever `prev_logprobs` holds.

    Plus `reference_policy_kl_penalty` times the KL to the reference (see `calculate_kl`), weighted by exp(c - c
    detached), which is 1 and adds the score-function gradient, or by exp(c - g) with `use_on_policy_kl_approximation`;
    left out with `use_kl_in_reward`. Plus `teacher_kl_penalty` times the divergence from a teacher (see `teacher_kl`).
    Plus `positive_example_nll_weight` times the mean of -c over tokens of samples
    with positive reward (VAPO, https://arxiv.org/abs/2504.05118).

    `token_level_loss` averages over all tokens of the global batch; otherwise over each sequence's tokens, then over
    sequences.

    Raises ValueError: switches that exclude each other.
    """

    input_type = LossInputType.LOGPROB

    def __init__(self, cfg: ClippedPGLossConfig | Mapping[str, object]) -> None:
        cfg = ClippedPGLossConfig.read(cfg)
        if problems := list(cfg.problems()):
            raise ValueError("; ".join(problems))
        self.cfg = cfg
        self.loss_type = LossType.TOKEN_LEVEL if cfg.token_level_loss else LossType.SEQUENCE_LEVEL
        upper, lower = cfg.truncated_importance_sampling_ratio, cfg.truncated_importance_sampling_ratio_min
        kind = cfg.truncated_importance_sampling_type or "tis"
        self.truncation = None if upper is None else Truncation(kind, upper, lower)
        self.compares_with_teacher = cfg.compares_with_teacher
        self.reads_rest = reads_rest(cfg)
        by_tokens = (
            "probs_ratio",
            "probs_ratio_clamped",
            "token_mult_prob_error",
            "gen_kl_error",
            "policy_kl_error",
            "js_divergence_error",
            "approx_entropy",
            "sampling_mask_share",
        )
        sequence_masked = self.truncation is not None and self.truncation.kind == "seq-mask-tis"
        self.metric_normalizations: Mapping[str, MetricNormalizer] = {
            **dict.fromkeys(by_tokens, MetricNormalizer.TOKENS),
            "sampling_importance_ratio": MetricNormalizer.SEQUENCES
            if cfg.sequence_level_importance_ratios
            else MetricNormalizer.TOKENS,
            "is_oob_ratio": MetricNormalizer.SEQUENCES if sequence_masked else MetricNormalizer.TOKENS,
            "num_valid_samples": MetricNormalizer.NONE,
        }

    def __call__(
        self,
        data: Mapping[str, torch.Tensor],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        *,
        next_token_logprobs: torch.Tensor,
        next_token_logprobs_unfiltered: torch.Tensor | None = None,
        given: GivenScores | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, LossMetrics]:
        """The loss of a microbatch, to be summed with its siblings.

        Args:
            data: per-token columns [B, S] `advantages`, `generation_logprobs`, `token_mask`, `prev_logprobs` (not read
                with `force_on_policy_ratio`) and `reference_policy_logprobs` (with a KL penalty), and per-row [B]
                `sample_mask` and, for the positive-example term, `rewards` and optionally `positive_nll_scale` (see the
                function of that name).
            global_valid_seqs: sequences of the global batch; 1 for plain sums.
            global_valid_toks: trained tokens of the global batch; 1 for plain sums.
            next_token_logprobs: c [B, T], after the sampling filters (top-k, top-p), or over what was recorded of them.
            next_token_logprobs_unfiltered: c before the sampling filters, which the KL is taken of; None where nothing
                is filtered, and over recorded sets, which the reference is taken over too.

        Returns the loss, and the metrics named in the class's tables.
        """
        tokens = self._shift(data, next_token_logprobs, next_token_logprobs_unfiltered)
        ratio_BT, clamped_BT = self._ratios(tokens)
        correction = importance_weights(
            tokens.previous_BT,
            tokens.generation_BT,
            tokens.mask_BT,
            sequence_level=self.cfg.sequence_level_importance_ratios,
            truncation=self.truncation,
        )
        policy_BT = self._policy_loss(tokens, ratio_BT, clamped_BT)
        if self.cfg.use_importance_sampling_correction:
            policy_BT = policy_BT * correction.weights_BT
        counts = (global_valid_seqs, global_valid_toks)
        kl_penalty = self._kl_penalty(tokens, counts)
        positive_nll = self._positive_nll(data, tokens, counts)
        loss = (
            self._reduce(policy_BT, tokens, counts)
            + self.cfg.reference_policy_kl_penalty * kl_penalty
            + self.cfg.positive_example_nll_weight * positive_nll
        )
        teacher_metrics: LossMetrics = {}
        if self.compares_with_teacher:
            divergence = self._reduce(compared(data, given, self.cfg), tokens, counts)
            loss = loss + self.cfg.teacher_kl_penalty * divergence
            teacher_metrics = {"teacher_kl": divergence.detach()}
        metrics: LossMetrics = {
            **_mask_metrics(data, tokens.mask_BT, global_valid_toks),
            **teacher_metrics,
            "loss": loss.detach(),
            "kl_penalty": kl_penalty.detach(),
            "positive_nll_loss": positive_nll.detach(),
            "num_valid_samples": tokens.sample_mask_B.sum(),
            **self._importance_metrics(correction.weights_BT, correction.out_of_bounds, tokens, counts),
            **ratio_metrics(ratio_BT, clamped_BT, tokens.mask_BT, global_valid_toks),
            **agreement_metrics(
                tokens.current_BT,
                tokens.previous_BT,
                tokens.generation_BT,
                tokens.mask_BT,
                global_valid_toks,
                self.cfg.reference_policy_kl_type,
            ),
        }
        return loss, metrics

    def _shift(
        self, data: Mapping[str, torch.Tensor], current_BT: torch.Tensor, unfiltered_BT: torch.Tensor | None
    ) -> _Tokens:
        dtype = torch.promote_types(current_BT.dtype, torch.float32)

        def column(name: str) -> torch.Tensor:
            if name not in data:
                raise KeyError(f"the policy-gradient loss needs the column {name!r}; the batch has {sorted(data)}")
            return data[name].to(dtype)

        def next_tokens(name: str) -> torch.Tensor:
            return column(name)[:, 1:]

        current_BT = current_BT.to(dtype)
        previous_BT = current_BT.detach() if self.cfg.force_on_policy_ratio else next_tokens("prev_logprobs")
        sample_mask_B = column("sample_mask")
        mask_BT = next_tokens("token_mask") * sample_mask_B[:, None]
        if unfiltered_BT is None:
            unfiltered_BT = current_BT
        else:
            mask_BT = _drop_filtered_out(mask_BT, current_BT, previous_BT)
        trained_BT = mask_BT != 0

        def masked(values_BT: torch.Tensor) -> torch.Tensor:
            # Prompt and padding hold anything; exp of it may overflow, and 0 * inf is NaN in the backward pass too.
            return torch.where(trained_BT, values_BT, 0)

        return _Tokens(
            current_BT=masked(current_BT),
            current_unfiltered_BT=masked(unfiltered_BT.to(dtype)),
            previous_BT=masked(previous_BT),
            generation_BT=masked(next_tokens("generation_logprobs")),
            reference_BT=masked(next_tokens("reference_policy_logprobs")) if self._has_kl_penalty else None,
            advantages_BT=masked(next_tokens("advantages")),
            mask_BT=mask_BT,
            sample_mask_B=sample_mask_B,
        )

    @property
    def _has_kl_penalty(self) -> bool:
        return self.cfg.reference_policy_kl_penalty != 0 and not self.cfg.use_kl_in_reward

    def _ratios(self, tokens: _Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        log_ratio_BT = tokens.current_BT - tokens.previous_BT
        if self.cfg.sequence_level_importance_ratios:
            log_ratio_BT = masked_mean(log_ratio_BT, tokens.mask_BT, dim=-1)[:, None].expand_as(log_ratio_BT)
        ratio_BT = bounded_exp(log_ratio_BT)
        return ratio_BT, ratio_BT.clamp(1 - self.cfg.ratio_clip_min, 1 + self.cfg.ratio_clip_max)

    def _policy_loss(self, tokens: _Tokens, ratio_BT: torch.Tensor, clamped_BT: torch.Tensor) -> torch.Tensor:
        advantages_BT = tokens.advantages_BT
        if self.cfg.disable_ppo_ratio:
            return -advantages_BT * tokens.current_BT
        if self.cfg.use_cispo:
            return -advantages_BT * clamped_BT.detach() * tokens.current_BT
        clipped_BT = torch.maximum(-advantages_BT * ratio_BT, -advantages_BT * clamped_BT)
        if self.cfg.ratio_clip_c is None:
            return clipped_BT
        return torch.where(
            advantages_BT < 0, torch.minimum(clipped_BT, -advantages_BT * self.cfg.ratio_clip_c), clipped_BT
        )

    def _kl_penalty(self, tokens: _Tokens, counts: tuple[Count, Count]) -> torch.Tensor:
        if tokens.reference_BT is None:
            return tokens.current_BT.new_zeros(())
        current_BT = tokens.current_unfiltered_BT
        weight_BT = bounded_exp(
            current_BT - (tokens.generation_BT if self.cfg.use_on_policy_kl_approximation else current_BT.detach())
        )
        kl_BT = calculate_kl(
            current_BT,
            tokens.reference_BT,
            self.cfg.reference_policy_kl_type,
            self.cfg.kl_input_clamp_value,
            self.cfg.kl_output_clamp_value,
            importance_sampling_weights=weight_BT,
        )
        return self._reduce(kl_BT, tokens, counts)

    def _positive_nll(
        self, data: Mapping[str, torch.Tensor], tokens: _Tokens, counts: tuple[Count, Count]
    ) -> torch.Tensor:
        """Mean of -c over positive samples' tokens.

        Divided by the gradient's own count, so that a split step can scale it like the rest: rows are scaled by that
        count over the positive tokens. The scale comes from the whole batch where the driver wrote it, else from this
        microbatch, whose mean then counts by its share of the batch.
        """
        if self.cfg.positive_example_nll_weight == 0 or "rewards" not in data:
            return tokens.current_BT.new_zeros(())
        positive_BT = tokens.mask_BT * (data["rewards"] > 0).to(tokens.mask_BT.dtype)[:, None]
        own_count = tokens.mask_BT.sum() if self.cfg.token_level_loss else tokens.sample_mask_B.sum()
        scale_BT = own_count / (positive_BT.sum() + EPSILON)
        if "positive_nll_scale" in data:
            scale_BT = data["positive_nll_scale"].to(tokens.mask_BT.dtype)[:, None]
        count = counts[1] if self.cfg.token_level_loss else counts[0]
        return masked_mean(-tokens.current_BT * scale_BT, positive_BT, global_normalization_factor=count)

    def _reduce(self, values_BT: torch.Tensor, tokens: _Tokens, counts: tuple[Count, Count]) -> torch.Tensor:
        if self.cfg.token_level_loss:
            return masked_mean(values_BT, tokens.mask_BT, global_normalization_factor=counts[1])
        return sequence_mean(values_BT, tokens.mask_BT, tokens.sample_mask_B, counts[0])

    @torch.no_grad()
    def _importance_metrics(
        self, weights_BT: torch.Tensor, outside: torch.Tensor, tokens: _Tokens, counts: tuple[Count, Count]
    ) -> LossMetrics:
        def mean(values: torch.Tensor, normalizer: MetricNormalizer) -> torch.Tensor:
            if normalizer is MetricNormalizer.TOKENS:
                return masked_mean(values, tokens.mask_BT, global_normalization_factor=counts[1])
            per_row_B = values[:, 0] if values.ndim == 2 else values
            return masked_mean(per_row_B, tokens.sample_mask_B, global_normalization_factor=counts[0])

        values = {"sampling_importance_ratio": weights_BT, "is_oob_ratio": outside}
        return {name: mean(value, self.metric_normalizations[name]) for name, value in values.items()}


def positive_nll_scale(
    rewards_B: torch.Tensor,
    valid_tokens_B: torch.Tensor,
    sample_mask_B: torch.Tensor,
    *,
    token_level_loss: bool,
) -> torch.Tensor:
    """The column `positive_nll_scale` [B] of a global batch, which makes the positive-example term the mean over all of
    it however it is cut.

    Args:
        valid_tokens_B: trained tokens of each row.
        sample_mask_B: 0 for rows without loss.
        token_level_loss: `loss_fn.token_level_loss`.

    Returns, for each row, the count that divides the gradient of the batch over the tokens of its positive rows.
    """
    tokens_B = (valid_tokens_B * sample_mask_B).double()
    count = tokens_B.sum() if token_level_loss else sample_mask_B.double().sum()
    positive = torch.where(rewards_B > 0, tokens_B, 0).sum()
    return (count / (positive + EPSILON)).repeat(len(rewards_B))


def _drop_filtered_out(mask_BT: torch.Tensor, current_BT: torch.Tensor, previous_BT: torch.Tensor) -> torch.Tensor:
    """Without tokens that the sampling filters now rule out: their log-probability is minus infinity and says nothing
    of the policy.
    """
    kept_BT = torch.isfinite(current_BT) & torch.isfinite(previous_BT)
    dropped = int((~kept_BT & (mask_BT != 0)).sum())
    if dropped:
        logger.warning(
            "tokens_outside_sampling_filter=%d: masked out of the loss (the training engine's top-k/top-p "
            "excludes what was sampled)",
            dropped,
        )
    return mask_BT * kept_BT


@torch.no_grad()
def agreement_metrics(
    current_BT: torch.Tensor,
    previous_BT: torch.Tensor,
    generation_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    global_valid_toks: Count,
    kl_type: KLType = "k3",
) -> LossMetrics:
    """Distances between the training engine (o), the generating engine (g) and the current policy (c), as means over
    trained tokens.

    `token_mult_prob_error` is the mean of exp|g - o|: 1 when both engines agree. Both KL errors take the estimator
    `kl_type`, of the loss. `approx_entropy` is -E[exp(c - g) c],
    the entropy of the current policy estimated from tokens of the generating one.
    """

    def mean(values_BT: torch.Tensor) -> torch.Tensor:
        return masked_mean(values_BT, mask_BT, global_normalization_factor=global_valid_toks)

    return {
        "token_mult_prob_error": mean(bounded_exp((generation_BT - previous_BT).abs())),
        "gen_kl_error": mean(calculate_kl(generation_BT, previous_BT, kl_type, None, None)),
        "policy_kl_error": mean(calculate_kl(previous_BT, generation_BT, kl_type, None, None)),
        "js_divergence_error": mean(jensen_shannon(previous_BT, generation_BT)),
        "approx_entropy": -mean(bounded_exp(current_BT - generation_BT) * current_BT),
    }


def _mask_metrics(data: Mapping[str, torch.Tensor], mask_BT: torch.Tensor, global_valid_toks: Count) -> LossMetrics:
    if "sampling_mask_counts" not in data:
        return {}
    recorded_BT = (data["sampling_mask_counts"][:, 1:] > 0).to(mask_BT.dtype)
    return {"sampling_mask_share": masked_mean(recorded_BT, mask_BT, global_normalization_factor=global_valid_toks)}


@torch.no_grad()
def ratio_metrics(
    ratio_BT: torch.Tensor, clamped_BT: torch.Tensor, mask_BT: torch.Tensor, global_valid_toks: Count
) -> LossMetrics:
    """Mean, smallest and largest probability ratio of trained tokens, before and after clipping."""
    metrics: LossMetrics = {}
    for name, values_BT in (("probs_ratio", ratio_BT), ("probs_ratio_clamped", clamped_BT)):
        metrics[name] = masked_mean(values_BT, mask_BT, global_normalization_factor=global_valid_toks)
        metrics[f"{name}_min"] = torch.where(mask_BT != 0, values_BT, torch.inf).amin()
        metrics[f"{name}_max"] = torch.where(mask_BT != 0, values_BT, -torch.inf).amax()
    return metrics
