"""Differences from NeMo-RL on purpose that a run may be touched by: for each row of docs/from_nemo_rl.md, which
configurations it touches and the few words that their start says of it.

Knows configurations only. Rows about data, functions and files have no entry: they are said where those are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nemo_rl.config.env import MathEnvConfig
from nemo_rl.config.evaluation import EvalMasterConfig
from nemo_rl.config.master import MasterConfig, RootConfig, SFTMasterConfig
from nemo_rl.config.rules import caution

_Config = RootConfig | EvalMasterConfig


@dataclass(frozen=True)
class DifferenceRow:
    """A row of the page."""

    what: str  # as the page names it
    short: str  # line at a run's start
    touches: Callable[[_Config], bool]


def _environments(config: _Config) -> set[str]:
    """Names of the environments that judge."""
    if isinstance(config, EvalMasterConfig):
        return {config.data.env_name}
    if not isinstance(config, MasterConfig) or config.distils:
        return set()
    return {entry.env_name for entry in [*config.data.train, *(config.data.validation or [])]}


def _judges(config: _Config) -> set[str]:
    """Names of the verifiers of mathematics and of choices."""
    if not isinstance(config, (MasterConfig, EvalMasterConfig)):
        return set()
    sections = [config.env.of(name) or MathEnvConfig() for name in _environments(config) & {"math", "math_default"}]
    return {
        section.math_verify_impl if section.verifier_type == "math" else section.verifier_type
        for section in sections
        if isinstance(section, MathEnvConfig)
    }


def _predicts_by_sequences(config: _Config) -> bool:
    if not isinstance(config, MasterConfig) or config.loss_fn.token_level_loss:
        return False
    megatron = config.policy.megatron_cfg
    return megatron.enabled and megatron.mtp_num_layers > 0


def _compares_groups(config: _Config) -> bool:
    return isinstance(config, MasterConfig) and not config.distils and config.grpo.num_generations_per_prompt > 1


def _ranks_its_last_step(config: _Config) -> bool:
    if not isinstance(config, (MasterConfig, SFTMasterConfig)):
        return False
    saved = config.checkpointing
    steps = (config.sft if isinstance(config, SFTMasterConfig) else config.grpo).max_num_steps
    extra = saved.ft_save_period is not None or saved.ft_keep_latest_k is not None
    return saved.enabled and saved.keep_top_k is not None and not extra and steps % saved.save_period != 0


DIFFERENCES = (
    DifferenceRow(
        "rewards of samples that the environment flags (`mask_sample`, `invalid_tool_call`) or whose prompt was cut",
        "rewards of flagged samples are in no baseline",
        lambda config: (
            isinstance(config, MasterConfig)
            and (config.grpo.should_mask_flagged_samples or config.grpo.invalid_tool_call_strategy is not None)
        ),
    ),
    DifferenceRow(
        "the loss of multi-token prediction (`mtp_num_layers`) beside a sequence-level loss",
        "the loss of multi-token prediction is a mean over sequences",
        _predicts_by_sequences,
    ),
    DifferenceRow("groups of a step", "equal prompts of two rows are two groups", _compares_groups),
    DifferenceRow(
        "the last observation of an episode that ended, where it is longer than the room in "
        "`max_total_sequence_length`",
        "a last observation that is cut does not make a sample truncated",
        lambda config: isinstance(config, MasterConfig) and config.grpo.max_rollout_turns > 1,
    ),
    DifferenceRow(
        "`dapo_math_verify` and the choices",
        "answers are read as docs/evaluation.md says",
        lambda config: bool(_judges(config) - {"hf_math_verify"}),
    ),
    DifferenceRow(
        "`hf_math_verify`: a `%` without the backslash that LaTeX wants",
        "`%` is `\\%`",
        lambda config: "hf_math_verify" in _judges(config),
    ),
    DifferenceRow(
        "`hf_math_verify`: numbers below 1, and an interval answered by inequalities",
        "small numbers are compared by their first digits, and intervals with inequalities",
        lambda config: "hf_math_verify" in _judges(config),
    ),
    DifferenceRow(
        "a whole number as an expected answer that pandas has written as `7.0`",
        "an expected answer 7.0 is 7",
        lambda config: bool(_environments(config) - {"code_jaccard"}),
    ),
    DifferenceRow(
        "which checkpoints `keep_top_k` ranks without `ft_save_period` and `ft_keep_latest_k`",
        "keep_top_k ranks the last step too",
        _ranks_its_last_step,
    ),
    DifferenceRow(
        "`env.code`: what a cell without a value shows, and its reward",
        "a cell without a value shows what it printed",
        lambda config: "code" in _environments(config),
    ),
    DifferenceRow(
        "`env.code_jaccard`: lengths",
        "code_jaccard's lengths are characters",
        lambda config: "code_jaccard" in _environments(config),
    ),
    DifferenceRow(
        "`env.sliding_puzzle`: wording, `view`, rows and columns",
        "the puzzle's words are our own",
        lambda config: "sliding_puzzle" in _environments(config),
    ),
)


@caution
def differences_that_touch_the_run(config: RootConfig | EvalMasterConfig) -> Iterator[str]:
    if touched := [difference.short for difference in DIFFERENCES if difference.touches(config)]:
        yield f"other than in NeMo-RL (docs/from_nemo_rl.md): {'; '.join(touched)}"
