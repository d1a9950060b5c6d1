"""The synchronous source: collects a step's experience (rollouts, rewards, dynamic sampling), then training runs.

With dynamic sampling (DAPO) it generates batches until enough groups have rewards that differ. Invariants: a step's
batch has exactly prompts x generations samples; every new row is either kept or recorded as dropped, once; every
admitted prompt group is recorded as committed; dropped rows are cleared from the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from nemo_rl.algorithms.grpo.run import GRPORun
from nemo_rl.algorithms.grpo.stages import Experience, filter_rows, joined_experience, score_rewards, valid_rewards
from nemo_rl.config import GRPOConfig, MasterConfig
from nemo_rl.config.async_rl import NativeTimeoutsConfig
from nemo_rl.config.errors import UserError
from nemo_rl.data.loader import HasState, Loader
from nemo_rl.data_plane.field_schema import PROMPT, PROMPT_TOKENS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.prompts import EpochPrompts, group_id
from nemo_rl.experience.rollouts import RolloutLimits, RolloutPlan, number_samples
from nemo_rl.experience.store import ExperienceStore, sample_of_row, sample_starts
from nemo_rl.models.generation.decisions import replays
from nemo_rl.models.generation.interfaces import VALIDATION_STEP_OFFSET, GenerationSamplingParams
from nemo_rl.utils.record import Record
from nemo_rl.utils.record_events import GroupAdmitted, GroupCommitted, GroupDropped
from nemo_rl.utils.timer import Timer

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


def training_plan(config: MasterConfig, step: int) -> RolloutPlan:
    """How training rollouts of a step are sampled."""
    generation = config.policy.generation
    sampling = GenerationSamplingParams(generation.temperature, generation.top_p, generation.top_k)
    return _plan(config, step, sampling, records=replays(config.policy))


def validation_plan(config: MasterConfig, batch: int) -> RolloutPlan:
    """How validation batch `batch` is sampled; the same at every validation, so that curves are comparable."""
    generation = config.policy.generation
    sampling = GenerationSamplingParams(generation.val_temperature, generation.val_top_p, generation.val_top_k)
    return _plan(config, VALIDATION_STEP_OFFSET + batch, sampling, records=False)


def _plan(config: MasterConfig, step: int, sampling: GenerationSamplingParams, *, records: bool) -> RolloutPlan:
    policy, grpo, streaming = config.policy, config.grpo, config.async_rl
    native = streaming.rollout_failure.native if streaming is not None else NativeTimeoutsConfig()
    limits = RolloutLimits(
        policy.max_total_sequence_length,
        policy.generation.max_new_tokens,
        grpo.max_rollout_turns,
        native.generation_timeout_s,
        native.env_timeout_s,
    )
    return RolloutPlan(grpo.seed, step, sampling, limits, tuple(policy.generation.stop_strings or ()), records)


def prompts_per_batch(cfg: GRPOConfig) -> int:
    """Prompts of one generation batch."""
    return int(cfg.num_prompts_per_step * cfg.batch_multiplier)


def prompts_of(cfg: GRPOConfig, loader: Loader, epoch: int) -> EpochPrompts:
    """A run's prompts, batch by batch across epochs, from `epoch` on."""
    return EpochPrompts(loader, batch_size=prompts_per_batch(cfg), epoch=epoch, max_epochs=cfg.max_num_epochs)


@dataclass(frozen=True)
class Gathering:
    """Scores and filters generation batches, and joins them into the experience of a step."""

    cfg: GRPOConfig
    store: ExperienceStore
    record: Record
    timer: Timer

    def gather(self, step: int, next_experience: Callable[[int], Experience]) -> Experience:
        """The scored and filtered experience of a step. `next_experience`: returns generation batch `attempt` (from 0),
        not yet scored. Raises DynamicSamplingError: too few groups differ in their rewards; StopIteration: the prompts
        ran out before the step was full.
        """
        cfg = self.cfg
        kept: list[Experience] = []
        selections: list[Selection] = []
        generated_rewards: list[torch.Tensor] = []
        while True:
            try:
                experience = next_experience(len(selections))
            except StopIteration:
                self._drop_incomplete(step, kept)
                raise
            with self.timer.time("reward_calculation"):
                score_rewards(experience.rows, cfg)
                # A process with only a handle, without the driver's columns, can judge its rows.
                tags = {name: experience.rows[name] for name in ("std", "baseline")}
                tags |= {PROMPT: _common_prompts(experience.rows), PROMPT_TOKENS: experience.rows["prompt_lengths"]}
                experience.handle = self.store.annotate(experience.handle, tags)
            if not cfg.use_dynamic_sampling:
                experience.metrics |= filter_rows(experience.rows, cfg)
                return experience
            with self.timer.time("dynamic_sampling"):
                generated_rewards.append(valid_rewards(experience.rows))
                selection = select_rows(
                    self.store.tag(experience.handle, "std"),
                    kept_before=sum(_samples(part) for part in kept),
                    num_gen_batches=len(selections) + 1,
                    cfg=cfg,
                    sample_B=sample_of_row(experience.rows),
                )
                selections.append(selection)
                kept.append(self._keep(step, experience, selection))
            if selection.complete:
                joined = joined_experience(kept, self.store)
                # Rollouts are described by the last generation batch.
                joined.samples, joined.metrics = experience.samples, dict(experience.metrics)
                joined.metrics |= sampling_metrics(selections, torch.cat(generated_rewards), valid_rewards(joined.rows))
                joined.metrics |= filter_rows(joined.rows, cfg)
                return joined

    def _drop_incomplete(self, step: int, kept: Sequence[Experience]) -> None:
        """The step stays incomplete: what was kept for it is not trained."""
        if kept:
            logger.warning(
                "the prompts are used up in step %d: %d samples that dynamic sampling kept of its %d generation "
                "batches do not fill it and are not trained",
                step + 1,
                sum(_samples(part) for part in kept),
                len(kept),
            )
        for part in kept:
            self._record_dropped(step, part.rows["prompt_number"].tolist(), "prompts_exhausted")

    def _keep(self, step: int, experience: Experience, selection: Selection) -> Experience:
        numbers = experience.rows["prompt_number"]
        self._record_dropped(step, set(numbers.tolist()) - set(numbers[selection.keep].tolist()), "zero_variance")
        part = Experience(
            self.store.select(experience.handle, selection.keep),
            experience.rows.select_indices(selection.keep),
        )
        self.store.clear(self.store.select(experience.handle, selection.drop))
        return part

    def _record_dropped(self, step: int, groups: Iterable[int], reason: str) -> None:
        for group in sorted(set(groups)):
            self.record.emit(GroupDropped(group_id(step, group), reason))


def _common_prompts(rows: BatchedDataDict) -> torch.Tensor:
    """Number of the prompt that each row [B] begins with; further branches of agents may begin with any other."""
    return torch.where(sample_starts(rows), rows["prompt_number"], -1 - torch.arange(rows.size))


def _samples(experience: Experience) -> int:
    return int(sample_starts(experience.rows).sum())


class WholeSteps:
    """Base of sources that yield each step as one part."""

    def next_experience(self) -> Experience:
        """The scored and filtered experience of the current step. Raises StopIteration: the prompts are used up."""
        raise NotImplementedError

    def parts(self) -> Generator[Experience]:
        """Yields the whole step."""
        try:
            whole = self.next_experience()
        except StopIteration:
            return
        yield whole


class SynchronousSource(WholeSteps):
    """Generates each step's batch when the step needs it, with the current weights."""

    collector: None = None

    def __init__(self, run: GRPORun) -> None:
        self._run = run
        self._prompts = prompts_of(run.config.grpo, run.train_loader, run.state.epoch)
        self._gathering = Gathering(run.config.grpo, run.store, run.record, run.timer)
        self._drawn = 0  # prompts of the current step so far

    def running(self) -> AbstractContextManager[object]:
        """Does nothing: the loader is already restored, and no rollout runs between steps."""
        return nullcontext()

    def published(self, version: int) -> None:
        """Does nothing: the step starts generation."""

    def next_experience(self) -> Experience:
        """Refits generation if needed and rolls out. Raises: see `Gathering.gather`."""
        accelerators, timer, step = self._run.accelerators, self._run.timer, self._run.state.step
        self._run.progress.phase("generation")
        with timer.time("prepare_for_generation/total"):
            accelerators.serve(step)
        self._drawn = 0
        with accelerators.demand(step, *self.waited_for()):
            return self._gathering.gather(step, self._rolled_out)

    def _rolled_out(self, attempt: int) -> Experience:
        """Generation batch `attempt` of the step, not yet scored. Raises StopIteration: the prompts are used up."""
        run, step, first_prompt = self._run, self._run.state.step, self._drawn
        with run.timer.time("data_processing"):
            prompts, epoch = self._next_prompts()
            batch = number_samples(prompts, run.config.grpo.num_generations_per_prompt, first_prompt)
        self._record_admission(batch, first_prompt, prompts, epoch)
        self._drawn += prompts.size
        with run.timer.time("generation"):
            rollout = run.rollouts.roll_out(batch, training_plan(run.config, step), attempt)
        self._record_committed(rollout.columns.rows)
        handle = run.store.write(rollout.columns.tokens)
        return Experience(handle, rollout.columns.rows, rollout.samples, dict(rollout.metrics))

    def _next_prompts(self) -> tuple[BatchedDataDict, int]:
        """The next prompts, and the epoch that they are of."""
        state = self._run.state
        try:
            return self._prompts.next(), self._prompts.epoch
        finally:
            if self._prompts.epoch != state.epoch:
                state.epoch, state.step_in_epoch = self._prompts.epoch, 0

    def _record_admission(
        self, batch: BatchedDataDict, first_prompt: int, prompts: BatchedDataDict, epoch: int
    ) -> None:
        run, samples = self._run, batch.size // prompts.size
        for offset, index in enumerate(prompts["idx"]):
            name = group_id(run.state.step, first_prompt + offset)
            run.record.emit(GroupAdmitted(name, f"{epoch}-{index}", samples, run.state.step, run.adapter))

    def _record_committed(self, rows: BatchedDataDict) -> None:
        for group in rows["prompt_number"].unique().tolist():
            of_group = rows["prompt_number"] == group
            version, tokens = rows["weight_version"][of_group].max(), rows["generated_lengths"][of_group].sum()
            self._run.record.emit(GroupCommitted(group_id(self._run.state.step, group), int(version), int(tokens)))

    def draw_ahead(self) -> None:
        """Fetches the next batch."""
        if not self.finished():
            self._prompts.prefetch()

    def trained(self) -> Mapping[str, float]:
        """Has no metrics: a trained step leaves no state."""
        return {}

    def finished(self) -> bool:
        """Whether steps or epochs are used up."""
        cfg, state, data = self._run.config.grpo, self._run.state, self._run.config.data
        if state.step >= cfg.max_num_steps:
            return True
        if data.use_multiple_dataloader or cfg.use_dynamic_sampling:
            return not data.use_multiple_dataloader and state.epoch >= cfg.max_num_epochs
        loader, in_last_epoch = self._run.train_loader, state.epoch == cfg.max_num_epochs - 1
        return state.epoch >= cfg.max_num_epochs or (
            in_last_epoch and isinstance(loader, Sized) and state.step_in_epoch >= len(loader)
        )

    def waited_for(self) -> tuple[int, int]:
        """A whole batch, none of it finished."""
        return (0 if self.finished() else self._run.config.grpo.num_prompts_per_step), 0

    def position(self) -> tuple[HasState, Mapping[str, object]]:
        """The loader position, before any prefetched batch."""
        return self._prompts.position(), {}
