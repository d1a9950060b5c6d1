"""The streaming source: a step trains on prompt groups as they finish.

Early groups run through scoring, forward and backward while slow groups still generate. One optimizer step, with one
gradient reduction, follows the last group. Settings that need all groups of a step at once are refused. Invariant:
every group of a step is yielded once, in a part that is large enough to fill the accelerators, or in the last part.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence

import torch
from typing_extensions import override

from nemo_rl.algorithms.accelerators import ReportProgress
from nemo_rl.algorithms.grpo.async_source import (
    AheadSource,
    collector_parts,
    joined_groups,
)
from nemo_rl.algorithms.grpo.run import GRPORun
from nemo_rl.algorithms.grpo.stages import (
    Experience,
    apply_staleness_policy,
    filter_rows,
    score_rewards,
    whole_batch_stages,
)
from nemo_rl.config import AsyncRLConfig, ConfigError, MasterConfig
from nemo_rl.config.world_sizes import data_parallel_size
from nemo_rl.experience.collector import Collector
from nemo_rl.experience.prompt_queue import PromptQueue, QueueLimits, worth_a_pass
from nemo_rl.experience.prompts import BufferedGroup, group_name
from nemo_rl.experience.rollout_tasks import FailurePolicy, RefitPolicy, StallPolicy
from nemo_rl.experience.samplers import BUILT_IN, Sampler, SamplerError, custom_sampler

logger = logging.getLogger(__name__)

_UNCLIPPED_LAG = 3
_STALL_ADVICE = {
    True: "async_rl.stall_watchdog.stall_timeout_s allows more",
    False: "async_rl.stall_watchdog.stall_action: abort ends the run instead",
}


def sampler_of(cfg: AsyncRLConfig) -> Sampler:
    """The sampler configured by `async_rl.sampler`. Raises SamplerError: a custom one cannot be made."""
    settings = cfg.sampler
    if settings.name == "custom":
        return custom_sampler(settings.target or "", settings.model_extra or {})
    if settings.name == "in_order":
        return BUILT_IN["in_order"](settings.max_lookahead_versions)
    if settings.name == "windowed":
        return BUILT_IN["windowed"](settings.max_staleness_versions, settings.sample_freshest_first)
    return BUILT_IN[settings.name](settings.max_staleness_versions)


def check_streaming(config: MasterConfig) -> None:
    """Checks that all stages are group-local and that the sampler can be created. Raises ConfigError: something of it
    cannot.
    """
    if config.async_rl is None:
        return
    if stages := whole_batch_stages(config.grpo, config.loss_fn):
        raise ConfigError(
            [f"async_rl trains on groups as they finish, and {key} does not: {why}" for key, why in stages.items()]
        )
    try:
        sampler = sampler_of(config.async_rl)
    except SamplerError as error:
        raise ConfigError([str(error)]) from error
    bound = config.loss_fn.truncated_importance_sampling_ratio
    if sampler.window() >= _UNCLIPPED_LAG and bound is None:
        logger.warning(
            "samples may be %d versions old, and their importance weights have no bound, which can raise the KL "
            "manifold; loss_fn.truncated_importance_sampling_ratio=2.0 bounds them",
            sampler.window(),
        )


class StreamingSource(AheadSource):
    """Rollouts run beside training, and a step takes groups as they finish."""

    def __init__(self, run: GRPORun) -> None:
        self._parts = 0
        self._cfg = run.config.async_rl or AsyncRLConfig()
        super().__init__(run, _build_collector(run, self._cfg), self._cfg.sampler.name)

    def parts(self) -> Generator[Experience]:
        """Yields groups of the current step as they finish, scored and filtered, in parts large enough for a pass.
        Raises CollectorError: the collector cannot deliver.
        """
        accelerators, step = self._run.accelerators, self._run.state.step
        self._parts = 0
        with accelerators.demand(step, *self.waited_for()) as report:
            while groups := self._take(report):
                self._parts += 1
                yield self._scored(groups)
        if self._parts:
            # They may have been away while the step waited for its last groups.
            accelerators.lend_training(step)

    def _take(self, report: ReportProgress) -> Sequence[BufferedGroup]:
        """The next groups; empty if the step is complete or the prompts are used up."""
        run = self._run
        run.progress.phase("waiting for rollouts")
        with run.timer.time("exposed_generation"):
            try:
                # A step that kept its training accelerators while it waits could wait for rollouts that need them.
                return self.collector.take(
                    self._enough, report, lambda: run.accelerators.yield_training(run.state.step)
                )
            except StopIteration:
                return ()

    def _scored(self, groups: Sequence[BufferedGroup]) -> Experience:
        cfg, numbers = self._run.config.grpo, self.collector.numbers()
        for group in groups:
            group.rows["prompt_number"] = torch.full_like(group.rows["prompt_number"], numbers[group.key])
        experience = joined_groups(self._run.store, groups)
        experience.group_names = {numbers[group.key]: group_name(group.key) for group in groups}
        score_rewards(experience.rows, cfg)
        experience.metrics |= filter_rows(experience.rows, cfg)
        apply_staleness_policy(experience, self._run.store, cfg.async_grpo.mixed_versions, self._run.state.step)
        experience.metrics["buffer_size"] = float(len(self.collector))
        experience.metrics["avg_trajectory_age"] = experience.metrics["lag/mean"]
        return experience

    def _enough(self, groups: Sequence[BufferedGroup]) -> bool:
        """Whether these groups fill the accelerators, by their number or their tokens."""
        least = self._cfg.min_prompt_groups_per_batch or self._cfg.min_groups_for_streaming_train
        if worth_a_pass(len(groups), self.collector.queue.step, least):
            return True
        packing = self._run.config.policy.sequence_packing
        if not packing.enabled:
            return False
        tokens = sum(float(group.rows["total_lengths"].sum()) for group in groups)
        return tokens >= packing.train_mb_tokens * data_parallel_size(self._run.config)

    @override
    def trained(self) -> Mapping[str, float]:
        """Also returns the number of parts, and the prompts dropped, replaced and evicted since the last step."""
        step, collector = self.collector.queue.step, self.collector
        evicted, collector.evicted = collector.evicted, 0
        lag_s, collector.tasks.loop_lag_s = collector.tasks.loop_lag_s, 0.0
        metrics = {
            "streaming/parts": float(self._parts),
            "dropped_prompt_groups": float(len(step.dropped)),
            "replaced_prompt_groups": float(len(step.replaced)),
            "evicted_stale_prompt_groups": float(evicted),
            "streaming/dispatch_loop_lag_s": lag_s,
        }
        super().trained()
        return metrics


def _build_collector(run: GRPORun, cfg: AsyncRLConfig) -> Collector:
    failure, watchdog, grpo = cfg.rollout_failure, cfg.stall_watchdog, run.config.grpo
    # On lent shards generation stands still by order, for as long as the scheduler likes.
    aborts = watchdog.stall_action == "abort" and not getattr(run.generation, "lent", False)
    limits = QueueLimits(
        wanted=grpo.num_prompts_per_step,
        last_step=min(grpo.max_num_steps, run.total_steps),
        capacity=cfg.max_buffered_rollouts,
        max_inflight=cfg.max_inflight_prompts,
        min_fraction=failure.min_step_batch_fraction,
        replaces=failure.on_dropped_prompt == "replace",
    )
    return Collector(
        collector_parts(run),
        PromptQueue(sampler_of(cfg), limits, run.state.step),
        FailurePolicy(
            infra_attempts=failure.max_infra_attempts_per_prompt,
            data_attempts=failure.max_data_attempts_per_prompt,
            backoff_s=(failure.backoff_base_s, failure.max_backoff_s),
            max_skipped=failure.max_skipped_prompts,
            max_skipped_in_a_row=failure.max_consecutive_dropped_prompts,
        ),
        StallPolicy(watchdog.stall_timeout_s, aborts, _STALL_ADVICE[aborts]),
        RefitPolicy(recompute_kv=cfg.recompute_kv_cache_after_weight_updates),
    )
