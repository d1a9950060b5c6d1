"""From rewards to per-token advantages: reward scaling and length shaping, group baselines, advantage estimators, token
stages; and a warning about steps that teach nothing (equal rewards in every group, or no trained token).

Invariants: a stage sees only its own rows, and the driver reduces what needs all rows (whitening); the deviation of
equal rewards is exactly 0, because dynamic sampling drops groups by that test; inputs are never changed in place, so
the raw rewards can still be logged; a series of useless steps is reported once it is a few steps long, and again each
time it has doubled.

Shapes: B samples, S tokens of a padded row, P prompts, G samples of the largest group.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from nemo_rl.config import AdvEstimatorConfig, ClippedPGLossConfig, GRPOConfig, RewardScalingConfig, RewardShapingConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.rollouts import RolloutWatch
from nemo_rl.experience.store import StageOutput, TokenStage
from nemo_rl.loss.clipped_pg import KLType, calculate_kl


@dataclass(frozen=True)
class GroupStatistics:
    """Per sample [B]."""

    baseline_B: torch.Tensor  # what its reward is compared with
    std_B: torch.Tensor  # standard deviation of the rewards behind that baseline
    group_std_B: torch.Tensor  # that of all valid rewards of its group, the sample's own included


def group_ids(prompts: torch.Tensor) -> torch.Tensor:
    """Group of each sample: rows with equal prompts form one. `prompts`: [B, L] padded prompt tokens, or [B] any id
    that samples of one prompt share. Returns [B] in `0 .. P-1`. Two equal prompts in one step share a group, as in
    NeMo-RL.
    """
    return torch.unique(prompts, dim=0, return_inverse=True)[1]


def group_statistics(
    rewards_B: torch.Tensor, group_ids_B: torch.Tensor, valid_B: torch.Tensor, *, leave_one_out: bool
) -> GroupStatistics:
    """Baseline and spread of each sample's group.

    The baseline is the mean of the group's valid rewards, or, leaving one out, of those of the other samples; the
    standard deviation is the unbiased one of the same set, and 0 where that set has fewer than two rewards. A sample
    with at most one valid reward in its group is its own baseline.

    Leaving one out makes the deviation a sample's own, as in NeMo-RL: the one odd sample of a group has deviation 0
    (the others are equal), and with two samples per prompt every deviation is 0. `group_std_B` says whether a group
    teaches anything.

    Args:
        group_ids_B: group of each sample, from 0.
        valid_B: 0 for samples outside the statistics.
        leave_one_out: leave each sample out of its own baseline.
    """
    if not len(rewards_B):
        return GroupStatistics(rewards_B.float(), rewards_B.float(), rewards_B.float())
    slots = _slots(group_ids_B)
    groups, width = int(group_ids_B.max()) + 1, int(slots.max()) + 1
    rewards_PG = torch.zeros(groups, width, dtype=torch.float64)
    valid_PG = torch.zeros(groups, width, dtype=torch.bool)
    rewards_PG[group_ids_B, slots] = rewards_B.double()
    valid_PG[group_ids_B, slots] = valid_B.bool()

    all_PGG = valid_PG[:, None, :].expand(groups, width, width)
    behind_PGG = all_PGG & ~torch.eye(width, dtype=torch.bool) if leave_one_out else all_PGG
    mean_PG, std_PG = _mean_and_deviation(rewards_PG, behind_PGG)
    _, group_std_PG = _mean_and_deviation(rewards_PG, all_PGG)
    alone_PG = (valid_PG.sum(-1) <= 1)[:, None] | (behind_PGG.sum(-1) == 0)
    dtype = rewards_B.dtype if rewards_B.dtype.is_floating_point else torch.float32
    return GroupStatistics(
        *(
            column_PG[group_ids_B, slots].to(dtype)
            for column_PG in (
                torch.where(alone_PG, rewards_PG, mean_PG),
                torch.where(alone_PG, 0, std_PG),
                group_std_PG,
            )
        )
    )


def _mean_and_deviation(rewards_PG: torch.Tensor, behind_PGG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of each sample's baseline set; the deviation is 0 for fewer than two rewards."""
    count_PG = behind_PGG.sum(-1)
    rewards_PGG = rewards_PG[:, None, :].expand(behind_PGG.shape)
    mean_PG = torch.where(behind_PGG, rewards_PGG, 0).sum(-1) / count_PG
    squares_PG = torch.where(behind_PGG, (rewards_PGG - mean_PG[..., None]).square(), 0).sum(-1)
    high_PG = torch.where(behind_PGG, rewards_PGG, -torch.inf).amax(-1)
    low_PG = torch.where(behind_PGG, rewards_PGG, torch.inf).amin(-1)
    # Rounding of the mean gives equal rewards a tiny variance; their range is exactly 0.
    return mean_PG, torch.where((count_PG > 1) & (high_PG > low_PG), (squares_PG / (count_PG - 1)).sqrt(), 0)


def calculate_baseline_and_std_per_prompt(
    prompts: torch.Tensor, rewards: torch.Tensor, valid_mask: torch.Tensor, leave_one_out_baseline: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """NeMo-RL's signature of `group_statistics`: `prompts` [B, L] tokens, `rewards` [B], `valid_mask` [B]; returns
    baseline [B] and standard deviation [B].
    """
    statistics = group_statistics(
        rewards.cpu(), group_ids(prompts).cpu(), valid_mask.cpu(), leave_one_out=leave_one_out_baseline
    )
    return statistics.baseline_B.to(rewards.device), statistics.std_B.to(rewards.device)


def _slots(group_ids_B: torch.Tensor) -> torch.Tensor:
    """Position of each sample within its group."""
    order = torch.argsort(group_ids_B, stable=True)
    counts = torch.bincount(group_ids_B)
    starts = torch.cumsum(counts, 0) - counts
    slots = torch.empty_like(order)
    slots[order] = torch.arange(len(order)) - starts[group_ids_B[order]]
    return slots


ApplyStage = Callable[
    [TokenStage], Mapping[str, torch.Tensor]
]  # runs a stage where the rows are and returns its `rows`

STD_EPSILON = 1e-6
WHITENING_VARIANCE_FLOOR = 1e-8


def row_advantages(
    cfg: AdvEstimatorConfig,
    rewards_B: torch.Tensor,
    components: Mapping[str, torch.Tensor],
    group_ids_B: torch.Tensor,
    valid_B: torch.Tensor,
) -> torch.Tensor:
    """What each sample is worth against its group [B]; zeros for `opd`, whose advantages come from tokens alone.

    - `grpo` (https://arxiv.org/abs/2402.03300): reward minus baseline, over the deviation.
    - `gdpo` (https://arxiv.org/abs/2601.05242): the same per `reward/<name>` component, weighted and summed, then
      standardised over the batch.
    - `reinforce_plus_plus` (https://arxiv.org/abs/2501.03262): reward minus the plain group mean, or the reward.

    Args:
        components: `reward/<name>` columns, for gdpo.
        valid_B: 0 for samples outside the baselines.

    Raises ValueError: gdpo without two components, or with weights that do not match them.
    """
    if cfg.name == "opd":
        return torch.zeros_like(rewards_B)
    if cfg.name == "gdpo":
        return _gdpo(cfg, components, group_ids_B, valid_B)
    if cfg.name == "reinforce_plus_plus":
        return (
            rewards_B - group_statistics(rewards_B, group_ids_B, valid_B, leave_one_out=False).baseline_B
            if cfg.minus_baseline
            else rewards_B
        )
    statistics = group_statistics(rewards_B, group_ids_B, valid_B, leave_one_out=cfg.use_leave_one_out_baseline)
    return normalized_advantages(cfg, rewards_B, statistics)


def normalized_advantages(
    cfg: AdvEstimatorConfig, rewards_B: torch.Tensor, statistics: GroupStatistics
) -> torch.Tensor:
    """Reward minus baseline; with `normalize_rewards` divided by the deviation plus 1e-6, where that is above 0.

    The odd one of a group that it is left out of has deviation 0. `zero_deviation` leaves its advantage in the unit of
    the rewards, as NeMo-RL does, or divides it by the deviation of its whole group.
    """
    advantages_B = rewards_B - statistics.baseline_B
    if not cfg.normalize_rewards:
        return advantages_B
    std_B = statistics.std_B
    if cfg.zero_deviation == "group":
        std_B = torch.where(std_B > 0, std_B, statistics.group_std_B)
    return torch.where(std_B > 0, advantages_B / (std_B + STD_EPSILON), advantages_B)


def _gdpo(
    cfg: AdvEstimatorConfig, components: Mapping[str, torch.Tensor], group_ids_B: torch.Tensor, valid_B: torch.Tensor
) -> torch.Tensor:
    names = sorted(name for name in components if name.startswith(COMPONENT_PREFIX))
    if len(names) < 2:
        raise ValueError(
            "grpo.adv_estimator.name=gdpo needs at least two reward/<name> components from the environment, "
            f"got {names}"
        )
    total_B = torch.zeros(len(group_ids_B))
    for name, weight in zip(names, _component_weights(cfg, names), strict=True):
        statistics = group_statistics(
            components[name], group_ids_B, valid_B, leave_one_out=cfg.use_leave_one_out_baseline
        )
        total_B = total_B + weight * normalized_advantages(cfg, components[name], statistics)
    counted = total_B[valid_B.bool()]
    centred_B = total_B - (counted.mean() if len(counted) else 0)
    std = counted.std() if len(counted) > 1 else total_B.new_zeros(())
    return centred_B / std if std > 0 else centred_B


def _component_weights(cfg: AdvEstimatorConfig, names: Sequence[str]) -> list[float]:
    weights = cfg.reward_weights
    if weights is None:
        return [1.0] * len(names)
    if isinstance(weights, dict):
        by_name = {
            name if name.startswith(COMPONENT_PREFIX) else COMPONENT_PREFIX + name: weight
            for name, weight in weights.items()
        }
        if set(by_name) != set(names):
            raise ValueError(
                f"grpo.adv_estimator.reward_weights names {sorted(by_name)}, the environment gives {list(names)}"
            )
        return [by_name[name] for name in names]
    if len(weights) != len(names):
        raise ValueError(
            f"grpo.adv_estimator.reward_weights has {len(weights)} weights for the components {list(names)}"
        )
    return weights


def compute_advantages(apply: ApplyStage, cfg: GRPOConfig, loss_cfg: ClippedPGLossConfig) -> dict[str, float]:
    """Write the column `advantages` [B, S] and return its metrics.

    Args:
        apply: runs a stage on the batch and returns its rows; the batch holds `row_advantages` [B], `token_mask` [B, S]
            and `sample_mask` [B], and the log-probabilities the estimator needs.
        cfg: `adv_estimator` and the clamps are read.
        loss_cfg: the KL switches are read, for `use_kl_in_reward`.
    """
    clip = {"clip_low": cfg.advantage_clip_low, "clip_high": cfg.advantage_clip_high}
    always = ("token_mask", "sample_mask")
    name = cfg.adv_estimator.name
    if name == "opd":
        rows = apply(
            TokenStage(distillation_advantages, ("teacher_logprobs", "prev_logprobs", *always), ("advantages",), clip)
        )
        return advantage_metrics(rows) | distillation_metrics(rows)
    elif name == "reinforce_plus_plus":
        unwhitened = apply(penalized_advantages_stage(loss_cfg))
        mean, variance = whitening_statistics(unwhitened)
        rows = apply(
            TokenStage(
                whitened_advantages,
                ("unwhitened_advantages", *always),
                ("advantages",),
                {"mean": mean, "variance": variance, **clip},
            )
        )
    else:
        rows = apply(TokenStage(broadcast_advantages, ("row_advantages", *always), ("advantages",), clip))
    return advantage_metrics(rows)


def broadcast_advantages(
    columns: BatchedDataDict, *, clip_low: float | None = None, clip_high: float | None = None
) -> StageOutput:
    """Every token of a row gets the row's advantage."""
    advantages_BS = columns["row_advantages"][:, None].expand(columns["token_mask"].shape)
    return _finish(columns, advantages_BS, clip_low, clip_high)


def distillation_advantages(
    columns: BatchedDataDict, *, clip_low: float | None = None, clip_high: float | None = None
) -> StageOutput:
    """On-policy distillation: teacher minus student log-probability of each trained token."""
    gap_BS = columns["teacher_logprobs"] - columns["prev_logprobs"]
    gap_BS = torch.where(_trained(columns) != 0, gap_BS, 0).detach()
    output = _finish(columns, gap_BS, clip_low, clip_high)
    output.rows["gap_sum"] = gap_BS.double().sum(-1)
    return output


def distillation_metrics(rows: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Mean gap over trained tokens, from the sums of `distillation_advantages`; 0 when there are none."""
    gap = rows["gap_sum"].sum().item() / max(1, int(rows["count"].sum()))
    return {"on_policy_distillation/teacher_student_logprob_gap_mean": gap}


def penalized_advantages_stage(loss_cfg: ClippedPGLossConfig) -> TokenStage:
    """The first of REINFORCE++'s two stages, with the KL penalty in it when `use_kl_in_reward`."""
    if not loss_cfg.use_kl_in_reward or loss_cfg.reference_policy_kl_penalty == 0:
        return TokenStage(
            penalized_advantages, ("row_advantages", "token_mask", "sample_mask"), ("unwhitened_advantages",)
        )
    params = {
        "kl_penalty": loss_cfg.reference_policy_kl_penalty,
        "kl_type": loss_cfg.reference_policy_kl_type,
        "input_clamp": loss_cfg.kl_input_clamp_value,
        "output_clamp": loss_cfg.kl_output_clamp_value,
    }
    reads = ("row_advantages", "token_mask", "sample_mask", "prev_logprobs", "reference_policy_logprobs")
    return TokenStage(penalized_advantages, reads, ("unwhitened_advantages",), params)


def penalized_advantages(
    columns: BatchedDataDict,
    *,
    kl_penalty: float = 0.0,
    kl_type: KLType = "k3",
    input_clamp: float | None = None,
    output_clamp: float | None = None,
) -> StageOutput:
    """Row advantages per token, minus the penalty times KL(training policy || reference); with the sums that whitening
    needs.
    """
    mask_BS = _trained(columns)
    advantages_BS = columns["row_advantages"][:, None].expand(mask_BS.shape)
    if kl_penalty:
        policy_BS, reference_BS = (
            torch.where(mask_BS != 0, columns[name], 0) for name in ("prev_logprobs", "reference_policy_logprobs")
        )
        advantages_BS = advantages_BS - kl_penalty * calculate_kl(
            policy_BS, reference_BS, kl_type, input_clamp, output_clamp
        )
    weighted_BS = (advantages_BS * mask_BS).double()
    rows = {
        "sum": weighted_BS.sum(-1),
        "sum_of_squares": (weighted_BS * advantages_BS.double()).sum(-1),
        "count": mask_BS.double().sum(-1),
    }
    return StageOutput({"unwhitened_advantages": advantages_BS.contiguous()}, rows)


def whitening_statistics(rows: Mapping[str, torch.Tensor]) -> tuple[float, float]:
    """Mean and variance over all trained tokens, from the sums of `penalized_advantages`."""
    count = rows["count"].sum().item()
    if count == 0:
        return 0.0, 1.0
    mean = rows["sum"].sum().item() / count
    return mean, max(rows["sum_of_squares"].sum().item() / count - mean**2, 0.0)


def whitened_advantages(
    columns: BatchedDataDict,
    *,
    mean: float,
    variance: float,
    clip_low: float | None = None,
    clip_high: float | None = None,
) -> StageOutput:
    """Advantages with the batch's mean taken off and divided by its deviation (variance at least 1e-8); 0 where nothing
    is trained.
    """
    white_BS = (columns["unwhitened_advantages"] - mean) / math.sqrt(max(variance, WHITENING_VARIANCE_FLOOR))
    return _finish(columns, torch.where(_trained(columns) != 0, white_BS, 0), clip_low, clip_high)


def _trained(columns: BatchedDataDict) -> torch.Tensor:
    return columns["token_mask"] * columns["sample_mask"][:, None]


def _finish(
    columns: BatchedDataDict, advantages_BS: torch.Tensor, clip_low: float | None, clip_high: float | None
) -> StageOutput:
    if clip_low is not None or clip_high is not None:
        advantages_BS = advantages_BS.clamp(clip_low, clip_high)
    trained_BS = _trained(columns) != 0
    rows = {
        "sum": torch.where(trained_BS, advantages_BS, 0).double().sum(-1),
        "count": trained_BS.sum(-1),
        "min": torch.where(trained_BS, advantages_BS, torch.inf).amin(-1),
        "max": torch.where(trained_BS, advantages_BS, -torch.inf).amax(-1),
    }
    return StageOutput({"advantages": advantages_BS.contiguous()}, rows)


def advantage_metrics(rows: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """`advantages/{mean,max,min,sum}` over trained tokens; zeros when there are none."""
    count = int(rows["count"].sum())
    if count == 0:
        return dict.fromkeys(("advantages/mean", "advantages/max", "advantages/min", "advantages/sum"), 0.0)
    total = rows["sum"].sum().item()
    return {
        "advantages/mean": total / count,
        "advantages/max": rows["max"].max().item(),
        "advantages/min": rows["min"].min().item(),
        "advantages/sum": total,
    }


logger = logging.getLogger(__name__)

COMPONENT_PREFIX = "reward/"
_SPELL = 4


@dataclass(frozen=True)
class ProcessedRewards:
    """Rewards of the samples [B] after each stage."""

    rewards_B: torch.Tensor
    unshaped_B: torch.Tensor  # scaled but not shaped; input of dynamic sampling
    components: dict[str, torch.Tensor]  # scaled `reward/<name>` columns


def process_rewards(
    rewards_B: torch.Tensor,
    components: Mapping[str, torch.Tensor],
    response_lengths_B: torch.Tensor,
    truncated_B: torch.Tensor,
    cfg: GRPOConfig,
) -> ProcessedRewards:
    """Applies scaling, then shaping, where configured.

    Args:
        rewards_B: total reward of each sample.
        components: `reward/<name>` columns, if the environment gives several.
        response_lengths_B: tokens of each sample's first assistant message.
        truncated_B: whether the response was cut off.
        cfg: `reward_scaling` and `reward_shaping` are read.
    """
    scaled = {
        "total": rewards_B,
        **{name: column for name, column in components.items() if name.startswith(COMPONENT_PREFIX)},
    }
    if cfg.reward_scaling.enabled:
        scaled = {name: scale_rewards(column, cfg.reward_scaling) for name, column in scaled.items()}
    unshaped_B = scaled.pop("total")
    shaped_B = (
        shape_rewards(unshaped_B, response_lengths_B, truncated_B, cfg.reward_shaping)
        if cfg.reward_shaping.enabled
        else unshaped_B
    )
    return ProcessedRewards(shaped_B, unshaped_B, scaled)


def scale_rewards(rewards_B: torch.Tensor, cfg: RewardScalingConfig) -> torch.Tensor:
    """Clamps to the source range, then maps linearly onto the target range. Raises ValueError: empty source range."""
    source, target = cfg.source_max - cfg.source_min, cfg.target_max - cfg.target_min
    if source <= 0:
        raise ValueError(f"grpo.reward_scaling.source_max={cfg.source_max} must be above source_min={cfg.source_min}")
    outside = int(((rewards_B < cfg.source_min) | (rewards_B > cfg.source_max)).sum())
    if outside:
        logger.warning(
            "rewards_clamped=%d of=%d source_min=%g source_max=%g",
            outside,
            len(rewards_B),
            cfg.source_min,
            cfg.source_max,
        )
    return cfg.target_min + (rewards_B.clamp(cfg.source_min, cfg.source_max) - cfg.source_min) / source * target


def shape_rewards(
    rewards_B: torch.Tensor, response_lengths_B: torch.Tensor, truncated_B: torch.Tensor, cfg: RewardShapingConfig
) -> torch.Tensor:
    """Penalises responses near the length limit (DAPO, https://arxiv.org/abs/2503.14476, eq. 13).

    `r + min(-(length - (max_response_length - buffer)) / buffer * penalty, 0)`: no floor, so a response beyond
    `max_response_length` loses more than the penalty, as in NeMo-RL. With `stop_properly_penalty_coef`, truncated
    rewards are multiplied by it instead and the overlong keys are ignored.

    Args:
        response_lengths_B: tokens of each sample's first assistant message.
        truncated_B: whether the response was cut off.

    Raises ValueError: the buffer is empty, or longer than `max_response_length`.
    """
    if cfg.stop_properly_penalty_coef is not None:
        return torch.where(truncated_B.bool(), rewards_B * cfg.stop_properly_penalty_coef, rewards_B)
    buffer = cfg.overlong_buffer_length
    if not 0 < buffer <= cfg.max_response_length:
        raise ValueError(
            f"grpo.reward_shaping.overlong_buffer_length={buffer} must lie in 1 .. "
            f"max_response_length={cfg.max_response_length}"
        )
    excess_B = response_lengths_B.to(rewards_B.dtype) - (cfg.max_response_length - buffer)
    return rewards_B + (-excess_B / buffer * cfg.overlong_buffer_penalty).clamp(max=0)


class RewardWatch:
    """Watches the rewards of a run; `rollouts` watches how its samples end."""

    def __init__(self) -> None:
        self.rollouts = RolloutWatch()
        self._equal = 0
        self._say_at = _SPELL

    def observe(self, step: int, rows: Mapping[str, torch.Tensor], trained_tokens: float) -> str | None:
        """A warning about the finished step, or None.

        Args:
            step: Its number, from 1.
            rows: `reward`, `prompt_number` (equal for the samples of a group) and `valid` (whether the reward counts),
                one value per sample.
            trained_tokens: Number of tokens in the loss.
        """
        if trained_tokens == 0:
            return f"step {step} trained no token, so the weights did not change: every sample was masked or cut off"
        rewards = rows["reward"][rows["valid"]].double()
        if not _equal_within_groups(rewards, rows["prompt_number"][rows["valid"]]):
            self._equal, self._say_at = 0, _SPELL
            return None
        self._equal += 1
        if self._equal < self._say_at:
            return None
        self._say_at *= 2
        low, high = float(rewards.min()), float(rewards.max())
        values = f"{low:g}" if low == high else f"between {low:g} and {high:g}"
        return (
            f"step {step}: for {self._equal} steps all samples of a prompt have had the same reward (now {values}), so "
            "there is nothing to learn from; are the prompts too hard or too easy, does the environment judge answers "
            f"(samples/train_data_step{step}.jsonl), is grpo.num_generations_per_prompt large enough?"
        )


def _equal_within_groups(rewards_B: torch.Tensor, groups_B: torch.Tensor) -> bool:
    _, index_B = groups_B.unique(return_inverse=True)
    first_G = torch.full((int(index_B.max()) + 1,), torch.nan, dtype=rewards_B.dtype)
    first_G[index_B] = rewards_B
    return bool(torch.equal(first_G[index_B], rewards_B))
