"""The source that generates ahead: rollouts of later steps run while a step trains.

Ties the trajectory collector to the run: builds it, takes a step's groups out of it, holds it in checkpoints.
Invariants: a step trains on groups whose oldest token is at most `grpo.async_grpo.max_trajectory_age_steps` versions
old; a checkpoint and the loader position saved with it hold every prompt group that was drawn and is not trained,
finished or not, exactly once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from nemo_rl.algorithms.grpo.collect import gather_experience, prompts_of, training_plan
from nemo_rl.algorithms.grpo.control_plane import ReportProgress
from nemo_rl.algorithms.grpo.experience_source import WholeSteps
from nemo_rl.algorithms.grpo.stages import Experience, apply_staleness_policy
from nemo_rl.algorithms.run_checkpoint import dataset_names
from nemo_rl.data.loader import HasState
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.collector import CollectorParts
from nemo_rl.experience.columns import RolloutColumns, joined_rows
from nemo_rl.experience.replay_buffer import BufferedGroup, GroupKey
from nemo_rl.experience.rollouts import merged_rollout_metrics
from nemo_rl.experience.stream_collector import StreamCollector
from nemo_rl.experience.trajectory_collector import CollectorLimits, SavedDraw, TrajectoryCollector
from nemo_rl.models.generation.interfaces import request_timeout_s

if TYPE_CHECKING:
    from nemo_rl.algorithms.grpo.run import GRPORun

logger = logging.getLogger(__name__)

_NEVER_S = 10 * 365 * 86400.0
BUFFER_FILE, ROLLOUTS_FILE = "replay_buffer.pt", "rollouts.pt"


Collector = TypeVar("Collector", TrajectoryCollector, StreamCollector)


class AheadSource(Generic[Collector]):
    """What sources have in common whose rollouts run beside training.

    Args:
        run: The run.
        collector: Rolls out for it.
    """

    generates_ahead = True

    def __init__(self, run: GRPORun, collector: Collector) -> None:
        self._run = run
        self.collector = collector

    @property
    def version(self) -> int:
        """The version of the run's weights."""
        return self._run.state.step

    def published(self, version: int) -> None:
        """Rollouts of the steps that this version is young enough for may begin."""
        self.collector.set_weight_version(version)

    def draw_ahead(self) -> None:
        """Draws and numbers what may begin under the next version."""
        self.collector.draw_ahead()

    def trained(self, step: int) -> None:
        """The loader's position moves past what is trained."""
        position, state = self.collector.finish_step(step), self._run.state
        if position.epoch != state.epoch:
            state.epoch, state.step_in_epoch = position.epoch, 0

    def finished(self) -> bool:
        """Whether steps or epochs are used up."""
        return self._run.state.step >= min(self._run.config.grpo.max_num_steps, self._run.total_steps)

    def waited_for(self) -> tuple[int, int]:
        """A whole step, and its groups that are finished."""
        groups = 0 if self.finished() else self._run.config.grpo.num_prompts_per_step
        return groups, self.collector.count_intended_for_step(self._run.state.step)

    def loader(self) -> HasState:
        """Where the loader stood before what is still to be trained."""
        return self.collector.position()

    def stop(self) -> None:
        """Ends every rollout."""
        self.collector.stop()

    def clear(self) -> None:
        """Forgets the groups that wait."""
        self.collector.clear()


class AsynchronousSource(WholeSteps, AheadSource[TrajectoryCollector]):
    """Rollouts run ahead of training, and every step takes what was made for it."""

    def __init__(self, run: GRPORun) -> None:
        super().__init__(run, build_collector(run))
        self._settings = run.config.grpo.async_grpo

    def start(self) -> None:
        """Goes on with the groups of the checkpoint."""
        restore_collector(self._run, self.collector)

    def next_experience(self) -> Experience:
        """Waits for the groups of the current step and judges the versions of their tokens.

        Raises:
            StopIteration: The prompts are used up.
            CollectorError: The collector cannot deliver.
        """
        run, step = self._run, self._run.state.step
        run.progress.phase("waiting for rollouts")
        with run.control.demand(step, *self.waited_for()) as report, run.timer.time("exposed_generation"):
            experience = gather_experience(run, lambda attempt: self._collected(attempt, report))
        apply_staleness_policy(experience, run.store, self._settings.mixed_versions, step)
        experience.metrics["buffer_size"] = float(len(self.collector.buffer))
        experience.metrics["avg_trajectory_age"] = experience.metrics["lag/mean"]
        return experience

    def _collected(self, attempt: int, on_progress: ReportProgress) -> Experience:
        groups = self.collector.take(self._run.state.step, attempt, on_progress)
        rows = joined_rows([group.rows for group in groups])
        store = self._run.store
        handle = store.concat([store.write(group.tokens) for group in groups])
        return Experience(handle, rows, merged_rollout_metrics([group.metrics for group in groups]))

    def recompute_kv(self) -> bool:
        """As configured; always where requests end first, whose prefixes are of no use then."""
        return self._settings.recompute_kv_cache_after_weight_updates or not self._settings.in_flight_weight_updates

    @contextmanager
    def refit_window(self) -> Iterator[None]:
        """Below running requests, or once they have ended."""
        in_flight, turns = self._settings.in_flight_weight_updates, self._run.config.grpo.max_rollout_turns
        if not in_flight:
            with self._run.timer.time("idle/refit_bubble"):
                self.collector.prepare_for_refit(timeout_s=turns * request_timeout_s())
        try:
            yield
        finally:
            self.collector.resume_after_refit()

    def saved(self) -> Mapping[str, object]:
        """Which batches are drawn and not trained, and their finished groups."""
        return saved_collector(self._run, self.collector)


def build_collector(run: GRPORun) -> TrajectoryCollector:
    """The run's collector, waiting for its first version."""
    cfg, ahead = run.config.grpo, run.config.grpo.async_grpo
    limits = CollectorLimits(
        max_age=ahead.max_trajectory_age_steps,
        last_step=cfg.max_num_steps,
        max_failures=ahead.max_generation_failures,
        # On lent shards generation stands still by order, for as long as the scheduler likes.
        stall_s=_NEVER_S if getattr(run.generation, "lent", False) else 2 * cfg.max_rollout_turns * request_timeout_s(),
    )
    return TrajectoryCollector(collector_parts(run), limits)


def collector_parts(run: GRPORun) -> CollectorParts:
    """What a collector of this run works with."""
    rollouts: Any = run.rollouts
    if run.generation is None:
        raise RuntimeError("rollouts ahead of training need generation")
    return CollectorParts(
        prompts=prompts_of(run),
        rollouts=rollouts,
        store=run.store,
        plan=lambda batch: training_plan(run, batch),
        start=run.generation.start_on_dispatch_loop,
        generations=run.config.grpo.num_generations_per_prompt,
        record=run.record,
    )


def saved_collector(run: GRPORun, collector: TrajectoryCollector) -> dict[str, object]:
    """What a checkpoint holds of the collector: which batches are drawn and not trained, and their finished groups."""
    draws = [list(draw) for draw in collector.draws()]
    return {
        BUFFER_FILE: {"groups": plain_groups(run, collector.finished())},
        ROLLOUTS_FILE: {"draws": draws, "shape": batch_shape(run)},
    }


def plain_groups(run: GRPORun, groups: Sequence[BufferedGroup]) -> list[dict[str, Any]]:
    """Finished groups as a checkpoint holds them."""
    return [
        {
            "key": list(group.key),
            "tokens": run.store.read(group.tokens, run.store.columns(group.tokens)).get_dict(),
            "rows": group.rows.get_dict(),
            "metrics": group.metrics,
            "generated_at": group.generated_at,
        }
        for group in groups
    ]


def saved_groups(run: GRPORun, wanted: Callable[[BufferedGroup], bool]) -> list[BufferedGroup]:
    """Those groups of the checkpoint that are wanted, in the store again."""
    groups: list[BufferedGroup] = []
    if run.resumed_from is None:
        return groups
    for plain in torch.load(run.resumed_from / BUFFER_FILE, weights_only=True)["groups"]:
        tokens, rows = BatchedDataDict(plain["tokens"]), BatchedDataDict(plain["rows"])
        group = BufferedGroup(GroupKey(*plain["key"]), tokens, rows, plain["metrics"], plain["generated_at"])
        if wanted(group):
            group.tokens = run.store.write_pending(RolloutColumns(tokens, rows))
            groups.append(group)
    return groups


def restore_collector(run: GRPORun, collector: TrajectoryCollector) -> None:
    """Goes on with the groups of the checkpoint that the run resumed from.

    Groups of past steps, and groups that are older than their step now allows, are left out: their prompts are
    generated anew. Of another batch shape, or of other datasets, all are.
    """
    if run.resumed_from is None or not (run.resumed_from / ROLLOUTS_FILE).exists():
        return
    rollouts = torch.load(run.resumed_from / ROLLOUTS_FILE, weights_only=True)
    if "draws" not in rollouts or rollouts["shape"] != batch_shape(run):
        logger.warning(
            "resume=buffer_ignored reason=batch_shape_or_datasets_changed saved=%s now=%s",
            rollouts["shape"],
            batch_shape(run),
        )
        return
    draws = [SavedDraw(*draw) for draw in rollouts["draws"]]
    max_age = run.config.grpo.async_grpo.max_trajectory_age_steps
    groups = saved_groups(run, lambda group: group.key.target >= run.state.step and not group.is_stale(max_age))
    collector.restore(draws, groups)
    logger.info("resume=buffer groups=%d batches=%d", len(groups), len(draws))


def batch_shape(run: GRPORun) -> list[Any]:
    """What drawn batches of prompts depend on."""
    cfg = run.config.grpo
    return [
        int(cfg.num_prompts_per_step * cfg.batch_multiplier),
        cfg.num_generations_per_prompt,
        cfg.seed,
        *dataset_names(run.config),
    ]
