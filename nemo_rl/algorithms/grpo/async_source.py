"""The asynchronous source: rollouts of later steps run while a step trains.

Builds the trajectory collector, takes each step's groups from it and stores it in checkpoints. Invariants: the oldest
token of a trained group is at most `grpo.async_grpo.max_trajectory_age_steps` versions old; a checkpoint holds every
prompt group that was drawn and is not trained, finished or not, exactly once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nemo_rl.algorithms.accelerators import ReportProgress
from nemo_rl.algorithms.grpo.collect import Gathering, WholeSteps, prompts_of, prompts_per_batch, training_plan
from nemo_rl.algorithms.grpo.run import GRPORun
from nemo_rl.algorithms.grpo.stages import Experience, apply_staleness_policy, joined_experience
from nemo_rl.algorithms.resume import dataset_names
from nemo_rl.config import MasterConfig
from nemo_rl.data.loader import HasState
from nemo_rl.data_plane.field_schema import ROUTE_FIELDS, SAMPLING_MASK_FIELDS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.collector import Collector, CollectorParts
from nemo_rl.experience.prompt_queue import PromptQueue, QueueLimits, SavedBatch
from nemo_rl.experience.prompts import BufferedGroup, GroupKey
from nemo_rl.experience.rollout_tasks import FailurePolicy, RefitPolicy, StallPolicy
from nemo_rl.experience.rollouts import SampleOutcome
from nemo_rl.experience.samplers import InOrder
from nemo_rl.experience.store import ExperienceStore, RolloutColumns
from nemo_rl.models.generation.interfaces import request_timeout_s

logger = logging.getLogger(__name__)

_NEVER_S = 10 * 365 * 86400.0
_RETRY_S = (0.1, 5.0)
BUFFER_FILE, ROLLOUTS_FILE = "replay_buffer.pt", "rollouts.pt"


class AheadSource:
    """Base of sources whose rollouts run beside training. `sampler`: name of the rule by which steps take groups; a
    checkpoint holds it.
    """

    def __init__(self, run: GRPORun, collector: Collector, sampler: str) -> None:
        self._run, self.collector, self._sampler = run, collector, sampler

    @contextmanager
    def running(self) -> Generator[None]:
        """Restores the prompts and finished groups of the checkpoint; stops all rollouts at the end, and then drops the
        finished groups.
        """
        try:
            if self._run.resumed_from is not None:
                self._restore(self._run.resumed_from)
            yield
        finally:
            self.collector.stop()
        self.collector.clear()

    def published(self, version: int) -> None:
        """Lets rollouts begin whose steps may use this version."""
        self.collector.set_weight_version(version)

    def draw_ahead(self) -> None:
        """Draws and numbers the prompts that may begin under the next version."""
        self.collector.draw_ahead()

    def trained(self) -> Mapping[str, float]:
        """Moves the loader's position past the trained step; returns metrics of that step."""
        position, state = self.collector.finish_step(), self._run.state
        if position.epoch != state.epoch:
            state.epoch, state.step_in_epoch = position.epoch, 0
        return {}

    def finished(self) -> bool:
        """Whether steps or epochs are used up."""
        return self._run.state.step >= min(self._run.config.grpo.max_num_steps, self._run.total_steps)

    def waited_for(self) -> tuple[int, int]:
        """The groups of a step, and how many of them are finished."""
        groups = 0 if self.finished() else self._run.config.grpo.num_prompts_per_step
        return groups, self.collector.count_intended_for_step(self._run.state.step)

    def position(self) -> tuple[HasState, Mapping[str, object]]:
        """The loader position before the first prompt that is not trained; drawn batches since, and their finished
        groups.
        """
        draws = [[draw.batch, draw.rows, [list(row) for row in draw.open]] for draw in self.collector.draws()]
        return self.collector.position(), {
            BUFFER_FILE: {"groups": _plain_groups(self._run.store, self.collector.finished())},
            ROLLOUTS_FILE: {"batches": draws, "shape": batch_shape(self._run.config), "sampler": self._sampler},
        }

    def _restore(self, checkpoint: Path) -> None:
        """Groups that are too old now, or that another sampler selected, are dropped, and their prompts are generated
        again. If the batch shape or the datasets changed, everything is dropped.
        """
        queue, saved = self.collector.queue, _saved_rollouts(self._run.config, checkpoint)
        if saved is None:
            return
        batches = _saved_batches(saved)
        groups: list[BufferedGroup] = []
        if saved["sampler"] == self._sampler:
            known = {GroupKey(draw.batch, attempt, number) for draw in batches for _, attempt, number in draw.open}
            groups = _saved_groups(
                self._run.store, checkpoint, lambda group: group.key in known and queue.may_still_take(group)
            )
        else:
            logger.warning("resume=groups_generated_anew reason=sampler_was_%s", saved["sampler"])
        self.collector.restore(batches, groups)
        logger.info("resume=buffer groups=%d batches=%d", len(groups), len(batches))


class AsynchronousSource(WholeSteps, AheadSource):
    """Rollouts run ahead of training; every prompt group belongs to one step from its draw on."""

    def __init__(self, run: GRPORun) -> None:
        super().__init__(run, _build_collector(run), "in_order")
        self._gathering = Gathering(run.config.grpo, run.store, run.record, run.timer)

    def next_experience(self) -> Experience:
        """Waits for the groups of the current step and applies the staleness policy. Raises StopIteration: the prompts
        are used up; CollectorError: the collector cannot deliver.
        """
        step, timer = self._run.state.step, self._run.timer
        self._run.progress.phase("waiting for rollouts")
        with (
            self._run.accelerators.demand(step, *self.waited_for()) as report,
            timer.time("exposed_generation"),
        ):
            experience = self._gathering.gather(step, lambda attempt: self._collected(attempt, report))
        apply_staleness_policy(experience, self._run.store, self._run.config.grpo.async_grpo.mixed_versions, step)
        experience.metrics["buffer_size"] = float(len(self.collector))
        experience.metrics["avg_trajectory_age"] = experience.metrics["lag/mean"]
        return experience

    def _collected(self, attempt: int, on_progress: ReportProgress) -> Experience:
        """A generation batch of the step, in the order of its prompts."""
        if attempt:
            self.collector.extend_step()
        groups = sorted(self.collector.take(on_progress=on_progress), key=lambda group: group.key)
        if self._run.config.grpo.use_dynamic_sampling:
            # It records which of them it drops.
            self.collector.hand_over(groups)
        return joined_groups(self._run.store, groups)


def _build_collector(run: GRPORun) -> Collector:
    """Steps take their groups in order, and rollouts begin with the first weight version."""
    cfg, ahead = run.config.grpo, run.config.grpo.async_grpo
    limits = QueueLimits(wanted=prompts_per_batch(cfg), last_step=cfg.max_num_steps)
    longest_s = cfg.max_rollout_turns * request_timeout_s()
    # On lent shards generation stands still by order, for as long as the scheduler likes.
    stall = StallPolicy(_NEVER_S if getattr(run.generation, "lent", False) else 2 * longest_s)
    in_flight = ahead.in_flight_weight_updates
    return Collector(
        collector_parts(run),
        PromptQueue(InOrder(ahead.max_trajectory_age_steps), limits, run.state.step),
        FailurePolicy(in_a_row=ahead.max_generation_failures, backoff_s=_RETRY_S),
        stall,
        RefitPolicy(
            recompute_kv=ahead.recompute_kv_cache_after_weight_updates or not in_flight,
            drain_s=None if in_flight else longest_s,
        ),
    )


def collector_parts(run: GRPORun) -> CollectorParts:
    """What collectors work with."""
    rollouts: Any = run.rollouts
    if run.generation is None:
        raise RuntimeError("rollouts ahead of training need generation")
    return CollectorParts(
        prompts=prompts_of(run.config.grpo, run.train_loader, run.state.epoch),
        rollouts=rollouts,
        store=run.store,
        plan=lambda step: training_plan(run.config, step),
        start=run.generation.start_on_dispatch_loop,
        generations=run.config.grpo.num_generations_per_prompt,
        record=run.record,
    )


def joined_groups(store: ExperienceStore, groups: Sequence[BufferedGroup]) -> Experience:
    """Finished groups as one experience."""
    parts = [Experience(store.write(group.tokens), group.rows, group.samples, group.metrics) for group in groups]
    return joined_experience(parts, store)


def _plain_groups(store: ExperienceStore, groups: Sequence[BufferedGroup]) -> list[dict[str, Any]]:
    """Finished groups as plain values for a checkpoint."""
    return [
        {
            "key": list(group.key),
            "tokens": store.read(group.tokens, store.columns(group.tokens)).get_dict(),
            "rows": group.rows.get_dict(),
            "samples": [list(sample) for sample in group.samples],
            "metrics": group.metrics,
            "generated_at": group.generated_at,
        }
        for group in groups
    ]


def _saved_rollouts(config: MasterConfig, checkpoint: Path) -> dict[str, Any] | None:
    """`rollouts.pt` of a checkpoint; None if there is none, or it holds batches of another shape, of other datasets, or
    trained in part while this run trains whole ones.
    """
    if not (checkpoint / ROLLOUTS_FILE).exists():
        return None
    saved: dict[str, Any] = torch.load(checkpoint / ROLLOUTS_FILE, weights_only=True)
    shape = batch_shape(config)
    whole = all(len(batch.open) in (0, batch.rows) for batch in _saved_batches(saved))
    if saved["shape"] == shape and (whole or config.async_rl is not None):
        return saved
    logger.warning(
        "resume=buffer_ignored reason=batch_shape_or_datasets_changed_or_other_source saved=%s now=%s",
        saved["shape"],
        shape,
    )
    return None


def _saved_batches(saved: Mapping[str, Any]) -> list[SavedBatch]:
    return [SavedBatch(batch, rows, tuple((r, a, n) for r, a, n in left)) for batch, rows, left in saved["batches"]]


def _saved_groups(
    store: ExperienceStore, checkpoint: Path, wanted: Callable[[BufferedGroup], bool]
) -> list[BufferedGroup]:
    """Loads the wanted groups of a checkpoint into the store."""
    groups: list[BufferedGroup] = []
    for plain in torch.load(checkpoint / BUFFER_FILE, weights_only=True)["groups"]:
        tokens, rows = BatchedDataDict(plain["tokens"]), BatchedDataDict(plain["rows"])
        samples = [SampleOutcome(*sample) for sample in plain["samples"]]
        key = GroupKey(*plain["key"])
        group = BufferedGroup(key, tokens, rows, samples, plain["metrics"], plain["generated_at"])
        if wanted(group):
            group.tokens = store.write_pending(RolloutColumns(tokens, rows))
            groups.append(group)
    return groups


def batch_shape(config: MasterConfig) -> list[Any]:
    """The settings that determine the drawn batches and their columns."""
    cfg, policy = config.grpo, config.policy
    return [
        prompts_per_batch(cfg),
        cfg.num_generations_per_prompt,
        cfg.seed,
        *dataset_names(config),
        *(ROUTE_FIELDS if policy.router_replay.enabled else ()),
        *(SAMPLING_MASK_FIELDS if policy.sampling_mask_replay else ()),
    ]
