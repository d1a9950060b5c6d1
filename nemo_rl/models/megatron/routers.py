"""Additions to Megatron's routers: replay of recorded choices, and the load-balancing loss.

Each router asks its `router_replay` slot, which Megatron-Core made for this, for the experts of its tokens. The
load-balancing loss is that of Switch Transformers (https://arxiv.org/abs/2101.03961) of each packed row, weighed by the
row's part in what divides the step's gradient. Invariants: routers get their inputs before every forward pass of a
part of the model; padding and idle rows have no loss.

Shapes: T tokens of this rank's slice of the row, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from nemo_rl.loss.interfaces import LossFunction, LossType, count_valid
from nemo_rl.models.megatron.groups import MegatronGroups
from nemo_rl.models.megatron.model import BuiltModel, unwrap
from nemo_rl.models.policy.model_config import UnsupportedModelError
from nemo_rl.models.policy.packed import PackedBatch, RowSlice
from nemo_rl.models.policy.router_replay import RouterPass, RouterReplay, RouterTarget

if TYPE_CHECKING:
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig

_KEY = "policy.router_replay.enabled=true"
_TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class _ReplayedTopK:
    """Implementation of a router's `router_replay` slot."""

    def __init__(self, target: RouterTarget) -> None:
        self._target = target

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: _TopK,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and experts [T, K] of each token from its scores [T, E]."""
        values_TK, natural_TK = default_compute_topk(scores, topk, num_groups, group_topk)
        chosen_TK = self._target.choose(natural_TK)
        return (values_TK, natural_TK) if chosen_TK is natural_TK else (scores.gather(1, chosen_TK), chosen_TK)


class _LoadBalancing:
    """Replacement of a router's `_apply_aux_loss`."""

    def __init__(self, router: TopKRouter, target: RouterTarget, coefficient: float) -> None:
        self._target, self._coefficient = target, coefficient
        self._experts_per_token, self._ranks = int(router.topk), router.tp_cp_group
        # The loss of each row times its weight, and the weights.
        self.sums = torch.zeros(2, dtype=torch.float64, device=router.weight.device)

    def __call__(
        self, probs: torch.Tensor, scores_TE: torch.Tensor, chosen_TE: torch.Tensor, with_padding_mask: bool = False
    ) -> torch.Tensor:
        """`probs` as they are, whose backward pass adds this rank's part of the loss."""
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        routed = self._target.now
        if routed.real_T is None:
            return probs
        real_T1 = routed.real_T[:, None]
        counts = torch.cat([(chosen_TE & real_T1).sum(dim=0), routed.real_T.sum()[None]])
        dist.all_reduce(counts, group=self._ranks)
        chosen_E, tokens = counts[:-1], counts[-1].clamp(min=1)
        share_E = chosen_E / (tokens * self._experts_per_token)
        loss = len(chosen_E) * (share_E * (scores_TE * real_T1).sum(dim=0) / tokens).sum()
        weight = torch.tensor([routed.weight, routed.weight / self._ranks.size()], device=loss.device).double()
        self.sums += torch.stack([loss.detach().double(), loss.new_ones((), dtype=torch.float64)]) * weight
        return MoEAuxLossAutoScaler.apply(probs, loss * (routed.weight * self._coefficient))


def _enter(target: RouterTarget, _: nn.Module, __: object) -> None:
    target.enter()


def expert_layers(config: TransformerConfig) -> list[int]:
    """Which layers of the whole model have experts, counted from 0. `config`: Megatron's of the model."""
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [layer for layer in range(config.num_layers) if layer % frequency == 0]
    return [layer for layer, has_experts in enumerate(frequency) if has_experts]


class Routers:
    """The routers of this rank's parts of a model.

    Args:
        replays: Whether recorded routes are replayed.

    Raises UnsupportedModelError: the routers choose experts in a way that cannot be replayed.
    """

    def __init__(self, model: BuiltModel, groups: MegatronGroups, *, replays: bool) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        config = model.config
        if replays and (not config.num_moe_experts or config.moe_router_fusion):
            raise UnsupportedModelError(
                f"{_KEY} replays the choices of an unfused top-k router; the model has none, or "
                "policy.megatron_cfg.model_overrides.moe_router_fusion is true"
            )
        self._groups, self._sequence_parallel = groups, bool(config.sequence_parallel)
        # Of the whole model: a stage may have no router, and takes part in sums all the same.
        self._balances = config.moe_router_load_balancing_type == "aux_loss" and config.moe_aux_loss_coeff > 0
        self._losses: list[_LoadBalancing] = []
        self._targets: dict[nn.Module, list[RouterTarget]] = {}
        layers = expert_layers(config) if config.num_moe_experts else []
        for chunk in model.chunks:
            self._targets[chunk] = []
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    layer = int(module.layer_number or 0) - 1
                    # Layers of multi-token prediction come after the model's own; no engine records their routes.
                    predicts = layer >= config.num_layers
                    target = RouterTarget(len(layers) if predicts else layers.index(layer), groups.device)
                    self._targets[chunk].append(target)
                    self._attach(module, target, replays=replays and not predicts)
        self.replay = (
            RouterReplay(self._all_targets(), len(layers), config.num_moe_experts, config.moe_router_topk)
            if replays
            else None
        )

    def _attach(self, router: TopKRouter, target: RouterTarget, *, replays: bool) -> None:
        router.register_forward_pre_hook(partial(_enter, target))
        if replays:
            if not hasattr(router, "router_replay"):
                raise UnsupportedModelError(f"{_KEY} needs megatron-core >= 0.16; pip install 'megatron-core>=0.16'")
            router.router_replay = _ReplayedTopK(target)
        coefficient = router.get_aux_loss_coeff("aux_loss")
        if coefficient:
            self._losses.append(_LoadBalancing(router, target, coefficient))
            router.__dict__["_apply_aux_loss"] = self._losses[-1]

    def _all_targets(self) -> list[RouterTarget]:
        return [target for own in self._targets.values() for target in own]

    def start_run(self) -> None:
        """Forgets the passes of an earlier run, which may have failed half-way."""
        for target in self._all_targets():
            target.clear()

    def aim(
        self,
        chunk: nn.Module,
        data: Mapping[str, torch.Tensor] | None,
        batch: PackedBatch,
        cut: RowSlice,
        loss_fn: LossFunction | None,
    ) -> None:
        """Prepares the routers of a part of the model for its next forward pass.

        Args:
            data: The microbatch; None for an idle one.
            loss_fn: The loss of a pass that is followed by a backward pass, else None.

        Raises RouterReplayError: routes do not fit the model.
        """
        own = self._targets[unwrap(chunk)]
        if not own:
            return
        routes, real_T, weight = None, None, 0.0
        if self.replay is not None:
            self.replay.check(batch.routes)
            routes = None if batch.routes is None else batch.routes.part(self._tokens(batch, cut))
        if self._balances and loss_fn is not None:
            real_T = torch.arange(len(batch.input_ids_T), device=batch.source_N.device) < len(batch.source_N)
            real_T = real_T[self._tokens(batch, cut)]
            weight = 0.0 if data is None else _part_of_divisor(data, loss_fn)
        backward = loss_fn is not None
        for target in own:
            target.aim(RouterPass(routes, real_T, weight), recomputes=backward, counts=backward)

    def _tokens(self, batch: PackedBatch, cut: RowSlice) -> slice:
        mine = cut.mine(batch)
        if not self._sequence_parallel:
            return mine
        # Sequence parallelism cuts a rank's slice once more, and its routers see that part alone.
        tokens = (mine.stop - mine.start) // self._groups.sizes.tp
        start = mine.start + tokens * self._groups.tp_group.rank()
        return slice(start, start + tokens)

    def start_counting(self) -> None:
        """Starts a step's counts at zero."""
        if self.replay is not None:
            self.replay.start_counting()
        for loss in self._losses:
            loss.sums.zero_()

    def metrics(self) -> dict[str, float]:
        """Shares of replayed decisions (`RouterReplay.shares`), and `moe/load_balancing_loss`, the mean over rows and
        layers before its coefficient: 1 where all experts are used alike. Collective over all ranks of the policy.
        """
        found = {} if self.replay is None else self.replay.shares(self._groups.device)
        if self._balances:
            total = torch.zeros(2, dtype=torch.float64, device=self._groups.device)
            for loss in self._losses:
                total += loss.sums
            dist.all_reduce(total)
            found["moe/load_balancing_loss"] = float(total[0] / total[1].clamp(min=1e-12))
        return found


def _part_of_divisor(data: Mapping[str, torch.Tensor], loss_fn: LossFunction) -> float:
    """The trained tokens or sequences of a microbatch, whichever divides the gradient of the step."""
    sequences, tokens = count_valid(data)
    return float(tokens if loss_fn.loss_type is LossType.TOKEN_LEVEL else sequences)
