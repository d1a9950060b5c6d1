"""Replay of recorded router decisions in Megatron's routers.

Each router asks its `router_replay` slot, which Megatron-Core made for this, for the experts of its tokens. Routes are
handed to this rank's routers before every forward pass of a part of the model.

Shapes: T tokens of this rank's slice of the row, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from nemo_rl.models.megatron.groups import MegatronGroups
from nemo_rl.models.megatron.model import BuiltModel
from nemo_rl.models.policy.model_config import UnsupportedModelError
from nemo_rl.models.policy.packed import PackedBatch
from nemo_rl.models.policy.router_replay import RouterReplay, RouterTarget
from nemo_rl.models.policy.row_slice import RowSlice

_KEY = "policy.router_replay.enabled=true"
_TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class _ReplayedTopK:
    """What fills a router's `router_replay` slot."""

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


def expert_layers(config: Any) -> list[int]:
    """Which layers of the whole model have experts, counted from 0. `config`: Megatron's of the model."""
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [layer for layer in range(config.num_layers) if layer % frequency == 0]
    return [layer for layer, has_experts in enumerate(frequency) if has_experts]


class MegatronReplay:
    """The routers of this rank's parts of a model. Raises UnsupportedModelError: the model has no experts, or its
    routers choose them in a way that cannot be replayed.
    """

    def __init__(self, model: BuiltModel, groups: MegatronGroups) -> None:
        config = model.config
        if not config.num_moe_experts:
            raise UnsupportedModelError(f"{_KEY}: the model has no experts; set it to false")
        if config.moe_router_fusion or config.moe_router_load_balancing_type == "sinkhorn":
            raise UnsupportedModelError(
                f"{_KEY} replays the choices of an unfused top-k router; leave "
                "policy.megatron_cfg.model_overrides.moe_router_fusion out"
            )
        self._sequence_parallel = bool(config.sequence_parallel)
        self._groups = groups
        layers = expert_layers(config)
        self._targets = [_attach(chunk, layers, groups.device) for chunk in model.chunks]
        self._modules = list(model.chunks)
        targets = [target for own in self._targets for target in own]
        self.replay = RouterReplay(targets, len(layers), config.num_moe_experts, config.moe_router_topk)

    def aim(self, chunk: nn.Module, batch: PackedBatch, cut: RowSlice, *, backward: bool) -> None:
        """Sets the routes of the next forward pass through a part of the model. Raises RouterReplayError: they do not
        fit the model.
        """
        self.replay.check(batch.routes)
        routes = None if batch.routes is None else batch.routes.part(self._tokens(batch, cut))
        module = getattr(chunk, "module", chunk)
        own = next(own for own, part in zip(self._targets, self._modules, strict=True) if part is module)
        self.replay.aim(routes, recomputes=backward, counts=backward, targets=own)

    def _tokens(self, batch: PackedBatch, cut: RowSlice) -> slice:
        mine = cut.mine(batch)
        if not self._sequence_parallel:
            return mine
        # Sequence parallelism cuts a rank's slice once more, and its routers see that part alone.
        tokens = (mine.stop - mine.start) // self._groups.sizes.tp
        start = mine.start + tokens * self._groups.tp_group.rank()
        return slice(start, start + tokens)


def _attach(chunk: nn.Module, layers: Sequence[int], device: torch.device) -> list[RouterTarget]:
    from megatron.core.transformer.moe.router import TopKRouter

    targets = []
    for module in chunk.modules():
        if not isinstance(module, TopKRouter):
            continue
        if not hasattr(module, "router_replay") or module.layer_number is None:
            raise UnsupportedModelError(f"{_KEY} needs megatron-core >= 0.16; pip install 'megatron-core>=0.16'")
        target = RouterTarget(layers.index(module.layer_number - 1), device)
        module.router_replay = _ReplayedTopK(target)
        targets.append(target)
    return targets
