"""Rules of metrics that are named in the configuration: what ranks checkpoints and what ends a run exists.

Validation's names are known wholly; training's depend on loss and environments, so that only a name close to a known one is refused.
Invariant: a name that a run measures is never refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nemo_rl.config.errors import did_you_mean
from nemo_rl.config.master import MasterConfig, RootConfig, SFTMasterConfig

GRPO_VALIDATION = ("accuracy", "avg_length", "pass_k")
SFT_VALIDATION = ("val_loss",)
_EVERY_STEP = ("loss", "grad_norm", "lr", "wd", "global_valid_seqs", "global_valid_toks", "num_valid_samples")
SFT_TRAINING = (*_EVERY_STEP, "num_unmasked_tokens")
GRPO_TRAINING = (
    *_EVERY_STEP,
    "reward",
    "filtered_reward",
    "baseline_reward/pct_0",
    "baseline_reward/pct_1",
    "baseline_reward/pct_mixed",
    "mean_prompt_length",
    "total_num_tokens",
    "kl_penalty",
    "approx_entropy",
    "probs_ratio",
    "probs_ratio_clamped",
    "token_mult_prob_error",
    "gen_kl_error",
    "policy_kl_error",
    "js_divergence_error",
    "sampling_importance_ratio",
    "is_oob_ratio",
    "positive_nll_loss",
    "mean_total_reward",
    "max_total_reward",
    "min_total_reward",
    "truncation_rate",
    "natural_termination_rate",
    "max_turns_reached_rate",
    "mean_gen_tokens_per_sample",
    "mean_total_tokens_per_sample",
    "avg_turns_per_sample",
)


def checkpoints_are_ranked_by_a_metric(config: RootConfig) -> Iterator[str]:
    name = config.checkpointing.metric_name
    if name is None:
        return
    kind, _, short = name.partition(":")
    if kind == "val":
        yield from _unknown_of_validation(config, f"checkpointing.metric_name: {name}", short, "val:")
        return
    known = SFT_TRAINING if isinstance(config, SFTMasterConfig) else GRPO_TRAINING
    near = did_you_mean(short, known)
    if short not in known and near:
        yield f"checkpointing.metric_name: {name}: training measures no {short!r}.{near} (train:<name>)"


def a_run_ends_by_a_metric(config: MasterConfig) -> Iterator[str]:
    name = config.grpo.stop_at_validation_metric
    if name is not None:
        short = name.removeprefix("val:").removeprefix("validation/")
        yield from _unknown_of_validation(config, f"grpo.stop_at_validation_metric: {name}", short, "")


def _unknown_of_validation(config: RootConfig, what: str, short: str, prefix: str) -> Iterator[str]:
    known = SFT_VALIDATION if isinstance(config, SFTMasterConfig) else GRPO_VALIDATION
    if short not in known and not (isinstance(config, MasterConfig) and short.startswith("accuracy/")):
        yield f"{what}: validation measures no {short!r}; it measures {', '.join(prefix + name for name in known)}"


SHARED_METRIC_RULES: tuple[Callable[[RootConfig], Iterator[str]], ...] = (checkpoints_are_ranked_by_a_metric,)
GRPO_METRIC_RULES: tuple[Callable[[MasterConfig], Iterator[str]], ...] = (a_run_ends_by_a_metric,)
