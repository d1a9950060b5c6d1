"""Optimizer and learning-rate schedule from the dotted names of the configuration.

Invariant: a name or argument that does not fit is an error that names the key.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from nemo_rl.config import OptimizerConfig, SchedulerConfig
from nemo_rl.config.errors import UserError
from nemo_rl.distributed.worker_groups import resolve_fqn
from nemo_rl.models.policy import fused_adam

logger = logging.getLogger(__name__)


class OptimizerConfigError(UserError, ValueError):
    """`policy.optimizer` or `policy.scheduler` cannot be built."""


def check_names(optimizer: OptimizerConfig | None, scheduler: list[SchedulerConfig] | None) -> None:
    """Whether optimizer and schedule can be built, by building them on a single number; needs no device. Raises
    OptimizerConfigError: they cannot.
    """
    if optimizer is None:
        return
    try:
        built = build_optimizer(optimizer, [torch.nn.Parameter(torch.zeros(1))])
    except RuntimeError as error:
        # Some optimizers are made for GPUs alone.
        logger.info("optimizer=not_checked name=%s reason=%s", optimizer.name, error)
        return
    if build_scheduler(scheduler, built) is None:
        return
    # Some arguments of a wrong kind are first read by a step.
    for index, entry in enumerate(scheduler or ()):
        if entry.name is not None:
            optimizer_of_one = build_optimizer(optimizer, [torch.nn.Parameter(torch.zeros(1))])
            one = _build_one(entry.name, entry.kwargs, optimizer_of_one, index)
            try:
                with warnings.catch_warnings(action="ignore"):
                    one.step()
            except (TypeError, ValueError) as error:
                call = _call(entry.name, entry.kwargs)
                raise OptimizerConfigError(f"policy.scheduler.{index}: {call} cannot take a step: {error}") from error


def build_optimizer(cfg: OptimizerConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer class behind `policy.optimizer.name` on `parameters`. Raises OptimizerConfigError: the name does
    not exist, is no optimizer, or refuses its arguments.
    """
    try:
        cls = fused_adam.FusedAdam if cfg.name in fused_adam.NAMES else resolve_fqn(cfg.name)
        optimizer = cls(_by_mesh(parameters), **cfg.kwargs)
    except (ImportError, TypeError, ValueError) as error:
        call = _call(cfg.name, cfg.kwargs)
        raise OptimizerConfigError(f"policy.optimizer: {call} cannot be built: {error}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerConfigError(f"policy.optimizer.name={cfg.name} is not a torch optimizer")
    return optimizer


def _by_mesh(parameters: Iterable[torch.nn.Parameter]) -> list[Any]:
    """The parameters, in groups where some are cut over other ranks than others: torch's batched updates take tensors
    of one mesh.
    """
    groups: dict[object, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in groups.values()] if len(groups) > 1 else next(iter(groups.values()), [])


def build_scheduler(entries: list[SchedulerConfig] | None, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """One scheduler, or several in a row where an entry gives `milestones`; None keeps the rate. Raises
    OptimizerConfigError: names, arguments or milestones do not fit.
    """
    if not entries:
        return None
    schedulers: list[LRScheduler] = []
    milestones: list[int] | None = None
    for index, entry in enumerate(entries):
        if entry.milestones is not None:
            milestones = list(entry.milestones)
            continue
        schedulers.append(_build_one(entry.name or "", entry.kwargs, optimizer, index))
    if milestones is None and len(schedulers) == 1:
        return schedulers[0]
    if milestones is None or len(milestones) != len(schedulers) - 1:
        raise OptimizerConfigError(
            f"policy.scheduler: {len(schedulers)} schedulers need {len(schedulers) - 1} milestones, got {milestones}"
        )
    return SequentialLR(optimizer, schedulers, milestones)


def advance_scheduler(scheduler: LRScheduler, steps: int) -> None:
    """Advances a new schedule by `steps` steps, in place. Steps are repeated, not restored: changed arguments take
    effect, and unchanged ones give the same rate bit for bit.
    """
    with warnings.catch_warnings():
        # The optimizer made these steps in an earlier process.
        warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler.step\(\)` before")
        for _ in range(steps):
            scheduler.step()


def _build_one(name: str, kwargs: dict[str, object], optimizer: torch.optim.Optimizer, index: int) -> LRScheduler:
    try:
        return resolve_fqn(name)(optimizer, **kwargs)
    except (ImportError, TypeError, ValueError) as error:
        call = _call(name, kwargs)
        raise OptimizerConfigError(f"policy.scheduler.{index}: {call} cannot be built: {error}") from error


def _call(name: str, kwargs: dict[str, object]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in kwargs.items())})"
