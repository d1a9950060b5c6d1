"""Which checkpoints are due, and which are kept.

Pure decisions on step numbers and recorded metrics. Invariant: the newest checkpoint is always kept.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl.config import CheckpointingConfig
from nemo_rl.config.errors import UserError
from nemo_rl.config.metric_names import MetricName

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedStep:
    """A finished checkpoint: its step, and the metric that ranks it, None where it was not measured."""

    step: int
    metric: float | None


class UnknownMetric(UserError, ValueError):
    """A metric is named that this run never computes."""


def steps_to_keep(saved: Iterable[SavedStep], cfg: CheckpointingConfig) -> set[int]:
    """The steps whose checkpoints stay: the union of three rules.

    - The `keep_top_k` best (all when null): by metric, ties to the newer; those without the metric come last, and with
      `metric_name` null the newest are best. With one of the keys `ft_*` only multiples of `save_period` are ranked, as
      in NeMo-RL; without them all are, so that a run which goes on keeps the last step of its first part by its rank.
    - The newest `ft_keep_latest_k` of all.
    - The newest.
    """
    newest_first = sorted(saved, key=lambda checkpoint: -checkpoint.step)
    extra = cfg.ft_save_period is not None or cfg.ft_keep_latest_k is not None
    ranked = [checkpoint for checkpoint in newest_first if not extra or checkpoint.step % cfg.save_period == 0]
    if cfg.keep_top_k is None and cfg.ft_save_period is None:
        return {checkpoint.step for checkpoint in newest_first}
    best = sorted(ranked, key=lambda checkpoint: _rank(checkpoint, cfg))[: cfg.keep_top_k]
    return {checkpoint.step for checkpoint in [*best, *newest_first[: max(cfg.ft_keep_latest_k or 0, 1)]]}


def best_step(saved: Iterable[SavedStep], cfg: CheckpointingConfig) -> int | None:
    """The step with the best metric (ties to the newer); the newest without metrics; None without checkpoints."""
    ranked = sorted(saved, key=lambda checkpoint: _rank(checkpoint, cfg))
    return ranked[0].step if ranked else None


def _rank(checkpoint: SavedStep, cfg: CheckpointingConfig) -> tuple[bool, float, int]:
    if cfg.metric_name is None or checkpoint.metric is None or math.isnan(checkpoint.metric):
        return (True, 0.0, -checkpoint.step)
    return (False, -checkpoint.metric if cfg.higher_is_better else checkpoint.metric, -checkpoint.step)


def should_save(
    step: int, cfg: CheckpointingConfig, *, is_last: bool = False, early_stop: bool = False, timeout: bool = False
) -> bool:
    """Whether a checkpoint is due after `step` (from 1): last step, time limit, `save_period` or `ft_save_period`."""
    if not cfg.enabled:
        return False
    periodic = step % cfg.save_period == 0 or (cfg.ft_save_period is not None and step % cfg.ft_save_period == 0)
    return is_last or early_stop or timeout or periodic


def ranking_metric(
    cfg: CheckpointingConfig, step: int, *, train: Mapping[str, Any] | None, val: Mapping[str, Any] | None
) -> dict[str, float]:
    """The entry of `training_info` that ranks a checkpoint, such as `{"val:accuracy": 0.5}`; empty with a warning if
    the metric was not measured in this step: the checkpoint is then unranked.
    """
    if cfg.metric_name is None:
        return {}
    metric = MetricName.read(cfg.metric_name)
    metrics = {"train": train, "val": val}[metric.kind]
    if metrics is None:
        logger.warning(
            "checkpoint_not_ranked step=%d metric=%s: not measured at this step; validate at every save_period",
            step,
            cfg.metric_name,
        )
        return {}
    if metric.name not in metrics:
        logger.warning(
            "checkpoint_not_ranked step=%d metric=%s: there is no such metric; %s metrics are %s",
            step,
            cfg.metric_name,
            metric.kind,
            sorted(metrics),
        )
        return {}
    return {cfg.metric_name: float(metrics[metric.name])}
