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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_rl.config.errors import UserError
from nemo_rl.models.generation.decisions import Array, SamplingMasks, TokenRoutes, route_dtype

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

REQUEST = "nrl_request"
"""Name under which a request's own id is among its sampling parameters: vLLM renames requests."""


class UnknownEngineError(UserError, RuntimeError):
    """This version of vLLM computes where its decisions cannot be read."""


class _Rows(NamedTuple):
    """Routes of consecutive positions of one request, as rows of an array: of a step's, or of cached ones."""

    start: int
    array: Array  # [rows, L, K]
    first: int
    count: int
    drew: bool  # whether the token after the last of these positions was drawn of it, and stayed
    known: NDArray[np.bool_] | None = None  # [count], of cached rows whether a step wrote them; None: all are known


class _Kept(NamedTuple):
    """The ids that a token was drawn from, in a step's array; all of the vocabulary where `whole`."""

    array: NDArray[np.int32]
    first: int
    count: int
    whole: bool


@dataclass
class _Recorded:
    """Recorded parts of one request, joined when it ends: a step must not do work that a later call can do."""

    parts: list[_Rows] = field(default_factory=list)
    masks: dict[int, _Kept] = field(default_factory=dict)  # by the position of the token that was drawn
    end: int = 0  # positions before it are in the parts

    def routes(self, start: int, end: int) -> TokenRoutes | None:
        """Routes of `[start, end)`: of each position those of its first computation, or those of the last one whose
        draw stayed. None if nothing was computed.
        """
        if not self.parts:
            return None
        counts = np.array([part.count for part in self.parts])
        ends = counts.cumsum()
        positions = np.repeat([part.start for part in self.parts] - ends + counts, counts) + np.arange(ends[-1])
        rows = np.concatenate([part.array[part.first : part.first + part.count] for part in self.parts])
        known = np.ones(len(rows), np.bool_)
        for part, last in zip(self.parts, ends, strict=True):
            if part.known is not None:
                known[last - part.count : last] = part.known
        chosen = np.full(max(end, int(positions.max()) + 1), -1)
        # Of equal indices the last is assigned: backwards that is the first.
        of_known = np.flatnonzero(known)[::-1]
        chosen[positions[of_known]] = of_known
        drawn = ends[[part.drew for part in self.parts]] - 1
        chosen[positions[drawn]] = drawn
        wanted = chosen[start:end]
        valid = wanted >= 0
        return TokenRoutes(start, np.where(valid[:, None, None], rows[wanted], np.zeros((), rows.dtype)), valid)


class _Drawn(NamedTuple):
    """A row of a step's logits: the record of whose it is, None if it is not recorded; the position of the token that
    is drawn of it, and whether that stays.
    """

    recorded: _Recorded | None
    position: int
    stays: bool


class StepRecorder:
    """Records the decisions of one runner's steps. `routes`, `masks`: the kinds to record."""

    def __init__(self, runner: GPUModelRunner, *, routes: bool, masks: bool) -> None:
        self._runner = runner
        self._requests: dict[str, _Recorded] = {}
        self._layers: list[torch.Tensor | None] = []
        self._rows: list[_Drawn] = []
        self._experts = 0
        self._slots: tuple[Array, NDArray[np.bool_]] | None = None
        cache = runner.vllm_config.cache_config
        self._caches_prefixes, self._block_size = bool(cache.enable_prefix_caching), int(cache.block_size)
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

        def execute_model(scheduler_output: SchedulerOutput, *args: object, **kwargs: object) -> object:
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

    def _read_sampler(self, sampler: Sampler) -> None:
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

    def _after_forward(self, scheduler_output: SchedulerOutput) -> None:
        """Deals the rows of a step to its requests."""
        if not scheduler_output.total_num_scheduled_tokens:
            return
        batch, counts, requests = self._runner.input_batch, scheduler_output.num_scheduled_tokens, self._runner.requests
        spans = [
            (requests[name], start, counts[name])
            for name, start in zip(batch.req_ids, batch.num_computed_tokens_cpu.tolist(), strict=False)
        ]
        # The row of a request's last token gives the logits of the token after it. vLLM drops the draws of prompts in
        # parts, and of tokens that are computed again.
        self._rows = [
            _Drawn(self._recorded(request), start + count, start + count >= request.num_tokens)
            for request, start, count in spans
        ]
        if not self._layers:
            return
        routes = self._step_routes(sum(count for _, _, count in spans))
        beside = self._beside_kv_cache(routes) if self._caches_prefixes else None
        if beside is not None:
            # First of all: a request may hit blocks that another one computes in this very step.
            experts, known = beside
            slots = [slot for request, start, count in spans for slot in self._slots_of(request, start, start + count)]
            experts[slots], known[slots] = routes, True
        first = 0
        for (request, start, count), drawn in zip(spans, self._rows, strict=True):
            recorded = drawn.recorded
            if recorded is not None:
                if beside is not None and recorded.end < start:
                    (experts, known), cached = beside, self._slots_of(request, recorded.end, start)
                    recorded.parts.append(_Rows(recorded.end, experts[cached], 0, len(cached), False, known[cached]))
                recorded.parts.append(_Rows(start, routes, first, count, drawn.stays))
                recorded.end = max(recorded.end, start + count)
            first += count

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

    def _recorded(self, request: CachedRequestState) -> _Recorded | None:
        """The record of a request that is to be recorded."""
        key = ((request.sampling_params and request.sampling_params.extra_args) or {}).get(REQUEST)
        if key is None:
            return None
        found = self._requests.get(key)
        if found is None:
            found = self._requests[key] = _Recorded()
        return found

    def _slots_of(self, request: CachedRequestState, start: int, end: int) -> list[int]:
        size, blocks = self._block_size, request.block_ids[0]
        return [blocks[position // size] * size + position % size for position in range(start, end)]

    def _beside_kv_cache(self, like: Array) -> tuple[Array, NDArray[np.bool_]]:
        """Routes by slot of the KV cache, and whether a step wrote them."""
        if self._slots is None:
            slots = self._runner.kv_cache_config.num_blocks * self._block_size
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
            if drawn.recorded is not None and drawn.stays:
                drawn.recorded.masks[drawn.position] = _Kept(ids, first, count, count == kept.shape[1])
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
        masks = [recorded.masks.get(position) for position in range(prompt, prompt + tokens)]
        ids = [
            None if mask.whole else mask.array[mask.first : mask.first + mask.count]
            for mask in masks
            if mask is not None
        ]
        complete = len(ids) == len(masks)
        return packed(recorded.routes(start, prompt + tokens), SamplingMasks.of(ids) if complete else None)

    def forget(self, keys: Sequence[str]) -> None:
        """Drops the records of requests whose results are not wanted."""
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
    """Inverse of `packed`."""
    routes, masks = None, None
    if "experts" in taken:
        experts = np.frombuffer(taken["experts"], np.dtype(taken["dtype"])).reshape(taken["shape"])
        routes = TokenRoutes(taken["start"], experts, np.frombuffer(taken["valid"], np.bool_))
    if "counts" in taken:
        masks = SamplingMasks(np.frombuffer(taken["counts"], np.int32), np.frombuffer(taken["ids"], np.int32))
    return routes, masks
