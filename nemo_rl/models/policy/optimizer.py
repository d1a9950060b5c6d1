"""Optimizer and learning-rate schedule from the dotted names of the configuration.

Knows torch's conventions (classes that take parameters, schedulers that take the optimizer) and nothing else.
Invariant: a name or argument that does not fit is an error that names the key.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from nemo_rl.config import OptimizerConfig, SchedulerConfig
from nemo_rl.distributed.worker_groups import resolve_fqn


class OptimizerConfigError(ValueError):
    """`policy.optimizer` or `policy.scheduler` cannot be built."""


def check_names(optimizer: OptimizerConfig | None, scheduler: list[SchedulerConfig] | None) -> None:
    """Whether the dotted names exist and take the given arguments; needs no parameters and no device.

    Raises:
        OptimizerConfigError: They do not.
    """
    named = [("policy.optimizer", optimizer.name, optimizer.kwargs)] if optimizer is not None else []
    named += [(f"policy.scheduler.{index}", entry.name, entry.kwargs) for index, entry in enumerate(scheduler or []) if entry.name is not None]
    for key, name, kwargs in named:
        try:
            inspect.signature(resolve_fqn(name)).bind(None, **kwargs)
        except (ImportError, TypeError, ValueError) as error:
            raise OptimizerConfigError(f"{key}: {name}({', '.join(kwargs)}) cannot be built: {error}") from error


def build_optimizer(cfg: OptimizerConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer class behind `policy.optimizer.name` on `parameters`.

    Raises:
        OptimizerConfigError: The name does not exist, is no optimizer, or refuses its arguments.
    """
    try:
        cls = resolve_fqn(cfg.name)
        optimizer = cls(_by_mesh(parameters), **cfg.kwargs)
    except (ImportError, TypeError, ValueError) as error:
        raise OptimizerConfigError(f"policy.optimizer: {cfg.name}({', '.join(cfg.kwargs)}) cannot be built: {error}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerConfigError(f"policy.optimizer.name={cfg.name} is not a torch optimizer")
    return optimizer


def _by_mesh(parameters: Iterable[torch.nn.Parameter]) -> list[Any]:
    """The parameters, in groups where some are cut over other ranks than others: torch's batched updates take tensors of one mesh."""
    groups: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in groups.values()] if len(groups) > 1 else next(iter(groups.values()), [])


def build_scheduler(entries: list[SchedulerConfig] | None, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """One scheduler, or several in a row where an entry gives `milestones`; None keeps the rate.

    Raises:
        OptimizerConfigError: Names, arguments or milestones do not fit.
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
        raise OptimizerConfigError(f"policy.scheduler: {len(schedulers)} schedulers need {len(schedulers) - 1} milestones, got {milestones}")
    return SequentialLR(optimizer, schedulers, milestones)


def _build_one(name: str, kwargs: dict[str, Any], optimizer: torch.optim.Optimizer, index: int) -> LRScheduler:
    try:
        return resolve_fqn(name)(optimizer, **kwargs)
    except (ImportError, TypeError, ValueError) as error:
        raise OptimizerConfigError(f"policy.scheduler.{index}: {name}({', '.join(kwargs)}) cannot be built: {error}") from error
