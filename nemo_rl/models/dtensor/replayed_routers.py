"""Replay of recorded router decisions in the routers of a Hugging Face model.

A router of transformers takes the `top_k` largest of its scores [T, num_experts] and makes gate weights of them. That
one choice is replaced while the router runs; everything before and after it is the model's own.

Shapes: T tokens of this rank's slice of the row, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nemo_rl.models.dtensor.experts import expert_modules
from nemo_rl.models.policy.model_config import UnsupportedModelError, decoder_of
from nemo_rl.models.policy.router_replay import RouterReplay, RouterTarget

_KEY = "policy.router_replay.enabled=true"


class _Choice(TorchFunctionMode):
    """Replaces the choice of experts inside the block."""

    def __init__(self, experts: int, experts_per_token: int, choose: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.times = 0
        self._experts, self._experts_per_token, self._choose = experts, experts_per_token, choose

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        kwargs = dict(kwargs or {})
        found = func(*args, **kwargs)
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        scores = args[0] if args else kwargs["input"]
        # Choices among groups of experts have another width or dimension.
        if scores.dim() != 2 or (scores.shape[1], found[1].shape[1]) != (self._experts, self._experts_per_token):
            return found
        self.times += 1
        chosen_TK = self._choose(found[1])
        return found if chosen_TK is found[1] else (scores.gather(1, chosen_TK), chosen_TK)


class _ReplayedRouter:
    """The forward pass of a router that replays."""

    def __init__(self, module: Any, target: RouterTarget) -> None:
        self._compute, self._target = module.forward, target
        self._sizes = (int(module.num_experts), int(module.top_k))

    def __call__(self, *args: object, **kwargs: object) -> Any:
        self._target.enter()
        with _Choice(*self._sizes, self._target.choose):
            return self._compute(*args, **kwargs)


def attach_router_replay(model: Any, device: torch.device) -> RouterReplay:
    """Makes the model's routers replay the routes of the returned `RouterReplay`, in place. Raises
    UnsupportedModelError: no experts, or routers that choose them in another way.
    """
    routers = [_router(layer, model) for layer in decoder_of(model).layers if expert_modules(layer)]
    if not routers:
        raise UnsupportedModelError(f"{_KEY}: {type(model).__name__} has no layers with experts; set it to false")
    targets = []
    for layer, router in enumerate(routers):
        target = RouterTarget(layer, device)
        # A compiled layer would keep the routes of the pass in which it was compiled: its router stays out.
        router.__dict__["forward"] = torch.compiler.disable(_ReplayedRouter(router, target).__call__)
        targets.append(target)
    return RouterReplay(targets, len(targets), int(routers[0].num_experts), int(routers[0].top_k))


def _router(layer: nn.Module, model: nn.Module) -> Any:
    found: list[Any] = [module for module in layer.modules() if "router" in type(module).__name__.lower()]
    if len(found) == 1 and all(isinstance(getattr(found[0], name, None), int) for name in ("num_experts", "top_k")):
        router = found[0]
        with _Choice(router.num_experts, router.top_k, lambda natural_TK: natural_TK) as choice:
            _run_on_shapes(router, model)
        if choice.times == 1:
            return router
    raise UnsupportedModelError(
        f"{_KEY}: the routers of {type(model).__name__} do not choose experts by one top-k of their scores, which is "
        "what can be replayed; set it to false"
    )


def _run_on_shapes(router: nn.Module, model: Any) -> None:
    """Runs a router on shapes alone."""
    state = {name: torch.empty_like(value, device="meta") for name, value in router.state_dict().items()}
    hidden = torch.empty(2, model.config.hidden_size, device="meta")
    torch.func.functional_call(router, state, (hidden,))
