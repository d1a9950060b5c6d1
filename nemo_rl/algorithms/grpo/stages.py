"""The stages of a GRPO step on one batch, in the order in which they depend on each other.

Each stage exists here once; drivers differ only in when they call it. Row stages work on small columns in the driver,
token stages go through the store. Knows no loader, no engine and no loop. Invariant: what a stage computes does not
depend on which store holds the rows or on which driver calls it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic

import torch

from nemo_rl.algorithms.grpo.advantages import compute_advantages, row_advantages
from nemo_rl.algorithms.grpo.baselines import group_ids, group_statistics
from nemo_rl.algorithms.grpo.masks import mask_by_sequence_error, overlong_filter, sequence_error_stage, skipped_sequence_error_metrics
from nemo_rl.algorithms.grpo.positive_examples import positive_example_columns
from nemo_rl.algorithms.grpo.rewards import COMPONENT_PREFIX, process_rewards
from nemo_rl.config import ClippedPGLossConfig, GRPOConfig
from nemo_rl.data_plane.schema import columns_of_others
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.store import ExperienceStore, Handle
from nemo_rl.loss.interfaces import LossFunction
from nemo_rl.models.policy.interfaces import PolicyInterface, TrainResult
from nemo_rl.utils.timer import Timer


@dataclass
class Experience(Generic[Handle]):
    """A batch on its way through the stages.

    Attributes:
        handle: Its token columns in the store.
        rows: Its small columns [B] in the driver.
        metrics: What the stages measured.
    """

    handle: Handle
    rows: BatchedDataDict[Any]
    metrics: dict[str, Any] = field(default_factory=dict)


def score_rewards(rows: BatchedDataDict[Any], cfg: GRPOConfig) -> None:
    """Scales and shapes rewards, then adds `group_id`, `baseline`, `std` and the processed rewards, in place."""
    components = {name: column for name, column in rows.items() if name.startswith(COMPONENT_PREFIX)}
    processed = process_rewards(rows["total_reward"], components, rows["response_lengths"], rows["truncated"], cfg)
    groups_B = group_ids(rows["prompt_number"])
    valid_B = torch.ones_like(processed.rewards_B)
    leave_one_out = cfg.use_leave_one_out_baseline
    rows["reward"] = processed.rewards_B
    rows["unshaped_reward"] = processed.unshaped_B
    rows.update(processed.components)
    rows["group_id"] = groups_B
    rows["baseline"] = group_statistics(processed.rewards_B, groups_B, valid_B, leave_one_out=leave_one_out).baseline_B
    # Shaping makes equal answers differ by their length; groups are judged by what the environment said.
    rows["std"] = group_statistics(processed.unshaped_B, groups_B, valid_B, leave_one_out=leave_one_out).std_B
    # Advantages belong to whole groups: dynamic sampling may drop single rows of one afterwards.
    rows["row_advantages"] = row_advantages(cfg.adv_estimator, processed.rewards_B, processed.components, groups_B, valid_B)


def filter_rows(rows: BatchedDataDict[Any], cfg: GRPOConfig) -> None:
    """Overlong filtering, in place on `sample_mask`."""
    if cfg.overlong_filtering:
        rows["sample_mask"] = overlong_filter(rows["sample_mask"], rows["truncated"])


def needs_previous_logprobs(cfg: GRPOConfig, loss_cfg: ClippedPGLossConfig) -> bool:
    """Whether log-probabilities under the weights before the step are read by anything."""
    return not loss_cfg.force_on_policy_ratio or cfg.seq_logprob_error_threshold is not None


def needs_reference_logprobs(cfg: GRPOConfig, loss_cfg: ClippedPGLossConfig) -> bool:
    """Whether log-probabilities under the reference weights are read by anything."""
    return loss_cfg.reference_policy_kl_penalty != 0 and not cfg.skip_reference_policy_logprobs_calculation


def compute_logprobs(
    experience: Experience[Handle], store: ExperienceStore[Handle], policy: PolicyInterface, cfg: GRPOConfig, loss_cfg: ClippedPGLossConfig, timer: Timer
) -> None:
    """Adds the columns `prev_logprobs` and `reference_policy_logprobs`, as far as they are read."""
    handle: Any = experience.handle
    if needs_previous_logprobs(cfg, loss_cfg):
        experience.handle = store.commit(experience.handle, policy.get_logprobs(handle, timer=timer), prev_logprobs="logprobs")
    if needs_reference_logprobs(cfg, loss_cfg):
        result = policy.get_reference_policy_logprobs(handle, timer=timer)
        experience.handle = store.commit(experience.handle, result, reference_policy_logprobs="reference_logprobs")


def mask_and_weigh(
    experience: Experience[Handle], store: ExperienceStore[Handle], cfg: GRPOConfig, loss_cfg: ClippedPGLossConfig, global_batch_size: int
) -> None:
    """Masks samples whose engines disagree, then writes `sample_mask`, `advantages` and the weight of correct answers, if the loss has one."""
    rows = experience.rows
    if needs_previous_logprobs(cfg, loss_cfg):
        error_B = store.apply(experience.handle, sequence_error_stage())["seq_mult_prob_error"]
        rows["sample_mask"], metrics = mask_by_sequence_error(error_B, rows["sample_mask"], rows["reward"], cfg.seq_logprob_error_threshold)
    else:
        metrics = skipped_sequence_error_metrics()
    experience.metrics.update(metrics)
    columns = {"sample_mask": rows["sample_mask"], "row_advantages": rows["row_advantages"], "rewards": rows["reward"], "sample_index": torch.arange(rows.size)}
    columns |= positive_example_columns(lambda stage: store.apply(experience.handle, stage), rows["reward"], rows["sample_mask"], loss_cfg, global_batch_size)
    experience.handle = store.update(experience.handle, columns)
    experience.metrics.update(compute_advantages(lambda stage: store.apply(experience.handle, stage), cfg, loss_cfg))


def train_columns(cfg: GRPOConfig, loss_cfg: ClippedPGLossConfig) -> list[str]:
    """The columns that training reads."""
    columns = ["input_ids", "input_lengths", "generation_logprobs", "token_mask", "sample_mask", "advantages", "sample_index"]
    if needs_previous_logprobs(cfg, loss_cfg):
        columns.append("prev_logprobs")
    if needs_reference_logprobs(cfg, loss_cfg):
        columns.append("reference_policy_logprobs")
    if loss_cfg.positive_example_nll_weight:
        columns += ["rewards", "positive_nll_scale"]
    return columns


def train(
    experience: Experience[Handle],
    store: ExperienceStore[Handle],
    policy: PolicyInterface,
    loss_fn: LossFunction,
    cfg: GRPOConfig,
    loss_cfg: ClippedPGLossConfig,
    timer: Timer,
) -> TrainResult:
    """One `policy.train` on the batch; columns that no stage knows go along, for the model and for losses of users."""
    columns = [*train_columns(cfg, loss_cfg), *columns_of_others(store.columns(experience.handle))]
    data: Any = store.select_columns(experience.handle, columns)
    return policy.train(data, loss_fn, timer=timer)
