"""Optimizer and learning-rate schedule from the dotted names of the configuration, and the update of Transformer
Engine's FusedAdam, computed by torch: Adam or AdamW whose moments may be kept in bfloat16.

Weights are float32 here, so they are the master weights that FusedAdam's options ask for. Invariants: a name or
argument that does not fit is an error that names the key; with moments in float32 FusedAdam's update is that of
`torch.optim.AdamW` (or of `Adam` without `adam_w_mode`).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from nemo_rl.config import OptimizerConfig, SchedulerConfig
from nemo_rl.config.errors import UserError
from nemo_rl.distributed.worker_groups import resolve_fqn

FUSED_ADAM = (
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
    "transformer_engine.pytorch.optimizers.FusedAdam",
)
_DTYPES = {"float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}


def moment_dtype(name: str, value: object) -> torch.dtype:
    """The dtype of a moment. Raises ValueError: it is neither float32 nor bfloat16."""
    found = value if value in _DTYPES.values() else _DTYPES.get(str(value).removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name}={value}: moments are kept in torch.float32 or torch.bfloat16")
    return found


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay (https://arxiv.org/abs/1711.05101), or added to the gradient without
    `adam_w_mode`.

    Args:
        exp_avg_dtype, exp_avg_sq_dtype: how the moments are kept between steps; a step computes in float32.
        master_weights, store_param_remainders: satisfied by weights in float32.

    Raises ValueError: an argument is out of range, or asks for what is not here.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: object = torch.float32,
        exp_avg_dtype: object = torch.float32,
        exp_avg_sq_dtype: object = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas) or len(betas) != 2:
            raise ValueError(f"lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}: out of range")
        for name, asked in (
            ("amsgrad", amsgrad),
            ("capturable", capturable),
            ("use_decoupled_grad", use_decoupled_grad),
        ):
            if asked:
                raise ValueError(f"{name}=true is not supported; leave it out")
        if moment_dtype("master_weight_dtype", master_weight_dtype) is not torch.float32:
            raise ValueError(f"master_weight_dtype={master_weight_dtype}: weights are kept in float32")
        self.adam_w_mode, self.bias_correction = adam_w_mode, bias_correction
        self.dtypes = {
            "exp_avg": moment_dtype("exp_avg_dtype", exp_avg_dtype),
            "exp_avg_sq": moment_dtype("exp_avg_sq_dtype", exp_avg_sq_dtype),
        }
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyrefly: ignore[bad-override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name, dtype in self.dtypes.items():
                state[name] = torch.zeros_like(parameter, dtype=dtype)
        state["step"] += 1
        first_beta, second_beta = group["betas"]
        weights, gradient = _local(parameter), _local(parameter.grad).float()
        if group["weight_decay"] and not self.adam_w_mode:
            gradient = gradient + group["weight_decay"] * weights
        moments = {}
        for name, dtype in self.dtypes.items():
            if state[name].dtype != dtype:
                # A restored state has the dtype of its parameter.
                state[name] = state[name].to(dtype)
            moments[name] = _local(state[name]).float()
        first = moments["exp_avg"].lerp(gradient, 1 - first_beta)
        second = moments["exp_avg_sq"].mul(second_beta).addcmul(gradient, gradient, value=1 - second_beta)
        for name, value in (("exp_avg", first), ("exp_avg_sq", second)):
            _local(state[name]).copy_(value)
        step = float(state["step"])
        scale = 1 - first_beta**step if self.bias_correction else 1.0
        root = (1 - second_beta**step) ** 0.5 if self.bias_correction else 1.0
        if self.adam_w_mode:
            weights.mul_(1 - group["lr"] * group["weight_decay"])
        weights.addcdiv_(first, (second.sqrt() / root).add_(group["eps"]), value=-float(group["lr"]) / scale)


def _local(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


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
        cls = FusedAdam if cfg.name in FUSED_ADAM else resolve_fqn(cfg.name)
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
