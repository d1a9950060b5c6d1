"""The update of Transformer Engine's FusedAdam, computed by torch: Adam or AdamW whose moments may be kept in bfloat16.

Weights are float32 here, so they are the master weights that its options ask for. Invariant: with moments in float32
the update is that of `torch.optim.AdamW` (or of `Adam` without `adam_w_mode`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

NAMES = (
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
