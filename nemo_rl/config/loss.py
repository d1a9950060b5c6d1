"""Keys of `loss_fn.*`: the clipped policy-gradient loss and its variants.

The formulas are in `nemo_rl.loss`; this file names their switches only. Which switches exclude each other is decided in `rules.py`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat

from nemo_rl.config.section import Section


class ClippedPGLossConfig(Section):
    """`loss_fn.*`."""

    loss_class: str | None = Field(None, alias="class", description="Dotted path of a loss of your own, built with this section; null: the clipped loss.")
    reference_policy_kl_penalty: NonNegativeFloat = Field(0.01, description="Weight of the KL term to the reference policy; 0 loads no reference model.")
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = Field("k3", description="KL estimator (http://joschu.net/blog/kl-approx.html).")
    kl_input_clamp_value: float | None = Field(20.0, description="Clamp on the log-ratio before the estimator; null does not clamp.")
    kl_output_clamp_value: float | None = Field(10.0, description="Clamp on the KL of a token; null does not clamp.")
    ratio_clip_min: NonNegativeFloat = Field(0.2, description="The ratio is clipped below at 1 - this.")
    ratio_clip_max: NonNegativeFloat = Field(0.2, description="The ratio is clipped above at 1 + this.")
    ratio_clip_c: float | None = Field(None, gt=1, description="Dual clip: bound -A*c for negative advantages; null is off, usual is 3.")
    use_on_policy_kl_approximation: bool = Field(False, description="Weigh the KL by the ratio of the current to the generating policy.")
    use_kl_in_reward: bool = Field(False, description="Subtract the KL from the reward instead of adding it to the loss (reinforce_plus_plus).")
    use_importance_sampling_correction: bool = Field(False, description="Weigh tokens by training over generation probability.")
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = Field(None, description="How importance weights are truncated.")
    truncated_importance_sampling_ratio: float | None = Field(None, gt=0, description="Upper bound of the importance weight; null does not truncate.")
    truncated_importance_sampling_ratio_min: float | None = Field(None, ge=0, description="Lower bound; mandatory for icepop and seq-mask-tis.")
    sequence_level_importance_ratios: bool = Field(False, description="One ratio per sequence (GSPO); needs token_level_loss false.")
    token_level_loss: bool = Field(True, description="Average over all tokens of the batch; false averages each sequence first.")
    force_on_policy_ratio: bool = Field(False, description="Take the ratio as 1; needs one optimizer step per RL step.")
    use_cispo: bool = Field(False, description="CISPO: clipped, detached ratio times the log-probability (https://arxiv.org/abs/2506.13585).")
    disable_ppo_ratio: bool = Field(False, description="REINFORCE: no ratio at all.")
    positive_example_nll_weight: NonNegativeFloat = Field(0.0, description="Weight of VAPO's negative log-likelihood on rewarded samples.")
