"""Records, in vLLM's worker process, which experts every token took and of which tokens each was drawn.

Reads the routers of the layers with experts during the runner's forward pass, and the sampler's filtered logits; rows
are dealt to requests by the scheduler's output of that very step. Of a prompt that is partly in the prefix cache, the
cached tokens have the routes of the step that computed them, kept beside the KV cache by slot. Invariant: routes and
mask of a token are those of the step that drew it, also where vLLM computed its position before or again: a preempted
request computes all of its tokens again, and draws only the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from nemo_rl.models.generation.decisions import Array, RouteRecord, SamplingMasks, TokenRoutes, route_dtype

REQUEST = "nrl_request"
"""Name under which a request's own id is among its sampling parameters: vLLM renames requests."""


class UnknownEngineError(RuntimeError):
    """This version of vLLM computes where its decisions cannot be read."""


@dataclass
class _Recorded:
    """What is known of one request. `masks`: kept ids by the position of the token that was drawn."""

    routes: RouteRecord = field(default_factory=RouteRecord)
    masks: dict[int, Array | None] = field(default_factory=dict)


class _Drawn(NamedTuple):
    """A row of a step's logits: whose it is, the position of the token that is drawn of it, and whether that stays."""

    request: str
    position: int
    kept: bool


class StepRecorder:
    """Records the steps of one runner. `routes`, `masks`: what is recorded."""

    def __init__(self, runner: Any, *, routes: bool, masks: bool) -> None:
        self._runner = runner
        self._requests: dict[str, _Recorded] = {}
        self._layers: list[torch.Tensor | None] = []
        self._rows: list[_Drawn] = []
        self._experts = 0
        self._slots: tuple[Array, Array] | None = None
        if not hasattr(runner, "input_batch"):
            raise UnknownEngineError(
                f"{type(runner).__name__} of this vLLM keeps its batch elsewhere; set "
                "policy.generation.vllm_cfg.env_vars.VLLM_USE_V2_MODEL_RUNNER to 0"
            )
        if routes:
            self._read_routers(runner.get_model())
        if masks:
            self._read_sampler(runner.sampler.topk_topp_sampler)
        execute = runner.execute_model

        def execute_model(scheduler_output: Any, *args: object, **kwargs: object) -> object:
            self._layers = [None] * len(self._layers)
            self._rows = []
            result = execute(scheduler_output, *args, **kwargs)
            self._after_forward(scheduler_output)
            return result

        runner.execute_model = execute_model

    def _read_routers(self, model: torch.nn.Module) -> None:
        found: list[Any] = [getattr(module, "router", None) for module in model.modules()]
        routers = {id(router): router for router in found if hasattr(router, "set_capture_fn")}
        for router in routers.values():
            router.set_capture_fn(partial(self._keep_layer, len(self._layers)))
            self._layers.append(None)
            self._experts = router.global_num_experts
        if not routers:
            raise UnknownEngineError(
                "policy.router_replay.enabled is true, but no layer of the engine's model has a router that says which "
                "experts it chose; set it to false"
            )

    def _keep_layer(self, layer: int, experts: torch.Tensor) -> None:
        self._layers[layer] = experts

    def _read_sampler(self, sampler: Any) -> None:
        draw: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = sampler.forward

        def forward(*args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor | None]:
            sampled, processed = draw(*args, **kwargs)
            if processed is None:
                raise UnknownEngineError(
                    "vLLM's sampler hands out no filtered log-probabilities; set "
                    "policy.generation.vllm_cfg.logprobs_mode to processed_logprobs"
                )
            self._after_draw(processed)
            return sampled, processed

        sampler.forward = forward

    # -- one step -----------------------------------------------------------------------------------------------------

    def _after_forward(self, scheduler_output: Any) -> None:
        """Deals the rows of a step to its requests."""
        if not scheduler_output.total_num_scheduled_tokens:
            return
        batch, scheduled = self._runner.input_batch, scheduler_output.num_scheduled_tokens
        computed = batch.num_computed_tokens_cpu
        spans = [(name, int(computed[row]), int(scheduled[name])) for row, name in enumerate(batch.req_ids)]
        # The row of a request's last token gives the logits of the token after it.
        self._rows = [_Drawn(name, start + count, self._is_kept(name, start + count)) for name, start, count in spans]
        if not self._layers:
            return
        routes = self._step_routes(sum(count for _, _, count in spans))
        ends = np.cumsum([count for _, _, count in spans])[:-1]
        by_request = [
            TokenRoutes(start, part, np.ones(count, np.bool_))
            for (_, start, count), part in zip(spans, np.split(routes, ends), strict=True)
        ]
        if self._caches_prefixes():
            # A request may hit blocks that another one computes in this very step.
            for (name, _, _), part in zip(spans, by_request, strict=True):
                experts, known = self._beside_kv_cache(part.experts)
                slots = self._slots_of(self._runner.requests[name], part.start, part.end)
                experts[slots], known[slots] = part.experts, True
        for drawn, part in zip(self._rows, by_request, strict=True):
            self._keep(drawn, part)

    def _is_kept(self, name: str, position: int) -> bool:
        """Whether the token drawn for a position is kept; vLLM drops those of a prompt in parts, and of tokens that are
        computed again.
        """
        return position >= self._runner.requests[name].num_tokens

    def _step_routes(self, tokens: int) -> Array:
        """Routes [tokens, L, K] of the step; rows after the tokens are padding."""
        layers = [layer for layer in self._layers if layer is not None]
        if len(layers) != len(self._layers):
            raise UnknownEngineError(
                f"only {len(layers)} of {len(self._layers)} layers with experts said which ones they chose; where "
                "kernels are replayed as CUDA graphs, set policy.generation.vllm_cfg.enforce_eager to true"
            )
        stacked = torch.stack([layer[:tokens] for layer in layers], dim=1)
        return stacked.cpu().numpy().astype(route_dtype(self._experts))

    def _keep(self, drawn: _Drawn, routes: TokenRoutes) -> None:
        request = self._runner.requests[drawn.request]
        recorded = self._recorded(request)
        if recorded is None:
            return
        if self._caches_prefixes() and (unknown := recorded.routes.known_until()) < routes.start:
            slots = self._slots_of(request, unknown, routes.start)
            experts, known = self._beside_kv_cache(routes.experts)
            recorded.routes.add(TokenRoutes(unknown, experts[slots], known[slots]))
        recorded.routes.add(routes)
        if drawn.kept:
            recorded.routes.correct(routes.end - 1, routes)

    def _recorded(self, request: Any) -> _Recorded | None:
        """The record of a request that is to be recorded."""
        key = ((request.sampling_params and request.sampling_params.extra_args) or {}).get(REQUEST)
        return None if key is None else self._requests.setdefault(key, _Recorded())

    def _caches_prefixes(self) -> bool:
        return bool(self._runner.vllm_config.cache_config.enable_prefix_caching)

    def _slots_of(self, request: Any, start: int, end: int) -> Array:
        size = self._runner.vllm_config.cache_config.block_size
        positions = np.arange(start, end)
        return np.asarray(request.block_ids[0], dtype=np.int64)[positions // size] * size + positions % size

    def _beside_kv_cache(self, like: Array) -> tuple[Array, Array]:
        """Routes by slot of the KV cache, and whether a step wrote them."""
        if self._slots is None:
            cache = self._runner.vllm_config.cache_config
            slots = self._runner.kv_cache_config.num_blocks * cache.block_size
            self._slots = np.zeros((slots, *like.shape[1:]), like.dtype), np.zeros(slots, np.bool_)
        return self._slots

    def _after_draw(self, processed: torch.Tensor) -> None:
        """Keeps which tokens each request's was drawn from. `processed`: filtered log-probabilities [requests, V]."""
        if not self._rows:
            return
        kept = processed > float("-inf")
        counts = kept.sum(dim=-1).tolist()
        ids = kept.nonzero()[:, 1].to(torch.int32).cpu().numpy()
        first = 0
        for drawn, count in zip(self._rows, counts, strict=True):
            recorded = self._recorded(self._runner.requests[drawn.request])
            if recorded is not None and drawn.kept:
                recorded.masks[drawn.position] = None if count == kept.shape[1] else ids[first : first + count]
            first += count

    # -- results ------------------------------------------------------------------------------------------------------

    def take(self, key: str, start: int, prompt: int, tokens: int) -> Taken:
        """Hands out what was recorded of an ended request and forgets it.

        Args:
            start: First position whose routes are wanted.
            prompt: Tokens of the prompt.
            tokens: Tokens of the response; what was computed or drawn beyond them is dropped.
        """
        recorded = self._requests.pop(key, None) or _Recorded()
        drawn = range(prompt, prompt + tokens)
        known = all(position in recorded.masks for position in drawn)
        masks = SamplingMasks.of([recorded.masks[position] for position in drawn]) if known else None
        return packed(recorded.routes.since(start, prompt + tokens), masks)

    def forget(self, keys: Sequence[str]) -> None:
        """Drops what was recorded of requests whose results nobody wants."""
        for key in keys:
            self._requests.pop(key, None)


Taken = dict[str, Any]
"""Routes and masks as plain values, which is all that vLLM hands out of its processes."""


def packed(routes: TokenRoutes | None, masks: SamplingMasks | None) -> Taken:
    """Routes and masks as plain values."""
    taken: Taken = {}
    if routes is not None:
        taken |= {
            "start": routes.start,
            "shape": list(routes.experts.shape),
            "dtype": routes.experts.dtype.name,
            "experts": routes.experts.tobytes(),
            "valid": routes.valid.tobytes(),
        }
    if masks is not None:
        taken |= {"counts": masks.counts.tobytes(), "ids": masks.ids.tobytes()}
    return taken


def unpacked(taken: Taken) -> tuple[TokenRoutes | None, SamplingMasks | None]:
    """What was packed."""
    routes, masks = None, None
    if "experts" in taken:
        experts = np.frombuffer(taken["experts"], np.dtype(taken["dtype"])).reshape(taken["shape"])
        routes = TokenRoutes(taken["start"], experts, np.frombuffer(taken["valid"], np.bool_))
    if "counts" in taken:
        masks = SamplingMasks(np.frombuffer(taken["counts"], np.int32), np.frombuffer(taken["ids"], np.int32))
    return routes, masks
