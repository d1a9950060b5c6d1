"""Collects the experience of one step: rollouts, rewards and dynamic sampling.

With dynamic sampling (DAPO) it generates batches until enough groups have rewards that differ. Invariants: a step's
batch has exactly prompts x generations samples; every new row is either kept or recorded as dropped, once; every
admitted prompt group is recorded as committed; dropped rows are cleared from the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from nemo_rl.algorithms.grpo.run import GRPORun
from nemo_rl.algorithms.grpo.stages import Experience, filter_rows, joined_experience, score_rewards, valid_rewards
from nemo_rl.config import GRPOConfig
from nemo_rl.config.async_rl import NativeTimeoutsConfig
from nemo_rl.config.errors import UserError
from nemo_rl.data_plane.schema import PROMPT, PROMPT_TOKENS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.columns import sample_of_row, sample_starts
from nemo_rl.experience.prompts import EpochPrompts
from nemo_rl.experience.rollouts import RolloutLimits, RolloutPlan, number_samples
from nemo_rl.models.generation.interfaces import VALIDATION_STEP_OFFSET, GenerationSamplingParams
from nemo_rl.models.generation.recording import replays
from nemo_rl.utils.record_events import GroupAdmitted, GroupCommitted, GroupDropped

logger = logging.getLogger(__name__)


class DynamicSamplingError(UserError, ValueError):
    """Too few groups had rewards that differ, in too many generation batches."""


@dataclass(frozen=True)
class Selection:
    """The rows of a generation batch that are kept and dropped."""

    keep: list[int]  # rows of the new batch that join the kept ones, in order
    drop: list[int]  # its other rows; they are not read again
    complete: bool  # the step is full; otherwise another generation batch is needed
    surplus: int  # usable samples that were dropped because the step was full


def select_rows(
    std_B: torch.Tensor,
    *,
    kept_before: int,
    num_gen_batches: int,
    cfg: GRPOConfig,
    sample_B: torch.Tensor | None = None,
) -> Selection:
    """Selects rows of a new generation batch.

    Args:
        std_B: deviation of the valid rewards of each row's group, before shaping; rows of groups with 0 are dropped.
        kept_before: samples kept from earlier generation batches of this step.
        num_gen_batches: generation batches of this step, this one included.
        cfg: `num_prompts_per_step` times `num_generations_per_prompt` samples make a step.
        sample_B: number of each row's sample, ascending; by default every row is one.

    Raises DynamicSamplingError: the step is still not full after more than `dynamic_sampling_max_gen_batches` batches.
    """
    target = cfg.num_prompts_per_step * cfg.num_generations_per_prompt
    sample_of = sample_B.tolist() if sample_B is not None else list(range(len(std_B)))
    good = torch.nonzero(std_B != 0).flatten().tolist()
    samples = list(dict.fromkeys(sample_of[row] for row in good))
    kept_samples = set(samples[: target - kept_before])
    keep = [row for row in good if sample_of[row] in kept_samples]
    complete = kept_before + len(kept_samples) == target
    if not complete and num_gen_batches > cfg.dynamic_sampling_max_gen_batches:
        raise DynamicSamplingError(
            f"after {num_gen_batches} generation batches only {kept_before + len(kept_samples)} of {target} samples "
            "come from groups whose rewards differ; "
            f"raise grpo.dynamic_sampling_max_gen_batches={cfg.dynamic_sampling_max_gen_batches}, or use "
            "prompts the model solves sometimes but not always"
        )
    kept = set(keep)
    dropped = [row for row in range(len(std_B)) if row not in kept]
    return Selection(keep, dropped, complete, len(samples) - len(kept_samples))


def sampling_metrics(
    selections: Sequence[Selection], generated_rewards_B: torch.Tensor, trained_rewards_B: torch.Tensor
) -> dict[str, float]:
    """Metrics of one step: how much was generated, and the rewards before and after the filter.

    Args:
        selections: one per generation batch of the step.
        generated_rewards_B: valid rewards of all generated rows, in order; as many as were trained on are averaged.
        trained_rewards_B: valid rewards of the kept rows.
    """
    return {
        "dynamic_sampling_num_gen_batches": float(len(selections)),
        "dynamic_sampling_num_discarded_valid_samples": float(sum(selection.surplus for selection in selections)),
        "reward": generated_rewards_B[: len(trained_rewards_B)].double().mean().item(),
        "filtered_reward": trained_rewards_B.double().mean().item(),
    }


NextBatch = Callable[[], BatchedDataDict]


def training_plan(run: GRPORun, step: int | None = None) -> RolloutPlan:
    """How training rollouts of a step (by default the current one) are sampled."""
    generation = run.config.policy.generation
    sampling = GenerationSamplingParams(generation.temperature, generation.top_p, generation.top_k)
    return RolloutPlan(
        run.config.grpo.seed,
        run.state.step if step is None else step,
        sampling,
        _limits(run),
        tuple(generation.stop_strings or ()),
        replays(run.config.policy),
    )


def validation_plan(run: GRPORun, batch: int) -> RolloutPlan:
    """How validation batch `batch` is sampled; the same at every validation, so that curves are comparable."""
    generation = run.config.policy.generation
    sampling = GenerationSamplingParams(generation.val_temperature, generation.val_top_p, generation.val_top_k)
    return RolloutPlan(
        run.config.grpo.seed,
        VALIDATION_STEP_OFFSET + batch,
        sampling,
        _limits(run),
        tuple(generation.stop_strings or ()),
    )


def _limits(run: GRPORun) -> RolloutLimits:
    policy, grpo, streaming = run.config.policy, run.config.grpo, run.config.async_rl
    native = streaming.rollout_failure.native if streaming is not None else NativeTimeoutsConfig()
    return RolloutLimits(
        policy.max_total_sequence_length,
        policy.generation.max_new_tokens,
        grpo.max_rollout_turns,
        native.generation_timeout_s,
        native.env_timeout_s,
    )


def prompts_per_batch(cfg: GRPOConfig) -> int:
    """Prompts of one generation batch."""
    return int(cfg.num_prompts_per_step * cfg.batch_multiplier)


def prompts_of(run: GRPORun) -> EpochPrompts:
    """The run's prompts, batch by batch across epochs."""
    cfg = run.config.grpo
    return EpochPrompts(
        run.train_loader,
        batch_size=prompts_per_batch(cfg),
        epoch=run.state.epoch,
        max_epochs=cfg.max_num_epochs,
    )


def collect_experience(run: GRPORun, next_batch: NextBatch) -> Experience:
    """Generates the scored and filtered experience of the current step. Raises DynamicSamplingError: too few groups
    differ in their rewards; StopIteration: the prompts ran out before the step was full.
    """
    first_prompt = 0

    def generate(attempt: int) -> Experience:
        nonlocal first_prompt
        with run.timer.time("data_processing"):
            prompts = next_batch()
            batch = number_samples(prompts, run.config.grpo.num_generations_per_prompt, first_prompt)
        _record_admission(run, batch, first_prompt, prompts)
        first_prompt += prompts.size
        return _roll_out(run, batch, attempt)

    return gather_experience(run, generate)


def gather_experience(run: GRPORun, next_experience: Callable[[int], Experience]) -> Experience:
    """Joins generation batches into the scored and filtered experience of the current step.

    Args:
        next_experience: Returns generation batch `attempt` (from 0), not yet scored.

    Raises DynamicSamplingError: too few groups differ in their rewards.
    """
    cfg = run.config.grpo
    kept: list[Experience] = []
    selections: list[Selection] = []
    generated_rewards: list[torch.Tensor] = []
    while True:
        try:
            experience = next_experience(len(selections))
        except StopIteration:
            # The step stays incomplete: what was kept for it is not trained.
            if selections:
                logger.warning(
                    "the prompts are used up in step %d: %d samples that dynamic sampling kept of its %d generation "
                    "batches do not fill it and are not trained",
                    run.state.step + 1,
                    sum(_samples(part) for part in kept),
                    len(selections),
                )
            for part in kept:
                _record_dropped(run, part.rows["prompt_number"].tolist(), "prompts_exhausted")
            raise
        with run.timer.time("reward_calculation"):
            score_rewards(experience.rows, cfg)
            # A process with only a handle, without the driver's columns, can judge its rows.
            tags = {name: experience.rows[name] for name in ("std", "baseline")}
            tags |= {PROMPT: _common_prompts(experience.rows), PROMPT_TOKENS: experience.rows["prompt_lengths"]}
            experience.handle = run.store.annotate(experience.handle, tags)
        if not cfg.use_dynamic_sampling:
            experience.metrics |= filter_rows(experience.rows, cfg)
            return experience
        with run.timer.time("dynamic_sampling"):
            generated_rewards.append(valid_rewards(experience.rows))
            selection = select_rows(
                run.store.tag(experience.handle, "std"),
                kept_before=sum(_samples(part) for part in kept),
                num_gen_batches=len(selections) + 1,
                cfg=cfg,
                sample_B=sample_of_row(experience.rows),
            )
            selections.append(selection)
            kept.append(_keep(run, experience, selection))
        if selection.complete:
            joined = joined_experience(kept, run.store, lambda parts: dict(parts[-1].metrics))
            joined.metrics |= sampling_metrics(selections, torch.cat(generated_rewards), valid_rewards(joined.rows))
            joined.metrics |= filter_rows(joined.rows, cfg)
            return joined


def _common_prompts(rows: BatchedDataDict) -> torch.Tensor:
    """Number of the prompt that each row [B] begins with; further branches of agents may begin with any other."""
    return torch.where(sample_starts(rows), rows["prompt_number"], -1 - torch.arange(rows.size))


def _samples(experience: Experience) -> int:
    return int(sample_starts(experience.rows).sum())


def _roll_out(run: GRPORun, batch: BatchedDataDict, attempt: int) -> Experience:
    with run.timer.time("generation"):
        rollout = run.rollouts.roll_out(batch, training_plan(run), attempt)
    columns = rollout.columns
    for group in columns.rows["prompt_number"].unique().tolist():
        rows = columns.rows["prompt_number"] == group
        version = int(columns.rows["weight_version"][rows].max())
        run.record.emit(
            GroupCommitted(group_id(run.state.step, group), version, int(columns.rows["generated_lengths"][rows].sum()))
        )
    return Experience(run.store.write(columns.tokens), columns.rows, dict(rollout.metrics))


def group_id(step: int, prompt: int) -> str:
    """Identifier of a prompt group in the run record."""
    return f"{step}-{prompt}"


def _record_admission(run: GRPORun, batch: BatchedDataDict, first_prompt: int, prompts: BatchedDataDict) -> None:
    for offset, index in enumerate(prompts["idx"]):
        identity = group_id(run.state.step, first_prompt + offset)
        run.record.emit(
            GroupAdmitted(
                identity, f"{run.state.epoch}-{index}", batch.size // prompts.size, run.state.step, run.adapter
            )
        )


def _keep(run: GRPORun, experience: Experience, selection: Selection) -> Experience:
    numbers = experience.rows["prompt_number"]
    _record_dropped(run, set(numbers.tolist()) - set(numbers[selection.keep].tolist()), "zero_variance")
    part = Experience(
        run.store.select(experience.handle, selection.keep),
        experience.rows.select_indices(selection.keep),
        experience.metrics,
    )
    run.store.clear(run.store.select(experience.handle, selection.drop))
    return part


def _record_dropped(run: GRPORun, groups: Iterable[int], reason: str) -> None:
    for group in sorted(set(groups)):
        run.record.emit(GroupDropped(group_id(run.state.step, group), reason))
