"""Expert parallelism: each rank of a group keeps some of the experts, and tokens are sent to the ranks of their
experts.

Every token is sent at most once to each rank that holds one of its experts, which adds up what its experts make of it
and sends one row back: never more traffic than gathering all tokens, and less than one copy per expert. Ranks may have
any number of tokens, none included. Invariants: ranks of a group exchange equally often, whatever their tokens are; an
expert's gradient is the sum over all tokens of the group, once each.

Shapes: T tokens of this rank, K experts of a token, D width, R rows sent or received, E ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from nemo_rl.models.policy.model_config import UnsupportedModelError


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a transformers 5 model that hold all experts of a layer in stacked weights, first dimension
    experts.
    """
    return [module for module in model.modules() if count_experts(module)]


def count_experts(module: nn.Module) -> int:
    """How many experts' weights `module` holds, stacked along their first dimension; 0 if it holds none."""
    experts = getattr(module, "num_experts", None)
    shapes = [parameter.shape for parameter in module.parameters(recurse=False)]
    stacked = any(len(shape) >= 3 for shape in shapes) and all(shape[0] == experts for shape in shapes)
    return experts if isinstance(experts, int) and stacked else 0


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cuts the experts of every layer over `mesh`, in place. Raises UnsupportedModelError: the model has no experts in
    stacked weights, or they cannot skip tokens of other ranks.
    """
    found = expert_modules(model)
    key = f"policy.dtensor_cfg.expert_parallel_size={mesh.size()}"
    if not found:
        raise UnsupportedModelError(
            f"{key}: {type(model).__name__} has no experts in stacked weights (transformers >= 5 has them); set it to 1"
        )
    for module in found:
        # What transformers 5.18 and later set on experts that its kernels compute, and what 5.17 does.
        if not hasattr(module, "_is_expert_parallel") and not (
            hasattr(module, "has_gate") and Version(transformers.__version__) >= Version("5.17")
        ):
            raise UnsupportedModelError(
                f"{key}: {type(module).__name__} computes with all experts at once and cannot be cut by transformers "
                f"{transformers.__version__}; set it to 1, or install transformers >= 5.17"
            )
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
        module.__dict__["forward"] = _Exchange(module, type(module).forward, mesh)


class _LocalExperts:
    """View of the module for the layer's own computation, with this rank's experts only."""

    def __init__(self, module: nn.Module, experts: int) -> None:
        self._module = module
        self.num_experts = experts
        # Rows may carry the id `num_experts`, which stands for an expert of another rank and costs nothing.
        self._is_expert_parallel = True

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to_local() if isinstance(value, DTensor) else value


class _Exchange:
    """The forward pass of an experts module whose experts are sharded over a group."""

    def __init__(self, module: nn.Module, compute: Callable[..., torch.Tensor], mesh: DeviceMesh) -> None:
        self._compute = compute
        self._group = mesh.get_group()
        self._ranks = mesh.size()
        self._rank = mesh.get_local_rank()
        self._experts = count_experts(module) // self._ranks
        self._local = _LocalExperts(module, self._experts)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Outputs [T, D] of the experts for this rank's tokens, weighted and summed."""
        tokens = hidden_states.shape[0]
        owner_TK = top_k_index // self._experts
        wanted_TE = torch.zeros((tokens, self._ranks), dtype=torch.bool, device=hidden_states.device).scatter_(
            1, owner_TK, True
        )
        # Rows in the order of the ranks they go to.
        rank_R, token_R = wanted_TE.t().nonzero(as_tuple=True)
        sent, received = self._counts(wanted_TE)
        elsewhere_RK = owner_TK[token_R] != rank_R[:, None]
        index_RK = (top_k_index[token_R] - self._experts * rank_R[:, None]).masked_fill(elsewhere_RK, self._experts)
        weights_RK = top_k_weights[token_R].masked_fill(elsewhere_RK, 0.0)
        there = [_AllToAll.apply(part, sent, received, self._group) for part in (hidden_states[token_R], weights_RK)]
        index = _all_to_all(index_RK, sent, received, self._group)
        back_RD = _AllToAll.apply(self._compute_rows(there[0], index, there[1]), received, sent, self._group)
        total_TD = torch.zeros_like(hidden_states, dtype=torch.float32)
        # Rank by rank a token appears once, so that the sum has one order on every device.
        for token, rows in zip(token_R.split(sent), back_RD.split(sent), strict=True):
            total_TD = total_TD.index_add(0, token, rows.float())
        return total_TD.to(hidden_states.dtype)

    def _counts(self, wanted_TE: torch.Tensor) -> tuple[list[int], list[int]]:
        sent_E = wanted_TE.sum(dim=0)
        received_E = torch.empty_like(sent_E)
        dist.all_to_all_single(received_E, sent_E, group=self._group)
        sent, received = torch.stack([sent_E, received_E]).tolist()
        return sent, received

    def _compute_rows(self, hidden_RD: torch.Tensor, index_RK: torch.Tensor, weights_RK: torch.Tensor) -> torch.Tensor:
        rows = hidden_RD.shape[0]
        if rows == 0:
            # The weights must have a gradient on every rank, for its reduction is collective: one row of zeros with
            # weight zero.
            hidden_RD = torch.cat([hidden_RD, hidden_RD.new_zeros(1, hidden_RD.shape[1])])
            index_RK = index_RK.new_zeros(1, index_RK.shape[1])
            weights_RK = torch.cat([weights_RK, weights_RK.new_zeros(1, weights_RK.shape[1])])
        return self._compute(self._local, hidden_RD, index_RK, weights_RK)[:rows]


def _all_to_all(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


class _AllToAll(torch.autograd.Function):
    """Sends `sent[i]` rows to rank i and receives `received[i]` from it; gradients travel the way back."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  # torch's stub takes any arguments, a function has its own
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.way = (sent, received, group)
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sent, received, group = ctx.way
        return _all_to_all(grads[0], received, sent, group), None, None, None
