"""What an asynchronous run has besides a synchronous one: its collector, a step's batch out of it, and both in checkpoints.

Builds and converts; when any of it happens is the driver's business. Invariant: a checkpoint and the loader position
saved with it hold every prompt group that was drawn and is not trained, finished or not, exactly once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from nemo_rl.algorithms.grpo.collect import training_plan
from nemo_rl.algorithms.grpo.run import GRPORun
from nemo_rl.algorithms.grpo.stages import Experience
from nemo_rl.algorithms.run_checkpoint import dataset_names
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.columns import RolloutColumns, joined_rows
from nemo_rl.experience.prompts import EpochPrompts
from nemo_rl.experience.replay_buffer import BufferedGroup, GroupKey
from nemo_rl.experience.rollout_metrics import merged_rollout_metrics
from nemo_rl.experience.trajectory_collector import CollectorLimits, SavedDraw, TrajectoryCollector
from nemo_rl.models.generation.interfaces import request_timeout_s

logger = logging.getLogger(__name__)

BUFFER_FILE, ROLLOUTS_FILE = "replay_buffer.pt", "rollouts.pt"


def build_collector(run: GRPORun) -> TrajectoryCollector:
    """The run's collector, waiting for its first version."""
    cfg = run.config.grpo
    rollouts: Any = run.rollouts
    prompts = EpochPrompts(
        run.train_loader, batch_size=int(cfg.num_prompts_per_step * cfg.batch_multiplier), epoch=run.state.epoch, max_epochs=cfg.max_num_epochs
    )
    limits = CollectorLimits(
        max_age=cfg.async_grpo.max_trajectory_age_steps,
        generations=cfg.num_generations_per_prompt,
        last_step=cfg.max_num_steps,
        max_failures=cfg.async_grpo.max_generation_failures,
        stall_s=2 * cfg.max_rollout_turns * request_timeout_s(),
    )
    return TrajectoryCollector(
        prompts=prompts,
        rollouts=rollouts,
        store=run.store,
        plan=lambda step: training_plan(run, step),
        start=run.generation.start_on_dispatch_loop,
        limits=limits,
        record=run.record,
    )


def collected_experience(run: GRPORun, collector: TrajectoryCollector, attempt: int, on_progress: Callable[[int, int], None]) -> Experience[Any]:
    """Generation batch `attempt` of the current step, once the collector has it.

    Raises:
        StopIteration: The prompts are exhausted.
        CollectorError: The collector cannot deliver.
    """
    groups = collector.take(run.state.step, attempt, on_progress)
    rows = joined_rows([group.rows for group in groups])
    handle = run.store.concat([run.store.write(group.tokens) for group in groups])
    return Experience(handle, rows, merged_rollout_metrics([group.metrics for group in groups]))


def saved_collector(run: GRPORun, collector: TrajectoryCollector) -> dict[str, Any]:
    """What a checkpoint holds of the collector: which batches are drawn and not trained, and their finished groups."""
    groups = [
        {
            "key": list(group.key),
            "tokens": run.store.read(group.tokens, run.store.columns(group.tokens)).get_dict(),
            "rows": group.rows.get_dict(),
            "metrics": group.metrics,
            "generated_at": group.generated_at,
        }
        for group in collector.finished()
    ]
    return {BUFFER_FILE: {"groups": groups}, ROLLOUTS_FILE: {"draws": [list(draw) for draw in collector.draws()], "shape": _shape(run)}}


def restore_collector(run: GRPORun, collector: TrajectoryCollector) -> None:
    """Goes on with the groups of the checkpoint that the run resumed from.

    Groups of past steps, and groups that are older than their step now allows, are left out: their prompts are generated anew. Of another batch shape,
    or of other datasets, all are.
    """
    if run.resumed_from is None or not (run.resumed_from / ROLLOUTS_FILE).exists():
        return
    rollouts = torch.load(run.resumed_from / ROLLOUTS_FILE, weights_only=True)
    if rollouts["shape"] != _shape(run):
        logger.warning("resume=buffer_ignored reason=batch_shape_or_datasets_changed saved=%s now=%s", rollouts["shape"], _shape(run))
        return
    draws = [SavedDraw(*draw) for draw in rollouts["draws"]]
    saved = torch.load(run.resumed_from / BUFFER_FILE, weights_only=True)["groups"]
    max_age = run.config.grpo.async_grpo.max_trajectory_age_steps
    groups = []
    for plain in saved:
        key = GroupKey(*plain["key"])
        rows = BatchedDataDict(plain["rows"])
        group = BufferedGroup(key, None, rows, plain["metrics"], plain["generated_at"])
        if key.target < run.state.step or group.is_stale(max_age):
            continue
        group.tokens = run.store.set_aside(RolloutColumns(BatchedDataDict(plain["tokens"]), rows))
        groups.append(group)
    collector.restore(draws, groups)
    logger.info("resume=buffer groups=%d batches=%d", len(groups), len(draws))


def _shape(run: GRPORun) -> list[Any]:
    cfg = run.config.grpo
    return [int(cfg.num_prompts_per_step * cfg.batch_multiplier), cfg.num_generations_per_prompt, cfg.seed, *dataset_names(run.config)]
