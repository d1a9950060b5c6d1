"""The stages between a rollout and the optimizer: rewards, masks, log-probabilities, advantages.

Each stage is a function of an `Experience`; its rows are in the driver, its tokens in a store. `whole_batch_stages`
lists the stages that need all groups of a step at once. Invariants: masks only remove samples; a sample without a
meaningful reward (`valid_samples`) counts in no reward statistic, while samples masked for other reasons (cut off, old
weights, engines that disagree) do; a sample of one weight version keeps all its tokens under every staleness policy.

Shapes: B samples, S tokens of a padded row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from nemo_rl.algorithms.grpo.advantages import (
    COMPONENT_PREFIX,
    ApplyStage,
    compute_advantages,
    group_ids,
    group_statistics,
    process_rewards,
    row_advantages,
)
from nemo_rl.config import ClippedPGLossConfig, GRPOConfig, RouterReplayConfig
from nemo_rl.data_plane.field_schema import TOPK_IDS, TOPK_LOGPROBS, columns_of_others, replayed_fields
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.rollouts import SampleOutcome
from nemo_rl.experience.store import ExperienceStore, StageOutput, TokenStage, joined_rows, sample_of_row, sample_starts
from nemo_rl.loss.clipped_pg import KLType, calculate_kl, positive_nll_scale
from nemo_rl.loss.interfaces import masked_mean
from nemo_rl.models.policy.interfaces import BatchHandle, PolicyInterface
from nemo_rl.utils.timer import Timer

if TYPE_CHECKING:
    from nemo_rl.utils.log_backends import Metrics


def overlong_filter(sample_mask_B: torch.Tensor, truncated_B: torch.Tensor) -> torch.Tensor:
    """`grpo.overlong_filtering`: masks truncated samples."""
    return torch.where(truncated_B.bool(), 0, sample_mask_B)


def mask_sample_filter(sample_mask_B: torch.Tensor, flagged_B: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    """Masks samples that the environment flagged; counts them in `num_mask_sample_filtered`."""
    newly = flagged_B.bool() & (sample_mask_B != 0)
    return torch.where(flagged_B.bool(), 0, sample_mask_B), {"num_mask_sample_filtered": float(newly.sum())}


def sequence_error_stage() -> TokenStage:
    """The stage behind `mask_by_sequence_error`; its row is `seq_mult_prob_error` [B], the mean over trained tokens of
    exp|g - o|.
    """
    return TokenStage(sequence_error, reads=("prev_logprobs", "generation_logprobs", "token_mask"))


def sequence_error(columns: BatchedDataDict) -> StageOutput:
    """Mean of exp|g - o| over the trained tokens of each row: 1 if both engines agree."""
    mask = columns["token_mask"][:, 1:]
    gap = torch.where(mask != 0, columns["generation_logprobs"][:, 1:] - columns["prev_logprobs"][:, 1:], 0)
    return StageOutput(columns={}, rows={"seq_mult_prob_error": masked_mean(gap.abs().exp(), mask, dim=-1)})


def mask_by_sequence_error(
    error_B: torch.Tensor, sample_mask_B: torch.Tensor, rewards_B: torch.Tensor, threshold: float | None
) -> tuple[torch.Tensor, dict[str, float]]:
    """`grpo.seq_logprob_error_threshold`: masks samples above it.

    Args:
        error_B: `seq_mult_prob_error` of the stage.
        sample_mask_B: 0 for samples that are already masked; they do not count in the metrics.
        rewards_B: rewards, 1 meaning correct.
        threshold: None measures without masking.

    Returns the new mask, and the metrics of the error before and after.
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
    """The metrics of `mask_by_sequence_error` as zeros, for steps that skip it."""
    none = torch.zeros(0)
    return mask_by_sequence_error(none, none, none, None)[1]


def _extent(name: str, values: torch.Tensor) -> dict[str, float]:
    if not len(values):
        return {f"{kind}_{name}": 0.0 for kind in ("max", "mean", "min")}
    return {
        f"max_{name}": values.max().item(),
        f"mean_{name}": values.mean().item(),
        f"min_{name}": values.min().item(),
    }


def positive_example_columns(
    apply: ApplyStage,
    rewards_B: torch.Tensor,
    sample_mask_B: torch.Tensor,
    loss_cfg: ClippedPGLossConfig,
    step_B: torch.Tensor,
) -> Mapping[str, torch.Tensor]:
    """The column `positive_nll_scale` [B]; empty if the loss has no such term.

    Args:
        apply: runs a stage on the batch, which holds `token_mask`.
        sample_mask_B: 0 for rows without loss.
        loss_cfg: `positive_example_nll_weight` and `token_level_loss` are read.
        step_B: number of each row's optimizer step.
    """
    if not loss_cfg.positive_example_nll_weight:
        return {}
    tokens_B = apply(TokenStage(trained_tokens, reads=("token_mask",)))["trained_tokens"]
    scale_B = torch.zeros(len(rewards_B), dtype=torch.float64)
    for step in step_B.unique().tolist():
        own_B = step_B == step
        scale_B[own_B] = positive_nll_scale(
            rewards_B[own_B], tokens_B[own_B], sample_mask_B[own_B], token_level_loss=loss_cfg.token_level_loss
        )
    return {"positive_nll_scale": scale_B}


def trained_tokens(columns: BatchedDataDict) -> StageOutput:
    """Number of tokens of each row in a next-token loss."""
    return StageOutput(columns={}, rows={"trained_tokens": columns["token_mask"][:, 1:].sum(-1)})


@dataclass
class Experience:
    """A batch on its way through the stages. `group_names`: identifier of each `prompt_number` in the run record; empty
    for the step's own groups.
    """

    handle: BatchHandle  # its token columns in the store
    rows: BatchedDataDict  # its small columns [B] in the driver
    samples: list[SampleOutcome] = field(default_factory=list)
    metrics: Metrics = field(default_factory=dict)  # besides those of its samples
    group_names: Mapping[int, str] = field(default_factory=dict)


def joined_experience(parts: Sequence[Experience], store: ExperienceStore) -> Experience:
    """Joins batches into one, in order. A single one is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    names = {number: name for part in parts for number, name in part.group_names.items()}
    return Experience(
        store.concat([part.handle for part in parts]),
        joined_rows([part.rows for part in parts]),
        [sample for part in parts for sample in part.samples],
        joined_metrics(parts),
        names,
    )


def joined_metrics(parts: Sequence[Experience]) -> dict[str, object]:
    """Joins metrics of parts by their names: extremes of extremes, sums of counts, averages by rows of the rest."""
    joined: dict[str, object] = {}
    for name in dict.fromkeys(name for part in parts for name in part.metrics):
        found = [(part.metrics[name], part.rows.size) for part in parts if name in part.metrics]
        values = [value for value, _ in found]
        if (extremum := _extremum(name)) is not None:
            joined[name] = extremum(values)
        elif name.startswith("num_") or name.endswith("/sum"):
            joined[name] = sum(values)
        else:
            joined[name] = sum(value * size for value, size in found) / sum(size for _, size in found)
    return joined


def _extremum(name: str) -> Callable[[Sequence[float]], float] | None:
    """How metrics join that are an extremum, such as `advantages/max`; a mean of maxima or a rate is none."""
    if name.endswith(("_rate", "/mean", "/p95", "/p99")):
        return None
    words = re.split("[/_]", name)
    return max if "max" in words else min if "min" in words else None


def run_stage(experience: Experience, store: ExperienceStore, stage: TokenStage) -> dict[str, torch.Tensor]:
    """Runs a token stage; returns its row scalars [B]."""
    experience.handle, rows = store.apply(experience.handle, stage)
    return rows


def valid_samples(rows: BatchedDataDict, cfg: GRPOConfig) -> torch.Tensor:
    """Which samples [B] have a reward that counts: all but prompts that were cut and samples that are masked because
    the environment flagged them.

    Truncated samples count, with `grpo.overlong_filtering` too: that is DAPO's rule.
    """
    valid_B = rows["sample_mask"] != 0
    if cfg.should_mask_flagged_samples:
        valid_B = valid_B & ~rows["mask_sample"].bool()
    if cfg.invalid_tool_call_strategy == "mask":
        valid_B = valid_B & ~rows["invalid_tool_call"].bool()
    return valid_B


def valid_rewards(rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The processed rewards that count, or all if none does."""
    return rows["reward"][rows["valid"]] if bool(rows["valid"].any()) else rows["reward"]


def score_rewards(rows: BatchedDataDict, cfg: GRPOConfig) -> None:
    """Scales and shapes rewards, in place. Adds `valid`, `group_id`, `baseline`, `std` (of the group), `row_advantages`
    and the processed rewards.

    A sample counts once in every statistic, however many rows it has: `valid` is False for its further branches, which
    otherwise have the values of its first row.
    """
    starts_B, sample_B = sample_starts(rows), sample_of_row(rows)
    scored = _scored_samples(rows.select_indices(starts_B.nonzero().flatten().tolist()), cfg)
    rows.update({name: column[sample_B] for name, column in scored.items()})
    rows["valid"] = rows["valid"] & starts_B


def _scored_samples(rows: BatchedDataDict, cfg: GRPOConfig) -> dict[str, torch.Tensor]:
    components = {name: column for name, column in rows.items() if name.startswith(COMPONENT_PREFIX)}
    rewards_B = rows["total_reward"]
    if cfg.invalid_tool_call_strategy == "zero_reward":
        invalid_B = rows["invalid_tool_call"].bool()
        rewards_B = rewards_B.masked_fill(invalid_B, 0)
        components = {name: column.masked_fill(invalid_B, 0) for name, column in components.items()}
    processed = process_rewards(rewards_B, components, rows["response_lengths"], rows["truncated"], cfg)
    groups_B = group_ids(rows["prompt_number"])
    valid_B = valid_samples(rows, cfg)
    leave_one_out = cfg.use_leave_one_out_baseline
    return {
        **processed.components,
        "valid": valid_B,
        "reward": processed.rewards_B,
        "unshaped_reward": processed.unshaped_B,
        "group_id": groups_B,
        "baseline": group_statistics(processed.rewards_B, groups_B, valid_B, leave_one_out=leave_one_out).baseline_B,
        # Shaping makes equal answers differ by their length; groups are judged by what the environment said.
        "std": group_statistics(processed.unshaped_B, groups_B, valid_B, leave_one_out=False).group_std_B,
        "row_advantages": row_advantages(
            cfg.adv_estimator, processed.rewards_B, processed.components, groups_B, valid_B
        ),
    }


def filter_rows(rows: BatchedDataDict, cfg: GRPOConfig) -> dict[str, float]:
    """Masks overlong and flagged samples in place; returns metrics."""
    metrics: dict[str, float] = {}
    if cfg.overlong_filtering:
        rows["sample_mask"] = overlong_filter(rows["sample_mask"], rows["truncated"])
    if cfg.should_mask_flagged_samples:
        rows["sample_mask"], metrics = mask_sample_filter(rows["sample_mask"], rows["mask_sample"])
    if cfg.invalid_tool_call_strategy is not None:
        metrics["num_invalid_tool_calls"] = float(rows["invalid_tool_call"].sum())
    if cfg.invalid_tool_call_strategy == "mask":
        rows["sample_mask"], _ = mask_sample_filter(rows["sample_mask"], rows["invalid_tool_call"])
    return metrics


def needs_previous_logprobs(cfg: GRPOConfig, loss_cfg: ClippedPGLossConfig) -> bool:
    """Whether anything reads log-probabilities under the weights before the step."""
    if not loss_cfg.reads_advantages:
        return False
    return not loss_cfg.force_on_policy_ratio or cfg.seq_logprob_error_threshold is not None


def needs_reference_logprobs(cfg: GRPOConfig, loss_cfg: ClippedPGLossConfig) -> bool:
    """Whether anything reads log-probabilities under the reference weights."""
    return loss_cfg.reference_policy_kl_penalty != 0 and not cfg.skip_reference_policy_logprobs_calculation


def compute_logprobs(
    experience: Experience,
    store: ExperienceStore,
    policy: PolicyInterface,
    cfg: GRPOConfig,
    loss_cfg: ClippedPGLossConfig,
    timer: Timer,
) -> None:
    """Adds the columns `prev_logprobs` and `reference_policy_logprobs` that are read, in one call."""
    handle = experience.handle
    previous, reference = needs_previous_logprobs(cfg, loss_cfg), needs_reference_logprobs(cfg, loss_cfg)
    if not previous and not reference:
        return
    if previous and reference:
        result = policy.get_policy_and_reference_logprobs(handle, timer=timer)
    else:
        result = (policy.get_logprobs if previous else policy.get_reference_policy_logprobs)(handle, timer=timer)
    columns = {"prev_logprobs": "logprobs"} if previous else {}
    columns |= {"reference_policy_logprobs": "reference_logprobs"} if reference else {}
    experience.handle = store.commit(handle, result, **columns)


def compares_routing(cfg: RouterReplayConfig, step: int) -> bool:
    """Whether the step after `step` measures the agreement of the engines without router replay."""
    return cfg.compare_period > 0 and (step + 1) % cfg.compare_period == 0


def compare_routing(
    experience: Experience, store: ExperienceStore, policy: PolicyInterface, loss_cfg: ClippedPGLossConfig, timer: Timer
) -> None:
    """Adds the metric `gen_kl_error_natural_routing`: `gen_kl_error` of log-probabilities with natural routing,
    over the tokens of samples that are not masked so far.
    """
    result = policy.get_naturally_routed_logprobs(experience.handle, timer=timer)
    name = "naturally_routed_logprobs"
    experience.handle = store.commit(experience.handle, result, **{name: name})
    measured = TokenStage(
        natural_kl_error,
        reads=(name, "generation_logprobs", "token_mask"),
        params={"kl_type": loss_cfg.reference_policy_kl_type},
    )
    rows = run_stage(experience, store, measured)
    kept_B = (experience.rows["sample_mask"] != 0).double()
    tokens = float((rows["tokens"] * kept_B).sum())
    experience.metrics["gen_kl_error_natural_routing"] = float((rows["kl"] * kept_B).sum()) / max(tokens, 1.0)


def natural_kl_error(columns: BatchedDataDict, kl_type: KLType) -> StageOutput:
    """Sums of each row: estimates of KL(generation || naturally routed policy), and tokens that have one."""
    mask = columns["token_mask"][:, 1:] != 0
    generation, natural = columns["generation_logprobs"][:, 1:], columns["naturally_routed_logprobs"][:, 1:]
    kl = calculate_kl(generation, natural, kl_type, None, None)
    return StageOutput(columns={}, rows={"kl": torch.where(mask, kl, 0).double().sum(-1), "tokens": mask.sum(-1)})


def mask_and_weigh(
    experience: Experience,
    store: ExperienceStore,
    cfg: GRPOConfig,
    loss_cfg: ClippedPGLossConfig,
    global_batch_size: int,
    first_row: int = 0,
) -> None:
    """Masks samples whose engines disagree, then writes `sample_mask`, `advantages` and, if the loss uses it, the
    weight of correct answers. `global_batch_size`: samples of one optimizer step. `first_row`: index of the part's
    first row in the step.
    """
    rows = experience.rows
    if needs_previous_logprobs(cfg, loss_cfg):
        error_B = run_stage(experience, store, sequence_error_stage())["seq_mult_prob_error"]
        rows["sample_mask"], metrics = mask_by_sequence_error(
            error_B, rows["sample_mask"], rows["reward"], cfg.seq_logprob_error_threshold
        )
    else:
        metrics = skipped_sequence_error_metrics()
    experience.metrics.update(metrics)
    columns = {
        "sample_mask": rows["sample_mask"],
        "row_advantages": rows["row_advantages"],
        "rewards": rows["reward"],
        "sample_index": torch.arange(first_row, first_row + rows.size),
    }
    columns |= positive_example_columns(
        partial(run_stage, experience, store),
        rows["reward"],
        rows["sample_mask"],
        loss_cfg,
        sample_of_row(rows) // global_batch_size,
    )
    experience.handle = store.update(experience.handle, columns)
    if loss_cfg.reads_advantages:
        experience.metrics.update(compute_advantages(partial(run_stage, experience, store), cfg, loss_cfg))


def train_columns(cfg: GRPOConfig, loss_cfg: ClippedPGLossConfig) -> list[str]:
    """The columns that training reads."""
    columns = [
        "input_ids",
        "input_lengths",
        "generation_logprobs",
        "token_mask",
        "sample_mask",
        "sample_index",
    ]
    if loss_cfg.reads_advantages:
        columns.append("advantages")
    if loss_cfg.compares_with_teacher:
        columns += [TOPK_IDS, TOPK_LOGPROBS]
    if needs_previous_logprobs(cfg, loss_cfg):
        columns.append("prev_logprobs")
    if needs_reference_logprobs(cfg, loss_cfg):
        columns.append("reference_policy_logprobs")
    if loss_cfg.positive_example_nll_weight:
        columns += ["rewards", "positive_nll_scale"]
    return columns


def columns_to_train(
    experience: Experience, store: ExperienceStore, cfg: GRPOConfig, loss_cfg: ClippedPGLossConfig
) -> BatchHandle:
    """Selects the columns that training reads, and custom columns that no stage knows."""
    present = store.columns(experience.handle)
    columns = [*train_columns(cfg, loss_cfg), *replayed_fields(present), *columns_of_others(present)]
    return store.select_columns(experience.handle, columns)


StalenessPolicy = Literal["importance", "mask", "drop"]
"""What a sample is worth that several weight versions made, or older ones than the step starts from: corrected by the
loss, its older tokens masked, or dropped."""


def newest_tokens_only(columns: BatchedDataDict) -> StageOutput:
    """Masks tokens of versions older than their row's newest; returns `masked_tokens` per row."""
    mask_BS, versions_BS = columns["token_mask"], columns["token_versions"]
    trained_BS = mask_BS != 0
    newest_B = torch.where(trained_BS, versions_BS, -1).amax(dim=1)
    kept_BS = trained_BS & (versions_BS == newest_B[:, None])
    return StageOutput(
        {"token_mask": mask_BS * kept_BS.to(mask_BS.dtype)}, {"masked_tokens": (trained_BS & ~kept_BS).sum(dim=1)}
    )


def apply_staleness_policy(experience: Experience, store: ExperienceStore, rule: StalenessPolicy, step: int) -> None:
    """Applies the policy to a step's batch, in place, and adds its metrics.

    Args:
        experience: With `weight_version`, `newest_version` and `mixed_kv` rows.
        rule: `grpo.async_grpo.mixed_versions`.
        step: Version of the weights that the step starts from.
    """
    rows = experience.rows
    oldest_B, newest_B = rows["weight_version"], rows["newest_version"]
    mixed_B = oldest_B != newest_B
    lag_B = (step - oldest_B)[oldest_B >= 0].double()
    experience.metrics |= {
        "lag/mean": float(lag_B.mean()) if len(lag_B) else 0.0,
        "lag/max": float(lag_B.max()) if len(lag_B) else 0.0,
        "mixed_share": float(mixed_B.double().mean()),
        "mixed_kv_share": float(rows["mixed_kv"].double().mean()),
        "dropped_share": 0.0,
    }
    if rule == "drop":
        rows["sample_mask"] = rows["sample_mask"] * (~mixed_B).to(rows["sample_mask"].dtype)
        experience.metrics["dropped_share"] = float(mixed_B.double().mean())
    elif rule == "mask" and bool(mixed_B.any()):
        masked_B = run_stage(
            experience, store, TokenStage(newest_tokens_only, ("token_mask", "token_versions"), ("token_mask",))
        )["masked_tokens"]
        experience.metrics["dropped_share"] = float(masked_B.sum() / rows["generated_lengths"].sum().clamp(min=1))


def whole_batch_stages(cfg: GRPOConfig, loss_cfg: ClippedPGLossConfig) -> dict[str, str]:
    """Stages that need all groups of a step at once, by configuration key; all others are group-local.

    A streaming run must refuse these keys.
    """
    found: dict[str, str] = {}
    if cfg.use_dynamic_sampling:
        found["grpo.use_dynamic_sampling"] = "dynamic sampling fills a step from whole generation batches"
    if cfg.adv_estimator.name == "reinforce_plus_plus":
        found["grpo.adv_estimator.name"] = "reinforce_plus_plus whitens advantages over all trained tokens of the step"
    if cfg.adv_estimator.name == "gdpo":
        found["grpo.adv_estimator.name"] = "gdpo standardises advantages over all samples of the step"
    if loss_cfg.positive_example_nll_weight:
        found["loss_fn.positive_example_nll_weight"] = "the weight of correct answers counts them over the global batch"
    return found
